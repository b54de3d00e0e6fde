//! The MPI backend: an MPI library found at run time moves all data.
//!
//! | file | what |
//! |---|---|
//! | `process.rs` | MPI in this process: loading, initialising, checking the world, finalising at exit |
//! | `collective.rs` | collectives as MPI calls |
//! | `nonblocking.rs` | started collectives: MPI's non-blocking calls |
//! | `large.rs` | collectives larger than one MPI call |
//! | `reduction.rs` | the MPI type and operation of each reduction; operations that MPI lacks |
//! | `accumulate.rs` | conversion to and from the accumulation type |
//! | `message.rs`, `message_table.rs` | sends and receives; which are posted, and how far each is |
//! | `transport.rs` | messages for the job's store, where NCCL moves the data |
//! | `watchdog.rs` | deadlines |
//! | `file.rs` | files of all ranks: MPI-IO |
//! | `window.rs` | memory that ranks access on each other's parts, or share |
//! | `cuda.rs`, `cuda_support.rs` | CUDA memory; whether MPI accepts it |
//!
//! # Deadlines
//! Plain collectives are MPI's blocking calls, unless collectives are started on the communicator: polling
//! the non-blocking calls costs up to three times the time. MPI cannot cancel a call of either form, and may
//! still write into its buffers. So when a deadline passes, the rank reports the operation it waited in and
//! ends the job with `MPI_Abort`. A thread watches the deadlines of blocking calls.

mod accumulate;
mod collective;
#[cfg(feature = "cuda")]
mod cuda;
mod cuda_support;
mod file;
mod gathering;
mod large;
mod message;
mod message_table;
mod nonblocking;
mod process;
mod reduction;
mod transport;
mod watchdog;
mod window;

use gathering::Gathering;
pub(crate) use process::Launched;
pub(crate) use transport::MpiTransport;

#[cfg(feature = "cuda")]
use crate::buffer::stream::Stream;
use crate::contract::{
    Backend, BackendKind, Blocks, Call, Departure, Envelope, HostMemory, Operation, OperationId, SharedFiles,
    StartCollectives, Transfer, Wanted, Window,
};
use crate::control::record::CallRecord;
use crate::os::Mapping;
use crate::os::float_mode::in_standard_float_mode;
use crate::os::random_number;
use crate::types::dtype::DType;
use crate::types::error::{Error, LibraryError, Result, UsageError};
use crate::types::memory::Allocation;
use crate::types::op::ReduceOp;
use collective::Scratch;
use message_table::MpiMessages;
use nonblocking::Collectives;
use phalanx_sys::mpi::{Constants, Handle, Mpi};
use process::MpiProcess;
use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use watchdog::{InitStep, OperationWatch};

/// Why an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MpiFailure {
    /// An MPI function returned an error code.
    Call { function: &'static str, code: c_int },
    /// The communicator has failed before; its error is kept there.
    CommFailed,
}

/// Turns the return code of an MPI function into a result.
#[inline(always)]
fn check(function: &'static str, code: c_int) -> std::result::Result<(), MpiFailure> {
    if code == 0 { Ok(()) } else { Err(MpiFailure::Call { function, code }) }
}

/// The tag with which members make a communicator. MPI keeps it apart from messages.
const MEMBERS_TAG: c_int = 1;

/// One rank's end of an MPI communicator.
pub(crate) struct MpiComm {
    process: &'static MpiProcess,
    comm: Handle,
    rank: usize,
    ranks: usize,
    watch: Arc<OperationWatch>,
    /// Checked mode: ranks compare their calls before any data moves.
    check: bool,
    failed: Arc<OnceLock<Error>>,
    #[cfg(feature = "cuda")]
    admission: Arc<cuda::CudaAdmission>,
    /// Whether plain collectives run as non-blocking calls.
    polled: AtomicBool,
    /// Locked before `messages`.
    collectives: Mutex<Collectives>,
    messages: Mutex<MpiMessages>,
    /// Used only inside `collective`, which one thread at a time may call.
    scratch: UnsafeCell<Scratch>,
}

// SAFETY: `scratch` is the only part that is not `Sync` by itself; the contract of `Backend::collective` says
// that one thread at a time uses it.
unsafe impl Sync for MpiComm {}

