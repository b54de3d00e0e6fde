//! Rows of a matrix on a GPU.

use super::rows::{NO_ROW, Rows};
use crate::Result;
use crate::device::gpu::Types;
use crate::device::gpu::kernels::{ROWS, grid_of_rows};
use crate::device::{Device, Gpu, Number};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, PushKernelArg};

/// Refuses rows that a matrix does not have.
fn check(rows: &[u32], width: usize, len: usize) {
    let is_there = |row: &u32| *row == NO_ROW || (*row as usize + 1).saturating_mul(width) <= len;
    assert!(rows.iter().all(is_there), "rows of {width} within {len} numbers");
}

impl Gpu {
    /// Factors, if there are some, and their address: 0 for none. They are used on the stream alone, and freed on it.
    fn upload_factors(&self, factors: Option<&[f64]>) -> Result<(Option<CudaSlice<f64>>, CUdeviceptr)> {
        let kept = factors.map(|factors| self.upload_list(factors)).transpose()?;
        let address = kept.as_ref().map_or(0, |kept| kept.device_ptr(self.stream()).0);
        Ok((kept, address))
    }
}

impl Rows for Gpu {
    fn gather_rows<T: Number>(
        &self,
        width: usize,
        rows: &[u32],
        factors: Option<&[f64]>,
        from: &CudaView<'_, T>,
        to: &mut CudaViewMut<'_, T>,
    ) -> Result<()> {
        let count = rows.len();
        check(rows, width, from.len());
        assert!(!rows.contains(&NO_ROW), "a row for each row of the target");
        assert_eq!(to.len(), count * width, "rows of the target");
        assert!(factors.is_none_or(|factors| factors.len() == count), "a factor for each row");
        let rows = self.upload_list(rows)?;
        let (_kept, factors) = self.upload_factors(factors)?;
        let kernel = self.kernel(&ROWS, "gather_rows", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&count).arg(&width).arg(&rows).arg(&factors).arg(from).arg(to);
        // SAFETY: the kernel's parameters; rows and lengths were checked.
        unsafe { launch.launch(grid_of_rows(count)) }?;
        Ok(())
    }

    fn sum_rows<T: Number>(
        &self,
        width: usize,
        of_each: usize,
        rows: &[u32],
        factors: Option<&[f64]>,
        from: &CudaView<'_, T>,
        to: &mut CudaViewMut<'_, T>,
    ) -> Result<()> {
        check(rows, width, from.len());
        let count = to.len() / width.max(1);
        assert_eq!((to.len(), rows.len()), (count * width, count * of_each), "rows of the target");
        assert!(factors.is_none_or(|factors| factors.len() == rows.len()), "a factor for each row");
        let rows = self.upload_list(rows)?;
        let (_kept, factors) = self.upload_factors(factors)?;
        let kernel = self.kernel(&ROWS, "sum_rows", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&count).arg(&width).arg(&of_each).arg(&rows).arg(&factors).arg(from).arg(to);
        // SAFETY: the kernel's parameters; rows and lengths were checked.
        unsafe { launch.launch(grid_of_rows(count)) }?;
        Ok(())
    }

    /// The order of a sum is the kernel's, and always the same.
    fn dot_rows<T: Number>(
        &self,
        width: usize,
        a_rows: &[u32],
        a: &CudaView<'_, T>,
        b_rows: &[u32],
        b: &CudaView<'_, T>,
    ) -> Result<Vec<f64>> {
        let count = a_rows.len();
        assert_eq!(count, b_rows.len(), "as many rows");
        check(a_rows, width, a.len());
        check(b_rows, width, b.len());
        let (a_rows, b_rows) = (self.upload_list(a_rows)?, self.upload_list(b_rows)?);
        let mut dots = self.uninit::<f64>(count)?;
        let kernel = self.kernel(&ROWS, "dot_rows", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&count).arg(&width).arg(&a_rows).arg(a).arg(&b_rows).arg(b).arg(&mut dots);
        // SAFETY: the kernel's parameters; rows were checked.
        unsafe { launch.launch(grid_of_rows(count)) }?;
        self.download(&self.view(&dots, 0..count))
    }
}
