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
pub(super) const FULL: Duration = Duration::from_millis(200);

/// A device and a stream of it, by their addresses: each device has a default stream, whose handle is null.
type Asked = (usize, usize);

/// Threads that wait for the driver's answer.
static UNANSWERED: Mutex<Vec<(Asked, Receiver<Result<bool>>)>> = Mutex::new(Vec::new());

fn key(device: GpuDevice, stream: &GpuStream) -> Asked {
    (std::ptr::from_ref(device.library_lock).addr(), stream.raw().0.addr())
}

impl GpuDevice {
    /// [`has_work`](Self::has_work), and yes if the driver does not answer within this time: the stream is full.
    pub fn is_busy(self, stream: &GpuStream, limit: Duration) -> Result<bool> {
        let asked = key(self, stream);
        if is_unanswered(asked) {
            return Ok(true);
        }
        let (sender, answer) = channel();
        // The stream lives until the driver has answered.
        let stream = stream.clone();
        let ask = move || {
            let current = self.enter();
            let answer = self.has_work(stream.raw());
            // This may be its end.
            drop(stream);
            drop(current);
            // Nobody waits for it any more, perhaps.
            let _ = sender.send(answer);
        };
        if std::thread::Builder::new().name("phalanx-query".into()).spawn(ask).is_err() {
            return Ok(true);
        }
        answer.recv_timeout(limit).unwrap_or_else(|_| {
            lock(&UNANSWERED).push((asked, answer));
            Ok(true)
        })
    }

    /// Waits until no query of a stream is left unanswered: it would spoil a capture that begins.
    pub fn wait_for_answers(self, stream: &GpuStream) {
        while is_unanswered(key(self, stream)) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn is_unanswered(asked: Asked) -> bool {
    let mut unanswered = lock(&UNANSWERED);
    unanswered.retain(|(_, answer)| matches!(answer.try_recv(), Err(TryRecvError::Empty)));
    unanswered.iter().any(|(other, _)| *other == asked)
}
