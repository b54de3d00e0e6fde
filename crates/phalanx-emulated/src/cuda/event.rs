//! Events.

use super::capture::{self, Point};
use super::context::{Context, current};
use super::error::{INVALID_HANDLE, INVALID_VALUE, NOT_READY};
use super::queue::{Mark, Plain, Stream, Work};
use super::stream;
use crate::call::{Answer, Code};
use crate::handles::{self, Handle, Handles};
use crate::lock;
use crate::pointers::Out;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// An event: the last point that it was recorded at.
pub struct Event {
    context: Arc<Context>,
    timed: bool,
    state: Mutex<State>,
}

/// Where in a stream, and when the stream got there.
type Recorded = (Mark, Arc<OnceLock<Instant>>);

#[derive(Clone, Default)]
enum State {
    /// Counts as complete.
    #[default]
    Never,
    Recorded(Recorded),
    Captured(Point),
}

static EVENTS: Handles<Event> = Handles::new("event");

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

impl Event {
    /// Whether it was ever recorded outside a capture.
    pub fn was_recorded(&self) -> bool {
        matches!(*lock(&self.state), State::Recorded(..))
    }

    fn state(&self) -> State {
        lock(&self.state).clone()
    }

    fn recorded(&self) -> Result<Option<Recorded>, Code> {
        match self.state() {
            State::Never => Ok(None),
            State::Recorded(recorded) => Ok(Some(recorded)),
            State::Captured(point) => Err(capture::refuse_point(&point)),
        }
    }

    fn record(&self, stream: &Arc<Stream>) -> Answer {
        if stream.context.handle != self.context.handle {
            return Err(INVALID_HANDLE);
        }
        if let Some(point) = capture::point(stream)? {
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
            State::Captured(point) if capture::goes_on(&point) => capture::join(stream, &point),
            State::Captured(point) => Err(capture::refuse_point(&point)),
            State::Recorded((mark, _)) => {
                capture::refuse_uncaptured(stream, self)?;
                capture::enqueue_after(stream, vec![mark], Arc::new(Plain(|| ())))
            }
        }
    }
}

exported! {
    fn cuEventCreate(event: Out<Handle>, flags: c_uint) {
        let context = current()?;
        // Blocking synchronisation, no timing, for other processes.
        if flags & !7 != 0 {
            return Err(INVALID_VALUE);
        }
        let handle = handles::fresh();
        let timed = flags & DISABLE_TIMING == 0;
        EVENTS.insert(handle, Arc::new(Event { context, timed, state: Mutex::default() }));
        event.set(handle);
        Ok(())
    }

    fn cuEventDestroy_v2(event: Handle) {
        // Whoever waits for it goes on waiting.
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
