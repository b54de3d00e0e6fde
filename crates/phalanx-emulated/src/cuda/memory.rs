//! Allocations, and checks of every access.
//!
//! Each device has a range of addresses, and page-locked host memory has another. Addresses are used once. An
//! allocation ends, up to the alignment of 256 bytes, at an inaccessible page; once freed, it is inaccessible
//! itself. The emulator checks its own reads and writes against the list of allocations first, since a
//! message says more than a crash. Pages that other processes may map (`ipc.rs`) are those of a file.

use super::error::OUT_OF_MEMORY;
use crate::base::call::Code;
use crate::base::handles::Handle;
use crate::base::lock::lock;
use crate::base::settings::settings;
use crate::base::violation::violation;
use rustix::fs::{FlockOperation, MemfdFlags, flock, ftruncate, memfd_create};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

const PAGE: u64 = 4096;
/// The alignment that CUDA promises for an allocation, in bytes.
const ALIGNMENT: u64 = 256;
/// Bytes of addresses of one device.
const ARENA: u64 = 1 << 40;
/// The byte that fills unwritten memory: a NaN in each float type except the 8-bit ones.
pub const GARBAGE: u8 = 0xff;
/// Allocations of more bytes than this start with zeros, for speed.
const MOST_GARBAGE: usize = 64 << 20;

/// How memory was allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc`.
    Device,
    /// `cuMemAllocAsync`.
    Pool,
    /// `ncclMemAlloc`.
    Nccl,
    /// `cuMemHostAlloc`.
    Host,
    /// NVSHMEM's heap, and memory of `cuMemMap`: mapped outside this file.
    Symmetric,
    /// Memory of another process (`cuIpcOpenMemHandle`): mapped outside this file.
    Peer,
}

/// One allocation.
#[derive(Debug, Clone)]
pub struct Allocation {
    pub address: u64,
    pub size: u64,
    pub kind: Kind,
    pub device: usize,
    pub context: Handle,
    /// A unique number (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub id: u64,
    live: bool,
    /// The call that freed it, set at the call: the stream may reach the free later.
    freed_by: Option<&'static str>,
    registrations: usize,
    /// The file behind the pages, if other processes may map them.
    file: Option<Arc<OwnedFd>>,
}

#[derive(Default)]
struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    arenas: BTreeMap<usize, Arena>,
    ids: u64,
}

impl Memory {
    fn add(&mut self, kind: Kind, address: u64, size: u64, device: usize, context: Handle, live: bool) {
        self.ids += 1;
        let id = self.ids;
        let (freed_by, registrations, file) = (None, 0, None);
        let allocation =
            Allocation { address, size, kind, device, context, id, live, freed_by, registrations, file };
        self.allocations.insert(address, allocation);
    }
}

struct Arena {
    start: u64,
    next: u64,
    used: u64,
    /// The greatest `used` so far.
    most: u64,
}

static MEMORY: Mutex<Memory> =
    Mutex::new(Memory { allocations: BTreeMap::new(), arenas: BTreeMap::new(), ids: 0 });

/// The key of host memory's arena among those of devices.
const HOST: usize = usize::MAX;

/// When an access is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// At the call. The stream may allocate the memory later.
    Called,
    /// When the stream performs the access.
    Performed,
}

/// A range of memory that a caller passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The function that was called, for messages.
    pub function: &'static str,
    /// The range's role in the call, for messages.
    pub role: &'static str,
    pub address: u64,
    pub len: usize,
}

/// Reserves addresses for an allocation, inaccessible until [`open`].
pub fn reserve(kind: Kind, device: usize, context: Handle, size: usize) -> Result<u64, Code> {
    let size = size as u64;
    let mut memory = lock(&MEMORY);
    let place = if kind == Kind::Host { HOST } else { device };
    let limit = if kind == Kind::Host { ARENA / 2 } else { settings().device_memory };
    let arena = memory.arenas.entry(place).or_insert_with(Arena::map);
    if size > limit.saturating_sub(arena.used) {
        return Err(OUT_OF_MEMORY);
    }
    let bytes = pages(size) + PAGE;
    if arena.next + bytes > arena.start + ARENA {
        violation("memory", "the emulator has no free addresses left for this process");
    }
    // NCCL's memory is aligned for windows. Other allocations end where their last page ends.
    let offset = if kind == Kind::Nccl { 0 } else { pages(size) - size.next_multiple_of(ALIGNMENT) };
    let address = arena.next + offset;
    arena.next += bytes;
    arena.used += size;
    arena.most = arena.most.max(arena.used);
    memory.add(kind, address, size, device, context, false);
    Ok(address)
}

