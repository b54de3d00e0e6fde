//! The environment as a source of libraries.
//!
//! A program that is setuid, setgid or has file capabilities runs with rights that its caller lacks. What the caller chooses must not
//! be loaded there. So the rules are those of the dynamic loader for secure execution: no variable counts, and no folder of the caller's.
//! In other programs a folder from a variable counts if it is absolute: a relative one would be another in each working directory.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Why a file that a variable names was not loaded.
pub(crate) const LEFT_OUT: &str =
    "left out, since this program has rights that its caller lacks (setuid, setgid or file capabilities)";

/// Whether this program runs with rights that its caller lacks (the kernel's `AT_SECURE`). It then takes nothing from the environment
/// that is loaded.
pub fn is_secure() -> bool {
    static SECURE: OnceLock<bool> = OnceLock::new();
    *SECURE.get_or_init(asked)
}

#[cfg(target_os = "linux")]
fn asked() -> bool {
    use std::ffi::c_ulong;
    const AT_SECURE: c_ulong = 23;
    unsafe extern "C" {
        fn getauxval(kind: c_ulong) -> c_ulong;
    }
    // SAFETY: the function reads what the kernel gave the program, and takes any number.
    unsafe { getauxval(AT_SECURE) != 0 }
}

#[cfg(all(unix, not(target_os = "linux")))]
fn asked() -> bool {
    unsafe extern "C" {
        fn issetugid() -> std::ffi::c_int;
    }
    // SAFETY: the function only answers.
    unsafe { issetugid() != 0 }
}

#[cfg(not(unix))]
fn asked() -> bool {
    false
}

/// The value of a variable that chooses a file or folder; `None` if it is unset, empty, or does not count.
pub(crate) fn chosen(variable: &str) -> Option<OsString> {
    counted(std::env::var_os(variable), is_secure())
}

/// The value of a variable that does not count here, although it is set.
pub(crate) fn left_out(variable: &str) -> Option<PathBuf> {
    counted(std::env::var_os(variable), false).filter(|_| is_secure()).map(PathBuf::from)
}

/// The folder that a variable names; `None` as for [`chosen`], and if it is relative.
pub(crate) fn folder(variable: &str) -> Option<PathBuf> {
    chosen(variable).map(PathBuf::from).filter(|folder| folder.is_absolute())
}

/// The folders of a variable with a list of them, such as `PATH`, without relative ones.
pub(crate) fn folders(variable: &str) -> Vec<PathBuf> {
    let list = chosen(variable).unwrap_or_default();
    std::env::split_paths(&list).filter(|folder| folder.is_absolute()).collect()
}

fn counted(value: Option<OsString>, secure: bool) -> Option<OsString> {
    value.filter(|value| !secure && !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_variables_and_those_of_secure_programs_do_not_count() {
        let value = |text: &str| Some(OsString::from(text));
        assert_eq!(counted(value("/a"), false), value("/a"));
        for (value, secure) in [(None, false), (value(""), false), (value("/a"), true)] {
            assert_eq!(counted(value, secure), None);
        }
        assert!(!is_secure(), "a test has its caller's rights");
    }
}
