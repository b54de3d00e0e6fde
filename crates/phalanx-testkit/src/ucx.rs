//! Whether this machine has UCX, for the tests that need it.

/// The variable that makes it a failure if UCX is missing, as in CI.
pub const REQUIRED: &str = "PHALANX_TEST_UCX";

/// Why tests on UCX cannot run here, if so.
///
/// # Panics
/// If it is missing and [`REQUIRED`].
pub fn missing() -> Option<String> {
    let error = phalanx_sys::ucx::Ucx::load().err()?;
    let required = std::env::var_os(REQUIRED).is_some_and(|value| value == "1");
    assert!(!required, "{REQUIRED} is set, and {error}");
    Some(format!("{error}"))
}
