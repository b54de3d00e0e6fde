//! The kernels of phalanx and phalanx-train, by name. Other kernels do not exist here.
//!
//! A module's image, PTX or a cubin, must have the kernel; the kernel's name selects the code of this folder. From the
//! top down, each file uses files further down only:
//!
//! | File | What it has |
//! |---|---|
//! | `launch.rs` | the functions on modules, and `cuLaunchKernel` |
//! | `image.rs` | which kernels an image has, and for which GPUs |
//! | `training/` | phalanx-train's kernels, and cuBLAS's products of matrices |
//! | `atomics.rs` | NVSHMEM's atomic operations: kernels of one thread |
//! | `collective.rs` | collectives: a kernel's arguments, its checks and its warps |
//! | `messages.rs` | messages |
//! | `copies.rs` | copies of blocks |
//! | `norm.rs` | sums of rows with what follows them |
//! | `experts.rs`, `expert_blocks.rs` | experts' dispatch and combine: the same, and what a block does |
//! | `reduce.rs`, `moving.rs` | what a warp does to reduce, and to move blocks |
//! | `exchange.rs` | a warp's exchange of steps with all peers |
//! | `lane.rs` | a warp's end of its lane in the FIFOs between GPUs |
//! | `element.rs` | element types and how they are combined |
//! | `warps.rs`, `words.rs` | warps that run side by side in one thread; words of the memory between GPUs |
//!
//! `collective.rs` and the files below follow `gpu/kernels/*.cu*` of phalanx line by line: the same memory layout, flags,
//! step numbers and credits. `shuttle.rs` of the testkit explores them. A warp is an `async` function that is polled; its 32 threads are one.

mod atomics;
mod collective;
mod copies;
mod element;
mod exchange;
mod expert_blocks;
mod experts;
mod image;
mod lane;
mod launch;
mod message_warps;
mod messages;
mod moving;
mod norm;
mod reduce;
mod training;
mod warps;
mod words;