fn pages(size: u64) -> u64 {
    size.next_multiple_of(PAGE)
}

impl Arena {
    fn map() -> Arena {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address that the system chooses.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), ARENA as usize, ProtFlags::empty(), flags) };
        match start {
            Ok(start) => Arena { start: start as u64, next: start as u64, used: 0, most: 0 },
            Err(error) => violation("memory", format!("cannot reserve a device's address range: {error}")),
        }
    }
}

impl Allocation {
    /// Ends the process if another one has the memory open. It holds a lock on the file meanwhile, which its death
    /// ends, too.
    fn check_closed(&self, function: &str) {
        let Some(file) = &self.file else { return };
        if flock(file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let address = self.address;
            violation(
                function,
                format!("the memory at {address:#x} is freed while another process has it open"),
            );
        }
        let _ = flock(file, FlockOperation::Unlock);
    }

    fn pages(&self) -> (*mut c_void, usize) {
        let start = self.address & !(PAGE - 1);
        (start as *mut c_void, pages(self.size) as usize)
    }

    fn protect(&self, access: MprotectFlags) {
        let (start, len) = self.pages();
        // SAFETY: the pages belong to this allocation alone. An access to freed memory crashes, as it should.
        let done = unsafe { mprotect(start, len, access) };
        if let Err(error) = done {
            violation("memory", format!("cannot change the protection of {len} bytes: {error}"));
        }
    }
}

/// Makes an allocation accessible. A graph does so at each launch.
pub fn open(address: u64) {
    let mut memory = lock(&MEMORY);
    let Some(allocation) = memory.allocations.get_mut(&address).filter(|allocation| !allocation.live) else {
        return;
    };
    allocation.live = true;
    allocation.protect(MprotectFlags::READ | MprotectFlags::WRITE);
    let (start, len) = allocation.pages();
    if allocation.kind != Kind::Host && len <= MOST_GARBAGE {
        // SAFETY: the pages belong to this allocation alone and were made accessible just now.
        unsafe { start.cast::<u8>().write_bytes(GARBAGE, len) };
    }
}

/// Marks an allocation as freed: later calls must not use it, although it is accessible until [`close`].
pub fn announce_free(function: &'static str, address: u64, kinds: &[Kind]) {
    let mut memory = lock(&MEMORY);
    let Some(allocation) = memory.allocations.get_mut(&address) else {
        violation(function, format!("{address:#x} is not the start of an allocation"));
    };
    if let Some(before) = allocation.freed_by {
        violation(function, format!("the memory at {address:#x} was freed by {before} before"));
    }
    if !kinds.contains(&allocation.kind) {
        violation(function, format!("the memory at {address:#x} is of another kind ({:?})", allocation.kind));
    }
    if allocation.registrations > 0 {
        violation(function, format!("the memory at {address:#x} is registered with a communicator"));
    }
    allocation.check_closed(function);
    allocation.freed_by = Some(function);
}

/// Whether the allocation around an address is registered with a communicator.
pub fn is_registered(address: u64) -> bool {
    find(address).is_some_and(|allocation| allocation.registrations > 0)
}

/// Makes an allocation inaccessible.
pub fn close(address: u64) {
    let mut memory = lock(&MEMORY);
    let Some(allocation) = memory.allocations.get_mut(&address).filter(|allocation| allocation.live) else {
        return;
    };
    allocation.live = false;
    allocation.protect(MprotectFlags::empty());
    let (start, len) = allocation.pages();
    // SAFETY: the pages belong to this allocation alone, which has been freed.
    let given_back = unsafe { madvise(start, len, Advice::LinuxDontNeed) };
    if let Err(error) = given_back {
        violation("memory", format!("cannot unmap {len} bytes: {error}"));
    }
    if allocation.file.take().is_some() {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: as above: instead of the file's pages.
        if let Err(error) = unsafe { mmap_anonymous(start, len, ProtFlags::empty(), flags) } {
            violation("memory", format!("cannot unmap {len} bytes: {error}"));
        }
    }
    let (size, place) =
        (allocation.size, if allocation.kind == Kind::Host { HOST } else { allocation.device });
    if let Some(arena) = memory.arenas.get_mut(&place) {
        arena.used -= size;
    }
}