impl MpiComm {
    /// The communicator of all ranks: a duplicate of `MPI_COMM_WORLD`, so that it does not interfere with the
    /// application's own use of MPI. Waits for all ranks.
    pub fn world(launched: &Launched, timeout: Duration, check_calls: bool) -> Result<MpiComm> {
        let process = MpiProcess::start(launched, timeout)?;
        process.check_world(launched)?;
        let watch = OperationWatch::start(Some(process.abort_of(process.world())), launched.rank, timeout)?;
        let mut comm = Handle::ZERO;
        let duplicated = {
            let _watched = watch.enter_init(InitStep::Duplicate);
            // SAFETY: MPI is initialised; the variable takes the new handle.
            check("MPI_Comm_dup", unsafe { (process.mpi.functions.comm_dup)(process.world(), &raw mut comm) })
        };
        duplicated.map_err(|failure| process.error(failure, launched.rank, "init", 0))?;
        MpiComm::attach(process, comm, timeout, check_calls)
    }

    /// The backend behind a communicator, if it is this one.
    pub fn of(backend: &dyn Backend) -> Option<&MpiComm> {
        (backend as &dyn std::any::Any).downcast_ref()
    }

    /// A duplicate of a communicator of the application's, and a number that is unique. Collective over that one.
    ///
    /// # Safety
    /// The value is that of a handle of a communicator that is alive, in this process's MPI library.
    pub unsafe fn adopt(&self, handle: usize) -> Result<(MpiComm, u64)> {
        self.ready()?;
        let theirs = Handle::new(handle);
        if theirs == self.process.mpi.constants.comm_null {
            let expected = "a communicator, not MPI_COMM_NULL".into();
            return Err(UsageError::Setting {
                name: "adopt_mpi_comm: handle".into(),
                value: format!("{handle:#x}"),
                expected,
            }
            .into());
        }
        let record = CallRecord::of(&Call::empty(Operation::Split));
        let inside = self.watch.enter(&record);
        let mut own = Handle::ZERO;
        // SAFETY: MPI is initialised; the handle is that of a communicator, says the caller; the variable takes the new handle.
        let made = unsafe { (self.process.mpi.functions.comm_dup)(theirs, &raw mut own) };
        let failed = |failure| self.failure(failure, &record, inside.sequence());
        check("MPI_Comm_dup", made).map_err(failed)?;
        self.numbered(own)
    }

    /// A communicator of this new handle, and a number that its first rank draws.
    fn numbered(&self, handle: Handle) -> Result<(MpiComm, u64)> {
        let new = MpiComm::attach(self.process, handle, self.timeout(), self.check)?;
        let number = random_number("each communicator needs a number of its own")?;
        let record = CallRecord::of(&Call::empty(Operation::Split));
        let numbers =
            new.all_gather_words([number as i64]).map_err(|failure| new.failure(failure, &record, 0))?;
        Ok((new, numbers[0][0] as u64))
    }

    /// A rank's end of a communicator that was just made.
    fn attach(
        process: &'static MpiProcess,
        comm: Handle,
        timeout: Duration,
        check_calls: bool,
    ) -> Result<MpiComm> {
        let (rank, ranks) = process.place_in(comm).map_err(|failure| process.error(failure, 0, "init", 0))?;
        let watch = OperationWatch::start(Some(process.abort_of(comm)), rank, timeout)?;
        let failed = Arc::<OnceLock<Error>>::default();
        Ok(MpiComm {
            process,
            comm,
            rank,
            ranks,
            #[cfg(feature = "cuda")]
            admission: Arc::new(cuda::CudaAdmission::new(process, watch.clone(), rank, failed.clone())),
            watch,
            check: check_calls,
            failed,
            polled: AtomicBool::new(check_calls),
            collectives: Mutex::default(),
            messages: Mutex::default(),
            scratch: UnsafeCell::default(),
        })
    }

    /// Checks that the communicator has not failed, and that this thread may use MPI.
    #[inline]
    fn ready(&self) -> Result<()> {
        self.check()?;
        self.process.check_thread()
    }

    /// Fails the communicator, with the first error that is reported: after an error, MPI guarantees nothing.
    #[cold]
    fn fail(&self, error: Error) -> Error {
        self.failed.get_or_init(|| error).clone()
    }

    #[cold]
    fn failure(&self, failure: MpiFailure, record: &CallRecord, sequence: u64) -> Error {
        if let (MpiFailure::CommFailed, Some(error)) = (failure, self.failed.get()) {
            return error.clone();
        }
        self.process.leave_unfinished("a communicator has failed");
        self.fail(self.process.error(failure, self.rank, &self.watch.named(record), sequence))
    }

    /// Whether internal threads can use it.
    pub fn is_for_all_threads(&self) -> bool {
        !self.process.main_only
    }

    /// Gathers bytes of any length from all ranks, in rank order, while the ranks join.
    pub fn all_gather_bytes(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let _watched = self.watch.enter_init(InitStep::Introduce);
        self.gather_bytes(mine).map_err(|failure| self.process.error(failure, self.rank, "init", 0))
    }

