//! Log events that cannot unwind.
//!
//! An event runs code of the program: its subscriber. `tracing_subscriber::fmt().init()` panics, for example, when the error
//! stream is a pipe whose reader has gone. Many events happen while a buffer is lent, in `Drop`, or on a thread of phalanx, and
//! none of these may unwind for it. So all of phalanx logs by these macros, which have the arguments of those of `tracing`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Lets the subscriber have an event. If it panics, that is said once on the error stream, as far as that can be written.
pub(crate) fn emit(event: impl FnOnce()) {
    static HAS_PANICKED: AtomicBool = AtomicBool::new(false);
    // A second panic in a thread that unwinds prints a backtrace, always. Finding its symbols takes up to seconds, in which the
    // other ranks wait for this one's end.
    if std::thread::panicking() && HAS_PANICKED.load(Ordering::Relaxed) {
        return;
    }
    if let Err(payload) = catch_unwind(AssertUnwindSafe(event)) {
        // Its destructor is the program's, too.
        std::mem::forget(payload);
        if !HAS_PANICKED.swap(true, Ordering::Relaxed) {
            print(format_args!("the program's tracing subscriber panicked: an event of the log is lost"));
        }
    }
}

/// Writes a line to the error stream. It is lost where the stream is closed, or takes nothing for a second: a pipe whose reader
/// does not read would otherwise hold the thread that ends a hanging job.
pub(crate) fn print(line: std::fmt::Arguments<'_>) {
    super::write_to_stderr(format!("phalanx: {line}\n").as_bytes());
}

macro_rules! error_event {
    ($($event:tt)*) => { $crate::os::log::emit(|| ::tracing::error!($($event)*)) };
}
macro_rules! warn_event {
    ($($event:tt)*) => { $crate::os::log::emit(|| ::tracing::warn!($($event)*)) };
}
macro_rules! info_event {
    ($($event:tt)*) => { $crate::os::log::emit(|| ::tracing::info!($($event)*)) };
}
macro_rules! debug_event {
    ($($event:tt)*) => { $crate::os::log::emit(|| ::tracing::debug!($($event)*)) };
}
pub(crate) use {debug_event as debug, error_event as error, info_event as info, warn_event as warn};

/// Whether the program's subscriber takes spans of operations.
pub(crate) fn takes_operations() -> bool {
    let mut takes = false;
    emit(|| takes = tracing::span_enabled!(target: "phalanx::operations", tracing::Level::TRACE));
    takes
}

/// A span of an operation, from its making until it is dropped.
pub(crate) struct OperationSpan(tracing::Span);

impl OperationSpan {
    pub fn new(operation: &str, bytes: u64, communicator: &str) -> OperationSpan {
        let mut span = tracing::Span::none();
        emit(|| {
            span = tracing::trace_span!(target: "phalanx::operations", "operation", operation, bytes, communicator);
        });
        OperationSpan(span)
    }
}

impl Drop for OperationSpan {
    fn drop(&mut self) {
        let span = std::mem::replace(&mut self.0, tracing::Span::none());
        emit(|| drop(span));
    }
}

/// Warns, on the error stream where the program has no log.
pub(crate) fn say(line: std::fmt::Arguments<'_>) {
    if tracing::dispatcher::has_been_set() {
        warn_event!("{line}");
    } else {
        print(line);
    }
}

#[cfg(test)]
mod tests {
    use crate::os::log;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    #[derive(Clone, Default)]
    struct Panics(Arc<AtomicUsize>);

    impl Subscriber for Panics {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("the log cannot be written");
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    struct LogsInDrop;

    impl Drop for LogsInDrop {
        fn drop(&mut self) {
            log::error!(rank = 1, "dropped");
        }
    }

    #[test]
    fn a_subscriber_that_panics_ends_nothing_not_even_in_drop_while_unwinding() {
        let subscriber = Panics::default();
        let events = subscriber.0.clone();
        tracing::subscriber::with_default(subscriber, || {
            log::warn!("an event");
            let unwound = std::panic::catch_unwind(|| {
                let _logs = LogsInDrop;
                panic!("the rank's own");
            });
            assert_eq!(*unwound.unwrap_err().downcast::<&str>().unwrap(), "the rank's own");
        });
        // The one in `Drop` is lost: a panic there, while this thread unwinds, would print a backtrace.
        assert_eq!(events.load(Ordering::Relaxed), 1);
    }
}
