//! What a program loads from: also as setuid, where the caller must have no say.

#[cfg(target_os = "linux")]
mod trials;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    trials::main()
}

/// There are no setuid programs here, or none that this can make.
#[cfg(not(target_os = "linux"))]
fn main() {}
