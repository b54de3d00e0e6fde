//! Copies and fills.
//!
//! As in CUDA, pageable host memory is read and written before the call returns. Other memory is accessed
//! when the stream reaches the copy.

use super::context::{self, current};
use super::error::INVALID_VALUE;
use super::memory::Range;
use super::queue::Stream;
use super::stream;
use super::work::Plain;
use crate::base::call::{Answer, Code, exported};
use crate::base::handles::Handle;
use crate::base::pointers::In;
use crate::base::violation::violation;
use std::sync::Arc;

/// One end of a copy.
#[derive(Clone, Copy)]
enum End {
    /// Memory of a device, or page-locked memory.
    Allocated(Range),
    /// Other memory of the process.
    Pageable { address: u64, len: usize },
}

impl End {
    fn new(function: &'static str, role: &'static str, address: u64, len: usize) -> Result<End, Code> {
        if address == 0 {
            return Err(INVALID_VALUE);
        }
        if !(Range { function, role, address, len }).is_allocated() {
            return Ok(End::Pageable { address, len });
        }
        Ok(End::Allocated(Range::given(function, role, address, len)))
    }

    fn device(function: &'static str, role: &'static str, address: u64, len: usize) -> Result<End, Code> {
        if address == 0 {
            return Err(INVALID_VALUE);
        }
        Ok(End::Allocated(Range::given(function, role, address, len)))
    }

    fn is_pageable(self) -> bool {
        matches!(self, End::Pageable { .. })
    }

    fn read(self) -> Vec<u8> {
        match self {
            End::Allocated(range) => range.read(),
            End::Pageable { address, len } => {
                // SAFETY: the caller's memory, which it keeps until the copy is done.
                unsafe { std::slice::from_raw_parts(address as *const u8, len) }.to_vec()
            }
        }
    }

    fn write(self, bytes: &[u8]) {
        match self {
            End::Allocated(range) => range.write(bytes),
            // SAFETY: the caller's memory, which it keeps until the copy is done.
            End::Pageable { address, .. } => unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len());
            },
        }
    }
}

fn copy(stream: &Arc<Stream>, to: End, from: End) -> Answer {
    let captures = stream.capture().is_some();
    if from.is_pageable() && !captures {
        let staged = from.read();
        return perform(stream, to.is_pageable(), move || to.write(&staged));
    }
    perform(stream, to.is_pageable() && !captures, move || to.write(&from.read()))
}

/// Enqueues work, and waits for it if `waits`.
fn perform(stream: &Arc<Stream>, waits: bool, work: impl Fn() + Send + Sync + 'static) -> Answer {
    stream.enqueue(Arc::new(Plain(work)))?;
    if waits {
        stream.mark().wait();
    }
    Ok(())
}

fn to_device(
    function: &'static str,
    stream: Handle,
    to: u64,
    from: u64,
    len: usize,
) -> Result<Arc<Stream>, Code> {
    let stream = stream::find(function, stream)?;
    if len > 0 {
        let to = End::device(function, "the destination", to, len)?;
        copy(&stream, to, End::new(function, "the source", from, len)?)?;
    }
    Ok(stream)
}

fn to_host(
    function: &'static str,
    stream: Handle,
    to: u64,
    from: u64,
    len: usize,
) -> Result<Arc<Stream>, Code> {
    let stream = stream::find(function, stream)?;
    if len > 0 {
        let from = End::device(function, "the source", from, len)?;
        copy(&stream, End::new(function, "the destination", to, len)?, from)?;
    }
    Ok(stream)
}

fn between(function: &'static str, stream: Handle, to: u64, from: u64, len: usize) -> Answer {
    let stream = stream::find(function, stream)?;
    if len == 0 {
        return Ok(());
    }
    let to = End::device(function, "the destination", to, len)?;
    copy(&stream, to, End::device(function, "the source", from, len)?)
}

fn fill(function: &'static str, stream: Handle, to: u64, pattern: &[u8], count: usize) -> Answer {
    let stream = stream::find(function, stream)?;
    if count == 0 {
        return Ok(());
    }
    if to == 0 {
        return Err(INVALID_VALUE);
    }
    let to = Range::given(function, "the destination", to, count * pattern.len());
    if pattern.iter().all(|byte| *byte == 0) {
        return perform(&stream, false, move || to.clear());
    }
    let pattern = pattern.to_vec();
    perform(&stream, false, move || to.write(&pattern.repeat(count)))
}

