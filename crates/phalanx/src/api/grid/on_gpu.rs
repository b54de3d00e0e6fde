//! Halos of arrays in GPU memory: packed and unpacked by strided copies on the communicator's stream, with the messages between them. All
//! of it is enqueued, and nothing waits.

use super::halo::Step;
use super::in_flight::{IN_FLIGHT_TAG, Way};
use super::slab::Slab;
use crate::api::comm::Comm;
use crate::buffer::loan::Loan;
use crate::buffer::scratch::Scratch;
use crate::buffer::stream::GpuStream;
use crate::gpu::pitched::Packing;
use crate::types::dtype::Plain;
use crate::types::error::{Error, Result, UnsupportedError};
use std::ops::Range;

impl Comm {
    /// The stream of the exchange. An error where operations are not on one.
    fn stream_of_halos(&self, operation: &str) -> Result<&GpuStream> {
        self.stream.gpu_stream().ok_or_else(|| {
            Error::from(UnsupportedError {
                what: format!("{operation} of GPU memory"),
                why: format!("operations of the backend {} are not on a GPU's stream", self.backend.kind()),
                remedy: "use a communicator on NCCL, RCCL or NVSHMEM, or copy the array to host memory"
                    .into(),
            })
        })
    }

    /// [`exchange_halo`](Comm::exchange_halo) of an array at this address.
    ///
    /// # Safety
    /// The array is lent to the communicator's stream, and has the shape of the steps.
    pub(super) unsafe fn exchange_on_gpu<T: Plain>(
        &self,
        operation: &'static str,
        array: u64,
        steps: &[Step<'_>],
    ) -> Result<()> {
        let stream = self.stream_of_halos(operation)?;
        let Some(most) = steps.iter().map(Step::cells).max() else { return Ok(()) };
        let scratch = Scratch::new(stream, 4 * most * size_of::<T>())?;
        for step in steps {
            let block = |number: usize| number * step.cells() * size_of::<T>();
            let sides = [0, 1].into_iter().filter(|side| step.neighbors.sources()[*side].is_some());
            for side in sides.clone() {
                // SAFETY: the caller's contract.
                unsafe { copy::<T>(&step.inner[side], array, &scratch, block(side), Packing::Pack) }?;
            }
            let sends = [0, 1].map(|side| scratch.part::<T>(block(side), step.cells()));
            let mut receives = [2, 3].map(|number| scratch.part::<T>(block(number), step.cells()));
            self.exchange_blocks(&step.neighbors, &sends, &mut receives)?;
            for side in sides {
                // SAFETY: the caller's contract.
                unsafe { copy::<T>(&step.outer[side], array, &scratch, block(2 + side), Packing::Unpack) }?;
            }
        }
        Ok(())
    }

    /// Packs the cells of all ways and sends them. The loan of the array ends when they are packed.
    ///
    /// # Safety
    /// The array is lent to the communicator's stream, and has the shape of the ways' slabs.
    pub(super) unsafe fn start_on_gpu<T: Plain>(
        &self,
        operation: &'static str,
        loan: Loan<'_>,
        ways: Vec<Way<'_>>,
    ) -> Result<GpuHalo> {
        let array = loan.span().start as u64;
        let cells = |slab: &Option<(usize, Slab<'_>)>| slab.as_ref().map_or(0, |(_, slab)| slab.cells());
        let all: usize = ways.iter().map(|way| cells(&way.leaving) + cells(&way.arriving)).sum();
        let scratch = Scratch::new(self.stream_of_halos(operation)?, all * size_of::<T>())?;
        let (mut sends, mut receives, mut received) = (Vec::new(), Vec::new(), Vec::new());
        let mut at = 0;
        {
            // Until all is packed.
            let _lent = loan;
            for Way { leaving, arriving } in ways {
                if let Some((destination, slab)) = leaving {
                    // SAFETY: the caller's contract.
                    unsafe { copy::<T>(&slab, array, &scratch, at, Packing::Pack) }?;
                    sends.push((scratch.part::<T>(at, slab.cells()), destination));
                    at += slab.cells() * size_of::<T>();
                }
                if let Some((source, slab)) = arriving {
                    receives.push((scratch.part::<T>(at, slab.cells()), source));
                    received.push((at, slab.ranges.clone()));
                    at += slab.cells() * size_of::<T>();
                }
            }
        }
        self.group(|group| {
            for (block, destination) in &sends {
                group.send_tagged(block, *destination, IN_FLIGHT_TAG)?;
            }
            for (block, source) in &mut receives {
                group.recv_tagged(block, *source, IN_FLIGHT_TAG)?;
            }
            Ok(())
        })?;
        Ok(GpuHalo { scratch, received })
    }
}

/// What has been sent and received on a stream, and is not in the halo yet.
pub(super) struct GpuHalo {
    scratch: Scratch,
    /// Where each block begins, in bytes, and the cells that it is for.
    received: Vec<(usize, Vec<Range<usize>>)>,
}

impl GpuHalo {
    /// Puts the cells into the array.
    ///
    /// # Safety
    /// The array is lent to the stream of the exchange, and has the shape.
    pub unsafe fn unpack<T: Plain>(self, array: u64, shape: &[usize]) -> Result<()> {
        self.received.into_iter().try_for_each(|(at, ranges)| {
            // SAFETY: the caller's contract.
            unsafe { copy::<T>(&Slab { shape, ranges }, array, &self.scratch, at, Packing::Unpack) }
        })
    }
}

/// Copies the cells of a slab to packed memory from byte `at` on, or back.
///
/// # Safety
/// The array is lent to the scratch memory's stream, and has the slab's shape.
unsafe fn copy<T>(slab: &Slab<'_>, array: u64, scratch: &Scratch, at: usize, packing: Packing) -> Result<()> {
    slab.for_each_copy(size_of::<T>(), |rows, start, packed| {
        // SAFETY: the caller's contract: the slab's cells are in the array.
        unsafe { scratch.copy(&rows, array + start as u64, at + packed, packing) }
    })
}
