//! The driver, through cudarc: streams that are late, events, memory that is gone when it is freed.

use super::child::{crashes, succeeds, violates};
use super::world::at;
use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, sys};
use libtest_mimic::Trial;
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("cuda/devices", devices),
    Scenario::process("cuda/late", late),
    Scenario::process("cuda/events", events),
    Scenario::process("cuda/no_events", no_events),
    Scenario::process("cuda/default_stream", default_stream),
    Scenario::process("cuda/copies", copies),
    Scenario::process("cuda/strided_copies", strided_copies),
    Scenario::process("cuda/strided_overrun", strided_overrun),
    Scenario::process("cuda/peers", peers),
    Scenario::process("cuda/host_function", host_function),
    Scenario::process("cuda/garbage", garbage),
    Scenario::process("cuda/accounts", accounts),
    Scenario::process("cuda/freed", |args| touch(args, Touch::Freed)),
    Scenario::process("cuda/overrun", |args| touch(args, Touch::Behind)),
    Scenario::process("cuda/freed_pinned", freed_pinned),
    Scenario::process("cuda/copy_from_freed", copy_from_freed),
    Scenario::process("cuda/copy_overrun", copy_overrun),
    Scenario::process("cuda/freed_twice", freed_twice),
    Scenario::process("cuda/used_before_allocated", used_before_allocated),
    Scenario::process("cuda/destroyed_stream", destroyed_stream),
    Scenario::process("cuda/call_in_host_function", call_in_host_function),
];

const SLOW: &[(&str, &str)] = &[("DELAY_US", "20000..20000")];
const SIGSEGV: i32 = 11;

pub fn trials() -> Vec<Trial> {
    vec![
        succeeds("cuda/devices", &[("DEVICES", "3")], "cuda/devices", &[]),
        succeeds("cuda/late", SLOW, "cuda/late", &[]),
        succeeds("cuda/events", &[], "cuda/events", &[]),
        succeeds("cuda/no_events", &[("DELAY_US", "0..2000")], "cuda/no_events", &[]),
        succeeds("cuda/default_stream", &[], "cuda/default_stream", &[]),
        succeeds("cuda/copies", SLOW, "cuda/copies", &[]),
        succeeds("cuda/strided_copies", SLOW, "cuda/strided_copies", &[]),
        violates(
            "cuda/strided_overrun",
            &[],
            "cuda/strided_overrun",
            &["cuMemcpy3DAsync_v2", "the source", "beyond its allocation"],
        ),
        succeeds("cuda/peers", &[], "cuda/peers", &[]),
        succeeds("cuda/host_function", SLOW, "cuda/host_function", &[]),
        succeeds("cuda/garbage", &[], "cuda/garbage", &[]),
        succeeds("cuda/accounts", &[("DEVICE_MEMORY", "1000000")], "cuda/accounts", &[]),
        succeeds(
            "cuda/accounts/no_pools",
            &[("DEVICE_MEMORY", "1000000"), ("ASYNC_ALLOC", "0")],
            "cuda/accounts",
            &[],
        ),
        crashes("cuda/freed", &[], "cuda/freed", SIGSEGV),
        crashes("cuda/overrun", &[], "cuda/overrun", SIGSEGV),
        crashes("cuda/freed_pinned", &[], "cuda/freed_pinned", SIGSEGV),
        violates(
            "cuda/copy_from_freed",
            &[],
            "cuda/copy_from_freed",
            &["cuMemcpyDtoHAsync_v2", "was freed by cuMemFree"],
        ),
        violates(
            "cuda/copy_overrun",
            &[],
            "cuda/copy_overrun",
            &["cuMemsetD8Async", "beyond its allocation"],
        ),
        violates(
            "cuda/freed_twice",
            &[],
            "cuda/freed_twice",
            &["cuMemFree_v2", "was freed by cuMemFree_v2 before"],
        ),
        violates(
            "cuda/used_before_allocated",
            SLOW,
            "cuda/used_before_allocated",
            &["before the stream that allocates it"],
        ),
        violates(
            "cuda/destroyed_stream",
            &[],
            "cuda/destroyed_stream",
            &["cuStreamSynchronize", "ended by cuStreamDestroy_v2"],
        ),
        violates(
            "cuda/call_in_host_function",
            &[],
            "cuda/call_in_host_function",
            &["cuCtxGetCurrent", "host function"],
        ),
    ]
}

