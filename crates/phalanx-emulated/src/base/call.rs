//! Exported functions: the macro that defines them, and the checks that each call goes through.

use super::settings;
use super::violation::violation;
use std::cell::Cell;
use std::sync::OnceLock;

/// A status of the C interfaces other than success: a `CUresult`, `hipError_t` or `ncclResult_t`.
pub type Code = i32;

/// The result of an exported function's body.
pub type Answer = Result<(), Code>;

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of an exported function and returns its status, unless the settings let this call fail.
pub fn answer(function: &'static str, body: impl FnOnce() -> Answer) -> Code {
    answer_or(function, |_| (), body)
}

/// As [`answer`]; `on_failure` gets the code of a call that the settings let fail.
pub fn answer_or(
    function: &'static str,
    on_failure: impl FnOnce(Code),
    body: impl FnOnce() -> Answer,
) -> Code {
    if IN_HOST_FUNCTION.get() {
        violation(function, "a host function (cuLaunchHostFunc) must not call CUDA or NCCL");
    }
    if let Some(code) = settings::failure(settings::When::Called, function, None) {
        on_failure(code);
        return code;
    }
    match body() {
        Ok(()) => 0,
        Err(code) => code,
    }
}

/// The result of a body that calls another exported function.
pub fn answered(code: Code) -> Answer {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// Runs a host function of the caller, during which this thread must not call the emulated libraries.
pub fn in_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

/// Ends a forked child that calls the library: the threads of CUDA and NCCL exist in the parent only.
pub fn check_fork(function: &str) {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    if *PROCESS.get_or_init(std::process::id) != std::process::id() {
        violation(function, "called in a forked child of the process that used the library first");
    }
}

/// Defines exported functions that return a status. In a body, `FUNCTION` is the function's name.
macro_rules! exported {
    ($($functions:tt)*) => {
        $crate::base::call::answered_by! { $crate::base::call::answer; $($functions)* }
    };
}

/// As [`exported`], with another function in the place of [`answer`].
macro_rules! answered_by {
    ($answer:path; $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[allow(non_snake_case, reason = "the names are the C libraries'")]
        #[allow(clippy::too_many_arguments, reason = "the arguments are the C libraries'")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> $crate::base::call::Code {
            #[allow(dead_code, reason = "not every body uses it")]
            const FUNCTION: &str = stringify!($name);
            $answer(FUNCTION, || -> $crate::base::call::Answer { $body })
        }
    )*};
}

pub(crate) use {answered_by, exported};
