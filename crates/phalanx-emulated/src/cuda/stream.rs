//! The functions on streams.

use super::context::current;
use super::error::{INVALID_VALUE, NOT_READY};
use super::memory::{Range, When};
use super::queue::{Kind, Stream};
use super::streams::STREAMS;
use super::work::Plain;
use crate::base::call::{Answer, Code, exported, in_host_function};
use crate::base::handles::Handle;
use crate::base::pointers::Out;
use crate::base::violation::violation;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// `CU_STREAM_LEGACY`.
const LEGACY: Handle = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: Handle = 2;
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;

/// `CU_STREAM_WAIT_VALUE_GEQ`.
const WAIT_VALUE_GEQ: c_uint = 0;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`.
const WRITE_VALUE_DEFAULT: c_uint = 0;
/// How often a stream looks at a word that it waits for.
const POLL: Duration = Duration::from_micros(20);

/// The stream of a handle. Default streams are those of the current context. A handle without a stream is a
/// violation.
pub fn find(function: &'static str, handle: Handle) -> Result<Arc<Stream>, Code> {
    match handle {
        0 | LEGACY => Ok(Arc::clone(current()?.legacy())),
        PER_THREAD => Ok(current()?.per_thread_stream()),
        _ => Ok(STREAMS.get(function, handle)),
    }
}

fn create(to: Out<Handle>, flags: c_uint, priority: c_int) -> Answer {
    let context = current()?;
    let kind = match flags {
        0 => Kind::Blocking,
        NON_BLOCKING => Kind::NonBlocking,
        _ => return Err(INVALID_VALUE),
    };
    context.wait_for_room();
    let stream = context.start_stream(kind, priority.clamp(-5, 0));
    STREAMS.insert(stream.handle, Arc::clone(&stream));
    to.set(stream.handle);
    Ok(())
}

/// The argument of a caller's host function.
#[derive(Clone, Copy)]
struct Opaque(*mut c_void);

// SAFETY: the caller passed it for use in the stream's thread (`cuLaunchHostFunc`).
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
        if stream.capture().is_some() {
            violation(FUNCTION, "the stream is being captured");
        }
        // Work that is in it is still performed.
        STREAMS.end(FUNCTION, handle, FUNCTION).close();
        Ok(())
    }

    fn cuStreamSynchronize(stream: Handle) {
        let stream = find(FUNCTION, stream)?;
        stream.refuse_capture()?;
        stream.marks().iter().for_each(|mark| mark.wait());
        Ok(())
    }

    fn cuStreamQuery(stream: Handle) {
        let stream = find(FUNCTION, stream)?;
        stream.refuse_capture()?;
        stream.wait_for_room();
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
        context.set(find(FUNCTION, stream)?.context);
        Ok(())
    }

    fn cuStreamGetDevice(stream: Handle, device: Out<c_int>) {
        device.set(find(FUNCTION, stream)?.device as c_int);
        Ok(())
    }

    fn cuLaunchHostFunc(
        stream: Handle, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void,
    ) {
        let stream = find(FUNCTION, stream)?;
        let function = function.ok_or(INVALID_VALUE)?;
        let data = Opaque(data);
        // SAFETY: the caller passed the function to be called with this argument.
        let call = move || in_host_function(|| unsafe { function(data.get()) });
        stream.enqueue(Arc::new(Plain(call)))
    }

    fn cuStreamWaitValue32_v2(stream: Handle, address: u64, value: u32, flags: c_uint) {
        if flags != WAIT_VALUE_GEQ || !address.is_multiple_of(4) {
            return Err(INVALID_VALUE);
        }
        let stream = find(FUNCTION, stream)?;
        let word = Range::given(FUNCTION, "the word", address, 4);
        let wait = move || {
            word.check(When::Performed);
            // SAFETY: four bytes of memory that the emulator knows, aligned; whoever writes them does so atomically, as on a GPU.
            let word = unsafe { AtomicU32::from_ptr(address as *mut u32) };
            // The difference counts, so that the values may wrap around.
            while (word.load(Ordering::Acquire).wrapping_sub(value) as i32) < 0 {
                std::thread::sleep(POLL);
            }
        };
        stream.enqueue(Arc::new(Plain(wait)))
    }

    fn cuStreamWriteValue32_v2(stream: Handle, address: u64, value: u32, flags: c_uint) {
        if flags != WRITE_VALUE_DEFAULT || !address.is_multiple_of(4) {
            return Err(INVALID_VALUE);
        }
        let stream = find(FUNCTION, stream)?;
        let word = Range::given(FUNCTION, "the word", address, 4);
        let write = move || {
            word.check(When::Performed);
            // SAFETY: as above. What the stream has written before is seen by whoever sees the value.
            unsafe { AtomicU32::from_ptr(address as *mut u32) }.store(value, Ordering::Release);
        };
        stream.enqueue(Arc::new(Plain(write)))
    }
}