fn context() -> Result<Arc<CudaContext>, String> {
    CudaContext::new(0).context(|| "a context".into())
}

fn stream() -> Result<Arc<CudaStream>, String> {
    context()?.new_stream().context(|| "a stream".into())
}

fn check(what: &str, holds: bool) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("not so: {what}")) }
}

fn devices(_: &[String]) -> Outcome {
    check("three devices", CudaContext::device_count() == Ok(3))?;
    let contexts: Vec<_> =
        (0..3).map(CudaContext::new).collect::<Result<_, _>>().context(|| "contexts".into())?;
    let uuids: Vec<_> = contexts.iter().map(|context| context.uuid().map(|uuid| uuid.bytes)).collect();
    check("uuids differ", uuids[0] != uuids[1] && uuids[1] != uuids[2] && uuids[0].is_ok())?;
    check("capability", contexts[1].compute_capability() == Ok((9, 0)))?;
    check("name", contexts[2].name().is_ok_and(|name| name.contains('2')))?;
    check("no fourth", CudaContext::new(3).is_err())?;
    // A fresh context has the memory that one before it had.
    let before = contexts[0].mem_get_info().context(|| "memory".into())?;
    check("all free", before.0 == before.1)?;
    Ok(String::new())
}

fn late(_: &[String]) -> Outcome {
    let stream = stream()?;
    let mut slice = stream.alloc_zeros::<u8>(10).context(|| "memory".into())?;
    stream.synchronize().context(|| "synchronize".into())?;
    stream.memset_zeros(&mut slice).context(|| "memset".into())?;
    let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let event = stream.record_event(timed).context(|| "event".into())?;
    check("not done at return", event.try_is_complete() == Ok(false))?;
    stream.synchronize().context(|| "synchronize".into())?;
    check("done at last", event.try_is_complete() == Ok(true))?;
    let later = stream.record_event(timed).context(|| "event".into())?;
    let elapsed = event.elapsed_ms(&later).context(|| "elapsed".into())?;
    check(&format!("{elapsed} ms between"), (1.0..1e4).contains(&elapsed))?;
    Ok(String::new())
}

/// One stream writes, another one reads: whether it always sees what was written.
fn always_ordered(with_event: bool) -> Result<bool, String> {
    let context = context()?;
    // SAFETY: the order is what is tested, and the events for it are made below.
    unsafe { context.disable_event_tracking() };
    let (writer, reader) = (context.new_stream(), context.new_stream());
    let (writer, reader) = (writer.context(|| "stream".into())?, reader.context(|| "stream".into())?);
    let mut source = writer.alloc_zeros::<u8>(100).context(|| "memory".into())?;
    let mut target = writer.alloc_zeros::<u8>(100).context(|| "memory".into())?;
    writer.synchronize().context(|| "synchronize".into())?;
    let mut ordered = true;
    for round in 1..40u8 {
        writer.memcpy_htod(&[round; 100], &mut source).context(|| "write".into())?;
        if with_event {
            reader.join(&writer).context(|| "join".into())?;
        }
        reader.memcpy_dtod(&source, &mut target).context(|| "copy".into())?;
        let seen = reader.clone_dtoh(&target).context(|| "read".into())?;
        ordered &= seen == [round; 100];
        writer.join(&reader).context(|| "join".into())?;
    }
    writer.synchronize().context(|| "synchronize".into())?;
    Ok(ordered)
}

fn events(_: &[String]) -> Outcome {
    check("events order streams", always_ordered(true)?)?;
    Ok(String::new())
}

fn no_events(_: &[String]) -> Outcome {
    check("without events there is no order", !always_ordered(false)?)?;
    Ok(String::new())
}

fn default_stream(_: &[String]) -> Outcome {
    let context = context()?;
    let default = context.default_stream();
    let raw = result::stream::create(StreamKind::Default).context(|| "stream".into())?;
    // SAFETY: the stream lives until the end of this process.
    let blocking = unsafe { context.wrap_borrowed_stream(raw) };
    let mut source = default.alloc_zeros::<u32>(10).context(|| "memory".into())?;
    let mut target = default.alloc_zeros::<u32>(10).context(|| "memory".into())?;
    for round in 1..40 {
        default.memcpy_htod(&[round; 10], &mut source).context(|| "write".into())?;
        blocking.memcpy_dtod(&source, &mut target).context(|| "copy".into())?;
        let seen = default.clone_dtoh(&target).context(|| "read".into())?;
        check("ordered through the default stream", seen == [round; 10])?;
    }
    Ok(String::new())
}

