//! Shared-memory primitives between ranks: sequence-stamped cache lines, counters, and futex sleep and wake.
//!
//! Every word has **one writer** (the rank it belongs to), except `Park::sleepers`. A reader waits for a value that the writer stores with
//! release ordering, and then reads the data written before without further synchronisation. The test kit compiles this file again with
//! loom's and shuttle's atomics (`crates/phalanx-testkit/tests/loom.rs`, `shuttle.rs`) to explore the interleavings.

use crate::os::sync::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};

use crate::os::LINE;

/// Payload bytes of a stamped line, and of a stamped pair of lines.
pub(crate) const LINE_PAYLOAD: usize = LINE - STAMP;
pub(crate) const PAIR_PAYLOAD: usize = 2 * LINE - STAMP;

const STAMP: usize = size_of::<u64>();

/// Cache lines stamped with the operation that their payload belongs to: no separate flag and no fence is needed (NCCL's LL128 protocol
/// rests on the same idea).
#[repr(C, align(64))]
pub(crate) struct Stamped<const PAYLOAD: usize> {
    stamp: AtomicU64,
    payload: crate::os::sync::UnsafeCell<[u8; PAYLOAD]>,
}

/// One line: it comes to its reader at once.
pub(crate) type StampedLine = Stamped<LINE_PAYLOAD>;

/// Two lines side by side. The second costs its reader little if it is prefetched while the first is awaited (`prefetch.rs`).
pub(crate) type StampedPair = Stamped<PAIR_PAYLOAD>;

impl<const PAYLOAD: usize> Stamped<PAYLOAD> {
    /// The state in a new region, which is all zeroes. For tests, like the other `new`s here.
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn new() -> Stamped<PAYLOAD> {
        Stamped { stamp: AtomicU64::new(0), payload: crate::os::sync::UnsafeCell::new([0; PAYLOAD]) }
    }

    /// Writes up to `PAYLOAD` bytes and then the stamp.
    ///
    /// # Safety
    /// This rank is the line's writer; nobody still reads what it held before (readers of an earlier
    /// stamp are done with it); `bytes` is readable for `len` ≤ `PAYLOAD` bytes.
    #[inline(always)]
    pub unsafe fn write(&self, stamp: u64, bytes: *const u8, len: usize) {
        debug_assert!(len <= PAYLOAD);
        // A full line is by far the most frequent case, and a copy of constant length is a handful of vector moves.
        let fill = |payload: *mut u8| unsafe {
            // SAFETY: the caller's contract; the payload is so long.
            if len == PAYLOAD {
                std::ptr::copy_nonoverlapping(bytes, payload, PAYLOAD);
            } else {
                std::ptr::copy_nonoverlapping(bytes, payload, len);
            }
        };
        // SAFETY: the caller's contract.
        unsafe { self.fill(stamp, fill) }
    }

    /// Calls `fill` to write the payload in its place, and then writes the stamp.
    ///
    /// # Safety
    /// As for [`write`](Self::write); `fill` writes to the `PAYLOAD` bytes that it is given.
    #[inline(always)]
    pub unsafe fn fill(&self, stamp: u64, fill: impl FnOnce(*mut u8)) {
        self.payload.with_mut(|payload| fill(payload.cast()));
        self.stamp.store(stamp, Ordering::Release);
    }

    /// Whether the line holds what was written with `stamp`.
    #[inline(always)]
    pub fn is(&self, stamp: u64) -> bool {
        self.stamp.load(Ordering::Acquire) == stamp
    }

    /// Address of the payload. The rules of [`read`](Self::read) say when it may be read.
    #[inline(always)]
    #[allow(dead_code, reason = "the models copy")]
    pub fn payload(&self) -> *const u8 {
        self.payload.with(|payload| payload.cast())
    }

