//! Merging on a GPU.

use super::Merge;
use crate::Result;
use crate::device::gpu::Types;
use crate::device::gpu::kernels::{ATTENTION, grid_of_rows};
use crate::device::{Gpu, Number};
use cudarc::driver::{CudaView, CudaViewMut, PushKernelArg};

impl Merge for Gpu {
    fn merge<T: Number, A: Number>(
        &self,
        size: usize,
        (more, more_sums): (&CudaView<'_, T>, &CudaView<'_, f64>),
        output: &mut CudaViewMut<'_, A>,
        sums: &mut CudaViewMut<'_, f64>,
    ) -> Result<()> {
        let rows = sums.len();
        assert_eq!([more.len(), output.len(), more_sums.len()], [rows * size, rows * size, rows], "rows");
        let kernel = self.kernel(&ATTENTION, "merge", <(T, A)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&rows).arg(&size).arg(more).arg(more_sums).arg(output).arg(sums);
        // SAFETY: the kernel's parameters; the lengths were checked.
        unsafe { launch.launch(grid_of_rows(rows)) }?;
        Ok(())
    }
}
