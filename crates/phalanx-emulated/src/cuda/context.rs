//! Contexts: which one is current in a thread, primary contexts, and the context that NCCL uses.

use super::capture;
use super::device::{check_initialized, index};
use super::error::{
    CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_VALUE, PEER_ACCESS_ALREADY_ENABLED,
    STREAM_CAPTURE_UNSUPPORTED,
};
use super::memory;
use super::queue::{Kind, Stream, Streams};
use super::streams;
use crate::base::call::{Answer, Code, exported};
use crate::base::handles::{self, Handle, Handles};
use crate::base::lock::lock;
use crate::base::pointers::{In, Out};
use crate::base::settings::settings;
use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex};

/// A context: a device's streams and memory.
pub struct CudaContext {
    pub handle: Handle,
    pub device: usize,
    streams: Arc<Streams>,
    /// Contexts that work of this one may access.
    peers: Mutex<HashSet<Handle>>,
}

static CONTEXTS: Handles<CudaContext> = Handles::new("context");

/// The primary context of each device that has one.
static PRIMARY: Mutex<Vec<Primary>> = Mutex::new(Vec::new());

struct Primary {
    context: Arc<CudaContext>,
    /// How many times it was retained and not released.
    retained: usize,
}

thread_local! {
    static CURRENT: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

impl CudaContext {
    fn start(device: usize) -> Arc<CudaContext> {
        let handle = handles::fresh();
        let streams = Streams::start(handle, device);
        let context = Arc::new(CudaContext { handle, device, streams, peers: Mutex::default() });
        CONTEXTS.insert(context.handle, Arc::clone(&context));
        context
    }

    /// The default stream.
    pub fn legacy(&self) -> &Arc<Stream> {
        self.streams.legacy()
    }

    /// All streams that a caller holds or that still work.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        self.streams.all()
    }

    /// [`wait_for_room`](Self::wait_for_room); and waits for the work of all streams, if `EMULATED_SYNC` asks for it.
    pub fn sync_implicitly(&self) {
        self.wait_for_room();
        if settings().implicit_sync {
            self.streams().iter().for_each(|stream| stream.mark().wait());
        }
    }

    /// What a call does that allocates: it waits while a thread waits for room in a stream.
    pub fn wait_for_room(&self) {
        self.streams().iter().for_each(|stream| stream.wait_for_room());
    }

    /// Starts a stream.
    pub(super) fn start_stream(&self, kind: Kind, priority: i32) -> Arc<Stream> {
        Stream::start(&self.streams, kind, priority)
    }

    /// The default stream of this thread.
    pub(super) fn per_thread_stream(&self) -> Arc<Stream> {
        streams::per_thread(self.handle, &self.streams)
    }

    /// Whether its work may access memory of another context.
    pub fn reaches(&self, other: Handle) -> bool {
        other == self.handle || lock(&self.peers).contains(&other)
    }

    fn synchronize(&self) {
        self.streams().iter().map(Stream::mark).for_each(|mark| mark.wait());
    }

    /// Ends the context. As in CUDA, its work ends first, then its memory is freed.
    fn destroy(&self, function: &'static str) {
        self.synchronize();
        CONTEXTS.end(function, self.handle, "the end of the context");
        for stream in self.streams() {
            streams::forget(function, &stream);
        }
        memory::free_context(function, self.handle);
    }
}

/// The context that is current in this thread.
pub fn current() -> Result<Arc<CudaContext>, Code> {
    check_initialized()?;
    let handle = CURRENT.with_borrow(|stack| stack.last().copied()).filter(|handle| *handle != 0);
    CONTEXTS.find(handle.ok_or(INVALID_CONTEXT)?).ok_or(CONTEXT_IS_DESTROYED)
}

fn set_current(handle: Handle) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.push(handle);
    });
}

fn retain(device: usize) -> Arc<CudaContext> {
    let mut all = lock(&PRIMARY);
    if let Some(primary) = all.iter_mut().find(|primary| primary.context.device == device) {
        primary.retained += 1;
        return Arc::clone(&primary.context);
    }
    let context = CudaContext::start(device);
    all.push(Primary { context: Arc::clone(&context), retained: 1 });
    context
}

fn release(function: &'static str, device: usize) -> Answer {
    let mut all = lock(&PRIMARY);
    let Some(place) = all.iter().position(|primary| primary.context.device == device) else {
        return Err(INVALID_CONTEXT);
    };
    all[place].retained -= 1;
    if all[place].retained == 0 {
        let primary = all.swap_remove(place);
        drop(all);
        primary.context.destroy(function);
    }
    Ok(())
}

/// The context that the CUDA runtime, and so NCCL, uses on a device: the primary one, retained until the
/// process ends.
pub fn runtime_context(device: usize) -> Arc<CudaContext> {
    static RETAINED: Mutex<Vec<Arc<CudaContext>>> = Mutex::new(Vec::new());
    let mut retained = lock(&RETAINED);
    let known = retained.iter().find(|context| context.device == device).map(Arc::clone);
    known.unwrap_or_else(|| {
        let context = retain(device);
        retained.push(Arc::clone(&context));
        context
    })
}

