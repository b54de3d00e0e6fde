//! PowerSGD (Vogels et al. 2019): a gradient's matrix as a product of two thin ones.

use crate::device::{Device, Number};
use crate::{Error, Result};
use phalanx::{Comm, ReduceOp, Source};

/// What the factors take. Matrices are in row-major order; a thin one has the rank's columns.
pub trait LowRank: Device {
    /// `product = matrix · thin`, or `matrixᵀ · thin` if `transposed`. `shape` is rows and columns of the
    /// matrix, and the rank.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn times_thin<M: Number>(
        &self,
        shape: [usize; 3],
        transposed: bool,
        matrix: &Self::View<'_, M>,
        thin: &Self::View<'_, M>,
        product: &mut Self::ViewMut<'_, M>,
    ) -> Result<()>;

    /// `matrix = left · rightᵀ`.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn outer_product<M: Number>(
        &self,
        shape: [usize; 3],
        left: &Self::View<'_, M>,
        right: &Self::View<'_, M>,
        matrix: &mut Self::ViewMut<'_, M>,
    ) -> Result<()>;

    /// Makes the columns of a thin matrix orthonormal, one after the other; a column that the ones before span becomes 0.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn orthonormalize<M: Number>(
        &self,
        rows: usize,
        rank: usize,
        thin: &mut Self::ViewMut<'_, M>,
    ) -> Result<()>;
}

/// Mean of a matrix over the ranks, of which only a part of low rank is delivered; the rest, the *error*, is kept and added to the next
/// one.
///
/// Delivered gradients and the mean of the ranks' errors add up to the mean gradients of all steps so far. The state belongs to one
/// parameter: it stays right if the parameter moves to another bucket.
#[derive(Debug)]
pub struct PowerSgd<D: Device, M: Number> {
    device: D,
    shape: [usize; 3],
    error: D::Buffer<M>,
    /// The right factor of the last step, from which the next begins.
    right: D::Buffer<M>,
}

impl<D: LowRank, M: Number> PowerSgd<D, M> {
    /// For a parameter of `rows` × `columns`. The seed is the same on every rank.
    ///
    /// # Errors
    /// [`Error::Usage`] if the rank is 0 or more than the matrix can have. Errors of the device.
    pub fn new(device: &D, rows: usize, columns: usize, rank: usize, seed: u64) -> Result<PowerSgd<D, M>> {
        let most = rows.min(columns);
        if rank == 0 || rank > most {
            return Err(Error::usage(format!(
                "rank {rank} for a matrix of {rows} × {columns}: 1 to {most} are possible"
            )));
        }
        // Between -1 and 1, by splitmix64.
        let number = |at: u64| {
            let mut x = seed.wrapping_add((at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            M::from_f64(((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
        };
        let right: Vec<M> = (0..(columns * rank) as u64).map(number).collect();
        Ok(PowerSgd {
            device: device.clone(),
            shape: [rows, columns, rank],
            error: device.zeros(rows * columns)?,
            right: device.upload(&right)?,
        })
    }

    /// Replaces the gradient by what is delivered of the mean. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] if the gradient has another length than the matrix. Errors of `comm` and of the device.
    pub fn reduce(&mut self, comm: &Comm, gradient: &mut D::ViewMut<'_, M>) -> Result<()> {
        let (device, shape) = (&self.device, self.shape);
        let [rows, columns, rank] = shape;
        let len = rows * columns;
        if gradient.len() != len {
            return Err(Error::usage(format!(
                "a gradient of {} numbers for {rows} × {columns}",
                gradient.len()
            )));
        }
        let mut error = device.view_mut(&mut self.error, 0..len);
        device.add(1.0, &D::reborrow(gradient), &mut error)?;

        let mut left = device.alloc::<M>(rows * rank)?;
        let mut left = device.view_mut(&mut left, 0..rows * rank);
        let mut right = device.view_mut(&mut self.right, 0..columns * rank);
        device.times_thin(shape, false, &D::reborrow(&error), &D::reborrow(&right), &mut left)?;
        comm.all_reduce_in_place(&mut left, ReduceOp::Avg)?;
        device.orthonormalize(rows, rank, &mut left)?;
        device.times_thin(shape, true, &D::reborrow(&error), &D::reborrow(&left), &mut right)?;
        comm.all_reduce_in_place(&mut right, ReduceOp::Avg)?;
        device.outer_product(shape, &D::reborrow(&left), &D::reborrow(&right), gradient)?;
        device.add(-1.0, &D::reborrow(gradient), &mut error)
    }

    /// This rank's error and the right factor, for checkpoints. The error is each rank's own.
    pub fn state(&mut self) -> [&mut D::Buffer<M>; 2] {
        [&mut self.error, &mut self.right]
    }
}
