//! Started collectives: MPI's non-blocking calls, advanced whenever a rank tests or waits.
//!
//! # One form
//! MPI matches a non-blocking call only with non-blocking ones, and a rank inside a blocking call learns of
//! nothing else. So from the first started collective on a communicator, plain collectives use the
//! non-blocking form too; all ranks switch at the same call. In checked mode all collectives use it from the
//! beginning, since each is first compared.
//!
//! # Order
//! MPI matches calls by their order on the communicator. A collective that is compared or cut into parts
//! makes several calls, each when the one before is complete. The next collective makes its first call after
//! the last call of the one before. So all ranks make the same calls in the same order, and collectives of
//! one call each all run at once.

use super::collective::{Prepared, Scratch};
use super::gathering::Gathering;
use super::large::CallParts;
use super::{MpiComm, MpiFailure, check};
use crate::contract::{Call, OperationId, StartCollectives};
use crate::control::record::CallRecord;
use crate::os::float_mode::in_standard_float_mode;
use crate::os::sync::lock;
use crate::types::error::{Error, MismatchError, Result};
use phalanx_sys::mpi::Handle;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Appended to a timeout: a likely reason why no other rank took part.
const FIRST: &str = ". It is the first that was started on this communicator, which all ranks have to start: another may have \
                     called it";

#[derive(Default)]
pub(crate) struct Collectives {
    /// Under way, or complete and not taken, by their numbers.
    started: BTreeMap<u64, StartedCollective>,
    /// The first started collective; from it on, plain collectives are non-blocking, too.
    first: Option<u64>,
}

struct StartedCollective {
    call: Call<'static>,
    record: CallRecord,
    stage: CollectiveStage,
    /// The steps of a collective that is gathered.
    gathering: Option<Gathering<'static>>,
    scratch: Scratch,
}

// SAFETY: the buffers that it points to are in nobody else's hands until it is over, by the contract of
// `StartCollectives::start`.
unsafe impl Send for StartedCollective {}

/// The stage that a collective is in.
enum CollectiveStage {
    /// An earlier collective has calls to make.
    Waiting,
    /// The ranks compare their calls: the numbers and records of all ranks, then this rank's own.
    Comparing(Handle, Vec<[i64; 4]>),
    /// A call of MPI is under way.
    Calling(Handle, Box<IssuedPart>),
    /// Messages are under way; and the outcome of the complete ones.
    Exchanging(Vec<OperationId>, std::result::Result<(), MpiFailure>),
    Over(Result<()>),
}

/// A call of MPI under way, and the parts after it.
struct IssuedPart {
    prepared: Prepared,
    rest: CallParts<'static>,
}

impl StartedCollective {
    /// Whether all its calls of MPI are made.
    fn has_called(&self) -> bool {
        match &self.stage {
            CollectiveStage::Waiting | CollectiveStage::Comparing(..) => false,
            _ if self.gathering.as_ref().is_some_and(Gathering::has_more) => false,
            CollectiveStage::Calling(_, made) => made.rest.clone().next().is_none(),
            CollectiveStage::Exchanging(..) | CollectiveStage::Over(_) => true,
        }
    }
}

impl MpiComm {
    /// Whether plain collectives run as started ones.
    #[inline]
    pub(crate) fn is_polled(&self) -> bool {
        self.polled.load(Ordering::Relaxed)
    }

    /// Carries out a plain collective in the non-blocking form.
    ///
    /// # Safety
    /// As for [`Backend::collective`](crate::contract::Backend::collective).
    #[cold]
    pub(crate) unsafe fn carry_out_polled(&self, call: &Call<'_>) -> Result<()> {
        // SAFETY: the wait ends when the collective is over, or with the process; nothing of the call is used
        // later.
        let call = unsafe { std::mem::transmute::<&Call<'_>, &Call<'static>>(call) };
        // SAFETY: the caller's contract.
        let number = unsafe { self.add(call) };
        self.wait_for_collective(number)
    }

    /// Queues a collective behind the earlier ones; returns its number.
    ///
    /// # Safety
    /// As for [`StartCollectives::start`].
    unsafe fn add(&self, call: &Call<'static>) -> u64 {
        let number = self.watch.next();
        let (stage, scratch) = (CollectiveStage::Waiting, Scratch::default());
        let record = CallRecord::of(call);
        let started = StartedCollective { call: *call, record, stage, gathering: None, scratch };
        let mut collectives = lock(&self.collectives);
        collectives.started.insert(number, started);
        self.advance_collectives(&mut collectives);
        number
    }

