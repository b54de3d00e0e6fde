//! The data of the check: the ranks' inputs and the expected results.
//!
//! Inputs are small whole numbers, chosen so that every result is exact in its type, in whatever order it is
//! reduced. A wrong bit is therefore an error and no matter of rounding.

mod check;
mod flow;
mod pattern;
mod value;

pub use check::{Patterns, patterns};
pub use flow::{Content, Flow, Segment};
pub(crate) use value::with_value;
pub use value::{Value, elements, elements_mut};
