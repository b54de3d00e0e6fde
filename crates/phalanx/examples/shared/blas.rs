//! Matrices in GPU memory and their products, by cuBLAS. Column-major: an element's row comes first.

use crate::gpu::{Result, missing};
use cudarc::cublas::{self, CudaBlas, Gemm, GemmConfig, sys::cublasOperation_t::CUBLAS_OP_N};
use cudarc::driver::{CudaSlice, CudaStream};
use std::sync::Arc;

pub struct Matrix {
    pub rows: usize,
    pub columns: usize,
    pub elements: CudaSlice<f32>,
}

impl Matrix {
    /// With the elements that `f` says for row and column.
    pub fn new(
        stream: &Arc<CudaStream>,
        (rows, columns): (usize, usize),
        f: impl Fn(usize, usize) -> f32,
    ) -> Result<Matrix> {
        let elements: Vec<f32> = (0..rows * columns).map(|index| f(index % rows, index / rows)).collect();
        Ok(Matrix { rows, columns, elements: stream.clone_htod(&elements)? })
    }

    pub fn zeros(stream: &Arc<CudaStream>, (rows, columns): (usize, usize)) -> Result<Matrix> {
        Ok(Matrix { rows, columns, elements: stream.alloc_zeros(rows * columns)? })
    }
}

/// Products on a stream.
pub struct Blas(CudaBlas);

impl Blas {
    pub fn new(stream: &Arc<CudaStream>) -> Result<Blas> {
        // SAFETY: looks whether the loader finds the library, which has no initialiser of note.
        if !unsafe { cublas::sys::is_culib_present() } {
            return Err(missing("libcublas", "CUDA's linear algebra", "nvidia-cublas"));
        }
        Ok(Blas(CudaBlas::new(stream.clone())?))
    }

    /// `product = left × right`.
    pub fn multiply(&self, left: &Matrix, right: &Matrix, product: &mut Matrix) -> Result<()> {
        let (rows, columns) = (product.rows, product.columns);
        assert_eq!((left.rows, left.columns, right.columns), (rows, right.rows, columns));
        let config = GemmConfig {
            transa: CUBLAS_OP_N,
            transb: CUBLAS_OP_N,
            m: rows as i32,
            n: columns as i32,
            k: left.columns as i32,
            alpha: 1.0,
            lda: rows as i32,
            ldb: right.rows as i32,
            beta: 0.0,
            ldc: rows as i32,
        };
        // SAFETY: the three matrices have the shapes that the configuration says: asserted above.
        unsafe { self.0.gemm(config, &left.elements, &right.elements, &mut product.elements) }?;
        Ok(())
    }
}