    /// Advances all collectives; `true` if any is under way.
    pub(crate) fn progress_collectives(&self) -> bool {
        self.advance_collectives(&mut lock(&self.collectives))
    }

    fn advance_collectives(&self, collectives: &mut Collectives) -> bool {
        let (mut is_next, mut under_way) = (true, false);
        for (number, started) in &mut collectives.started {
            if let Err(failure) = self.advance_collective(*number, started, is_next) {
                started.stage = CollectiveStage::Over(Err(self.failure(failure, &started.record, *number)));
            }
            is_next &= started.has_called();
            under_way |= !matches!(started.stage, CollectiveStage::Over(_));
        }
        under_way
    }

    /// Advances one collective as far as it can without waiting. Makes its first call only when it `is_next`.
    fn advance_collective(
        &self,
        number: u64,
        started: &mut StartedCollective,
        is_next: bool,
    ) -> std::result::Result<(), MpiFailure> {
        loop {
            match &mut started.stage {
                CollectiveStage::Over(_) => return Ok(()),
                CollectiveStage::Waiting => {
                    if self.failed.get().is_some() {
                        return Err(MpiFailure::CommFailed);
                    }
                    if !is_next {
                        return Ok(());
                    }
                    started.stage = if self.check {
                        self.compare(number, &started.record)?
                    } else {
                        self.begin(started)?
                    };
                }
                CollectiveStage::Comparing(request, calls) => {
                    if !self.test_request(request)? {
                        return Ok(());
                    }
                    if let Some(mismatch) = mismatch(number, &calls[..self.ranks]) {
                        self.fail(mismatch);
                        return Err(MpiFailure::CommFailed);
                    }
                    self.watch.progress();
                    started.stage = self.begin(started)?;
                }
                CollectiveStage::Calling(request, made) => {
                    if !self.test_request(request)? {
                        return Ok(());
                    }
                    // SAFETY: MPI says that it is complete; the next stage has another call.
                    unsafe { made.prepared.finish() };
                    self.watch.progress();
                    started.stage = match made.rest.next() {
                        // SAFETY: the memory is valid until the collective is over.
                        Some(part) => unsafe { self.make(&part, made.rest.clone(), &mut started.scratch) }?,
                        None => self.go_on(started)?,
                    };
                }
                CollectiveStage::Exchanging(ids, outcome) => {
                    self.settle(ids, outcome);
                    if !ids.is_empty() {
                        return Ok(());
                    }
                    (*outcome)?;
                    started.stage = self.go_on(started)?;
                }
            }
        }
    }

    /// Starts the comparison of the ranks' calls.
    fn compare(&self, number: u64, record: &CallRecord) -> std::result::Result<CollectiveStage, MpiFailure> {
        let [head, count, counts] = record.words();
        let mut calls = vec![[number, head, count, counts].map(u64::cast_signed); self.ranks + 1];
        let mpi = &self.process.mpi;
        let (words, int64) = (calls[0].len() as c_int, mpi.constants.int64);
        let (all, own) = calls.split_at_mut(self.ranks);
        let (send, recv) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
        let mut request = Handle::ZERO;
        // SAFETY: so many words of each rank, and room for them, which stays where it is until the request is
        // complete.
        check("MPI_Iallgather", unsafe {
            let started = mpi.functions.iallgather;
            started(send, words, int64, recv, words, int64, self.comm, &raw mut request)
        })?;
        Ok(CollectiveStage::Comparing(request, calls))
    }

    /// Starts a collective's own calls.
    fn begin(&self, started: &mut StartedCollective) -> std::result::Result<CollectiveStage, MpiFailure> {
        if started.call.is_combined_in_order() {
            started.gathering = Some(Gathering::new(&started.call, self.rank, self.ranks));
            return self.gather_next(started);
        }
        self.begin_call(&started.call, &mut started.scratch)
    }

    /// After the calls of a collective, or of one of its gathers.
    fn go_on(&self, started: &mut StartedCollective) -> std::result::Result<CollectiveStage, MpiFailure> {
        if let Some(gathering) = &mut started.gathering {
            // SAFETY: the gather is complete, and the collective's memory valid until it is over.
            unsafe { gathering.combine() };
        }
        self.gather_next(started)
    }

