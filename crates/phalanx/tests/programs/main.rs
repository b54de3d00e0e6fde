//! Programs that use the library: those that must not compile, its errors as text, and the examples; and what the documents say of it.

mod compile_fail;
mod errors;
mod examples;
mod guides;
mod links;
