//! The emulated CUDA driver and NCCL: what tests of the library rely on is tested here.
//!
//! Every trial is one or more processes of this program that find the emulator by the loader's path. They use
//! the driver through cudarc, and NCCL through a small table of its functions.

#[cfg(target_os = "linux")]
mod suite;

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    suite::main()
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    eprintln!("not run: the emulator is for Linux");
    ExitCode::SUCCESS
}
