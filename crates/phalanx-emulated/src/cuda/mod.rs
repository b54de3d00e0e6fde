//! The emulated driver.
//!
//! | File | What it has |
//! |---|---|
//! | `device.rs`, `context.rs` | devices and what is current |
//! | `queue.rs`, `stream.rs` | how a stream works; the functions on streams |
//! | `event.rs` | events |
//! | `memory.rs`, `allocation.rs`, `copy.rs` | where memory comes from; the functions that allocate; copies and fills |
//! | `virtual_memory.rs` | physical memory and where it is mapped |
//! | `capture.rs`, `graph.rs`, `user_object.rs` | how a stream's work becomes a graph; graphs; what they keep alive |
//! | `kernel.rs` | the kernels that phalanx itself has, by their names |
//! | `error.rs` | results and their texts |

pub mod allocation;
pub mod capture;
pub mod context;
pub mod copy;
pub mod device;
pub mod error;
pub mod event;
pub mod graph;
pub mod kernel;
pub mod memory;
pub mod queue;
pub mod stream;
pub mod user_object;
pub mod virtual_memory;
