//! The layers of a transformer on flat row-major buffers, forwards and backwards: plain loops on the host, and products of a device.

use phalanx::Comm;
use phalanx_train::Result;
use phalanx_train::device::{Host, Number, Overlap};
use phalanx_train::norm::Squares;
use phalanx_train::optimizer::ElementWise;
use phalanx_train::pipeline::Messages;
use phalanx_train::tensor::CrossEntropy;

/// f32 or f64, with a product of matrices.
pub trait Real:
    Number
    + std::ops::Add<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::AddAssign
{
    /// `c = a · b + beta · c`, of `[m, k]` and `[k, n]`, each with strides of rows and columns.
    ///
    /// # Safety
    /// The pointers have all elements that sizes and strides reach.
    unsafe fn gemm(
        size: [usize; 3],
        a: (*const Self, [isize; 2]),
        b: (*const Self, [isize; 2]),
        beta: Self,
        c: (*mut Self, [isize; 2]),
    );
}

macro_rules! real {
    ($($ty:ty: $gemm:path, $one:literal;)*) => {$(
        impl Real for $ty {
            unsafe fn gemm(
                [m, k, n]: [usize; 3],
                (a, [ra, ca]): (*const $ty, [isize; 2]),
                (b, [rb, cb]): (*const $ty, [isize; 2]),
                beta: $ty,
                (c, [rc, cc]): (*mut $ty, [isize; 2]),
            ) {
                // SAFETY: the caller's contract.
                unsafe { $gemm(m, k, n, $one, a, ra, ca, b, rb, cb, beta, c, rc, cc) }
            }
        }
    )*};
}

real! {
    f32: matrixmultiply::sgemm, 1.0;
    f64: matrixmultiply::dgemm, 1.0;
}

/// A device that has all that the training needs.
pub trait Place: Overlap + Messages + ElementWise + Squares + CrossEntropy {
    /// The device for messages between the ranks of a communicator. Collective.
    fn connected(&self, comm: &Comm) -> Result<Self>;

    /// `c = a · b`, or `c += a · b` if `adds`, with sizes and transposition as [`Products`](phalanx_train::tensor::Products) has them.
    fn product<T: Real>(
        &self,
        size: [usize; 3],
        transposed: [bool; 2],
        a: &[T],
        b: &[T],
        c: &mut [T],
        adds: bool,
    ) -> Result<()>;
}

impl Place for Host {
    fn connected(&self, _comm: &Comm) -> Result<Host> {
        Ok(*self)
    }

    fn product<T: Real>(
        &self,
        [m, k, n]: [usize; 3],
        transposed: [bool; 2],
        a: &[T],
        b: &[T],
        c: &mut [T],
        adds: bool,
    ) -> Result<()> {
        let matrix = |rows, columns, is_transposed| match is_transposed {
            false => Matrix::new(rows, columns),
            true => Matrix::new(columns, rows).transposed(),
        };
        let (of_a, of_b) = (matrix(m, k, transposed[0]), matrix(k, n, transposed[1]));
        product((a, of_a), (b, of_b), (c, Matrix::new(m, n)), adds);
        Ok(())
    }
}

/// A matrix inside a buffer: where it begins, its rows and columns, and the strides of both.
#[derive(Clone, Copy)]
pub struct Matrix {
    pub start: usize,
    pub rows: usize,
    pub columns: usize,
    pub strides: [usize; 2],
}

impl Matrix {
    pub fn new(rows: usize, columns: usize) -> Matrix {
        Matrix { start: 0, rows, columns, strides: [columns, 1] }
    }

    /// Some columns of a matrix with longer rows.
    pub fn of_columns(rows: usize, columns: usize, row: usize, start: usize) -> Matrix {
        Matrix { start, rows, columns, strides: [row, 1] }
    }

    pub fn transposed(self) -> Matrix {
        let Matrix { start, rows, columns, strides: [row, column] } = self;
        Matrix { start, rows: columns, columns: rows, strides: [column, row] }
    }

    fn check(&self, len: usize) {
        let end = (self.rows - 1) * self.strides[0] + (self.columns - 1) * self.strides[1];
        assert!(self.start + end < len, "a matrix of {} × {} in {len}", self.rows, self.columns);
    }

    fn strides(&self) -> [isize; 2] {
        self.strides.map(|stride| stride as isize)
    }
}

