//! The functions on streams.

use super::capture;
use super::context::{Context, current};
use super::error::{INVALID_VALUE, NOT_READY};
use super::queue::{Kind, Plain, Stream};
use crate::call::{Answer, Code, in_host_function};
use crate::handles::{Handle, Handles};
use crate::lock;
use crate::pointers::Out;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::ThreadId;

static STREAMS: Handles<Stream> = Handles::new("stream");

/// `CU_STREAM_LEGACY`.
const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: Handle = 2;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

/// The stream of a handle; the default ones are those of the current context. A stream that was destroyed is a
/// violation.
pub fn find(function: &'static str, handle: Handle) -> Result<Arc<Stream>, Code> {
    match handle {
        0 | LEGACY => Ok(Arc::clone(current()?.legacy())),
        PER_THREAD => Ok(per_thread(&current()?)),
        _ => Ok(STREAMS.get(function, handle)),
    }
}

/// Every stream that has a handle or belongs to a thread.
pub fn all() -> Vec<Arc<Stream>> {
    let mut all = STREAMS.live();
    all.extend(lock(per_thread_streams()).values().cloned());
    all
}

/// The default stream of each thread in each context.
type PerThread = HashMap<(ThreadId, Handle), Arc<Stream>>;

fn per_thread_streams() -> &'static Mutex<PerThread> {
    static STREAMS: OnceLock<Mutex<PerThread>> = OnceLock::new();
    STREAMS.get_or_init(Mutex::default)
}

fn per_thread(context: &Arc<Context>) -> Arc<Stream> {
    let key = (std::thread::current().id(), context.handle);
    let mut streams = lock(per_thread_streams());
    Arc::clone(streams.entry(key).or_insert_with(|| Stream::start(context, Kind::Blocking, 0)))
}

/// Lets a stream end with its context.
pub fn forget(function: &str, stream: &Arc<Stream>) {
    if STREAMS.find(stream.handle).is_some() {
        STREAMS.end(function, stream.handle, "the end of its context");
    }
    lock(per_thread_streams()).retain(|_, other| other.handle != stream.handle);
    stream.close();
}

fn create(to: Out<Handle>, flags: c_uint, priority: c_int) -> Answer {
    let context = current()?;
    let kind = match flags {
        0 => Kind::Blocking,
        NON_BLOCKING => Kind::NonBlocking,
        _ => return Err(INVALID_VALUE),
    };
    let stream = Stream::start(&context, kind, priority.clamp(-5, 0));
    STREAMS.insert(stream.handle, Arc::clone(&stream));
    to.set(stream.handle);
    Ok(())
}

/// A pointer that is handed through to a callback.
#[derive(Clone, Copy)]
struct Opaque(*mut c_void);

// SAFETY: it is the caller's, who gave it to be used by another thread.
unsafe impl Send for Opaque {}
// SAFETY: as above.
unsafe impl Sync for Opaque {}

impl Opaque {
    fn get(self) -> *mut c_void {
        self.0
    }
}

exported! {
    fn cuStreamCreate(stream: Out<Handle>, flags: c_uint) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }

    fn cuStreamDestroy_v2(handle: Handle) {
        if handle <= PER_THREAD {
            return Err(INVALID_VALUE);
        }
        let stream = find(FUNCTION, handle)?;
        if capture::of(&stream).is_some() {
            crate::violation::violation(FUNCTION, "the stream takes part in a capture");
        }
        // What is in it is still done.
        STREAMS.end(FUNCTION, handle, FUNCTION).close();
        Ok(())
    }

    fn cuStreamSynchronize(stream: Handle) {
        let stream = find(FUNCTION, stream)?;
        capture::refuse(&stream)?;
        stream.marks().iter().for_each(|mark| mark.wait());
        Ok(())
    }

    fn cuStreamQuery(stream: Handle) {
        let stream = find(FUNCTION, stream)?;
        capture::refuse(&stream)?;
        if stream.marks().iter().all(|mark| mark.reached()) { Ok(()) } else { Err(NOT_READY) }
    }

    fn cuStreamGetFlags(stream: Handle, flags: Out<c_uint>) {
        flags.set(c_uint::from(find(FUNCTION, stream)?.kind == Kind::NonBlocking));
        Ok(())
    }

    fn cuStreamGetPriority(stream: Handle, priority: Out<c_int>) {
        priority.set(find(FUNCTION, stream)?.priority);
        Ok(())
    }

    fn cuStreamGetId(stream: Handle, id: Out<u64>) {
        id.set(find(FUNCTION, stream)?.handle);
        Ok(())
    }

    fn cuStreamGetCtx(stream: Handle, context: Out<Handle>) {
        context.set(find(FUNCTION, stream)?.context.handle);
        Ok(())
    }

    fn cuStreamGetDevice(stream: Handle, device: Out<c_int>) {
        device.set(find(FUNCTION, stream)?.context.device as c_int);
        Ok(())
    }

    fn cuLaunchHostFunc(
        stream: Handle, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void,
    ) {
        let stream = find(FUNCTION, stream)?;
        let function = function.ok_or(INVALID_VALUE)?;
        let data = Opaque(data);
        // SAFETY: the caller gave the function to be called with this argument.
        let call = move || in_host_function(|| unsafe { function(data.get()) });
        capture::enqueue(&stream, Arc::new(Plain(call)))
    }
}
