//! GPU memory that the library knows: allocated by it, registered with a communicator, or a window of all
//! ranks.

mod buffer;
mod lend;
mod registration;
mod slice;

pub use buffer::Buffer;
pub use registration::Registration;
pub(crate) use registration::{Handle, best, free};
pub use slice::GpuSlice;