/// `c = a · b`, or `c += a · b` if `adds`.
pub fn product<T: Real>(a: (&[T], Matrix), b: (&[T], Matrix), c: (&mut [T], Matrix), adds: bool) {
    let size = [a.1.rows, a.1.columns, b.1.columns];
    assert_eq!((a.1.columns, c.1.rows, c.1.columns), (b.1.rows, a.1.rows, b.1.columns), "sizes of a product");
    if size.contains(&0) {
        return;
    }
    a.1.check(a.0.len());
    b.1.check(b.0.len());
    c.1.check(c.0.len());
    let beta = T::from_f32(f32::from(u8::from(adds)));
    // SAFETY: the last element of each matrix is inside its buffer, just checked; strides are not negative.
    unsafe {
        T::gemm(
            size,
            (a.0.as_ptr().add(a.1.start), a.1.strides()),
            (b.0.as_ptr().add(b.1.start), b.1.strides()),
            beta,
            (c.0.as_mut_ptr().add(c.1.start), c.1.strides()),
        );
    }
}

/// `x Wᵀ + b`, with W as `[outputs, inputs]`.
pub fn linear<D: Place, T: Real>(
    device: &D,
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    inputs: usize,
) -> Result<Vec<T>> {
    let (rows, outputs) = (x.len() / inputs, weight.len() / inputs);
    let mut y = match bias {
        Some(bias) => bias.repeat(rows),
        None => vec![T::default(); rows * outputs],
    };
    device.product([rows, inputs, outputs], [false, true], x, weight, &mut y, true)?;
    Ok(y)
}

/// Backward of [`linear`]: adds to the gradients of weight and bias, and answers that of the input.
pub fn linear_backward<D: Place, T: Real>(
    device: &D,
    [x, weight, dy]: [&[T]; 3],
    inputs: usize,
    dweight: &mut [T],
    dbias: Option<&mut [T]>,
) -> Result<Vec<T>> {
    let (rows, outputs) = (x.len() / inputs, weight.len() / inputs);
    device.product([outputs, rows, inputs], [true, false], dy, x, dweight, true)?;
    if let Some(dbias) = dbias {
        dy.chunks_exact(outputs).for_each(|row| add(dbias, row));
    }
    let mut dx = vec![T::default(); rows * inputs];
    device.product([rows, outputs, inputs], [false; 2], dy, weight, &mut dx, false)?;
    Ok(dx)
}

/// `to += from`.
pub fn add<T: Real>(to: &mut [T], from: &[T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += *from);
}

/// What the backward of a layer norm needs: normalized rows, and the inverse deviation of each.
pub struct Normalized<T> {
    rows: Vec<T>,
    inverse: Vec<f64>,
}

/// Layer norm of rows of `width`, with scale and shift.
pub fn layer_norm<T: Real>(x: &[T], scale: &[T], shift: &[T]) -> (Vec<T>, Normalized<T>) {
    let width = scale.len();
    let (mut y, mut normalized) = (Vec::with_capacity(x.len()), Vec::with_capacity(x.len()));
    let mut inverses = Vec::with_capacity(x.len() / width);
    for row in x.chunks_exact(width) {
        let mean = row.iter().map(|x| x.to_f64()).sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x.to_f64() - mean).powi(2)).sum::<f64>() / width as f64;
        let inverse = 1.0 / (variance + 1e-5).sqrt();
        for ((x, scale), shift) in row.iter().zip(scale).zip(shift) {
            let number = T::from_f64((x.to_f64() - mean) * inverse);
            normalized.push(number);
            y.push(number * *scale + *shift);
        }
        inverses.push(inverse);
    }
    (y, Normalized { rows: normalized, inverse: inverses })
}

/// Backward of [`layer_norm`].
pub fn layer_norm_backward<T: Real>(
    normalized: &Normalized<T>,
    scale: &[T],
    dy: &[T],
    dscale: &mut [T],
    dshift: &mut [T],
) -> Vec<T> {
    let width = scale.len();
    let mut dx = Vec::with_capacity(dy.len());
    let rows = dy.chunks_exact(width).zip(normalized.rows.chunks_exact(width)).zip(&normalized.inverse);
    for ((dy, x), inverse) in rows {
        add(dshift, dy);
        let (mut sum, mut along) = (0.0, 0.0);
        for at in 0..width {
            dscale[at] += dy[at] * x[at];
            let dx = (dy[at] * scale[at]).to_f64();
            sum += dx;
            along += dx * x[at].to_f64();
        }
        let width = width as f64;
        dx.extend((0..dy.len()).map(|at| {
            let of_norm = (dy[at] * scale[at]).to_f64() - sum / width - x[at].to_f64() * along / width;
            T::from_f64(inverse * of_norm)
        }));
    }
    dx
}

