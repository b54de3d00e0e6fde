//! The arithmetic of compression on a GPU.

use super::{Format, LowRank, Quantize};
use crate::Result;
use crate::device::gpu::kernels::{COMPRESS, MATRICES, grid, grid_of_rows};
use crate::device::gpu::{Shape, Types};
use crate::device::{Gpu, Number};
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, PushKernelArg};

impl LowRank for Gpu {
    /// By cuBLAS, in f32 but for f64.
    fn times_thin<M: Number>(
        &self,
        [rows, columns, rank]: [usize; 3],
        transposed: bool,
        matrix: &CudaView<'_, M>,
        thin: &CudaView<'_, M>,
        product: &mut CudaViewMut<'_, M>,
    ) -> Result<()> {
        let size = if transposed { [columns, rows, rank] } else { [rows, columns, rank] };
        self.multiply(Shape { size, transposed: [transposed, false] }, matrix, thin, product, false)
    }

    fn outer_product<M: Number>(
        &self,
        [rows, columns, rank]: [usize; 3],
        left: &CudaView<'_, M>,
        right: &CudaView<'_, M>,
        matrix: &mut CudaViewMut<'_, M>,
    ) -> Result<()> {
        let shape = Shape { size: [rows, rank, columns], transposed: [false, true] };
        self.multiply(shape, left, right, matrix, false)
    }

    fn orthonormalize<M: Number>(
        &self,
        rows: usize,
        rank: usize,
        thin: &mut CudaViewMut<'_, M>,
    ) -> Result<()> {
        assert_eq!(thin.len(), rows * rank, "numbers of the thin matrix");
        let mut work = self.uninit::<f64>(rows * rank)?;
        let kernel = self.kernel(&MATRICES, "orthonormalize", <(M,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        // SAFETY: the kernel's parameters, and one block, as it wants; the lengths were checked.
        unsafe { launch.arg(&rows).arg(&rank).arg(thin).arg(&mut work).launch(grid(1)) }?;
        Ok(())
    }
}

impl Quantize for Gpu {
    type Bytes = CudaSlice<u8>;

    fn zero_bytes(&self, len: usize) -> Result<CudaSlice<u8>> {
        self.zeroed(len)
    }

    fn quantize<T: Number>(
        &self,
        format: Format,
        block: usize,
        from: &CudaView<'_, T>,
        bytes: &mut CudaSlice<u8>,
        scales: &mut CudaViewMut<'_, f32>,
    ) -> Result<()> {
        let (fp8, blocks) = (u32::from(format == Format::Fp8), scales.len());
        assert_eq!((from.len(), from.len()), (bytes.len(), blocks * block), "bytes and scales");
        let kernel = self.kernel(&COMPRESS, "quantize", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&fp8).arg(&blocks).arg(&block).arg(from).arg(bytes).arg(scales);
        // SAFETY: the kernel's parameters; the lengths were checked.
        unsafe { launch.launch(grid_of_rows(blocks)) }?;
        Ok(())
    }

    fn sum_quantized<T: Number>(
        &self,
        format: Format,
        block: usize,
        factor: f64,
        bytes: &CudaSlice<u8>,
        scales: &CudaView<'_, f32>,
        to: &mut CudaViewMut<'_, T>,
    ) -> Result<()> {
        let (fp8, len) = (u32::from(format == Format::Fp8), to.len());
        let ranks = bytes.len() / len.max(1);
        assert_eq!((bytes.len(), bytes.len()), (ranks * len, scales.len() * block), "bytes and scales");
        let kernel = self.kernel(&COMPRESS, "sum_quantized", <(T,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&fp8).arg(&ranks).arg(&len).arg(&block).arg(&factor).arg(bytes).arg(scales).arg(to);
        // SAFETY: the kernel's parameters; the lengths were checked.
        unsafe { launch.launch(grid(len)) }?;
        Ok(())
    }
}