fn copies(_: &[String]) -> Outcome {
    let context = context()?;
    let stream = context.new_stream().context(|| "stream".into())?;
    let mut host = vec![7u32; 50];
    let slice = stream.clone_htod(&host).context(|| "to the device".into())?;
    // Memory that is not page-locked may be used again at once.
    host.fill(8);
    check("staged", stream.clone_dtoh(&slice) == Ok(vec![7; 50]))?;
    // SAFETY: it is written to before it is read.
    let mut pinned = unsafe { context.alloc_pinned::<u32>(50) }.context(|| "pinned".into())?;
    pinned.as_mut_slice().context(|| "pinned".into())?.fill(9);
    let slice = stream.clone_htod(&pinned).context(|| "from pinned".into())?;
    check("from pinned", stream.clone_dtoh(&slice) == Ok(vec![9; 50]))?;
    // SAFETY: as above.
    let mut back = unsafe { context.alloc_pinned::<u32>(50) }.context(|| "pinned".into())?;
    back.as_mut_slice().context(|| "pinned".into())?.fill(1);
    let early = at_pinned(&back)?;
    stream.memcpy_dtoh(&slice, &mut back).context(|| "to pinned".into())?;
    // SAFETY: the memory is there; that the device writes to it late is what is looked at.
    check("late", unsafe { early.read_volatile() } == 1)?;
    check("to pinned", back.as_slice().context(|| "pinned".into())? == [9; 50])?;
    Ok(String::new())
}

fn at_pinned(pinned: &cudarc::driver::PinnedHostSlice<u32>) -> Result<*const u32, String> {
    pinned.as_ptr().context(|| "pinned".into())
}

/// A strided copy between memory of a device, from the place (1, 2, 1) of the source to the start of the target.
fn strided_copy(
    to: (u64, usize, usize),
    from: (u64, usize, usize),
    extent: [usize; 3],
) -> sys::CUDA_MEMCPY3D {
    // SAFETY: numbers, null pointers, and a kind of memory, which is set.
    let mut copy: sys::CUDA_MEMCPY3D = unsafe {
        let mut zeroed = std::mem::MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
        (*zeroed.as_mut_ptr()).srcMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        (*zeroed.as_mut_ptr()).dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        zeroed.assume_init()
    };
    (copy.srcDevice, copy.srcPitch, copy.srcHeight) = from;
    (copy.dstDevice, copy.dstPitch, copy.dstHeight) = to;
    (copy.srcXInBytes, copy.srcY, copy.srcZ) = (1, 2, 1);
    [copy.WidthInBytes, copy.Height, copy.Depth] = extent;
    copy
}

/// The start of a slice's memory, when it is there.
fn start_of(stream: &Arc<CudaStream>, slice: &cudarc::driver::CudaSlice<u8>) -> u64 {
    slice.device_ptr(stream).0
}

fn strided_copies(_: &[String]) -> Outcome {
    let stream = stream()?;
    // Planes of 4 rows of 5 bytes.
    let bytes: Vec<u8> = (0..3 * 4 * 5).collect();
    let source = stream.clone_htod(&bytes).context(|| "to the device".into())?;
    let target = stream.clone_htod(&[99u8; 2 * 3 * 4]).context(|| "to the device".into())?;
    let (from, to) = (start_of(&stream, &source), start_of(&stream, &target));
    let extent = [3, 2, 2];
    // SAFETY: memory of the device, as the copies say.
    let copy =
        |copy: sys::CUDA_MEMCPY3D| unsafe { sys::cuMemcpy3DAsync_v2(&raw const copy, stream.cu_stream()) };
    let good = copy(strided_copy((to, 4, 3), (from, 5, 4), extent));
    check("copied", good == sys::CUresult::CUDA_SUCCESS)?;
    let mut expected = [99u8; 24];
    for (plane, row, column) in (0..2).flat_map(|p| (0..2).flat_map(move |r| (0..3).map(move |c| (p, r, c))))
    {
        expected[(plane * 3 + row) * 4 + column] = bytes[((plane + 1) * 4 + row + 2) * 5 + column + 1];
    }
    check("the rows", stream.clone_dtoh(&target).is_ok_and(|got| got == expected))?;
    // Rows that overlap the next, planes that overlap, a pitch that is too large.
    let invalid = [
        strided_copy((to, 2, 3), (from, 5, 4), extent),
        strided_copy((to, 4, 3), (from, 3, 4), extent),
        strided_copy((to, 4, 1), (from, 5, 4), extent),
        strided_copy((to, 4, 3), (from, 1 << 31, 4), extent),
        strided_copy((0, 4, 3), (from, 5, 4), extent),
    ];
    for (number, one) in invalid.into_iter().enumerate() {
        let result = copy(one);
        check(&format!("copy {number} is refused"), result == sys::CUresult::CUDA_ERROR_INVALID_VALUE)?;
    }
    check("of nothing", copy(strided_copy((0, 0, 0), (0, 0, 0), [3, 0, 2])) == sys::CUresult::CUDA_SUCCESS)?;
    Ok(String::new())
}

