//! Programs that use the library: those that must not compile, and the examples.

mod compile_fail;
mod examples;
