//! A launch may write to a graph's buffers.

use phalanx::ReduceOp;
use phalanx::cudarc::driver::CudaSlice;
use phalanx::nccl::Graph;

fn all_reduce(comm: &phalanx::Comm, gradients: CudaSlice<f32>) -> phalanx::Result<usize> {
    let mut graph = Graph::capture(comm, gradients, |group, gradients| {
        group.all_reduce_in_place(gradients, ReduceOp::Sum)
    })?;
    let before = graph.buffers();
    graph.launch()?;
    Ok(before.num_bytes())
}

fn main() {}
