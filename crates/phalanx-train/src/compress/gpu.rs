//! The arithmetic of compression on a GPU.

use super::{Format, Quantize};
use crate::Result;
use crate::device::gpu::Types;
use crate::device::gpu::kernels::{COMPRESS, grid, grid_of_rows};
use crate::device::{Gpu, Number};
use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, PushKernelArg};

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