    fn gather_next(
        &self,
        started: &mut StartedCollective,
    ) -> std::result::Result<CollectiveStage, MpiFailure> {
        match started.gathering.as_mut().and_then(Gathering::next) {
            Some(gather) => self.begin_call(&gather, &mut started.scratch),
            None => Ok(CollectiveStage::Over(Ok(()))),
        }
    }

    fn begin_call(
        &self,
        call: &Call<'static>,
        scratch: &mut Scratch,
    ) -> std::result::Result<CollectiveStage, MpiFailure> {
        // SAFETY: the memory is valid until the collective is over, and so is the scratch memory, which
        // nothing else uses.
        unsafe {
            if self.is_of_messages(call) {
                return Ok(CollectiveStage::Exchanging(self.post_blocks(call, scratch), Ok(())));
            }
            let mut parts = self.parts(call);
            match parts.next() {
                Some(part) => self.make(&part, parts, scratch),
                None => Ok(CollectiveStage::Over(Ok(()))),
            }
        }
    }

    /// Makes the call of a part; `rest` are the parts after it.
    ///
    /// # Safety
    /// The part's memory and the scratch memory are valid until the call is complete.
    unsafe fn make(
        &self,
        part: &Call<'_>,
        rest: CallParts<'static>,
        scratch: &mut Scratch,
    ) -> std::result::Result<CollectiveStage, MpiFailure> {
        let mut request = Handle::ZERO;
        // SAFETY: the caller's contract.
        let prepared = unsafe {
            let prepared = self.prepare(part, scratch);
            self.issue(&prepared, Some(&mut request))?;
            prepared
        };
        Ok(CollectiveStage::Calling(request, Box::new(IssuedPart { prepared, rest })))
    }

    /// Takes a collective's outcome if it is complete. Advances all collectives.
    fn take_if_over(&self, number: u64) -> Option<Result<()>> {
        let mut collectives = lock(&self.collectives);
        self.advance_collectives(&mut collectives);
        match collectives.started.get(&number)?.stage {
            CollectiveStage::Over(_) => {}
            _ => return None,
        }
        let started = collectives.started.remove(&number)?;
        let CollectiveStage::Over(outcome) = started.stage else { unreachable!("looked at just now") };
        Some(outcome)
    }

    fn wait_for_collective(&self, number: u64) -> Result<()> {
        let give_up = |waited: Duration| -> Result<()> {
            let collectives = lock(&self.collectives);
            let record = collectives.started.get(&number).map(|started| started.record.to_string());
            let hint = if collectives.first == Some(number) { FIRST } else { "" };
            drop(collectives);
            self.watch.give_up(&record.unwrap_or_default(), number, waited, hint)
        };
        let others = || {
            self.progress_messages();
        };
        self.poll(|| self.take_if_over(number), others, give_up)
    }
}

impl StartCollectives for MpiComm {
    unsafe fn start(&self, call: &Call<'static>) -> Result<OperationId> {
        self.ready()?;
        if !self.polled.swap(true, Ordering::Relaxed) {
            lock(&self.collectives).first = Some(self.watch.last() + 1);
        }
        // SAFETY: the caller's contract.
        Ok(OperationId(in_standard_float_mode(|| unsafe { self.add(call) }) as usize))
    }

    fn wait(&self, id: OperationId) -> Result<()> {
        in_standard_float_mode(|| self.wait_for_collective(id.0 as u64))
    }

    fn test(&self, id: OperationId) -> Result<bool> {
        if self.process.check_thread().is_err() {
            return Ok(false);
        }
        in_standard_float_mode(|| self.take_if_over(id.0 as u64))
            .map_or(Ok(false), |outcome| outcome.map(|()| true))
    }
}

/// The error if the ranks' calls differ.
fn mismatch(sequence: u64, all: &[[i64; 4]]) -> Option<Error> {
    let rank = all.iter().position(|theirs| *theirs != all[0])?;
    let text = |rank: usize| {
        let [_, head, count, counts] = all[rank].map(i64::cast_unsigned);
        CallRecord::from_words([head, count, counts]).map_or("an unknown call".into(), |r| r.to_string())
    };
    Some(MismatchError { rank, theirs: text(rank), other_rank: 0, ours: text(0), sequence }.into())
}
