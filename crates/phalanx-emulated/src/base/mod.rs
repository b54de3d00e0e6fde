//! The common base of the emulated libraries.
//!
//! | File | What it has |
//! |---|---|
//! | `call.rs` | the macro that defines an exported function, and the checks that each call goes through |
//! | `pointers.rs`, `handles.rs` | pointers that C callers pass; handles that they hold |
//! | `settings.rs` | the environment variables that configure the emulator |
//! | `random.rs` | choices and delays from a seed |
//! | `violation.rs` | the end of the process after a broken rule |
//! | `exit.rs` | functions that run at the process's exit |
//! | `lock.rs` | a mutex's lock that ignores poisoning |

pub mod call;
pub mod exit;
pub mod handles;
pub mod lock;
pub mod pointers;
pub mod random;
pub mod settings;
pub mod violation;