exported! {
    fn cuMemcpyHtoD_v2(to: u64, from: u64, len: usize) {
        // Page-locked memory, too, has been read when this returns.
        to_device(FUNCTION, 0, to, from, len).map(|stream| stream.mark().wait())
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: Handle) {
        to_device(FUNCTION, stream, to, from, len).map(drop)
    }

    fn cuMemcpyDtoH_v2(to: u64, from: u64, len: usize) {
        to_host(FUNCTION, 0, to, from, len).map(|stream| stream.mark().wait())
    }

    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: Handle) {
        to_host(FUNCTION, stream, to, from, len).map(drop)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) {
        between(FUNCTION, 0, to, from, len)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: Handle) {
        between(FUNCTION, stream, to, from, len)
    }

    fn cuMemcpyPeer(to: u64, to_context: Handle, from: u64, from_context: Handle, len: usize) {
        context::find(to_context)?;
        context::find(from_context)?;
        between(FUNCTION, 0, to, from, len)
    }

    fn cuMemcpyPeerAsync(to: u64, to_context: Handle, from: u64, from_context: Handle, len: usize, stream: Handle) {
        context::find(to_context)?;
        context::find(from_context)?;
        between(FUNCTION, stream, to, from, len)
    }

    fn cuMemcpy(to: u64, from: u64, len: usize) {
        any(FUNCTION, 0, to, from, len)
    }

    fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: Handle) {
        any(FUNCTION, stream, to, from, len)
    }

    fn cuMemcpy3DAsync_v2(copy: In<StridedCopy>, stream: Handle) {
        strided(FUNCTION, stream, &copy.get().ok_or(INVALID_VALUE)?)
    }

    fn cuMemsetD8_v2(to: u64, value: u8, count: usize) {
        fill(FUNCTION, 0, to, &[value], count)
    }

    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Handle) {
        fill(FUNCTION, stream, to, &[value], count)
    }

    fn cuMemsetD16_v2(to: u64, value: u16, count: usize) {
        fill(FUNCTION, 0, to, &value.to_ne_bytes(), count)
    }

    fn cuMemsetD16Async(to: u64, value: u16, count: usize, stream: Handle) {
        fill(FUNCTION, stream, to, &value.to_ne_bytes(), count)
    }

    fn cuMemsetD32_v2(to: u64, value: u32, count: usize) {
        fill(FUNCTION, 0, to, &value.to_ne_bytes(), count)
    }

    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: Handle) {
        fill(FUNCTION, stream, to, &value.to_ne_bytes(), count)
    }
}

/// One end of a `CUDA_MEMCPY3D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct StridedEnd {
    x_in_bytes: usize,
    y: usize,
    z: usize,
    lod: usize,
    memory_type: u32,
    host: u64,
    device: u64,
    array: u64,
    reserved: u64,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct StridedCopy {
    from: StridedEnd,
    to: StridedEnd,
    width_in_bytes: usize,
    height: usize,
    depth: usize,
}

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;
/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH`, as GPUs have it.
const MAX_PITCH: usize = i32::MAX as usize;

impl StridedEnd {
    /// Memory of a device from an address on, with this pitch, in planes of so many rows.
    pub fn device(address: u64, pitch: usize, height: usize) -> StridedEnd {
        let (memory_type, device) = (DEVICE, address);
        let (x_in_bytes, y, z, lod, host, array, reserved) = (0, 0, 0, 0, 0, 0, 0);
        StridedEnd { x_in_bytes, y, z, lod, memory_type, host, device, array, reserved, pitch, height }
    }

    /// The rows of the end, in order.
    fn rows(
        &self,
        function: &'static str,
        role: &'static str,
        copy: &StridedCopy,
    ) -> Result<Vec<Range>, Code> {
        let StridedCopy { width_in_bytes: len, height, depth, .. } = *copy;
        if self.memory_type != DEVICE {
            violation(function, format!("{role} is not memory of a device: the emulator has no other"));
        }
        let is_pitched = self.pitch >= self.x_in_bytes + len && self.pitch <= MAX_PITCH;
        let is_high = depth == 1 || self.height >= self.y + height;
        if self.lod != 0 || self.device == 0 || !is_pitched || !is_high {
            return Err(INVALID_VALUE);
        }
        let row = |plane: usize, row: usize| {
            let rows = (self.z + plane) * self.height + self.y + row;
            let address = self.device + (rows * self.pitch + self.x_in_bytes) as u64;
            Range::given(function, role, address, len)
        };
        Ok((0..depth).flat_map(|plane| (0..height).map(move |number| row(plane, number))).collect())
    }
}

/// Rows at equal distances, to rows at equal distances.
pub fn strided(function: &'static str, stream: Handle, copy: &StridedCopy) -> Answer {
    let stream = stream::find(function, stream)?;
    if copy.width_in_bytes * copy.height * copy.depth == 0 {
        return Ok(());
    }
    let from = copy.from.rows(function, "the source", copy)?;
    let to = copy.to.rows(function, "the destination", copy)?;
    perform(&stream, false, move || {
        from.iter().zip(&to).for_each(|(from, to)| to.write(&from.read()));
    })
}

impl StridedCopy {
    pub fn new(
        to: StridedEnd,
        from: StridedEnd,
        (width_in_bytes, height, depth): (usize, usize, usize),
    ) -> StridedCopy {
        StridedCopy { from, to, width_in_bytes, height, depth }
    }
}

fn any(function: &'static str, stream: Handle, to: u64, from: u64, len: usize) -> Answer {
    current()?;
    let stream = stream::find(function, stream)?;
    if len == 0 {
        return Ok(());
    }
    let from = End::new(function, "the source", from, len)?;
    copy(&stream, End::new(function, "the destination", to, len)?, from)
}
