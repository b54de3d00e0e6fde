//! Strided copies in GPU memory: rows at equal distances, to and from memory where they lie one after the other.

#[cfg(feature = "rccl")]
use super::hip;
use crate::types::error::Result;
#[cfg(feature = "cuda")]
use cudarc::driver::{CudaStream, DriverError, sys};
#[cfg(feature = "cuda")]
use std::ptr::null_mut;

/// The largest pitch of a strided copy: that of every GPU so far (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
pub(crate) const MAX_PITCH: usize = i32::MAX as usize;

/// Rows of bytes at equal distances, in planes at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PitchedRows {
    /// Bytes of a row.
    pub bytes: usize,
    /// Bytes from a row to the next one: at least those of a row, and at most [`MAX_PITCH`] if there are several rows.
    pub pitch: usize,
    /// Rows of each plane.
    pub rows: usize,
    /// The distance of two planes, in pitches.
    pub height: usize,
    pub planes: usize,
}

impl PitchedRows {
    /// All bytes of the rows.
    pub fn total(&self) -> usize {
        self.bytes * self.rows * self.planes
    }

    fn is_one_row(&self) -> bool {
        self.rows * self.planes == 1
    }
}

/// The direction of a strided copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// From the rows to packed memory.
    Pack,
    /// From packed memory to the rows.
    Unpack,
}

impl Packing {
    /// Target and source, of what is at the rows and what is at packed memory.
    fn order<T>(self, pitched: T, packed: T) -> [T; 2] {
        match self {
            Packing::Pack => [packed, pitched],
            Packing::Unpack => [pitched, packed],
        }
    }
}

/// Copies rows on a stream of CUDA (`cuMemcpy3DAsync`), whose context is current.
///
/// # Safety
/// Both are memory of the stream's GPU, valid and apart from each other until the stream's work is complete.
#[cfg(feature = "cuda")]
pub(crate) unsafe fn copy_on_cuda(
    stream: &CudaStream,
    rows: &PitchedRows,
    (pitched, packed): (u64, u64),
    packing: Packing,
) -> Result<()> {
    let [target, source] = packing.order(pitched, packed);
    let (function, result) = if rows.is_one_row() {
        // SAFETY: the caller's contract.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, rows.bytes, stream.cu_stream()) };
        ("cuMemcpyDtoDAsync", result)
    } else {
        let [(dst_pitch, dst_height), (src_pitch, src_height)] =
            packing.order((rows.pitch, rows.height), (rows.bytes, rows.rows));
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let copy = sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: device,
            srcHost: null_mut(),
            srcDevice: source,
            srcArray: null_mut(),
            reserved0: null_mut(),
            srcPitch: src_pitch,
            srcHeight: src_height,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: device,
            dstHost: null_mut(),
            dstDevice: target,
            dstArray: null_mut(),
            reserved1: null_mut(),
            dstPitch: dst_pitch,
            dstHeight: dst_height,
            WidthInBytes: rows.bytes,
            Height: rows.rows,
            Depth: rows.planes,
        };
        // SAFETY: the caller's contract; the description is read during the call.
        ("cuMemcpy3DAsync", unsafe { sys::cuMemcpy3DAsync_v2(&raw const copy, stream.cu_stream()) })
    };
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(super::cuda::failed(function, DriverError(error)).into()),
    }
}

/// Copies rows on a stream of HIP: a call of `hipMemcpy2DAsync` for each plane.
///
/// # Safety
/// As for [`copy_on_cuda`].
#[cfg(feature = "rccl")]
pub(crate) unsafe fn copy_on_hip(
    stream: &hip::Stream,
    rows: &PitchedRows,
    (pitched, packed): (u64, u64),
    packing: Packing,
) -> Result<()> {
    let api = hip::api()?;
    let _current = hip::enter(stream.device())?;
    let pitch = if rows.is_one_row() { rows.bytes } else { rows.pitch };
    let [target_pitch, source_pitch] = packing.order(pitch, rows.bytes);
    for plane in 0..rows.planes {
        let pitched = pitched as usize + plane * rows.height * rows.pitch;
        let packed = packed as usize + plane * rows.rows * rows.bytes;
        let [target, source] = packing.order(pitched, packed);
        // SAFETY: the caller's contract.
        let result = unsafe {
            (api.hipMemcpy2DAsync)(
                target as *mut _,
                target_pitch,
                source as *const _,
                source_pitch,
                rows.bytes,
                rows.rows,
                phalanx_sys::hip::hipMemcpyDefault,
                stream.as_raw(),
            )
        };
        hip::check(api, "hipMemcpy2DAsync", result)?;
    }
    Ok(())
}
