//! cuBLAS, as far as phalanx-train uses it: products of matrices, in column-major order.

use super::memory::Buffer;
use super::number::{Number, Real, bf16, f16};
use crate::base::call::{Code, exported};
use crate::base::handles::{self, Handle, Handles};
use crate::base::lock::lock;
use crate::base::pointers::{In, Out};
use crate::cuda::context::current;
use crate::cuda::queue::Stream;
use crate::cuda::stream;
use crate::cuda::work::{Plain, Work};
use std::ffi::c_int;
use std::sync::{Arc, Mutex};

const INVALID_VALUE: Code = 7;
const NOT_SUPPORTED: Code = 15;

/// Of `cudaDataType`.
const F32: c_int = 0;
const F64: c_int = 1;
const F16: c_int = 2;
const BF16: c_int = 14;
/// Of `cublasComputeType_t`.
const COMPUTE_32F: c_int = 68;
const COMPUTE_64F: c_int = 70;

/// The stream of a handle; none before it is set.
static HANDLES: Handles<Mutex<Option<Arc<Stream>>>> = Handles::new("cuBLAS handle");

/// A matrix: whether it is transposed, where it is, and the distance of its columns.
#[derive(Clone, Copy)]
struct Matrix<T> {
    is_transposed: bool,
    numbers: Buffer<T>,
    leading: usize,
}

impl<T: Number> Matrix<T> {
    /// A matrix of so many rows and columns when it is used.
    fn new(
        operation: c_int,
        address: u64,
        rows: usize,
        columns: usize,
        leading: usize,
    ) -> Result<Matrix<T>, Code> {
        let is_transposed = operation == 1;
        let (rows, columns) = if is_transposed { (columns, rows) } else { (rows, columns) };
        if operation > 1 || leading < rows.max(1) {
            return Err(INVALID_VALUE);
        }
        let len = if rows == 0 || columns == 0 { 0 } else { (columns - 1) * leading + rows };
        Ok(Matrix { is_transposed, numbers: Buffer::given(address, len), leading })
    }

    fn at(&self, row: usize, column: usize) -> usize {
        if self.is_transposed { column + row * self.leading } else { row + column * self.leading }
    }
}

/// `c = alpha · a · b + beta · c`, of m × k and k × n.
fn product<T: Number>(
    [m, n, k]: [usize; 3],
    alpha: f64,
    a: Matrix<T>,
    b: Matrix<T>,
    beta: f64,
    c: Matrix<T>,
) {
    let (a_numbers, b_numbers) = (a.numbers.read(), b.numbers.read());
    let (alpha, has_before) = (T::Real::of(alpha), beta != 0.0);
    c.numbers.change(|c_numbers| {
        for column in 0..n {
            for row in 0..m {
                let mut sum = T::Real::of(0.0);
                for l in 0..k {
                    sum = sum + a_numbers[a.at(row, l)].up::<T::Real>() * b_numbers[b.at(l, column)].up();
                }
                let place = &mut c_numbers[c.at(row, column)];
                // What was there is not read if it does not count.
                let before = if has_before { T::Real::of(beta) * place.up() } else { T::Real::of(0.0) };
                *place = T::down((alpha * sum + before).wide());
            }
        }
    });
}

exported! {
    fn cublasCreate_v2(handle: Out<Handle>) {
        current()?;
        let fresh = handles::fresh();
        HANDLES.insert(fresh, Arc::default());
        handle.set(fresh);
        Ok(())
    }

    fn cublasDestroy_v2(handle: Handle) {
        HANDLES.end(FUNCTION, handle, FUNCTION);
        Ok(())
    }

    fn cublasSetStream_v2(handle: Handle, stream: Handle) {
        *lock(&HANDLES.get(FUNCTION, handle)) = Some(stream::find(FUNCTION, stream)?);
        Ok(())
    }

    fn cublasGemmEx(
        handle: Handle, a_operation: c_int, b_operation: c_int, m: c_int, n: c_int, k: c_int, alpha: In<f64>, a: u64,
        a_type: c_int, a_leading: c_int, b: u64, b_type: c_int, b_leading: c_int, beta: In<f64>, c: u64, c_type: c_int,
        c_leading: c_int, compute: c_int, _algorithm: c_int,
    ) {
        let handle = HANDLES.get(FUNCTION, handle);
        let stream = lock(&handle).clone().ok_or(INVALID_VALUE)?;
        let sizes = [m, n, k].map(usize::try_from);
        let [Ok(m), Ok(n), Ok(k)] = sizes else { return Err(INVALID_VALUE) };
        let [a_leading, b_leading, c_leading] = [a_leading, b_leading, c_leading].map(|leading| leading as usize);
        if a_type != b_type || a_type != c_type {
            return Err(NOT_SUPPORTED);
        }
        let (alpha, beta) = match compute {
            COMPUTE_32F => (f64::from(alpha.cast::<f32>().slice(1)[0]), f64::from(beta.cast::<f32>().slice(1)[0])),
            COMPUTE_64F => (alpha.slice(1)[0], beta.slice(1)[0]),
            _ => return Err(NOT_SUPPORTED),
        };
        macro_rules! of_type {
            ($T:ty) => {{
                let a = Matrix::<$T>::new(a_operation, a, m, k, a_leading)?;
                let b = Matrix::<$T>::new(b_operation, b, k, n, b_leading)?;
                let c = Matrix::<$T>::new(0, c, m, n, c_leading)?;
                Arc::new(Plain(move || product([m, n, k], alpha, a, b, beta, c)))
            }};
        }
        let work: Arc<dyn Work> = match (a_type, compute) {
            (F32, COMPUTE_32F) => of_type!(f32),
            (F64, COMPUTE_64F) => of_type!(f64),
            (F16, COMPUTE_32F) => of_type!(f16),
            (BF16, COMPUTE_32F) => of_type!(bf16),
            _ => return Err(NOT_SUPPORTED),
        };
        stream.enqueue(work)
    }
}
