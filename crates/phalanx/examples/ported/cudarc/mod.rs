//! Tests of cudarc's NCCL: it has no examples of it.

pub mod all_reduce;
pub mod all_reduce_views;
pub mod single_thread;