    fn gather_bytes(&self, mine: &[u8]) -> std::result::Result<Vec<Vec<u8>>, MpiFailure> {
        let counts: Vec<c_int> =
            self.all_gather_words([mine.len() as i64])?.iter().map(|[len]| *len as c_int).collect();
        let starts: Vec<c_int> =
            counts.iter().scan(0, |end, count| Some(std::mem::replace(end, *end + count))).collect();
        let mut all = vec![0u8; counts.iter().sum::<c_int>() as usize];
        let (mpi, byte) = (&self.process.mpi, self.process.mpi.constants.byte);
        // SAFETY: so many bytes of each rank, and room for them.
        check("MPI_Allgatherv", unsafe {
            let (send, recv, len) =
                (self.no_sentinel(mine.as_ptr()), all.as_mut_ptr().cast(), mine.len() as c_int);
            (mpi.functions.allgatherv)(
                send,
                len,
                byte,
                recv,
                counts.as_ptr(),
                starts.as_ptr(),
                byte,
                self.comm,
            )
        })?;
        let part = |(start, count): (&c_int, &c_int)| all[*start as usize..][..*count as usize].to_vec();
        Ok(starts.iter().zip(&counts).map(part).collect())
    }

    /// Gathers `N` numbers from each rank, as a part of an operation.
    fn all_gather_words<const N: usize>(
        &self,
        own: [i64; N],
    ) -> std::result::Result<Vec<[i64; N]>, MpiFailure> {
        let mut all = vec![[0i64; N]; self.ranks];
        let (send, recv, int64) =
            (own.as_ptr().cast(), all.as_mut_ptr().cast(), self.process.mpi.constants.int64);
        let count = N as c_int;
        // SAFETY: so many numbers of each rank, and room for them.
        check("MPI_Allgather", unsafe {
            (self.process.mpi.functions.allgather)(send, count, int64, recv, count, int64, self.comm)
        })?;
        Ok(all)
    }

    /// A collective on host memory, or on GPU memory that only MPI touches.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    #[inline]
    unsafe fn collective_on_host(&self, call: &Call<'_>) -> Result<()> {
        if self.is_polled() {
            // SAFETY: the caller's contract.
            return unsafe { self.carry_out_polled(call) };
        }
        let record = CallRecord::of(call);
        let (sequence, _watched) = (self.watch.next(), self.watch.enter(&record));
        // SAFETY: the caller's contract.
        let done = unsafe { self.carry_out(call) };
        done.map_err(|failure| self.failure(failure, &record, sequence))
    }

    /// A scan, or a reduction of elements that are no numbers: gathered in pieces, and combined in rank order.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    #[cold]
    unsafe fn gather_and_combine(&self, call: &Call<'_>) -> Result<()> {
        if self.is_polled() {
            // SAFETY: the caller's contract.
            return unsafe { self.carry_out_polled(call) };
        }
        let record = CallRecord::of(call);
        let (sequence, _watched) = (self.watch.next(), self.watch.enter(&record));
        let mut gathering = Gathering::new(call, self.rank, self.ranks);
        while let Some(part) = gathering.next() {
            // SAFETY: the caller's contract; the gather is complete when it returns.
            let done = unsafe { self.carry_out(&part).map(|()| gathering.combine()) };
            self.watch.progress();
            done.map_err(|failure| self.failure(failure, &record, sequence))?;
        }
        Ok(())
    }

    /// `MPI_Comm_create_group` of these ranks, and a number that the first of them draws.
    fn members_handle(&self, members: &[usize]) -> std::result::Result<Handle, MpiFailure> {
        let f = &self.process.mpi.functions;
        let members: Vec<c_int> = members.iter().map(|rank| *rank as c_int).collect();
        let [mut all, mut group, mut part] = [Handle::ZERO; 3];
        // SAFETY: the communicator is alive; the variables take the new handles, and the list has so many ranks.
        unsafe {
            check("MPI_Comm_group", (f.comm_group)(self.comm, &raw mut all))?;
            let count = members.len() as c_int;
            check("MPI_Group_incl", (f.group_incl)(all, count, members.as_ptr(), &raw mut group))?;
            check(
                "MPI_Comm_create_group",
                (f.comm_create_group)(self.comm, group, MEMBERS_TAG, &raw mut part),
            )?;
            check("MPI_Group_free", (f.group_free)(&raw mut group))?;
            check("MPI_Group_free", (f.group_free)(&raw mut all))?;
        }
        Ok(part)
    }

