//! Events: points in a stream's work.

use super::capture::Point;
use super::context::current;
use super::error::{INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use super::queue::{Mark, Stream};
use super::stream;
use super::work::{Plain, Work};
use crate::base::call::{Answer, Code, exported};
use crate::base::handles::{self, Handle, Handles};
use crate::base::lock::lock;
use crate::base::pointers::Out;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// An event: the point at which it was last recorded.
pub struct CudaEvent {
    context: Handle,
    timed: bool,
    state: Mutex<State>,
}

/// A point in a stream, and the time at which the stream reached it.
type Recorded = (Mark, Arc<OnceLock<Instant>>);

#[derive(Clone, Default)]
enum State {
    /// Counts as complete.
    #[default]
    Never,
    Recorded(Recorded),
    Captured(Point),
}

static EVENTS: Handles<CudaEvent> = Handles::new("event");

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

impl CudaEvent {
    fn state(&self) -> State {
        lock(&self.state).clone()
    }

    fn recorded(&self) -> Result<Option<Recorded>, Code> {
        match self.state() {
            State::Never => Ok(None),
            State::Recorded(recorded) => Ok(Some(recorded)),
            State::Captured(point) => Err(point.refuse()),
        }
    }

    fn record(&self, stream: &Arc<Stream>) -> Answer {
        if stream.context != self.context {
            return Err(INVALID_HANDLE);
        }
        if let Some(point) = stream.capture_point()? {
            *lock(&self.state) = State::Captured(point);
            return Ok(());
        }
        let time = Arc::new(OnceLock::new());
        let at = Arc::clone(&time);
        let work: Arc<dyn Work> = Arc::new(Plain(move || {
            at.get_or_init(Instant::now);
        }));
        let mark = stream.submit(Vec::new(), work.bind());
        *lock(&self.state) = State::Recorded((mark, time));
        Ok(())
    }

    fn is_waited_for_by(&self, stream: &Arc<Stream>) -> Answer {
        match self.state() {
            State::Never => Ok(()),
            State::Captured(point) if point.is_open() => stream.join_capture(&point),
            State::Captured(point) => Err(point.refuse()),
            State::Recorded((mark, _)) => {
                stream.refuse_uncaptured()?;
                stream.enqueue_after(vec![mark], Arc::new(Plain(|| ())))
            }
        }
    }
}

exported! {
    fn cuEventCreate(event: Out<Handle>, flags: c_uint) {
        let context = current()?.handle;
        // Flags: blocking synchronisation, no timing, for other processes.
        if flags & !7 != 0 {
            return Err(INVALID_VALUE);
        }
        let handle = handles::fresh();
        let timed = flags & DISABLE_TIMING == 0;
        EVENTS.insert(handle, Arc::new(CudaEvent { context, timed, state: Mutex::default() }));
        event.set(handle);
        Ok(())
    }

    fn cuEventDestroy_v2(event: Handle) {
        // Streams that wait for it keep the point.
        EVENTS.end(FUNCTION, event, FUNCTION);
        Ok(())
    }

    fn cuEventRecord(event: Handle, stream: Handle) {
        EVENTS.get(FUNCTION, event).record(&stream::find(FUNCTION, stream)?)
    }

    fn cuEventRecordWithFlags(event: Handle, stream: Handle, _flags: c_uint) {
        EVENTS.get(FUNCTION, event).record(&stream::find(FUNCTION, stream)?)
    }

    fn cuEventQuery(event: Handle) {
        match EVENTS.get(FUNCTION, event).recorded()? {
            Some((mark, _)) if !mark.reached() => Err(NOT_READY),
            _ => Ok(()),
        }
    }

    fn cuEventSynchronize(event: Handle) {
        if let Some((mark, _)) = EVENTS.get(FUNCTION, event).recorded()? {
            mark.wait();
        }
        Ok(())
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) {
        elapsed(FUNCTION, milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: Handle, end: Handle) {
        elapsed(FUNCTION, milliseconds, start, end)
    }

    fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) {
        let stream = stream::find(FUNCTION, stream)?;
        EVENTS.get(FUNCTION, event).is_waited_for_by(&stream)
    }
}

fn elapsed(function: &str, milliseconds: Out<f32>, start: Handle, end: Handle) -> Answer {
    let time = |handle| -> Result<Instant, Code> {
        let event = EVENTS.get(function, handle);
        let recorded = event.recorded()?.filter(|_| event.timed);
        let (_, time) = recorded.ok_or(INVALID_HANDLE)?;
        time.get().copied().ok_or(NOT_READY)
    };
    let (start, end) = (time(start)?, time(end)?);
    let forward = end.saturating_duration_since(start).as_secs_f64();
    let backward = start.saturating_duration_since(end).as_secs_f64();
    milliseconds.set(((forward - backward) * 1e3) as f32);
    Ok(())
}
