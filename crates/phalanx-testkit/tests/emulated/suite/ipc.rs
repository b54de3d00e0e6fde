//! Memory of other processes, memory of other GPUs, and the modes of captures: what phalanx's own kernels need.

use super::child::{succeeds, violates};
use cudarc::driver::result::mem_get_info;
use cudarc::driver::sys::{self, CUipcMemHandle, CUresult, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaContext, DriverError};
use libtest_mimic::Trial;
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::sync::Arc;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("ipc/shared", shared),
    Scenario::process("ipc/peer", peer),
    Scenario::process("ipc/holder", holder),
    Scenario::process("ipc/freed_while_open", freed_while_open),
    Scenario::process("ipc/closed_twice", |args| parent_of("ipc/closes_twice", args)),
    Scenario::process("ipc/closes_twice", closes_twice),
    Scenario::process("ipc/closed_elsewhere", |args| parent_of("ipc/closes_elsewhere", args)),
    Scenario::process("ipc/closes_elsewhere", closes_elsewhere),
    Scenario::process("ipc/kernel_without_access", kernel_without_access),
    Scenario::process("ipc/modes", modes),
];

pub fn trials() -> Vec<Trial> {
    vec![
        succeeds("ipc/shared", &[], "ipc/shared", &[]),
        succeeds("ipc/modes", &[], "ipc/modes", &[]),
        violates("ipc/freed_while_open", &[], "ipc/freed_while_open", &["cuMemFree_v2", "has it open"]),
        violates("ipc/closed_twice", &[], "ipc/closed_twice", &["cuIpcCloseMemHandle", "is not open"]),
        violates(
            "ipc/closed_elsewhere",
            &[],
            "ipc/closed_elsewhere",
            &["cuIpcCloseMemHandle", "another context"],
        ),
        violates(
            "ipc/kernel_without_access",
            &[],
            "ipc/kernel_without_access",
            &["cuLaunchKernel", "inbox at a peer", "no access"],
        ),
    ]
}

const LEN: usize = 10_000;

/// What a function of the driver has answered.
fn must(function: &str, result: CUresult) -> Result<(), String> {
    result.result().context(|| function.to_owned())
}

/// The context of a GPU, which is current.
fn context(device: usize) -> Result<Arc<CudaContext>, String> {
    let context = CudaContext::new(device).context(|| "a context".into())?;
    context.bind_to_thread().context(|| "bind".into())?;
    Ok(context)
}

fn allocate(len: usize) -> Result<u64, String> {
    let mut start = 0;
    // SAFETY: an out-pointer on the stack.
    must("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut start, len) })?;
    Ok(start)
}

fn fill(start: u64, value: u8) -> Result<(), String> {
    // SAFETY: memory of so many bytes; waited for.
    must("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(start, value, LEN) })?;
    // SAFETY: the current context.
    must("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
}

fn read(start: u64) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0u8; LEN];
    // SAFETY: both are of so many bytes.
    must("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), start, LEN) })?;
    Ok(bytes)
}

/// Memory that others can open, and its handle as text.
fn exported() -> Result<(u64, String), String> {
    let start = allocate(LEN)?;
    fill(start, 5)?;
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the start of an allocation; an out-pointer on the stack.
    must("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&raw mut handle, start) })?;
    Ok((start, handle.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect()))
}

fn open(args: &[String]) -> Result<u64, String> {
    let text = args.first().ok_or("no handle")?;
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    for (byte, digits) in handle.reserved.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).context(|| "digits".into())?;
        *byte = u8::from_str_radix(digits, 16).context(|| "digits".into())? as _;
    }
    let mut start = 0;
    // SAFETY: a handle of the parent, which keeps the memory; an out-pointer on the stack.
    must("cuIpcOpenMemHandle", unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut start, handle, 1) })?;
    Ok(start)
}

fn close(start: u64) -> Result<(), String> {
    // SAFETY: open, and not used any more.
    must("cuIpcCloseMemHandle", unsafe { sys::cuIpcCloseMemHandle(start) })
}

/// Another process, with a handle; it finds the same emulator.
fn child(scenario: &str, handle: &str) -> Launch {
    Launch::alone(scenario).on_gpus().arg(handle).deadline(Duration::from_secs(30))
}

fn shared(_: &[String]) -> Outcome {
    let _context = context(0)?;
    let (free, _) = mem_get_info().context(|| "mem_get_info".into())?;
    let (start, handle) = exported()?;
    child("ipc/peer", &handle).reports()?;
    assert_eq!(read(start)?, [7; LEN], "what the peer wrote");
    // SAFETY: allocated above; the peer has closed it.
    must("cuMemFree", unsafe { sys::cuMemFree_v2(start) })?;
    assert_eq!(mem_get_info(), Ok((free, mem_get_info().context(|| "mem_get_info".into())?.1)));
    let late = child("ipc/peer", &handle).run()?;
    assert!(late.iter().all(|ended| ended.outcome.is_err()), "freed memory was opened");
    Ok(String::new())
}

