//! Lists of blocks by a kernel (`gpu/kernels/copies.cu`): the driver takes a microsecond or more for each copy, in which NVLink carries
//! hundreds of KiB.

use crate::backend::nccl::device::{GpuDevice, StreamMemory};
use crate::gpu::kernels::{KernelModule, Kernels, check, generation};
use crate::types::error::Result;
use crate::types::memory::RawStream;
use cudarc::driver::sys;

/// A list of fewer blocks is left to the driver.
const FEWEST: usize = 4;
/// Longer blocks, on average, are left to the driver: its copies take no multiprocessors, and so long ones the full bandwidth.
const LONGEST: usize = 1 << 20;
/// Most blocks of a launch. Their list is less than the 64 KiB that the driver takes without waiting for the stream.
pub(super) const MOST: usize = 2048;
/// In gpu/kernels/copies.cu.
const THREADS: u32 = 256;
const PIECE: usize = 16 << 10;
/// Most blocks along each dimension of the grid.
const GRID: [usize; 2] = [2048, 64];

/// `Block` in gpu/kernels/copies.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub to: u64,
    pub from: u64,
    pub bytes: u64,
}

/// Whether a kernel carries out a list of so many blocks, of so many bytes together.
pub(super) fn is_for_kernel(blocks: usize, bytes: usize) -> bool {
    blocks >= FEWEST && bytes / blocks <= LONGEST
}

/// Enqueues a copy for each block.
///
/// # Safety
/// Memory that this GPU reaches, until the stream's work is complete. The device is current.
pub(super) unsafe fn copy_each(
    device: &GpuDevice,
    stream: RawStream,
    mut blocks: impl Iterator<Item = Block>,
) -> Result<()> {
    blocks.try_for_each(|Block { to, from, bytes }| match bytes {
        0 => Ok(()),
        // SAFETY: the caller's contract.
        _ => unsafe { device.copy(to as *mut u8, from as *const u8, bytes as usize, stream) },
    })
}

/// Enqueues one kernel for at most [`MOST`] blocks, or a copy for each where the GPU cannot.
///
/// # Safety
/// That of [`copy_each`].
pub(super) unsafe fn copy_together(device: &GpuDevice, stream: RawStream, blocks: &[Block]) -> Result<()> {
    let gpu = device.cuda().expect("windows are CUDA's memory");
    let bytes = size_of_val(blocks);
    let need = ("a list of copies", "copy the blocks one by one");
    let list = match generation(gpu)? >= 7 {
        true => StreamMemory::new(device, bytes, stream, need).ok(),
        false => None,
    };
    let Some(list) = list else {
        // SAFETY: the caller's contract.
        return unsafe { copy_each(device, stream, blocks.iter().copied()) };
    };
    let kernel = Kernels::load(gpu, KernelModule::Copies)?.get(0);
    // SAFETY: the list is read during the call, which copies it to memory of as many bytes.
    unsafe { device.copy(list.start, blocks.as_ptr().cast(), bytes, stream) }?;
    let longest = blocks.iter().map(|block| block.bytes as usize).max().unwrap_or(0);
    let grid = [blocks.len().min(GRID[0]) as u32, longest.div_ceil(PIECE).clamp(1, GRID[1]) as u32];
    let (mut start, mut count) = (list.start, blocks.len() as u32);
    let mut parameters = [(&raw mut start).cast(), (&raw mut count).cast()];
    let none = std::ptr::null_mut();
    // SAFETY: the kernel's parameters, which the driver copies; the list lives until the kernel is done, and the caller's contract.
    check("cuLaunchKernel", unsafe {
        sys::cuLaunchKernel(
            kernel.function,
            grid[0],
            grid[1],
            1,
            THREADS,
            1,
            1,
            0,
            stream.0.cast(),
            parameters.as_mut_ptr(),
            none,
        )
    })
}
