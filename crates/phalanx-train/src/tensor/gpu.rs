//! The arithmetic of tensor parallelism on a GPU.

use super::{CrossEntropy, Products, Slabs};
use crate::Result;
use crate::device::gpu::kernels::{MATRICES, TENSOR, grid, grid_of_rows};
use crate::device::gpu::{Shape, Types};
use crate::device::{Gpu, Number};
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, PushKernelArg};

/// Elements from the start of the first row to the end of the last.
fn extent(count: usize, len: usize, row: usize) -> usize {
    if count == 0 { 0 } else { (count - 1).saturating_mul(row).saturating_add(len) }
}

impl Slabs for Gpu {
    fn copy_rows<T: Number>(
        &self,
        count: usize,
        len: usize,
        from: &CudaView<'_, T>,
        from_row: usize,
        to: &mut CudaViewMut<'_, T>,
        to_row: usize,
    ) -> Result<()> {
        let is_within = extent(count, len, from_row) <= from.len() && extent(count, len, to_row) <= to.len();
        assert!(is_within, "{count} rows of {len} within the views");
        let kernel = self.kernel(&TENSOR, "copy_rows", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&count).arg(&len).arg(from).arg(&from_row).arg(to).arg(&to_row);
        // SAFETY: the kernel's parameters; the rows are within the views.
        unsafe { launch.launch(grid_of_rows(count)) }?;
        Ok(())
    }
}

impl Products for Gpu {
    /// By cuBLAS: the order of its sums is its own.
    fn product<T: Number>(
        &self,
        size: [usize; 3],
        transposed: [bool; 2],
        a: &CudaView<'_, T>,
        b: &CudaView<'_, T>,
        c: &mut CudaViewMut<'_, T>,
        adds: bool,
    ) -> Result<()> {
        self.multiply(Shape { size, transposed }, a, b, c, adds)
    }

    fn add_to_rows<T: Number>(&self, bias: &CudaView<'_, T>, to: &mut CudaViewMut<'_, T>) -> Result<()> {
        let columns = bias.len();
        let rows = to.len() / columns.max(1);
        let kernel = self.kernel(&MATRICES, "add_to_rows", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        // SAFETY: the kernel's parameters; as many rows as there are.
        unsafe { launch.arg(&rows).arg(&columns).arg(bias).arg(to).launch(grid_of_rows(rows)) }?;
        Ok(())
    }

    fn sum_of_rows<T: Number>(&self, from: &CudaView<'_, T>, to: &mut CudaViewMut<'_, T>) -> Result<()> {
        let columns = to.len();
        let rows = from.len() / columns.max(1);
        assert_eq!(from.len(), rows * columns, "rows of {columns}");
        let kernel = self.kernel(&MATRICES, "sum_of_rows", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        // SAFETY: the kernel's parameters; the lengths were checked.
        unsafe { launch.arg(&rows).arg(&columns).arg(from).arg(to).launch(grid(columns)) }?;
        Ok(())
    }
}

impl Gpu {
    /// The columns of targets, checked, and none as a number that no column has.
    fn upload_targets(&self, targets: &[Option<u32>], columns: usize) -> Result<CudaSlice<u32>> {
        let is_within = |target: &u32| (*target as usize) < columns;
        assert!(targets.iter().flatten().all(is_within), "targets within {columns} columns");
        let targets: Vec<u32> = targets.iter().map(|target| target.unwrap_or(u32::MAX)).collect();
        self.upload_list(&targets)
    }
}

impl CrossEntropy for Gpu {
    fn greatest<T: Number>(
        &self,
        columns: usize,
        logits: &CudaView<'_, T>,
        greatest: &mut CudaViewMut<'_, f64>,
    ) -> Result<()> {
        let rows = greatest.len();
        assert_eq!(logits.len(), rows * columns, "logits");
        let kernel = self.kernel(&TENSOR, "greatest", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&rows).arg(&columns).arg(logits).arg(greatest);
        // SAFETY: the kernel's parameters; the lengths were checked.
        unsafe { launch.launch(grid_of_rows(rows)) }?;
        Ok(())
    }

    fn sums<T: Number>(
        &self,
        columns: usize,
        logits: &CudaView<'_, T>,
        greatest: &CudaView<'_, f64>,
        targets: &[Option<u32>],
        sums: &mut CudaViewMut<'_, f64>,
    ) -> Result<()> {
        let rows = targets.len();
        assert_eq!([logits.len(), greatest.len(), sums.len()], [rows * columns, rows, 3 * rows], "rows");
        let targets = self.upload_targets(targets, columns)?;
        let kernel = self.kernel(&TENSOR, "sums", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&rows).arg(&columns).arg(logits).arg(greatest).arg(&targets).arg(sums);
        // SAFETY: the kernel's parameters; the lengths and targets were checked.
        unsafe { launch.launch(grid_of_rows(rows)) }?;
        Ok(())
    }

    fn gradient<T: Number>(
        &self,
        columns: usize,
        logits: &mut CudaViewMut<'_, T>,
        greatest: &CudaView<'_, f64>,
        sums: &CudaView<'_, f64>,
        targets: &[Option<u32>],
        [uniform, peak]: [f64; 2],
        factors: &[f64],
    ) -> Result<()> {
        let rows = targets.len();
        assert_eq!([logits.len(), greatest.len(), sums.len()], [rows * columns, rows, 3 * rows], "rows");
        assert_eq!(factors.len(), rows, "factors");
        let (targets, factors) = (self.upload_targets(targets, columns)?, self.upload_list(factors)?);
        let kernel = self.kernel(&TENSOR, "gradient", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&rows).arg(&columns).arg(logits).arg(greatest).arg(sums).arg(&targets);
        launch.arg(&uniform).arg(&peak).arg(&factors);
        // SAFETY: the kernel's parameters; the lengths and targets were checked.
        unsafe { launch.launch(grid_of_rows(rows)) }?;
        Ok(())
    }
}
