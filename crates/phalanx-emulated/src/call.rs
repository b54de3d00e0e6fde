//! What every exported function goes through.

use crate::settings;
use crate::violation::violation;
use std::cell::Cell;
use std::sync::OnceLock;

/// A status of the C interfaces that is not success: a `CUresult` or an `ncclResult_t`.
pub type Code = i32;

/// What the body of an exported function answers.
pub type Answer = Result<(), Code>;

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs the body of an exported function, unless it was told to fail.
pub fn answer(function: &'static str, body: impl FnOnce() -> Answer) -> Code {
    if IN_HOST_FUNCTION.get() {
        violation(function, "a host function (cuLaunchHostFunc) must not call CUDA or NCCL");
    }
    if let Some(code) = settings::failure(settings::When::Called, function, None) {
        crate::nccl::group::failed(function, code);
        return code;
    }
    match body() {
        Ok(()) => 0,
        Err(code) => code,
    }
}

/// Runs a host function of a caller.
pub fn in_host_function(run: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    run();
    IN_HOST_FUNCTION.set(false);
}

/// CUDA and NCCL do not survive a fork: their threads are not in the child.
pub fn check_fork(function: &str) {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    if *PROCESS.get_or_init(std::process::id) != std::process::id() {
        violation(function, "called in a forked child of the process that used the library first");
    }
}

/// Defines exported functions. In a body, `FUNCTION` is the function's name.
macro_rules! exported {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[allow(non_snake_case, reason = "the names are the C libraries'")]
        #[allow(clippy::too_many_arguments, reason = "the arguments are the C libraries'")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> $crate::call::Code {
            #[allow(dead_code, reason = "not every body names itself")]
            const FUNCTION: &str = stringify!($name);
            $crate::call::answer(FUNCTION, || -> $crate::call::Answer { $body })
        }
    )*};
}
