//! A graph is launched later: it cannot work on what it has only borrowed.

use phalanx::ReduceOp;
use phalanx::cudarc::driver::CudaSlice;
use phalanx::nccl::Graph;

fn all_reduce(comm: &phalanx::Comm, gradients: &CudaSlice<f32>, sum: CudaSlice<f32>) -> phalanx::Result<()> {
    let mut graph = Graph::capture(comm, sum, |group, sum| group.all_reduce(gradients, sum, ReduceOp::Sum))?;
    graph.launch()
}

fn main() {}
