//! All_reduce of numbers in 8 bits, with a scale for each block.

use crate::device::{Device, Number};
use crate::{Error, Result};
use phalanx::{Comm, Source, Target};

/// Eight bits for a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Integers from -127 to 127 times the scale.
    Int8,
    /// Floating-point numbers with 4 bits of exponent and 3 of mantissa (E4M3) times the scale.
    Fp8,
}

impl Format {
    /// The greatest number that it can say.
    pub fn greatest(self) -> f32 {
        match self {
            Format::Int8 => 127.0,
            Format::Fp8 => 448.0,
        }
    }
}

/// Numbers as bytes, and back.
pub trait Quantize: Device {
    /// Memory of bytes.
    type Bytes: Target<Elem = u8> + Send + 'static;

    /// Bytes, all 0.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn zero_bytes(&self, len: usize) -> Result<Self::Bytes>;

    /// A byte for each number, and a scale for each block of `block` numbers: its greatest absolute number over
    /// [`Format::greatest`]. A block with a number that is not finite has the scale NaN.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn quantize<T: Number>(
        &self,
        format: Format,
        block: usize,
        from: &Self::View<'_, T>,
        bytes: &mut Self::Bytes,
        scales: &mut Self::ViewMut<'_, f32>,
    ) -> Result<()>;

    /// `to[i] = factor * Σ_r scale_r[i / block] * byte_r[i]`, where the bytes of `to.len()` numbers, and their scales, follow one another, rank by
    /// rank.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn sum_quantized<T: Number>(
        &self,
        format: Format,
        block: usize,
        factor: f64,
        bytes: &Self::Bytes,
        scales: &Self::View<'_, f32>,
        to: &mut Self::ViewMut<'_, T>,
    ) -> Result<()>;
}

/// An all_reduce that sends 8 bits for each number.
///
/// The numbers are cut into blocks. A rank sends each part of its numbers to the rank that adds them up, in f32; the sum travels in 8 bits again.
/// So each number is rounded once on each rank, and the sum once more. With [`Format::Int8`] each rounding moves it by at most 1/254 of the
/// block's greatest number; with [`Format::Fp8`] by at most 1/16 of itself, or 1/458752 of the block's greatest number near 0. NaN and
/// infinity make the whole block NaN on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantized {
    format: Format,
    block: usize,
}

impl Quantized {
    /// With a scale, of four bytes, for each `block` of numbers.
    ///
    /// # Errors
    /// [`Error::Usage`] for blocks of 0.
    pub fn new(format: Format, block: usize) -> Result<Quantized> {
        if block == 0 {
            return Err(Error::usage("blocks of 0 numbers: 1 at least; 256 is usual"));
        }
        Ok(Quantized { format, block })
    }

    /// Replaces the numbers by their mean over all ranks. Collective, with the same length on every rank.
    ///
    /// # Errors
    /// Errors of `comm` and of the device.
    pub fn all_reduce_mean<D: Quantize, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        numbers: &mut D::ViewMut<'_, T>,
    ) -> Result<()> {
        let Quantized { format, block } = *self;
        let (ranks, len) = (comm.world_size(), numbers.len());
        // Equal parts of whole blocks; what is beyond the numbers is 0.
        let part = len.div_ceil(ranks).next_multiple_of(block);
        let (all, blocks) = (part * ranks, part / block);
        let mut padded = device.zeros::<T>(all)?;
        device.convert(&D::reborrow(numbers), &mut device.view_mut(&mut padded, 0..len))?;

        let (mut bytes, mut scales) = (device.zero_bytes(all)?, device.zeros::<f32>(blocks * ranks)?);
        let whole = 0..blocks * ranks;
        let mut view = device.view_mut(&mut scales, whole.clone());
        device.quantize(format, block, &device.view(&padded, 0..all), &mut bytes, &mut view)?;
        drop(view);
        let (mut their_bytes, mut their_scales) =
            (device.zero_bytes(all)?, device.zeros::<f32>(blocks * ranks)?);
        comm.all_to_all(&bytes, &mut their_bytes)?;
        comm.all_to_all(&scales, &mut their_scales)?;

        let mut sum = device.zeros::<f32>(part)?;
        let (factor, their) = (1.0 / ranks as f64, device.view(&their_scales, whole.clone()));
        device.sum_quantized(
            format,
            block,
            factor,
            &their_bytes,
            &their,
            &mut device.view_mut(&mut sum, 0..part),
        )?;
        let (mut own_bytes, mut own_scales) = (device.zero_bytes(part)?, device.zeros::<f32>(blocks)?);
        let mut view = device.view_mut(&mut own_scales, 0..blocks);
        device.quantize(format, block, &device.view(&sum, 0..part), &mut own_bytes, &mut view)?;
        drop(view);
        comm.all_gather(&own_bytes, &mut bytes)?;
        comm.all_gather(&own_scales, &mut scales)?;
        let scales = device.view(&scales, whole);
        device.sum_quantized(
            format,
            block,
            1.0,
            &bytes,
            &scales,
            &mut device.view_mut(&mut padded, 0..all),
        )?;
        device.convert(&device.view(&padded, 0..len), numbers)
    }
}