/// Puts a file behind the pages of an allocation, so that other processes can map them. The caller does not use
/// the memory meanwhile. Returns the file, and the allocation's place in it; `None` for other memory than that of
/// `cuMemAlloc`.
pub fn share(address: u64) -> Option<(Arc<OwnedFd>, Allocation, u64)> {
    let mut memory = lock(&MEMORY);
    let allocation = memory.allocations.get_mut(&address)?;
    if allocation.kind != Kind::Device || !allocation.live || allocation.freed_by.is_some() {
        return None;
    }
    let (start, len) = allocation.pages();
    if allocation.file.is_none() {
        let file = memfd_create("emulated-device-memory", MemfdFlags::CLOEXEC).ok()?;
        ftruncate(&file, len as u64).ok()?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the system chooses.
        let copy = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) }.ok()?;
        for page in (0..len).step_by(PAGE as usize) {
            // SAFETY: a page of a live allocation, and one of a mapping of as many bytes.
            let (from, to) =
                unsafe { (start.byte_add(page).cast::<[u8; PAGE as usize]>(), copy.byte_add(page).cast()) };
            // SAFETY: as above. Pages of zeroes stay holes of the file.
            unsafe {
                if (*from).iter().any(|byte| *byte != 0) {
                    std::ptr::copy_nonoverlapping(from, to, 1);
                }
            }
        }
        // SAFETY: the mapping above, which nobody uses any more; its pages stay in the file.
        unsafe { munmap(copy, len) }.ok()?;
        // SAFETY: over the pages, which belong to this allocation alone, with the same contents.
        unsafe { mmap(start, len, access, MapFlags::SHARED | MapFlags::FIXED, &file, 0) }.ok()?;
        allocation.file = Some(Arc::new(file));
    }
    let file = Arc::clone(allocation.file.as_ref()?);
    Some((file, allocation.clone(), address - start as u64))
}

/// Adds memory that was mapped elsewhere to the list.
pub fn adopt(kind: Kind, address: u64, size: u64, device: usize, context: Handle) {
    let mut memory = lock(&MEMORY);
    memory.add(kind, address, size, device, context, true);
}

/// Marks adopted memory as freed. It stays mapped: peers may still access it.
pub fn disown(function: &'static str, address: u64) {
    if let Some(allocation) = lock(&MEMORY).allocations.get_mut(&address) {
        allocation.live = false;
        allocation.freed_by = Some(function);
    }
}

/// Frees the allocations of a context at its end.
pub fn free_context(function: &'static str, context: Handle) {
    let mut addresses = Vec::new();
    for allocation in lock(&MEMORY).allocations.values_mut().filter(|a| a.context == context && a.live) {
        allocation.freed_by.get_or_insert(function);
        addresses.push(allocation.address);
    }
    addresses.into_iter().for_each(close);
}

/// Counts bytes of a device that are mapped elsewhere; false if the device has fewer left.
pub fn take(device: usize, bytes: u64) -> bool {
    let mut memory = lock(&MEMORY);
    let arena = memory.arenas.entry(device).or_insert_with(Arena::map);
    let fits = bytes <= settings().device_memory.saturating_sub(arena.used);
    if fits {
        arena.used += bytes;
        arena.most = arena.most.max(arena.used);
    }
    fits
}

/// Gives such bytes back.
pub fn put_back(device: usize, bytes: u64) {
    if let Some(arena) = lock(&MEMORY).arenas.get_mut(&device) {
        arena.used -= bytes;
    }
}

/// Bytes in use on a device.
pub fn used(device: usize) -> u64 {
    lock(&MEMORY).arenas.get(&device).map_or(0, |arena| arena.used)
}

/// The most bytes that were in use on a device at a time.
pub fn most_used(device: usize) -> u64 {
    lock(&MEMORY).arenas.get(&device).map_or(0, |arena| arena.most)
}

/// The allocation that contains an address.
pub fn find(address: u64) -> Option<Allocation> {
    lock(&MEMORY).find(address).cloned()
}

