//! What the types forbid: each program in `tests/compile_fail/` is wrong, and the compiler says so.
//!
//! After a change of the compiler's wording: `TRYBUILD=overwrite cargo test -p phalanx --test programs`.

#[test]
fn the_types_forbid_it() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