/// Rows behind those of the source.
fn strided_overrun(_: &[String]) -> Outcome {
    let stream = stream()?;
    let source = stream.clone_htod(&[0u8; 4 * 128]).context(|| "to the device".into())?;
    let target = stream.clone_htod(&[0u8; 4 * 128]).context(|| "to the device".into())?;
    let (from, to) = (start_of(&stream, &source), start_of(&stream, &target));
    let copy = strided_copy((to, 100, 3), (from, 128, 3), [100, 1, 2]);
    // SAFETY: the emulator ends the process, since the last row is beyond the source.
    unsafe { sys::cuMemcpy3DAsync_v2(&raw const copy, stream.cu_stream()) };
    Ok(String::new())
}

fn peers(_: &[String]) -> Outcome {
    let (first, second) = (CudaContext::new(0), CudaContext::new(1));
    let (first, second) = (first.context(|| "0".into())?, second.context(|| "1".into())?);
    let streams = (first.new_stream(), second.new_stream());
    let (first, second) = (streams.0.context(|| "0".into())?, streams.1.context(|| "1".into())?);
    for round in 0..20u64 {
        let a = first.clone_htod(&[round; 33]).context(|| "write".into())?;
        let b = second.clone_dtod(&a).context(|| "copy".into())?;
        check("copied", second.clone_dtoh(&b) == Ok(vec![round; 33]))?;
    }
    Ok(String::new())
}

static CALLS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn count(by: *mut std::ffi::c_void) {
    CALLS.fetch_add(by as usize, Ordering::SeqCst);
}

fn host_function(_: &[String]) -> Outcome {
    let stream = stream()?;
    // SAFETY: the argument is a number.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), count, 3 as _) }
        .context(|| "launch".into())?;
    check("not at return", CALLS.load(Ordering::SeqCst) == 0)?;
    stream.synchronize().context(|| "synchronize".into())?;
    check("at last", CALLS.load(Ordering::SeqCst) == 3)?;
    Ok(String::new())
}

unsafe extern "C" fn misbehave(_: *mut std::ffi::c_void) {
    // Ends the process.
    let _ = result::ctx::get_current();
}

fn call_in_host_function(_: &[String]) -> Outcome {
    let stream = stream()?;
    // SAFETY: the argument is not used.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), misbehave, std::ptr::null_mut()) }
        .context(|| "launch".into())?;
    stream.synchronize().context(|| "synchronize".into())?;
    Ok(String::new())
}

fn garbage(_: &[String]) -> Outcome {
    let stream = stream()?;
    // SAFETY: every bit pattern is a number.
    let slice = unsafe { stream.alloc::<u8>(1000) }.context(|| "memory".into())?;
    check("garbage", stream.clone_dtoh(&slice) == Ok(vec![0xff; 1000]))?;
    Ok(String::new())
}

fn accounts(_: &[String]) -> Outcome {
    let context = context()?;
    let stream = context.new_stream().context(|| "stream".into())?;
    let slice = stream.alloc_zeros::<u8>(600_000).context(|| "memory".into())?;
    check("no more", stream.alloc_zeros::<u8>(600_000).is_err())?;
    check("counted", context.mem_get_info() == Ok((400_000, 1_000_000)))?;
    let address = at(&slice);
    drop(slice);
    stream.synchronize().context(|| "synchronize".into())?;
    check("given back", context.mem_get_info() == Ok((1_000_000, 1_000_000)))?;
    let again = stream.alloc_zeros::<u8>(600_000).context(|| "memory".into())?;
    check("addresses are not used again", at(&again) != address)?;
    Ok(String::new())
}

