//! Products of matrices, by cuBLAS, which is loaded at the first one.

use super::Gpu;
use crate::device::{Device, Number};
use crate::{Error, Result};
use cudarc::cublas::sys::{self, cublasComputeType_t, cublasOperation_t, cudaDataType};
use cudarc::cublas::{CudaBlas, result};
use cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut};
use phalanx::DType;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

/// Row-major matrices: sizes, and which are stored transposed, as [`Products::product`](crate::tensor::Products::product) has them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub size: [usize; 3],
    pub transposed: [bool; 2],
}

fn data_type(dtype: DType) -> cudaDataType {
    match dtype {
        DType::F64 => cudaDataType::CUDA_R_64F,
        DType::F16 => cudaDataType::CUDA_R_16F,
        DType::Bf16 => cudaDataType::CUDA_R_16BF,
        _ => cudaDataType::CUDA_R_32F,
    }
}

fn operation(is_transposed: bool) -> cublasOperation_t {
    if is_transposed { cublasOperation_t::CUBLAS_OP_T } else { cublasOperation_t::CUBLAS_OP_N }
}

fn open(gpu: &Gpu) -> Result<CudaBlas> {
    // cudarc panics where it loads the library and does not find it. Whether it is there can be asked in that mode only.
    let opened = catch_unwind(AssertUnwindSafe(|| CudaBlas::new(gpu.stream.clone())));
    let missing = "libcublas.so is not found: install cuBLAS, and name its folder in LD_LIBRARY_PATH";
    opened.map_err(|_| Error::Blas(missing.into()))?.map_err(failed)
}

fn failed(error: result::CublasError) -> Error {
    Error::Blas(format!("cuBLAS: {error}"))
}

impl Gpu {
    /// `c = a · b`, or `c += a · b` if `adds`: in f64 for f64, else in f32. The lengths fit the sizes.
    pub(crate) fn multiply<T: Number>(
        &self,
        Shape { size: [m, k, n], transposed }: Shape,
        a: &CudaView<'_, T>,
        b: &CudaView<'_, T>,
        c: &mut CudaViewMut<'_, T>,
        adds: bool,
    ) -> Result<()> {
        assert_eq!((a.len(), b.len(), c.len()), (m * k, k * n, m * n), "matrices of {m} × {k} and {k} × {n}");
        if k == 0 || c.is_empty() {
            return if adds { Ok(()) } else { self.fill(c, 0.0) };
        }
        let int = |len: usize| {
            i32::try_from(len).map_err(|_| {
                Error::usage(format!("a matrix of {len} rows or columns: cuBLAS takes 2^31 - 1"))
            })
        };
        // Row by row is column by column of the transposed: cᵀ = bᵀ · aᵀ.
        let (rows, columns, inner) = (int(n)?, int(m)?, int(k)?);
        let leading =
            |is_transposed, rows: i32, columns: i32| (if is_transposed { rows } else { columns }).max(1);
        let (b_leading, a_leading) =
            (leading(transposed[1], inner, rows), leading(transposed[0], columns, inner));
        let dtype = data_type(T::DTYPE);
        let (one, beta) = (1.0f64, f64::from(u8::from(adds)));
        let (one_single, beta_single) = (one as f32, beta as f32);
        let (compute, one, beta): (_, *const c_void, *const c_void) = match T::DTYPE {
            DType::F64 => {
                (cublasComputeType_t::CUBLAS_COMPUTE_64F, (&raw const one).cast(), (&raw const beta).cast())
            }
            _ => (
                cublasComputeType_t::CUBLAS_COMPUTE_32F,
                (&raw const one_single).cast(),
                (&raw const beta_single).cast(),
            ),
        };
        let mut blas = self.blas.lock().unwrap_or_else(PoisonError::into_inner);
        if blas.is_none() {
            *blas = Some(open(self)?);
        }
        let handle = *blas.as_ref().expect("just opened").handle();
        self.stream.context().bind_to_thread()?;
        // The uses are recorded when the second of each pair is dropped, behind the call.
        let ((a, _a_use), (b, _b_use), (c, _c_use)) =
            (a.device_ptr(&self.stream), b.device_ptr(&self.stream), c.device_ptr_mut(&self.stream));
        // SAFETY: matrices of the sizes that were checked; factors of the type of the computation, on the stack.
        let answer = unsafe {
            result::gemm_ex(
                handle,
                operation(transposed[1]),
                operation(transposed[0]),
                rows,
                columns,
                inner,
                one,
                b as *const c_void,
                dtype,
                b_leading,
                a as *const c_void,
                dtype,
                a_leading,
                beta,
                c as *mut c_void,
                dtype,
                rows,
                compute,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        answer.map_err(failed)
    }
}