/// GELU, by tanh, and its derivative.
fn gelu_of(x: f64) -> (f64, f64) {
    let inner = (2.0 / std::f64::consts::PI).sqrt();
    let tanh = (inner * (x + 0.044715 * x * x * x)).tanh();
    let slope = inner * (1.0 + 3.0 * 0.044715 * x * x);
    (0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope)
}

pub fn gelu<T: Real>(x: &[T]) -> Vec<T> {
    x.iter().map(|x| T::from_f64(gelu_of(x.to_f64()).0)).collect()
}

pub fn gelu_backward<T: Real>(x: &[T], dy: &[T]) -> Vec<T> {
    x.iter().zip(dy).map(|(x, dy)| *dy * T::from_f64(gelu_of(x.to_f64()).1)).collect()
}

/// Causal attention of sequences of `tokens`. Each of q, k and v is `[rows, heads × size]`; the answer is that of the output and the weights
/// of all heads.
pub fn attention<T: Real>(
    [q, k, v]: [&[T]; 3],
    tokens: usize,
    heads: usize,
    size: usize,
) -> (Vec<T>, Vec<T>) {
    let row = heads * size;
    let sequences = q.len() / (tokens * row);
    let mut output = vec![T::default(); q.len()];
    let mut weights = vec![T::default(); sequences * heads * tokens * tokens];
    for (number, weights) in weights.chunks_exact_mut(tokens * tokens).enumerate() {
        let start = number / heads * tokens * row + number % heads * size;
        let of_head = Matrix::of_columns(tokens, size, row, start);
        let square = Matrix::new(tokens, tokens);
        product((q, of_head), (k, of_head.transposed()), (weights, square), false);
        for (at, scores) in weights.chunks_exact_mut(tokens).enumerate() {
            softmax_of_first(scores, at + 1, 1.0 / (size as f64).sqrt());
        }
        product((weights, square), (v, of_head), (&mut output, of_head), false);
    }
    (output, weights)
}

/// Softmax of the first `count` scores times `factor`; the others become 0.
fn softmax_of_first<T: Real>(scores: &mut [T], count: usize, factor: f64) {
    let greatest = scores[..count].iter().map(|score| score.to_f64()).fold(f64::MIN, f64::max);
    let exps: Vec<f64> =
        scores[..count].iter().map(|score| (factor * (score.to_f64() - greatest)).exp()).collect();
    let sum: f64 = exps.iter().sum();
    scores.iter_mut().zip(&exps).for_each(|(score, exp)| *score = T::from_f64(exp / sum));
    scores[count..].fill(T::default());
}

/// Backward of [`attention`]: the gradients of q, k and v.
pub fn attention_backward<T: Real>(
    [q, k, v]: [&[T]; 3],
    weights: &[T],
    doutput: &[T],
    tokens: usize,
    heads: usize,
    size: usize,
) -> [Vec<T>; 3] {
    let row = heads * size;
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|of| vec![T::default(); of.len()]);
    let mut dweights = vec![T::default(); tokens * tokens];
    let factor = 1.0 / (size as f64).sqrt();
    for (number, weights) in weights.chunks_exact(tokens * tokens).enumerate() {
        let start = number / heads * tokens * row + number % heads * size;
        let of_head = Matrix::of_columns(tokens, size, row, start);
        let square = Matrix::new(tokens, tokens);
        product((weights, square.transposed()), (doutput, of_head), (&mut dv, of_head), false);
        product((doutput, of_head), (v, of_head.transposed()), (&mut dweights, square), false);
        for (weights, dweights) in weights.chunks_exact(tokens).zip(dweights.chunks_exact_mut(tokens)) {
            let along: f64 = weights.iter().zip(&*dweights).map(|(w, d)| w.to_f64() * d.to_f64()).sum();
            for (weight, dweight) in weights.iter().zip(dweights) {
                *dweight = T::from_f64(factor * weight.to_f64() * (dweight.to_f64() - along));
            }
        }
        product((&dweights, square), (k, of_head), (&mut dq, of_head), false);
        product((&dweights, square.transposed()), (q, of_head), (&mut dk, of_head), false);
    }
    [dq, dk, dv]
}
