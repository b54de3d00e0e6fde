//! NCCL would wait for a graph's end when its communicator is finalized.

use phalanx::ReduceOp;
use phalanx::cudarc::driver::CudaSlice;
use phalanx::nccl::Graph;

fn all_reduce(comm: phalanx::Comm, gradients: CudaSlice<f32>) -> phalanx::Result<()> {
    let mut graph = Graph::capture(&comm, gradients, |group, gradients| {
        group.all_reduce_in_place(gradients, ReduceOp::Sum)
    })?;
    comm.finalize()?;
    graph.launch()
}

fn main() {}
