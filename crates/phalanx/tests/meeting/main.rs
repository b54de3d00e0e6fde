//! How processes of one host find each other, or say why they cannot: real processes, in namespaces and as users of their own.

#[cfg(target_os = "linux")]
mod process;
#[cfg(target_os = "linux")]
mod trials;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    match process::act() {
        Some(code) => code,
        None => phalanx_testkit::suite::run(&libtest_mimic::Arguments::from_args(), trials::all(), &[], &[]),
    }
}

/// Processes share no memory here.
#[cfg(not(target_os = "linux"))]
fn main() {}
