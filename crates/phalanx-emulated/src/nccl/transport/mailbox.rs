//! A rank's mailbox: messages, signals, and the windows that peers write to.

use super::message::{Message, Tag};
use crate::base::lock::lock;
use crate::base::violation::violation;
use crate::cuda::memory::Range;
use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, PoisonError};

/// A rank's mailbox.
#[derive(Debug, Default)]
pub struct Mailbox {
    contents: Mutex<Contents>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Contents {
    messages: HashMap<(u32, Tag), VecDeque<Vec<u8>>>,
    signals: HashMap<SignalOf, u64>,
    windows: HashMap<u64, Range>,
}

/// Sender, index and context of a signal.
pub type SignalOf = (u32, i32, i32);

/// The error of a wait that was stopped: the communicator was aborted or revoked.
#[derive(Debug, Clone, Copy)]
pub struct Stopped;

impl Mailbox {
    /// Delivers a message. Data for a window is written at once.
    pub fn put(&self, message: Message) {
        let mut contents = lock(&self.contents);
        match message.tag {
            Tag::Put { window, offset, signal, context } => {
                contents.store(window, offset, &message.body);
                *contents.signals.entry((message.from, signal, context)).or_default() += 1;
            }
            Tag::Signal { signal, context } => {
                *contents.signals.entry((message.from, signal, context)).or_default() += 1;
            }
            tag => contents.messages.entry((message.from, tag)).or_default().push_back(message.body),
        }
        drop(contents);
        self.changed.notify_all();
    }

    /// Waits for a message and takes it out.
    pub fn take(&self, from: u32, tag: Tag, stop: impl Fn() -> bool) -> Result<Vec<u8>, Stopped> {
        self.wait(stop, |contents| contents.messages.get_mut(&(from, tag))?.pop_front())
    }

    /// Waits for a message and leaves it in the mailbox.
    pub fn await_message(&self, from: u32, tag: Tag, stop: impl Fn() -> bool) -> Result<(), Stopped> {
        self.wait(stop, |contents| contents.messages.contains_key(&(from, tag)).then_some(()))
    }

    /// Whether a message has arrived.
    pub fn has(&self, from: u32, tag: Tag) -> bool {
        lock(&self.contents).messages.get(&(from, tag)).is_some_and(|messages| !messages.is_empty())
    }

    /// Waits for a number of signals and takes them out.
    pub fn take_signals(&self, of: SignalOf, number: u64, stop: impl Fn() -> bool) -> Result<(), Stopped> {
        self.wait(stop, |contents| {
            let signals = contents.signals.entry(of).or_default();
            *signals = signals.checked_sub(number)?;
            Some(())
        })
    }

    /// Opens a window of this rank: peers may write to the range.
    pub fn open_window(&self, window: u64, range: Range) {
        lock(&self.contents).windows.insert(window, range);
    }

    /// Closes a window: a later write by a peer is a violation.
    pub fn close_window(&self, window: u64) {
        lock(&self.contents).windows.remove(&window);
    }

    /// Waits until the communicator is stopped.
    pub fn wait_for_ever(&self, stop: impl Fn() -> bool) -> Stopped {
        match self.wait(stop, |_| None::<()>) {
            Ok(()) | Err(Stopped) => Stopped,
        }
    }

    /// Wakes all waits, which check whether to stop.
    pub fn wake(&self) {
        // With the lock, so that no wait is between its check and its sleep.
        drop(lock(&self.contents));
        self.changed.notify_all();
    }

    fn wait<T>(
        &self,
        stop: impl Fn() -> bool,
        mut look: impl FnMut(&mut Contents) -> Option<T>,
    ) -> Result<T, Stopped> {
        let mut contents = lock(&self.contents);
        loop {
            if stop() {
                return Err(Stopped);
            }
            if let Some(found) = look(&mut contents) {
                return Ok(found);
            }
            contents = self.changed.wait(contents).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Contents {
    fn store(&self, window: u64, offset: u64, bytes: &[u8]) {
        let Some(range) = self.windows.get(&window) else {
            violation("ncclPutSignal", format!("a peer's window {window} is not registered there"));
        };
        if offset as usize + bytes.len() > range.len {
            violation(
                "ncclPutSignal",
                format!("{} bytes at offset {offset} are beyond the peer's window", bytes.len()),
            );
        }
        range.part(offset as usize, bytes.len()).write(bytes);
    }
}
