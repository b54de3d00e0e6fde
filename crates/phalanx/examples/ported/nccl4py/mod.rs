//! Examples of nccl4py, NVIDIA's Python binding of NCCL.

/// Elements of a buffer. The original has more: 32 Mi for `allreduce`, 256 Mi for `ring_pattern`.
const COUNT: usize = 1 << 20;

pub mod allreduce;
pub mod allreduce_basic;
pub mod allreduce_ub;
pub mod multiple_devices_single_process;
pub mod ring_pattern;
pub mod send_recv;
