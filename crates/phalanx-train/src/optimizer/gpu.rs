//! The optimizers' arithmetic on a GPU.

use super::{AdamW, ElementWise, Sgd};
use crate::Result;
use crate::device::gpu::kernels::{OPTIMIZER, grid_of_fours};
use crate::device::gpu::{Types, check};
use crate::device::{Gpu, Number};
use cudarc::driver::{CudaView, CudaViewMut, PushKernelArg};

impl ElementWise for Gpu {
    fn adamw<M: Number>(
        &self,
        hyper: &AdamW,
        step: u64,
        gradient: &CudaView<'_, M>,
        parameters: &mut CudaViewMut<'_, M>,
        first: &mut CudaViewMut<'_, M>,
        second: &mut CudaViewMut<'_, M>,
    ) -> Result<()> {
        let len = gradient.len();
        for other in [parameters.len(), first.len(), second.len()] {
            check(len, other);
        }
        let (factors, kernel) = (hyper.factors(step), self.kernel(&OPTIMIZER, "adamw", <(M,)>::OF)?);
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&factors).arg(gradient).arg(parameters).arg(first).arg(second).arg(&len);
        // SAFETY: the kernel's parameters; it stays within the views.
        unsafe { launch.launch(grid_of_fours(len)) }?;
        Ok(())
    }

    fn sgd<M: Number>(
        &self,
        hyper: &Sgd,
        gradient: &CudaView<'_, M>,
        parameters: &mut CudaViewMut<'_, M>,
        momentum: &mut CudaViewMut<'_, M>,
    ) -> Result<()> {
        let len = gradient.len();
        check(len, parameters.len());
        check(len, momentum.len());
        let Sgd { learning_rate, momentum: part, nesterov, weight_decay } = *hyper;
        let factors = [learning_rate, part, weight_decay, f64::from(u8::from(nesterov))];
        let kernel = self.kernel(&OPTIMIZER, "sgd", <(M,)>::OF)?;
        let mut launch = self.stream().launch_builder(&kernel);
        launch.arg(&factors).arg(gradient).arg(parameters).arg(momentum).arg(&len);
        // SAFETY: the kernel's parameters; it stays within the views.
        unsafe { launch.launch(grid_of_fours(len)) }?;
        Ok(())
    }
}