/// Counts a registration of the allocation that contains an address, up or down.
pub fn register(address: u64, up: bool) {
    let mut memory = lock(&MEMORY);
    let start = memory.find(address).map(|allocation| allocation.address);
    if let Some(allocation) = start.and_then(|start| memory.allocations.get_mut(&start)) {
        allocation.registrations =
            if up { allocation.registrations + 1 } else { allocation.registrations - 1 };
    }
}

impl Memory {
    fn find(&self, address: u64) -> Option<&Allocation> {
        let (_, allocation) = self.allocations.range(..=address).next_back()?;
        // The inaccessible page after an allocation belongs to it: an address there is an overrun.
        (address < allocation.address + pages(allocation.size) + PAGE).then_some(allocation)
    }
}

impl Range {
    /// A range that a caller passed, checked as far as it can be at the call.
    pub fn given(function: &'static str, role: &'static str, address: u64, len: usize) -> Range {
        let range = Range { function, role, address, len };
        range.check(When::Called);
        range
    }

    /// Whether the range is in an allocation of the emulator, and not in other memory of the process.
    pub fn is_allocated(&self) -> bool {
        find(self.address).is_some()
    }

    /// Ends the process if the range must not be accessed.
    pub fn check(&self, when: When) {
        if self.len == 0 {
            return;
        }
        let Range { role, address, len, .. } = *self;
        let refuse =
            |why: String| violation(self.function, format!("{role} ({len} bytes at {address:#x}) {why}"));
        let Some(allocation) = find(address) else { refuse("is not memory of a device".into()) };
        if let Some(function) = allocation.freed_by.filter(|_| when == When::Called || !allocation.live) {
            refuse(format!("was freed by {function}"));
        }
        if address + len as u64 > allocation.address + allocation.size {
            let (size, start) = (allocation.size, allocation.address);
            refuse(format!("is beyond its allocation, which has {size} bytes at {start:#x}"));
        }
        if when == When::Performed && !allocation.live {
            refuse("is used before the stream that allocates it got there, or after a graph freed it".into());
        }
    }

    /// A copy of the bytes.
    pub fn read(&self) -> Vec<u8> {
        self.check(When::Performed);
        let mut bytes = vec![0; self.len];
        // SAFETY: the range is in a live allocation. If the program frees it during the copy, the crash is
        // intended.
        unsafe { std::ptr::copy_nonoverlapping(self.address as *const u8, bytes.as_mut_ptr(), self.len) };
        bytes
    }

    /// Stores bytes at the start of the range.
    pub fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "a write stays in its range");
        self.check(When::Performed);
        // SAFETY: the range is in a live allocation. If the program frees it during the copy, the crash is
        // intended.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address as *mut u8, bytes.len()) };
    }

    /// Stores zeroes. Whole pages are given back to the system, which has zeroes for them: FIFOs of own kernels are large
    /// and little used.
    pub fn clear(&self) {
        self.check(When::Performed);
        let (first, last) =
            (self.address.next_multiple_of(PAGE), (self.address + self.len as u64) & !(PAGE - 1));
        let is_private = find(self.address).is_some_and(|it| it.file.is_none() && it.kind == Kind::Device);
        if !is_private || first >= last {
            return self.write(&vec![0; self.len]);
        }
        let head = (first - self.address) as usize;
        self.part(0, head).write(&vec![0; head]);
        let tail = self.part(head + (last - first) as usize, self.len - head - (last - first) as usize);
        tail.write(&vec![0; tail.len]);
        // SAFETY: whole pages of a live allocation, without a file behind them.
        let cleared =
            unsafe { madvise(first as *mut c_void, (last - first) as usize, Advice::LinuxDontNeed) };
        if let Err(error) = cleared {
            violation(self.function, format!("cannot clear {} bytes: {error}", self.len));
        }
    }

    /// Whether the two have a byte in common.
    pub fn overlaps(&self, other: &Range) -> bool {
        let end = |range: &Range| range.address + range.len as u64;
        self.address < end(other) && other.address < end(self)
    }

    /// A part of it.
    pub fn part(&self, offset: usize, len: usize) -> Range {
        Range { address: self.address + offset as u64, len, ..*self }
    }
}
