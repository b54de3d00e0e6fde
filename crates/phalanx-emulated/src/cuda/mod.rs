//! The emulated driver.
//!
//! From the top down, each file uses files further down only:
//!
//! | File | What it has |
//! |---|---|
//! | `executable.rs`, `stream_capture.rs` | executable graphs and their launches; the functions that begin and end captures |
//! | `allocation.rs`, `copy.rs`, `ipc.rs`, `virtual_memory.rs` | the functions that allocate; copies and fills; memory of other processes; physical memory and its mappings |
//! | `event.rs` | events |
//! | `stream.rs` | the functions on streams |
//! | `context.rs` | contexts, and which one is current |
//! | `streams.rs`, `enqueue.rs` | the tables of streams; how work gets into a stream or a capture |
//! | `queue.rs` | a stream: its queue and its thread |
//! | `capture.rs` | captures |
//! | `graph.rs` | graphs |
//! | `user_object.rs`, `work.rs` | objects that graphs keep alive; what a stream performs |
//! | `memory.rs` | allocations, and checks of every access |
//! | `device.rs`, `error.rs` | devices; status codes and their texts |

pub mod allocation;
pub mod capture;
pub mod context;
pub mod copy;
pub mod device;
pub mod enqueue;
pub mod error;
pub mod event;
pub mod executable;
pub mod graph;
pub mod ipc;
pub mod memory;
pub mod queue;
pub mod stream;
pub mod stream_capture;
pub mod streams;
pub mod user_object;
pub mod virtual_memory;
pub mod work;
