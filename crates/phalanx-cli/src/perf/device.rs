//! The GPU of a rank: its stream and its memory.

use super::plan::{Plan, Registration};
use super::report::RankGpu;
use crate::gpu::Gpu;
use crate::size;
use anyhow::{Context, ensure};
use phalanx::cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceSlice};
use phalanx::{BackendKind, Comm, HostBuffer, Result, nccl, nvshmem};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of the host memory through which GPU memory is filled and checked: a multiple of every element's
/// size.
pub const STAGE: usize = 16 << 20;

/// Bytes, at most, of a GPU's description for the other ranks.
const DESCRIPTION: usize = 256;

/// A stream on the communicator's GPU, for all its operations and memory; `None` without a GPU.
///
/// CUDA graphs cannot be captured on the default stream.
pub fn stream(comm: &Comm, plan: &Plan) -> anyhow::Result<Option<Arc<CudaStream>>> {
    let Ok(default) = comm.cuda_stream() else {
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
    // SAFETY: all memory of this context is allocated, used and freed on the one stream that is made here:
    // its order suffices.
    unsafe { context.disable_event_tracking() };
    Ok(Some(context.new_stream()?))
}

/// The ranks' GPUs in rank order; empty if ranks have none. `gpu` is this rank's. Collective.
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
    // Padded with spaces, which JSON ignores.
    let mut mine = [b' '; DESCRIPTION];
    mine[..text.len()].copy_from_slice(text.as_bytes());
    let mut all = vec![0; DESCRIPTION * comm.world_size()];
    comm.all_gather(&mine, &mut all)?;
    all.chunks(DESCRIPTION).map(|text| Ok(serde_json::from_slice(text)?)).collect()
}

/// Memory of a GPU, and host memory through which it is filled and checked.
pub struct DeviceMemory {
    bytes: Bytes,
    stage: HostBuffer<u8>,
}

enum Bytes {
    Slice(CudaSlice<u8>),
    /// Registered with NCCL.
    Registered(nccl::Buffer<u8>),
    /// NVSHMEM's symmetric memory. It is freed with the library: freeing it alone is collective, and a rank
    /// that fails does not wait for the others.
    Symmetric(nvshmem::Buffer<u8>),
}

impl DeviceMemory {
    /// This many bytes, all 0. Collective.
    pub fn new(
        comm: &Comm,
        stream: &Arc<CudaStream>,
        len: usize,
        registration: Registration,
    ) -> anyhow::Result<DeviceMemory> {
        let bytes = match registration {
            Registration::None => Bytes::Slice(stream.alloc_zeros(len)?),
            Registration::Local => registered(comm, len, nccl::Registration::Local)?,
            Registration::Symmetric => match comm.nvshmem() {
                Some(nvshmem) => Bytes::Symmetric(nvshmem.alloc(len)?),
                None => registered(comm, len, nccl::Registration::Symmetric)?,
            },
        };
        Ok(DeviceMemory { bytes, stage: comm.alloc(len.min(STAGE))? })
    }

    pub fn view(&self, range: Range<usize>) -> CudaView<'_, u8> {
        self.bytes.part(range)
    }

    pub fn view_mut(&mut self, range: Range<usize>) -> CudaViewMut<'_, u8> {
        self.bytes.part_mut(range)
    }

    /// Sets bytes to 0.
    pub fn zero(bytes: &mut CudaViewMut<'_, u8>) -> Result<()> {
        let stream = bytes.stream().clone();
        Ok(stream.memset_zeros(bytes)?)
    }

    /// Calls `write` with each piece of the first `len` bytes: its place and the bytes to set.
    pub fn write(&mut self, len: usize, write: &mut dyn FnMut(usize, &mut [u8])) -> Result<()> {
        for piece in pieces(len, self.stage.len()) {
            let stage = &mut self.stage[..piece.len()];
            write(piece.start, stage);
            let mut part = self.bytes.part_mut(piece);
            let stream = part.stream().clone();
            stream.memcpy_htod(&*stage, &mut part)?;
            // The stage is used again.
            stream.synchronize()?;
        }
        Ok(())
    }

    /// Calls `read` with each piece of the first `len` bytes.
    pub fn read(&mut self, len: usize, read: &mut dyn FnMut(usize, &[u8])) -> Result<()> {
        for piece in pieces(len, self.stage.len()) {
            let stage = &mut self.stage[..piece.len()];
            let part = self.bytes.part(piece.clone());
            let stream = part.stream().clone();
            stream.memcpy_dtoh(&part, stage)?;
            stream.synchronize()?;
            read(piece.start, stage);
        }
        Ok(())
    }
}

impl Bytes {
    fn part(&self, range: Range<usize>) -> CudaView<'_, u8> {
        match self {
            Bytes::Slice(bytes) => bytes.slice(range),
            Bytes::Registered(bytes) => bytes.slice(range),
            Bytes::Symmetric(bytes) => bytes.slice(range),
        }
    }

    fn part_mut(&mut self, range: Range<usize>) -> CudaViewMut<'_, u8> {
        match self {
            Bytes::Slice(bytes) => bytes.slice_mut(range),
            Bytes::Registered(bytes) => bytes.slice_mut(range),
            Bytes::Symmetric(bytes) => bytes.slice_mut(range),
        }
    }
}

/// NCCL's memory with this registration. NCCL may make memory without it, and figures of that would have a
/// wrong name.
fn registered(comm: &Comm, len: usize, wanted: nccl::Registration) -> anyhow::Result<Bytes> {
    let nccl =
        comm.nccl().context("-R: only NCCL registers GPU memory (and NVSHMEM has symmetric memory, -R 2)")?;
    let buffer = nccl.alloc_as(len, wanted)?;
    ensure!(
        buffer.registration() == wanted,
        "-R: NCCL {} has nothing to gain from {} memory between these GPUs, and made none: leave -R out",
        nccl.version(),
        if wanted == nccl::Registration::Local { "registered" } else { "symmetric" }
    );
    Ok(Bytes::Registered(buffer))
}

/// Divides `0..len` into ranges of `most`, of which the last may be shorter.
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
