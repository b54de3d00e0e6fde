//! Two parts of one slice may overlap; `split_at_mut` makes some that do not.

use phalanx::Comm;
use phalanx::cudarc::driver::CudaSlice;

fn both(comm: &Comm, mut buffer: CudaSlice<f32>) -> phalanx::Result<()> {
    let mut first = buffer.slice_mut(..600);
    let mut second = buffer.slice_mut(400..);
    comm.group(|group| {
        group.recv(&mut first, 0)?;
        group.recv(&mut second, 1)
    })
}

fn main() {}