/// Opens twice, which is once, reads and writes.
fn peer(args: &[String]) -> Outcome {
    let _context = context(1)?;
    let (start, again) = (open(args)?, open(args)?);
    assert_eq!(start, again);
    assert_eq!(read(start)?, [5; LEN]);
    close(again)?;
    fill(start, 7)?;
    close(start)?;
    Ok(String::new())
}

/// Opens, says so in the memory, and stays.
fn holder(args: &[String]) -> Outcome {
    let _context = context(1)?;
    fill(open(args)?, 9)?;
    std::thread::sleep(Duration::from_secs(30));
    Ok(String::new())
}

fn freed_while_open(_: &[String]) -> Outcome {
    let _context = context(0)?;
    let (start, handle) = exported()?;
    let _child = child("ipc/holder", &handle).start()?;
    while read(start)?[LEN - 1] != 9 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: the violation that is tested: nothing is freed.
    must("cuMemFree", unsafe { sys::cuMemFree_v2(start) })?;
    Ok(String::new())
}

/// The parent of a process that breaks a rule: its output has the violation, and it ends as the child.
fn parent_of(scenario: &str, _: &[String]) -> Outcome {
    let _context = context(0)?;
    let (_, handle) = exported()?;
    let ended = child(scenario, &handle).run()?;
    let output = ended.iter().map(|ended| ended.output.as_str()).collect::<String>();
    eprintln!("{output}");
    if output.contains("EMULATED VIOLATION") {
        std::process::abort();
    }
    Err("no violation".into())
}

fn closes_twice(args: &[String]) -> Outcome {
    let _context = context(1)?;
    let start = open(args)?;
    close(start).and_then(|()| close(start))?;
    Ok(String::new())
}

fn closes_elsewhere(args: &[String]) -> Outcome {
    let _context = context(1)?;
    let start = open(args)?;
    let _other = context(0)?;
    close(start)?;
    Ok(String::new())
}

/// A kernel that writes to another GPU's memory, without `cuCtxEnablePeerAccess`.
fn kernel_without_access(_: &[String]) -> Outcome {
    const INBOX: usize = 4_755_456;
    let _other = context(1)?;
    let remote = allocate(INBOX)?;
    let context = context(0)?;
    let own = allocate(INBOX)?;
    let abort = allocate(4)?;
    let (mut module, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
    let image = c".target sm_70\n.visible .entry phalanx_move_ll(";
    // SAFETY: a text that ends in NUL; an out-pointer on the stack.
    must("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
    let name = c"phalanx_move_ll";
    // SAFETY: as above.
    let found = unsafe { sys::cuModuleGetFunction(&raw mut kernel, module, name.as_ptr()) };
    must("cuModuleGetFunction", found)?;
    // Rank 0 of 2, without blocks; the second peer's inbox comes after the first's 48 bytes.
    let mut arguments = [0u64; 102];
    (arguments[0], arguments[1], arguments[2]) = (own, abort, 2 << 32);
    arguments[6 + 6] = remote;
    let mut parameters = [arguments.as_mut_ptr().cast::<std::ffi::c_void>()];
    let (stream, none) = (context.default_stream().cu_stream(), std::ptr::null_mut());
    // SAFETY: the violation that is tested: nothing is launched.
    let launched =
        unsafe { sys::cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, parameters.as_mut_ptr(), none) };
    must("cuLaunchKernel", launched)?;
    Ok(String::new())
}

/// In a capture, an allocation is refused unless the thread is in relaxed mode.
fn modes(_: &[String]) -> Outcome {
    let context = context(0)?;
    let stream = context.new_stream().context(|| "stream".into())?;
    let exchange = |mut mode: Mode| {
        // SAFETY: a mode on the stack.
        must("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&raw mut mode)
        })
        .map(|()| mode)
    };
    let (global, relaxed) = (Mode::CU_STREAM_CAPTURE_MODE_GLOBAL, Mode::CU_STREAM_CAPTURE_MODE_RELAXED);
    let none = sys::CUgraphInstantiate_flags(0);
    stream.begin_capture(global).context(|| "begin".into())?;
    assert_eq!(exchange(relaxed)?, global);
    allocate(LEN)?;
    assert_eq!(exchange(global)?, relaxed);
    stream.end_capture(none).context(|| "the capture goes on".into())?;
    stream.begin_capture(global).context(|| "begin".into())?;
    let refused = allocate(LEN).map(drop).unwrap_err();
    assert!(refused.contains("STREAM_CAPTURE_UNSUPPORTED"), "{refused}");
    let invalidated = DriverError(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    assert_eq!(stream.end_capture(none).map(drop), Err(invalidated));
    Ok(String::new())
}