    /// `MPI_Comm_split` with any colour and key. MPI takes C `int`s, so the colour is the first member's rank
    /// and the key the position among the members.
    fn split_handle(&self, color: Option<u32>, key: i64) -> std::result::Result<Option<Handle>, MpiFailure> {
        let all = self.all_gather_words([color.map_or(-1, i64::from), key])?;
        let own = all[self.rank][0];
        let mut members: Vec<usize> = (0..self.ranks).filter(|rank| all[*rank][0] == own).collect();
        let first = members[0];
        members.sort_by_key(|rank| (all[*rank][1], *rank));
        let place = members.iter().position(|rank| *rank == self.rank).expect("one of them");
        let mpi = &self.process.mpi;
        let color = if color.is_some() { first as c_int } else { mpi.constants.undefined };
        let mut part = Handle::ZERO;
        // SAFETY: the communicator is alive; the variable takes the new handle.
        check("MPI_Comm_split", unsafe {
            (mpi.functions.comm_split)(self.comm, color, place as c_int, &raw mut part)
        })?;
        Ok((part != mpi.constants.comm_null).then_some(part))
    }
}

impl Backend for MpiComm {
    fn kind(&self) -> BackendKind {
        BackendKind::Mpi
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.ranks
    }

    fn set_given_name(&self, name: &str) {
        self.watch.set_name(name);
    }

    /// All ranks remain: MPI ends the job where one is lost.
    fn agree(&self, flag: bool) -> Result<bool> {
        let mut all_set = u8::from(flag);
        let (block, place) = (Blocks::Equal(1), (&raw mut all_set));
        let call = Call {
            reduction: ReduceOp::Min.into(),
            send: place,
            recv: place,
            blocks: block,
            recv_blocks: block,
            ..Call::empty(Operation::AllReduce)
        };
        // SAFETY: one byte in place, and the thread that has the communicator.
        unsafe { self.collective(&call) }?;
        Ok(all_set != 0)
    }

    fn collectives_of_agree(&self) -> u64 {
        1
    }

    #[cfg(feature = "cuda")]
    fn stream(&self) -> Stream {
        Stream::host_with_cuda(self.admission.clone())
    }

    #[inline]
    unsafe fn collective(&self, call: &Call<'_>) -> Result<()> {
        self.ready()?;
        if call.is_combined_on_host() {
            call.check_combined_on_host(BackendKind::Mpi)?;
        }
        if call.is_combined_in_order() {
            // SAFETY: the caller's contract.
            return in_standard_float_mode(|| unsafe { self.gather_and_combine(call) });
        }
        #[cfg(feature = "cuda")]
        if call.is_on_gpu() {
            // SAFETY: the caller's contract.
            return unsafe { self.collective_on_cuda(call) };
        }
        // SAFETY: the caller's contract.
        in_standard_float_mode(|| unsafe { self.collective_on_host(call) })
    }

    fn start_collectives(&self) -> Option<&dyn StartCollectives> {
        Some(self)
    }

    fn files(&self) -> Option<&dyn SharedFiles> {
        self.process.mpi.file_functions.is_some().then_some(self)
    }

    unsafe fn post(&self, transfer: Transfer) -> Result<OperationId> {
        self.ready()?;
        // SAFETY: the caller's contract.
        unsafe { self.post_message(transfer) }
    }

    fn try_probe(&self, wanted: Wanted) -> Result<Option<Envelope>> {
        self.ready()?;
        in_standard_float_mode(|| self.probe_now(wanted))
    }

    fn probe(&self, wanted: Wanted) -> Result<Envelope> {
        self.ready()?;
        in_standard_float_mode(|| self.wait_for_probe(wanted))
    }

    fn wait(&self, id: OperationId, meanwhile: &dyn Fn()) -> Result<()> {
        in_standard_float_mode(|| self.wait_for_message(id, meanwhile))
    }

    fn test(&self, id: OperationId) -> Result<bool> {
        in_standard_float_mode(|| self.test_message(id))
    }

    fn progress(&self) -> Result<bool> {
        // MPI may reduce in any of its calls.
        Ok(in_standard_float_mode(|| self.progress_all()))
    }

    fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn sync(&self) -> Result<()> {
        if !self.has_messages() {
            return self.check();
        }
        // On a thread that may not use MPI this is an error. Waiting there would end the job.
        self.ready()?;
        self.finish_messages()
    }