/// Makes a device current as the CUDA runtime does.
pub fn runtime_set_device(device: usize) {
    set_current(runtime_context(device).handle);
}

/// The device that is current in this thread for the CUDA runtime.
pub fn runtime_device() -> usize {
    current().map_or(0, |context| context.device)
}

/// Makes the primary context current in a thread without a context, as every call of the CUDA runtime does.
pub fn runtime_ensure(device: usize) {
    if current().is_err() {
        runtime_set_device(device);
    }
}

/// Runs a function with a device current, as NCCL does.
pub fn runtime_on_device<T>(device: usize, run: impl FnOnce() -> T) -> T {
    let before = runtime_device();
    if before == device {
        runtime_ensure(device);
        return run();
    }
    runtime_set_device(device);
    let result = run();
    if !settings().leaves_device {
        runtime_set_device(before);
    }
    result
}

/// The context of a handle.
pub fn find(handle: Handle) -> Result<Arc<CudaContext>, Code> {
    CONTEXTS.find(handle).ok_or(INVALID_CONTEXT)
}

exported! {
    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) {
        context.set(retain(index(device)?).handle);
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        release(FUNCTION, index(device)?)
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) {
        let device = index(device)?;
        flags.set(0);
        active.set(c_int::from(lock(&PRIMARY).iter().any(|primary| primary.context.device == device)));
        Ok(())
    }

    fn cuCtxCreate_v2(context: Out<Handle>, _flags: c_uint, device: c_int) {
        create(context, device)
    }

    fn cuCtxCreate_v4(context: Out<Handle>, _params: In<c_void>, _flags: c_uint, device: c_int) {
        create(context, device)
    }

    fn cuCtxDestroy_v2(context: Handle) {
        let context = CONTEXTS.get(FUNCTION, context);
        if lock(&PRIMARY).iter().any(|primary| primary.context.handle == context.handle) {
            return Err(INVALID_CONTEXT);
        }
        context.destroy(FUNCTION);
        CURRENT.with_borrow_mut(|stack| stack.retain(|handle| *handle != context.handle));
        Ok(())
    }

    fn cuCtxGetCurrent(context: Out<Handle>) {
        check_initialized()?;
        context.set(CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0)));
        Ok(())
    }

    fn cuCtxSetCurrent(context: Handle) {
        check_initialized()?;
        if context == 0 {
            CURRENT.with_borrow_mut(Vec::pop);
            return Ok(());
        }
        set_current(find(context)?.handle);
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: Handle) {
        check_initialized()?;
        let context = find(context)?;
        CURRENT.with_borrow_mut(|stack| stack.push(context.handle));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<Handle>) {
        check_initialized()?;
        context.set(CURRENT.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?);
        Ok(())
    }

    fn cuCtxGetDevice(device: Out<c_int>) {
        device.set(current()?.device as c_int);
        Ok(())
    }

    fn cuCtxSynchronize() {
        let context = current()?;
        capture::refuse_in(context.handle)?;
        context.synchronize();
        Ok(())
    }

    fn cuCtxSetFlags(_flags: c_uint) {
        current().map(drop)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        current()?;
        least.set(0);
        greatest.set(-5);
        Ok(())
    }

    fn cuCtxGetLimit(value: Out<usize>, _limit: c_int) {
        current()?;
        value.set(1024);
        Ok(())
    }

    fn cuCtxSetLimit(_limit: c_int, _value: usize) {
        current().map(drop)
    }

    fn cuCtxEnablePeerAccess(peer: Handle, flags: c_uint) {
        let context = current()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let peer = find(peer)?;
        enable_access(&context, &peer)
    }
}

/// Lets work of a context access another's memory. Refused during a capture in either, whatever its mode.
fn enable_access(context: &CudaContext, peer: &CudaContext) -> Answer {
    if capture::any_in(context.handle) || capture::any_in(peer.handle) {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    if lock(&context.peers).insert(peer.handle) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
}

/// Waits as the driver does before it frees memory of a device: until the work there and on the devices that reach its memory,
/// or whose memory it reaches, is complete.
pub fn wait_to_free(device: usize) {
    let contexts = CONTEXTS.live();
    let here: Vec<_> = contexts.iter().filter(|context| context.device == device).collect();
    let is_near = |one: &CudaContext| {
        here.iter().any(|context| context.reaches(one.handle) || one.reaches(context.handle))
    };
    contexts.iter().filter(|one| is_near(one)).for_each(|one| one.synchronize());
}

/// Enables access from one device to another, unless it is enabled already. NCCL does so to connect two ranks
/// of this process.
pub fn runtime_enable_access(device: usize, peer: usize) -> Answer {
    let (context, peer) = (runtime_context(device), runtime_context(peer));
    if lock(&context.peers).contains(&peer.handle) {
        return Ok(());
    }
    match enable_access(&context, &peer) {
        Err(PEER_ACCESS_ALREADY_ENABLED) => Ok(()),
        answer => answer,
    }
}

fn create(to: Out<Handle>, device: c_int) -> Answer {
    let context = CudaContext::start(index(device)?);
    CURRENT.with_borrow_mut(|stack| stack.push(context.handle));
    to.set(context.handle);
    Ok(())
}
