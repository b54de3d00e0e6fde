//! The optimizers' arithmetic on the host: in f64 for f64, else in f32.

use super::{AdamW, ElementWise, Matrices, Sgd};
use crate::Result;
use crate::device::{Host, Number, in_double};
use std::ops::{Add, AddAssign, Div, Mul, Sub};

/// What the arithmetic is done in.
trait Real:
    Copy + Default + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + AddAssign
{
    fn of<M: Number>(number: M) -> Self;
    fn to<M: Number>(self) -> M;
    fn from_f64(value: f64) -> Self;
    fn sqrt(self) -> Self;
}

macro_rules! reals {
    ($($ty:ty: $of:ident, $to:ident;)*) => {$(
        impl Real for $ty {
            fn of<M: Number>(number: M) -> $ty {
                number.$of()
            }
            fn to<M: Number>(self) -> M {
                M::$to(self)
            }
            fn from_f64(value: f64) -> $ty {
                value as $ty
            }
            fn sqrt(self) -> $ty {
                self.sqrt()
            }
        }
    )*};
}

reals! {
    f32: to_f32, from_f32;
    f64: to_f64, from_f64;
}

fn adamw<R: Real, M: Number>(
    hyper: &AdamW,
    step: u64,
    gradient: &[M],
    parameters: &mut [M],
    first: &mut [M],
    second: &mut [M],
) {
    let [decay, length, root, beta1, beta2, rest1, rest2, epsilon] = hyper.factors(step).map(R::from_f64);
    let states = first.iter_mut().zip(second);
    for ((parameter, gradient), (first, second)) in parameters.iter_mut().zip(gradient).zip(states) {
        let g = R::of(*gradient);
        let m = beta1 * R::of(*first) + rest1 * g;
        let v = beta2 * R::of(*second) + rest2 * g * g;
        (*first, *second) = (m.to(), v.to());
        *parameter = (R::of(*parameter) * decay - length * m / (v.sqrt() / root + epsilon)).to();
    }
}

fn sgd<R: Real, M: Number>(hyper: &Sgd, gradient: &[M], parameters: &mut [M], momentum: &mut [M]) {
    let [length, part, decay] = [hyper.learning_rate, hyper.momentum, hyper.weight_decay].map(R::from_f64);
    for ((parameter, gradient), momentum) in parameters.iter_mut().zip(gradient).zip(momentum) {
        let p = R::of(*parameter);
        let g = R::of(*gradient) + decay * p;
        let b = part * R::of(*momentum) + g;
        *momentum = b.to();
        *parameter = (p - length * if hyper.nesterov { g + part * b } else { b }).to();
    }
}

/// `a · b` of an n × k and a k × m matrix.
fn product<R: Real>(a: &[R], b: &[R], [n, k, m]: [usize; 3]) -> Vec<R> {
    let mut c = vec![R::default(); n * m];
    for i in 0..n {
        for l in 0..k {
            let factor = a[i * k + l];
            for j in 0..m {
                c[i * m + j] += factor * b[l * m + j];
            }
        }
    }
    c
}

fn transposed<R: Real>(a: &[R], rows: usize, columns: usize) -> Vec<R> {
    (0..columns * rows).map(|at| a[at % rows * columns + at / rows]).collect()
}

/// Newton–Schulz iteration towards the nearest orthogonal matrix.
fn orthogonalize<R: Real, M: Number>(
    rows: usize,
    columns: usize,
    steps: usize,
    coefficients: [f64; 3],
    epsilon: f64,
    matrix: &mut [M],
) {
    let [a, b, c] = coefficients.map(R::from_f64);
    let wide = rows <= columns;
    let mut x: Vec<R> = matrix.iter().map(|number| R::of(*number)).collect();
    if !wide {
        x = transposed(&x, rows, columns);
    }
    let (n, m) = (rows.min(columns), rows.max(columns));
    let mut squares = R::default();
    for number in &x {
        squares += *number * *number;
    }
    let norm = squares.sqrt() + R::from_f64(epsilon);
    x.iter_mut().for_each(|number| *number = *number / norm);
    for _ in 0..steps {
        let square = product(&x, &transposed(&x, n, m), [n, m, n]);
        let fourth = product(&square, &square, [n, n, n]);
        let factor: Vec<R> = square.iter().zip(&fourth).map(|(s, f)| b * *s + c * *f).collect();
        let next = product(&factor, &x, [n, n, m]);
        x.iter_mut().zip(next).for_each(|(x, next)| *x = a * *x + next);
    }
    if !wide {
        x = transposed(&x, n, m);
    }
    matrix.iter_mut().zip(x).for_each(|(number, x)| *number = x.to());
}

fn check<A, B>(a: &[A], b: &[B]) {
    assert_eq!(a.len(), b.len(), "views of one length");
}

impl ElementWise for Host {
    fn adamw<M: Number>(
        &self,
        hyper: &AdamW,
        step: u64,
        gradient: &&[M],
        parameters: &mut &mut [M],
        first: &mut &mut [M],
        second: &mut &mut [M],
    ) -> Result<()> {
        for len in [parameters.len(), first.len(), second.len()] {
            assert_eq!(len, gradient.len(), "views of one length");
        }
        let run = if in_double::<M>() { adamw::<f64, M> } else { adamw::<f32, M> };
        run(hyper, step, gradient, parameters, first, second);
        Ok(())
    }

    fn sgd<M: Number>(
        &self,
        hyper: &Sgd,
        gradient: &&[M],
        parameters: &mut &mut [M],
        momentum: &mut &mut [M],
    ) -> Result<()> {
        check(gradient, parameters);
        check(gradient, momentum);
        let run = if in_double::<M>() { sgd::<f64, M> } else { sgd::<f32, M> };
        run(hyper, gradient, parameters, momentum);
        Ok(())
    }
}

impl Matrices for Host {
    fn orthogonalize<M: Number>(
        &self,
        rows: usize,
        columns: usize,
        steps: usize,
        coefficients: [f64; 3],
        epsilon: f64,
        matrix: &mut &mut [M],
    ) -> Result<()> {
        assert_eq!(matrix.len(), rows * columns, "numbers of the matrix");
        let run = if in_double::<M>() { orthogonalize::<f64, M> } else { orthogonalize::<f32, M> };
        run(rows, columns, steps, coefficients, epsilon, matrix);
        Ok(())
    }
}
