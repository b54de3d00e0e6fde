//! The warps of a launch, side by side in the stream's thread: each is polled in turn until it is through.

use crate::base::handles;
use crate::base::random::Random;
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Rounds without a change after which the thread sleeps between two.
const BUSY_ROUNDS: u32 = 50;
/// How long it sleeps: other ranks need the cores.
const SLEEP: Duration = Duration::from_micros(50);

/// What all warps of a launch share.
pub struct Grid {
    /// The address of the abort word, in page-locked memory.
    abort: u64,
    has_changed: Cell<bool>,
    random: Random,
}

/// A warp's work.
pub type Warp<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Lets the other warps go on.
pub async fn pause() {
    let mut is_over = false;
    std::future::poll_fn(
        |_| if std::mem::replace(&mut is_over, true) { Poll::Ready(()) } else { Poll::Pending },
    )
    .await;
}

impl Grid {
    /// The abort word has been checked.
    pub fn new(abort: u64) -> Grid {
        Grid { abort, has_changed: Cell::new(false), random: Random::new(handles::fresh()) }
    }

    /// Whether the host has set the abort word.
    pub fn is_aborted(&self) -> bool {
        // SAFETY: aligned page-locked memory that lives as long as the communicator; the host uses it so, too.
        unsafe { &*(self.abort as *const AtomicU32) }.load(Ordering::Acquire) != 0
    }

    /// A warp has found what it waited for.
    pub fn has_changed(&self) {
        self.has_changed.set(true);
    }

    /// A number below `limit`.
    pub fn below(&self, limit: usize) -> usize {
        self.random.below(limit)
    }

    /// Runs warps to their ends, in an order that changes.
    pub fn run(&self, mut warps: Vec<Warp<'_>>) {
        let mut context = Context::from_waker(Waker::noop());
        let mut idle_rounds = 0;
        while !warps.is_empty() {
            let first = self.random.below(warps.len());
            warps.rotate_left(first);
            let before = warps.len();
            // Some warps fall behind the others.
            warps.retain_mut(|warp| self.random.chance(0.1) || warp.as_mut().poll(&mut context).is_pending());
            if self.has_changed.replace(false) || warps.len() < before {
                idle_rounds = 0;
                continue;
            }
            idle_rounds += 1;
            if idle_rounds < BUSY_ROUNDS { std::thread::yield_now() } else { std::thread::sleep(SLEEP) }
        }
    }
}
