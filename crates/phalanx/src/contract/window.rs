//! [`Window`]: memory of which every rank of a communicator has a part, for accesses of one side.

use crate::types::dtype::DType;
use crate::types::error::Result;
use crate::types::op::ReductionCode;

/// The parts of all ranks, where this process reaches them by loads and stores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MappedParts {
    /// Where rank 0's part begins.
    pub start: *mut u8,
    /// Bytes from the beginning of a part to that of the next rank's.
    pub stride: usize,
}

impl MappedParts {
    /// Where a rank's part begins.
    #[inline(always)]
    pub fn of(self, rank: usize) -> *mut u8 {
        self.start.wrapping_add(rank * self.stride)
    }
}

/// Elements of a rank's part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RemoteSlice {
    pub rank: usize,
    pub dtype: DType,
    /// The first element.
    pub at: usize,
    pub count: usize,
    /// Elements from one to the next.
    pub stride: usize,
}

/// What an atomic access makes of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Combine(ReductionCode),
    Replace,
    /// Leaves it.
    Load,
}

/// One rank's end of a window. What concerns all ranks (its beginning, epochs) is a collective call of the communicator.
///
/// Where the parts are mapped, the front accesses them itself, and calls none of the unsafe functions.
pub(crate) trait Window {
    /// This rank's own part, which is there as long as the window. Aligned to 64 bytes.
    fn own(&self) -> *mut u8;

    /// The parts of all ranks, if this process reaches them.
    fn mapped(&self) -> Option<MappedParts> {
        None
    }

    /// An epoch begins, or has ended: while one is open, other ranks access this rank's part.
    fn set_open(&self, _is_open: bool) {}

    /// Makes this rank's plain accesses to its own part and other ranks' accesses to it visible to each other: at the ends of epochs.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Waits until this rank's accesses to a rank's part, or to all parts, are complete there.
    fn flush(&self, rank: Option<usize>) -> Result<()>;

    /// Counts one up at `rank`, which waits for it with `wait_signals`. Earlier accesses to that rank's part are complete there before.
    fn signal(&self, rank: usize) -> Result<()>;

    /// Waits for so many signals of `rank`, more than were waited for before.
    fn wait_signals(&self, rank: usize, count: u64) -> Result<()>;

    /// Writes elements, every `source_stride`-th from `source` on. These can be changed when it returns.
    ///
    /// # Safety
    /// The elements are in the parts, and at `source`.
    unsafe fn put(&self, _to: RemoteSlice, _source: *const u8, _source_stride: usize) -> Result<()> {
        unreachable!("the parts are mapped")
    }

    /// Reads elements to every `target_stride`-th from `target` on. They are there when it returns.
    ///
    /// # Safety
    /// The elements are in the parts, and `target` has room for them.
    unsafe fn get(&self, _from: RemoteSlice, _target: *mut u8, _target_stride: usize) -> Result<()> {
        unreachable!("the parts are mapped")
    }

    /// Combines contiguous elements with those at `source`, each in one step.
    ///
    /// # Safety
    /// As for `put`; the type has 4 or 8 bytes.
    unsafe fn accumulate(&self, _to: RemoteSlice, _source: *const u8, _op: AtomicOp) -> Result<()> {
        unreachable!("the parts are mapped")
    }

    /// Changes one element in one step, and answers the bits that it had.
    ///
    /// # Safety
    /// The element is in the parts; its type has 4 or 8 bytes.
    unsafe fn fetch_and_op(&self, _at: RemoteSlice, _value: u64, _op: AtomicOp) -> Result<u64> {
        unreachable!("the parts are mapped")
    }

    /// Sets one element if it has these bits, in one step, and answers the bits that it had.
    ///
    /// # Safety
    /// As for `fetch_and_op`, and the type is an integer.
    unsafe fn compare_and_swap(&self, _at: RemoteSlice, _expected: u64, _value: u64) -> Result<u64> {
        unreachable!("the parts are mapped")
    }

    /// Frees what only all ranks together can free. They have all called it.
    fn free(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// Memory that the ranks of a host share: one copy.
pub(crate) trait HostMemory: Send + Sync {
    /// Where it begins. Aligned to 64 bytes.
    fn start(&self) -> *mut u8;

    /// This rank among those of its host, and their number.
    fn place(&self) -> (usize, usize);

    /// As [`Window::synchronize`].
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Frees what only all ranks together can free. They have all called it.
    fn free(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