    unsafe fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn Backend>>> {
        self.ready()?;
        let call = Call::empty(Operation::Split);
        if self.is_polled() {
            // After the started collectives; compared in checked mode.
            // SAFETY: the caller's contract; the call has no memory.
            unsafe { self.carry_out_polled(&call) }?;
        } else {
            self.watch.next();
        }
        let record = CallRecord::of(&call);
        let inside = self.watch.enter(&record);
        let part = self.split_handle(color, key);
        let failed = |failure| self.failure(failure, &record, inside.sequence());
        let Some(part) = part.map_err(failed)? else {
            return Ok(None);
        };
        Ok(Some(Box::new(MpiComm::attach(self.process, part, self.timeout(), self.check)?)))
    }

    fn split_members(&self, members: &[usize]) -> Result<(Box<dyn Backend>, u64)> {
        self.ready()?;
        let record = CallRecord::of(&Call::empty(Operation::Split));
        let inside = self.watch.enter(&record);
        let failed = |failure| self.failure(failure, &record, inside.sequence());
        let part = self.members_handle(members).map_err(failed)?;
        let (part, number) = self.numbered(part)?;
        Ok((Box::new(part), number))
    }

    fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let memory = Mapping::anonymous(bytes.max(1))?;
        Ok(Allocation { start: memory.as_ptr(), keep: Box::new(memory) })
    }

    unsafe fn symmetric(&self, call: &Call<'_>) -> Result<Box<dyn Window + '_>> {
        // SAFETY: the caller's contract.
        unsafe { self.window(call) }
    }

    unsafe fn shared_by_host(&self, call: &Call<'_>) -> Result<Box<dyn HostMemory>> {
        // SAFETY: the caller's contract.
        unsafe { self.host_memory(call) }
    }

    fn timeout(&self) -> Duration {
        self.watch.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.watch.set_timeout(timeout);
    }

    fn abort(&self) {
        self.watch.end_job(&format!("rank {} aborted the communicator", self.rank));
    }

    fn depart(&self, departure: Departure) {
        // After a failure or a panic MPI may still use the communicator.
        if departure == Departure::Panicked || self.failed.get().is_some() || self.process.is_finalized() {
            return;
        }
        if self.process.check_thread().is_err() {
            return crate::os::log::warn!(
                "an MPI communicator was dropped on a thread that may not use MPI: it is leaked"
            );
        }
        self.watch.next();
        let inside = self.watch.enter(&CallRecord::of(&Call::empty(Operation::Finalize)));
        let mut comm = self.comm;
        // SAFETY: nobody uses the handle after this. MPI keeps what pending messages need.
        let freed = unsafe { (self.process.mpi.functions.comm_free)(&raw mut comm) };
        if let Err(failure) = check("MPI_Comm_free", freed) {
            let error = self.process.error(failure, self.rank, "drop", inside.sequence());
            crate::os::log::error!("{error}");
        }
    }
}

/// An error of MPI, with its text.
#[cold]
fn error(mpi: &Mpi, failure: MpiFailure, rank: usize, operation: &str, sequence: u64) -> Error {
    let (function, code) = match failure {
        MpiFailure::Call { function, code } => (function, code),
        MpiFailure::CommFailed => ("an MPI function", 0),
    };
    LibraryError {
        library: mpi.version.clone(),
        function,
        code,
        text: mpi.functions.describe(code),
        context: Some((rank, operation.to_owned(), sequence)),
        fatal: true,
    }
    .into()
}

impl MpiProcess {
    fn error(&self, failure: MpiFailure, rank: usize, operation: &str, sequence: u64) -> Error {
        error(&self.mpi, failure, rank, operation, sequence)
    }
}

/// The MPI type in which elements are moved, and how many of it an element has: an integer of its size where MPI has none, bytes for plain
/// data.
#[inline]
fn moved_type(constants: &Constants, dtype: DType) -> (Handle, usize) {
    match dtype {
        DType::Plain(plain) => (constants.uint8, plain.size()),
        number => (datatype(constants, number), 1),
    }
}

/// The MPI type of a number; an integer of its size where MPI has none.
#[inline]
fn datatype(constants: &Constants, dtype: DType) -> Handle {
    match dtype {
        DType::F32 => constants.float,
        DType::F64 => constants.double,
        DType::F16 | DType::Bf16 | DType::U16 => constants.uint16,
        DType::F8E4M3 | DType::F8E5M2 | DType::U8 => constants.uint8,
        DType::I8 => constants.int8,
        DType::I16 => constants.int16,
        DType::I32 => constants.int32,
        DType::U32 => constants.uint32,
        DType::I64 => constants.int64,
        DType::U64 => constants.uint64,
        DType::Plain(_) => unreachable!("plain data is moved only"),
    }
}