    /// Copies up to `PAYLOAD` bytes out.
    ///
    /// # Safety
    /// [`is`](Self::is) answered true for the expected stamp, the writer does not write again before this
    /// rank says that it is done, and `bytes` is writable for `len` ≤ `PAYLOAD` bytes.
    #[inline(always)]
    pub unsafe fn read(&self, bytes: *mut u8, len: usize) {
        debug_assert!(len <= PAYLOAD);
        self.payload.with(|payload| {
            let payload = payload.cast::<u8>();
            // SAFETY: the caller's contract.
            unsafe {
                if len == PAYLOAD {
                    std::ptr::copy_nonoverlapping(payload, bytes, PAYLOAD);
                } else {
                    std::ptr::copy_nonoverlapping(payload, bytes, len);
                }
            }
        });
    }
}

/// A counter in a cache line of its own (two, since the hardware fetches pairs).
#[repr(C, align(128))]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn new() -> Counter {
        Counter(AtomicU64::new(0))
    }

    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    #[inline(always)]
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }
}

/// The signals of one rank to another one in a window. The first counts up, and the second waits for a number.
#[repr(transparent)]
pub(crate) struct Signals(AtomicU64);

impl Signals {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn new() -> Signals {
        Signals(AtomicU64::new(0))
    }

    /// One more. What its rank has stored before is seen by whoever sees it.
    #[inline(always)]
    pub fn give(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// So many so far.
    #[inline(always)]
    pub fn given(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// A word of a single-producer, single-consumer queue, stamped with the number of its entry. The queue has a word for each entry that
/// can be under way.
#[repr(transparent)]
pub(crate) struct StampedWord(AtomicU64);

impl StampedWord {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn new() -> StampedWord {
        StampedWord(AtomicU64::new(0))
    }

    /// Writes entry number `number`, from 1.
    #[inline(always)]
    pub fn put(&self, number: u64, value: u16) {
        self.0.store(number << 16 | u64::from(value), Ordering::Release);
    }

    /// The value of entry number `number`, once it is there.
    #[inline(always)]
    pub fn get(&self, number: u64) -> Option<u16> {
        let word = self.0.load(Ordering::Acquire);
        (word >> 16 == number).then_some(word as u16)
    }
}

/// Words under a sequence number, as in a seqlock: a reader gets the words of the number it asks for, or learns that they are gone.
#[repr(C, align(64))]
pub(crate) struct NumberedWords {
    /// 0 while there are none, and while they change.
    number: AtomicU64,
    words: [AtomicU64; 3],
}

impl NumberedWords {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn new() -> NumberedWords {
        NumberedWords { number: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    #[inline(always)]
    pub fn write(&self, number: u64, words: [u64; 3]) {
        self.number.store(0, Ordering::Relaxed);
        // A reader that finds one of the new words finds the old number gone.
        fence(Ordering::Release);
        for (word, value) in self.words.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        self.number.store(number, Ordering::Release);
    }

    /// Withdraws the words.
    #[allow(dead_code, reason = "for backends on GPUs")]
    pub fn withdraw(&self) {
        self.number.store(0, Ordering::Release);
    }

    #[inline(always)]
    pub fn number(&self) -> u64 {
        self.number.load(Ordering::Acquire)
    }

    /// The words that were written with `number`, unless they have not come or are gone.
    pub fn read(&self, number: u64) -> Option<[u64; 3]> {
        if self.number() != number {
            return None;
        }
        let words = std::array::from_fn(|i| self.words[i].load(Ordering::Acquire));
        (self.number() == number).then_some(words)
    }
}

/// How a store is made visible before a later load of the same rank.
///
/// Two patterns here need that (Dekker's): a rank announces progress and then loads the count of sleepers; a rank enters a gate and then
/// loads whether it is closed. Both are on the fast path; their counterparts (going to sleep, closing) are not. Where the system has
/// barriers that order *other* threads (`membarrier`), only the slow side pays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fences {
    /// A fence on either side.
    Symmetric,
    /// A compiler fence on the fast side, a barrier on all ranks on the slow side.
    Asymmetric,
}

impl Fences {
    #[inline(always)]
    pub fn fast_side(self) {
        match self {
            Fences::Symmetric => fence(Ordering::SeqCst),
            Fences::Asymmetric => compiler_fence(Ordering::SeqCst),
        }
    }

    pub fn slow_side(self) {
        match self {
            Fences::Symmetric => fence(Ordering::SeqCst),
            Fences::Asymmetric => crate::os::heavy_barrier(),
        }
    }
}

/// A rank's futex, and the count of peers' threads that sleep until this rank makes progress.
#[repr(C, align(128))]
pub(crate) struct Park {
    /// Number of threads of other ranks that sleep until this rank announces progress.
    sleepers: AtomicU32,
    /// The futex: odd while a thread of this rank sleeps or is about to; a new number with every waking.
    turn: AtomicU32,
}

impl Park {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn new() -> Park {
        Park { sleepers: AtomicU32::new(0), turn: AtomicU32::new(0) }
    }

    /// Whether a thread that has prepared would sleep.
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn is_asleep(&self, turn: u32) -> bool {
        self.turn.load(Ordering::Acquire) == turn
    }

    /// Whether threads have to be woken. Called after the store that announces progress.
    #[inline(always)]
    pub fn has_sleepers(&self, fences: Fences) -> bool {
        fences.fast_side();
        self.sleepers.load(Ordering::Acquire) != 0
    }

    /// Counts a sleeper that is never removed: progress always wakes.
    pub fn add_sleeper(&self) {
        self.sleepers.fetch_add(1, Ordering::Release);
    }

    /// First step of a sleeper. It then checks once more what it waits for, and calls [`sleep`](Self::sleep) with the result of this.
    #[must_use]
    pub fn prepare<'a>(&self, awaited: impl Iterator<Item = &'a Park>, fences: Fences) -> u32 {
        let turn = self.turn.fetch_or(1, Ordering::Relaxed) | 1;
        for peer in awaited {
            peer.sleepers.fetch_add(1, Ordering::Release);
        }
        fences.slow_side();
        turn
    }

    /// Sleeps until woken or `timeout` has passed.
    pub fn sleep(&self, turn: u32, timeout: std::time::Duration) {
        crate::os::futex_wait(&self.turn, turn, timeout);
    }

    /// Last step of a sleeper. The futex stays odd if nobody has woken this thread: another thread may rely on that.
    pub fn finish<'a>(awaited: impl Iterator<Item = &'a Park>) {
        for peer in awaited {
            peer.sleepers.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Wakes the owner's threads that sleep.
    pub fn wake(&self) {
        // Most ranks do not sleep: a load leaves the line in their cache.
        let turn = self.turn.load(Ordering::Relaxed);
        // If the number has changed meanwhile, another rank wakes the same threads.
        if turn % 2 == 1
            && self
                .turn
                .compare_exchange(turn, turn.wrapping_add(1), Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        {
            crate::os::futex_wake(&self.turn);
        }
    }
}

/// Flag of a rank that is inside a peer's memory: a peer that gives up waits until it has left.
#[repr(C, align(64))]
pub(crate) struct Gate(AtomicU32);

impl Gate {
    #[cfg(test)]
    #[allow(dead_code, reason = "for the models")]
    pub fn new() -> Gate {
        Gate(AtomicU32::new(0))
    }

    /// Enters, unless `closed` says that a peer has given up. Must be left soon: see [`leave`](Self::leave).
    #[inline(always)]
    #[must_use]
    pub fn enter(&self, fences: Fences, closed: impl Fn() -> bool) -> bool {
        self.0.store(1, Ordering::Relaxed);
        fences.fast_side();
        if closed() {
            self.leave();
            return false;
        }
        true
    }

    #[inline(always)]
    pub fn leave(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Whether the owner may still be inside. Called by a rank that has closed, after a slow-side fence.
    pub fn is_inside(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}
