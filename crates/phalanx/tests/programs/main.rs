//! Programs that use the library: those that must not compile, its errors as text, and the examples.

mod compile_fail;
mod errors;
mod examples;
mod guides;
