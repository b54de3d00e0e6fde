//! The optimizers' arithmetic on a GPU.

use super::{AdamW, ElementWise, Matrices, Sgd};
use crate::Result;
use crate::device::gpu::kernels::{MATRICES, OPTIMIZER, grid_of_fours};
use crate::device::gpu::{Shape, Types, check};
use crate::device::{Device, Gpu, Number, in_double};
use crate::norm::Squares;
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

impl Gpu {
    /// Newton–Schulz iteration, in numbers of type `R`.
    fn orthogonalize_in<R: Number, M: Number>(
        &self,
        [rows, columns]: [usize; 2],
        steps: usize,
        [a, b, c]: [f64; 3],
        epsilon: f64,
        matrix: &mut CudaViewMut<'_, M>,
    ) -> Result<()> {
        let (len, n, is_wide) = (rows * columns, rows.min(columns), rows <= columns);
        let [mut x, mut next] = [self.uninit::<R>(len)?, self.uninit::<R>(len)?];
        let [mut square, mut fourth] = [self.uninit::<R>(n * n)?, self.uninit::<R>(n * n)?];
        let (mut x, mut next) = (x.as_view_mut(), next.as_view_mut());
        let (mut square, mut fourth) = (square.as_view_mut(), fourth.as_view_mut());
        self.convert(&Self::reborrow(matrix), &mut x)?;
        self.divide_by_norm(epsilon, &mut x)?;
        // Of a tall matrix the same is done from the other side, in the place of transposing it.
        let of_square = if is_wide {
            Shape { size: [n, columns, n], transposed: [false, true] }
        } else {
            Shape { size: [n, rows, n], transposed: [true, false] }
        };
        let plain = |size| Shape { size, transposed: [false; 2] };
        for _ in 0..steps {
            self.multiply(of_square, &x.as_view(), &x.as_view(), &mut square, false)?;
            self.multiply(plain([n, n, n]), &square.as_view(), &square.as_view(), &mut fourth, false)?;
            self.scale(&mut square, b)?;
            self.add(c, &fourth.as_view(), &mut square)?;
            if is_wide {
                self.multiply(plain([n, n, columns]), &square.as_view(), &x.as_view(), &mut next, false)?;
            } else {
                self.multiply(plain([rows, n, n]), &x.as_view(), &square.as_view(), &mut next, false)?;
            }
            self.scale(&mut x, a)?;
            self.add(1.0, &next.as_view(), &mut x)?;
        }
        self.convert(&x.as_view(), matrix)
    }

    /// `x ← x / (‖x‖ + epsilon)`.
    fn divide_by_norm<R: Number>(&self, epsilon: f64, x: &mut CudaViewMut<'_, R>) -> Result<()> {
        let (len, mut squares) = (x.len(), self.zeros::<f64>(1)?);
        self.add_squares(&x.as_view(), &mut squares.as_view_mut())?;
        let (kernel, squares) = (self.kernel(&MATRICES, "divide_by_norm", <(R,)>::OF)?, squares.as_view());
        let mut launch = self.stream().launch_builder(&kernel);
        // SAFETY: the kernel's parameters; it stays within the view.
        unsafe { launch.arg(&squares).arg(&epsilon).arg(x).arg(&len).launch(grid_of_fours(len)) }?;
        Ok(())
    }
}

impl Matrices for Gpu {
    fn orthogonalize<M: Number>(
        &self,
        rows: usize,
        columns: usize,
        steps: usize,
        coefficients: [f64; 3],
        epsilon: f64,
        matrix: &mut CudaViewMut<'_, M>,
    ) -> Result<()> {
        assert_eq!(matrix.len(), rows * columns, "numbers of the matrix");
        if in_double::<M>() {
            self.orthogonalize_in::<f64, M>([rows, columns], steps, coefficients, epsilon, matrix)
        } else {
            self.orthogonalize_in::<f32, M>([rows, columns], steps, coefficients, epsilon, matrix)
        }
    }
}
