//! Norms on a GPU.

use super::Squares;
use crate::Result;
use crate::device::gpu::Types;
use crate::device::gpu::kernels::{NORM, grid, grid_of_fours};
use crate::device::{Device, Gpu, Number};
use cudarc::driver::{CudaView, CudaViewMut, PushKernelArg};

impl Squares for Gpu {
    /// The order of the sum depends on the length alone: each block's threads, and then the blocks.
    fn add_squares<T: Number>(&self, from: &CudaView<'_, T>, to: &mut CudaViewMut<'_, f64>) -> Result<()> {
        assert_eq!(to.len(), 1, "a sum");
        let (len, blocks) = (from.len(), grid_of_fours(from.len()));
        let count = blocks.grid_dim.0 as usize;
        let mut partial = self.uninit::<f64>(count)?;
        let kernel = self.kernel(&NORM, "squares", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        // SAFETY: the kernel's parameters; it stays within the view, and each block writes one sum.
        unsafe { launch.arg(from).arg(&mut partial).arg(&len).launch(blocks) }?;
        let (kernel, partial) = (self.kernel(&NORM, "add_sums", &[])?, self.view(&partial, 0..count));
        let mut launch = self.stream().launch_builder(&kernel);
        // SAFETY: the kernel's parameters; it reads the sums, and adds to the first element.
        unsafe { launch.arg(&partial).arg(to).arg(&count).launch(grid(1)) }?;
        Ok(())
    }

    fn checksums<T: Number>(&self, views: &[&CudaView<'_, T>]) -> Result<Vec<u64>> {
        let mut sums = self.zeroed::<u64>(views.len())?;
        let kernel = self.kernel(&NORM, "checksum", <(T,)>::OF)?;
        for (at, from) in views.iter().copied().enumerate() {
            let (len, mut to) = (from.len(), sums.slice_mut(at..at + 1));
            let mut launch = self.stream().launch_builder(&kernel);
            // SAFETY: the kernel's parameters; it stays within the view, and adds to one sum.
            unsafe { launch.arg(from).arg(&mut to).arg(&len).launch(grid_of_fours(len)) }?;
        }
        let sums = self.stream().clone_dtoh(&sums)?;
        self.stream().synchronize()?;
        Ok(sums)
    }
}