enum Touch {
    Freed,
    Behind,
}

/// The process touches memory of a device itself, since it is memory of the process.
fn touch(_: &[String], what: Touch) -> Outcome {
    let stream = stream()?;
    let slice = stream.alloc_zeros::<u8>(512).context(|| "memory".into())?;
    stream.synchronize().context(|| "synchronize".into())?;
    let address = at(&slice) as *const u8;
    // SAFETY: it is there.
    check("zero", unsafe { address.read_volatile() } == 0)?;
    let address = match what {
        Touch::Behind => address.wrapping_add(512),
        Touch::Freed => {
            drop(slice);
            stream.synchronize().context(|| "synchronize".into())?;
            address
        }
    };
    // SAFETY: it is not there, and ends the process: that is the test.
    let value = unsafe { address.read_volatile() };
    Err(format!("{value} was read"))
}

fn freed_pinned(_: &[String]) -> Outcome {
    let context = context()?;
    // SAFETY: it is not read before it is gone.
    let pinned = unsafe { context.alloc_pinned::<u32>(50) }.context(|| "pinned".into())?;
    let address = at_pinned(&pinned)?;
    drop(pinned);
    // SAFETY: it is not there, and ends the process: that is the test.
    Err(format!("{} was read", unsafe { address.read_volatile() }))
}

fn copy_from_freed(_: &[String]) -> Outcome {
    let stream = stream()?;
    let slice = stream.alloc_zeros::<u8>(512).context(|| "memory".into())?;
    let (address, _) = slice.device_ptr(&stream);
    drop(slice.clone());
    let address = { address };
    drop(slice);
    let mut to = [0u8; 10];
    // SAFETY: the memory is gone, and the call ends the process: that is the test.
    let copied = unsafe { result::memcpy_dtoh_async(&mut to, address, stream.cu_stream()) };
    Err(format!("{copied:?}"))
}

fn copy_overrun(_: &[String]) -> Outcome {
    let stream = stream()?;
    let slice = stream.alloc_zeros::<u8>(511).context(|| "memory".into())?;
    // SAFETY: a byte too much, and the call ends the process: that is the test.
    let filled = unsafe { result::memset_d8_async(at(&slice), 0, 512, stream.cu_stream()) };
    Err(format!("{filled:?}"))
}

fn freed_twice(_: &[String]) -> Outcome {
    let _context = context()?;
    // SAFETY: nobody uses the memory; that it is freed twice ends the process.
    let freed = unsafe {
        let address = result::malloc_sync(100).context(|| "memory".into())?;
        result::free_sync(address).context(|| "free".into())?;
        result::free_sync(address)
    };
    Err(format!("{freed:?}"))
}

fn used_before_allocated(_: &[String]) -> Outcome {
    let (first, second) = (stream()?, stream()?);
    // SAFETY: the other stream does not wait for the allocation, which ends the process: that is the test.
    unsafe {
        let address = result::malloc_async(first.cu_stream(), 100).context(|| "memory".into())?;
        first.synchronize().context(|| "synchronize".into())?;
        result::memset_d8_async(address, 0, 100, second.cu_stream()).context(|| "allowed".into())?;
        second.synchronize().context(|| "synchronize".into())?;
        // The first stream has something else to do before it allocates.
        for _ in 0..5 {
            result::memset_d8_async(address, 0, 100, first.cu_stream()).context(|| "work".into())?;
        }
        let address = result::malloc_async(first.cu_stream(), 100).context(|| "memory".into())?;
        result::memset_d8_async(address, 0, 100, second.cu_stream()).context(|| "not allowed".into())?;
    }
    second.synchronize().context(|| "synchronize".into())?;
    Err("the memory was used".into())
}

fn destroyed_stream(_: &[String]) -> Outcome {
    let stream = stream()?;
    let raw = stream.cu_stream();
    drop(stream);
    // SAFETY: the stream is gone, and the call ends the process: that is the test.
    Err(format!("{:?}", unsafe { result::stream::synchronize(raw) }))
}
