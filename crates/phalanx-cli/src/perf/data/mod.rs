//! The data of the check: what the ranks put in, and what must come out.
//!
//! Inputs are small whole numbers, chosen so that every result is exact in its type whatever the
//! order of the reduction; a wrong bit is then an error and never a matter of rounding.

mod check;
mod flow;
mod pattern;
mod value;

pub use check::Patterns;
pub use flow::{Content, Flow, Segment, clip};
pub use value::Value;
pub(crate) use value::with_value;
