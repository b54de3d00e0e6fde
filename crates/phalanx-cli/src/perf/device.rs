//! The GPU of a rank: its stream, and its buffers as the check sees them.

use super::data::Value;
use super::plan::{Plan, Registration};
use super::report::RankGpu;
use crate::gpu::Gpu;
use crate::size;
use anyhow::{Context, ensure};
use phalanx::cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceSlice};
use phalanx::{BackendKind, Comm, HostBuffer, Result, nccl, nvshmem};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of the host memory through which a buffer is filled and checked.
pub const STAGE: usize = 16 << 20;

/// Most bytes in which a rank describes its GPU to the others.
const DESCRIPTION: usize = 256;

/// A stream on the communicator's GPU, for all its operations and memory; `None` without GPU.
///
/// It is not the default stream, of which no graph can be captured.
pub fn stream(comm: &Comm, plan: &Plan) -> anyhow::Result<Option<Arc<CudaStream>>> {
    let Some(default) = comm.cuda_stream() else {
        return Ok(None);
    };
    let context = default.context();
    let (free, _) = context.mem_get_info()?;
    let needed = plan.largest().saturating_mul(2);
    ensure!(
        needed <= free,
        "two buffers of {} need {}, and {} of GPU {} are free: lower --maxbytes",
        size::format(plan.largest() as u64),
        size::format(needed as u64),
        size::format(free as u64),
        context.ordinal()
    );
    // SAFETY: all memory of this context is allocated, used and freed on the one stream that is made here, so its
    // order is all the order there has to be.
    unsafe { context.disable_event_tracking() };
    Ok(Some(context.new_stream()?))
}

/// The ranks' GPUs, in rank order; empty without. `gpu` is this rank's. Collective.
pub fn gpus(comm: &Comm, gpu: Option<usize>) -> anyhow::Result<Vec<RankGpu>> {
    let Some(number) = gpu else {
        return Ok(Vec::new());
    };
    ensure!(
        comm.backend() != BackendKind::Rccl,
        "nothing is measured on AMD's GPUs; --backend host measures the memory of this host"
    );
    let gpu = Gpu::number(number)?;
    let text = serde_json::to_string(&RankGpu { number, name: gpu.name()?, pci: gpu.pci()? })?;
    ensure!(
        text.len() <= DESCRIPTION,
        "the description of GPU {number} is longer than {DESCRIPTION} bytes: {text}"
    );
    // Behind the text, spaces.
    let mut mine = [b' '; DESCRIPTION];
    mine[..text.len()].copy_from_slice(text.as_bytes());
    let mut all = vec![0; DESCRIPTION * comm.world_size()];
    comm.all_gather(&mine, &mut all)?;
    all.chunks(DESCRIPTION).map(|text| Ok(serde_json::from_slice(text)?)).collect()
}

/// Memory of a GPU, and a piece of host memory on the way there and back.
pub struct DeviceMemory<T: Value> {
    elements: Elements<T>,
    stage: HostBuffer<T>,
}

enum Elements<T: Value> {
    Slice(CudaSlice<T>),
    /// NCCL's own, which it knows beforehand.
    Known(nccl::Buffer<T>),
    /// NVSHMEM's. Freeing it would be collective, and a rank that fails does not wait for the others: the library's end frees it.
    Shared(nvshmem::Buffer<T>),
}

impl<T: Value> DeviceMemory<T> {
    /// `len` elements, 0, in the order of the stream. Collective.
    pub fn new(
        comm: &Comm,
        stream: &Arc<CudaStream>,
        len: usize,
        registration: Registration,
    ) -> anyhow::Result<DeviceMemory<T>> {
        let elements = match registration {
            Registration::None => Elements::Slice(stream.alloc_zeros(len)?),
            Registration::Local => known(comm, len, nccl::Registration::Local)?,
            Registration::Symmetric => match comm.nvshmem() {
                Some(nvshmem) => Elements::Shared(nvshmem.alloc(len)?),
                None => known(comm, len, nccl::Registration::Symmetric)?,
            },
        };
        Ok(DeviceMemory { elements, stage: comm.alloc(len.min(STAGE / size_of::<T>()))? })
    }

    pub fn view(&self, range: Range<usize>) -> CudaView<'_, T> {
        self.elements.part(range)
    }

    pub fn view_mut(&mut self, range: Range<usize>) -> CudaViewMut<'_, T> {
        self.elements.part_mut(range)
    }

    /// Makes elements 0.
    pub fn zero(elements: &mut CudaViewMut<'_, T>) -> Result<()> {
        let stream = elements.stream().clone();
        Ok(stream.memset_zeros(elements)?)
    }

    /// Has the first `len` elements written, piece by piece.
    pub fn write(&mut self, len: usize, mut write: impl FnMut(usize, &mut [T])) -> Result<()> {
        for piece in pieces(len, self.stage.len()) {
            let stage = &mut self.stage[..piece.len()];
            write(piece.start, stage);
            let mut part = self.elements.part_mut(piece);
            let stream = part.stream().clone();
            stream.memcpy_htod(&*stage, &mut part)?;
            // The stage is free again.
            stream.synchronize()?;
        }
        Ok(())
    }

    /// Has the first `len` elements read, piece by piece.
    pub fn read(&mut self, len: usize, mut read: impl FnMut(usize, &[T])) -> Result<()> {
        for piece in pieces(len, self.stage.len()) {
            let stage = &mut self.stage[..piece.len()];
            let part = self.elements.part(piece.clone());
            let stream = part.stream().clone();
            stream.memcpy_dtoh(&part, stage)?;
            stream.synchronize()?;
            read(piece.start, stage);
        }
        Ok(())
    }
}

impl<T: Value> Elements<T> {
    fn part(&self, range: Range<usize>) -> CudaView<'_, T> {
        match self {
            Elements::Slice(elements) => elements.slice(range),
            Elements::Known(elements) => elements.slice(range),
            Elements::Shared(elements) => elements.slice(range),
        }
    }

    fn part_mut(&mut self, range: Range<usize>) -> CudaViewMut<'_, T> {
        match self {
            Elements::Slice(elements) => elements.slice_mut(range),
            Elements::Known(elements) => elements.slice_mut(range),
            Elements::Shared(elements) => elements.slice_mut(range),
        }
    }
}

/// Memory of NCCL's, registered as `-R` says: figures of anything else would bear a wrong name.
fn known<T: Value>(comm: &Comm, len: usize, wanted: nccl::Registration) -> anyhow::Result<Elements<T>> {
    let nccl =
        comm.nccl().context("-R: only NCCL registers GPU memory (and NVSHMEM has symmetric memory, -R 2)")?;
    let buffer = nccl.alloc_as(len, wanted)?;
    ensure!(
        buffer.registration() == wanted,
        "-R: NCCL {} has nothing to gain from {} memory between these GPUs, and made none: leave -R out",
        nccl.version(),
        if wanted == nccl::Registration::Local { "registered" } else { "symmetric" }
    );
    Ok(Elements::Known(buffer))
}

/// The ranges of `most` elements each, but for the last, that make up `len`.
pub fn pieces(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(most.max(1)).map(move |start| start..(start + most).min(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_everything_once() {
        let all = |len, most| pieces(len, most).collect::<Vec<_>>();
        assert_eq!(all(10, 4), [0..4, 4..8, 8..10]);
        assert_eq!(all(8, 4), [0..4, 4..8]);
        assert_eq!(all(5, 4), [0..4, 4..5]);
        assert!(all(0, 4).is_empty());
    }
}
