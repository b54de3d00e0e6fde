//! Whether a stream has work, asked without waiting.
//!
//! The driver takes about 1,000 pieces of work for a stream. A thread that enqueues more waits in the driver, and so does each other thread
//! that asks for that stream, on which the GPU may wait for a rank that is lost. (Measured on an H200 with CUDA 13.0, which answers for events.)

use super::device::GpuDevice;
use crate::buffer::stream::GpuStream;
use crate::os::sync::lock;
use crate::types::error::Result;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Duration;

/// A stream whose query has not been answered for so long is full.
const FULL: Duration = Duration::from_millis(200);

/// A device and a stream of it, by their addresses: each device has a default stream, at none.
type Asked = (usize, usize);

/// Threads that wait for the driver's answer.
static UNANSWERED: Mutex<Vec<(Asked, Receiver<Result<bool>>)>> = Mutex::new(Vec::new());

impl GpuDevice {
    /// Whether a stream has work, also if it is full. A captured stream has none, and must not be queried.
    pub fn is_busy(self, stream: &GpuStream) -> Result<bool> {
        let asked = (std::ptr::from_ref(self.library_lock).addr(), stream.raw().0.addr());
        if is_unanswered(asked) {
            return Ok(true);
        }
        let (sender, answer) = channel();
        // The stream lives until the driver has answered.
        let stream = stream.clone();
        let ask = move || {
            let (_current, raw) = (self.enter(), stream.raw());
            let answer =
                self.is_captured(raw).and_then(|is_captured| Ok(!is_captured && !self.is_idle(raw)?));
            // Nobody waits for it any more.
            let _ = sender.send(answer);
        };
        if std::thread::Builder::new().name("phalanx-query".into()).spawn(ask).is_err() {
            return Ok(true);
        }
        answer.recv_timeout(FULL).unwrap_or_else(|_| {
            lock(&UNANSWERED).push((asked, answer));
            Ok(true)
        })
    }
}

fn is_unanswered(asked: Asked) -> bool {
    let mut unanswered = lock(&UNANSWERED);
    unanswered.retain(|(_, answer)| matches!(answer.try_recv(), Err(TryRecvError::Empty)));
    unanswered.iter().any(|(other, _)| *other == asked)
}
