//! Errors, by their cause.
//!
//! - [`UsageError`]: this rank's own arguments are wrong. Nothing was started; the communicator works on.
//! - [`MismatchError`], [`PeerError`], [`TimeoutError`], [`Error::Aborted`]: the communicator has failed.
//!   Every rank gets the same error, now and from every later call; the contents of
//!   output buffers are unspecified. Go on with [`Comm::shrink`](crate::Comm::shrink), or drop the
//!   communicator.
//! - [`LibraryError`]: a C library refused a call ([`fatal`](LibraryError::fatal) says whether the
//!   communicator has failed); [`Error::LibraryNotFound`], [`Error::MissingFunction`]: it is not there, or
//!   too old.
//! - [`ObjectError`]: an object could not be exchanged. The communicator works on.
//! - [`SystemError`], [`Error::Unsupported`], [`Error::Bootstrap`]: the operating system or the
//!   environment refused something; the text names the remedy.
//!
//! `Debug` writes the same text as `Display`, since `unwrap` and a `main` that returns an error print that.

use super::dtype::DType;
use super::object_error::ObjectError;
use phalanx_sys::{LoadError, MissingFunction, NotFound};
use std::error::Error as StdError;
use std::time::Duration;
use std::{fmt, io, iter};

/// The result of a phalanx call.
pub type Result<T> = std::result::Result<T, Error>;

/// Any error of phalanx.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This rank's arguments are wrong; nothing was started.
    #[error(transparent)]
    Usage(Box<UsageError>),
    /// The ranks called different operations, or the same one with different arguments.
    #[error(transparent)]
    Mismatch(Box<MismatchError>),
    /// A peer died, left or gave up.
    #[error(transparent)]
    Peer(Box<PeerError>),
    /// A deadline passed.
    #[error(transparent)]
    Timeout(Box<TimeoutError>),
    /// A rank called [`Comm::abort`](crate::Comm::abort).
    #[error("rank {rank} aborted the communicator")]
    Aborted {
        /// The rank that aborted.
        rank: usize,
    },
    /// The other ranks have gone on without this one: see [`Comm::shrink`](crate::Comm::shrink).
    #[error(
        "rank {rank} was left behind: the other ranks found it missing or gone and have gone on without it; end \
         this process, or start it again as a new rank of a new job"
    )]
    LeftBehind {
        /// This rank.
        rank: usize,
    },
    /// The operating system refused something.
    #[error(transparent)]
    System(Box<SystemError>),
    /// The ranks could not find each other, or the launcher's variables make no sense.
    #[error(transparent)]
    Bootstrap(Box<BootstrapError>),
    /// A library that is needed was not found where libraries may be.
    #[error(transparent)]
    LibraryNotFound(Box<NotFound>),
    /// The loaded version of a library lacks a function.
    #[error(transparent)]
    MissingFunction(Box<MissingFunction>),
    /// A library refused a call, or failed.
    #[error(transparent)]
    Library(Box<LibraryError>),
    /// Code for a GPU does not compile or link.
    #[cfg(all(feature = "jit", target_pointer_width = "64", target_endian = "little"))]
    #[error(transparent)]
    Compile(Box<super::compile_error::CompileError>),
    /// This build, platform or backend cannot do what was asked.
    #[error(transparent)]
    Unsupported(Box<UnsupportedError>),
    /// An object could not be exchanged.
    #[error(transparent)]
    Object(Box<ObjectError>),
}

/// Writes an error's message and its causes in one line. A cause that the message contains already is left out.
pub(crate) fn write_with_causes(error: &dyn StdError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut text = error.to_string();
    for cause in iter::successors(error.source(), |cause| (**cause).source()).map(ToString::to_string) {
        if !text.contains(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    f.write_str(&text)
}

macro_rules! debug_is_the_message {
    ($($error:ident),* $(,)?) => {$(
        impl fmt::Debug for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $crate::types::error::write_with_causes(self, f)
            }
        }
    )*};
}
pub(crate) use debug_is_the_message;

debug_is_the_message!(
    Error,
    UnsupportedError,
    UsageError,
    MismatchError,
    PeerError,
    TimeoutError,
    LibraryError,
    SystemError,
    SharedIoError,
    BootstrapError,
);

// A `Result<()>` of 16 bytes is returned in two registers. If it were returned in memory, loading it would
// wait for all earlier stores, and those to peers wait for the peers' caches.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<Result<()>>() == 16);

/// Something that this build, platform or backend does not have.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} is not available: {why}; {remedy}")]
pub struct UnsupportedError {
    /// What was asked for.
    pub what: String,
    /// Why it is not there.
    pub why: String,
    /// What to do instead.
    pub remedy: String,
}

impl UnsupportedError {
    /// The error for something that needs a feature of this crate.
    pub(crate) fn left_out(what: impl Into<String>, feature: &str) -> Error {
        Error::from(UnsupportedError {
            what: what.into(),
            why: format!("phalanx was built without its feature `{feature}`"),
            remedy: format!("build it with `--features {feature}`"),
        })
    }
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Error {
        match error {
            LoadError::NotFound(error) => error.into(),
            LoadError::MissingFunction(error) => error.into(),
        }
    }
}

impl Error {
    /// Whether the communicator has failed for good: every later call gives the same answer.
    ///
    /// After a usage error, or a refusal by the operating system, it works on.
    pub fn is_fatal(&self) -> bool {
        match self {
            Error::Mismatch(_)
            | Error::Peer(_)
            | Error::Timeout(_)
            | Error::Aborted { .. }
            | Error::LeftBehind { .. } => true,
            Error::Library(error) => error.fatal,
            _ => false,
        }
    }

    /// The ranks that this error names as the reason.
    pub(crate) fn ranks_at_fault(&self) -> Vec<usize> {
        match self {
            Error::Mismatch(error) => vec![error.rank, error.other_rank],
            Error::Peer(error) => vec![error.rank],
            Error::Timeout(error) => error.missing.iter().map(|missing| missing.rank).collect(),
            Error::Aborted { rank } => vec![*rank],
            Error::Bootstrap(error) => error.missing.clone(),
            _ => Vec::new(),
        }
    }

    pub(crate) fn system(call: &'static str, source: io::Error, remedy: impl Into<String>) -> Error {
        Error::System(Box::new(SystemError { call, source: source.into(), remedy: remedy.into() }))
    }

    /// The error for using a communicator in a forked process.
    #[cold]
    pub(crate) fn forked() -> Error {
        Error::from(UnsupportedError {
            what: "a communicator of the process before fork".into(),
            why: "the rank is the process that made it, and this is a copy".into(),
            remedy: "make communicators after fork, or start the process with exec".into(),
        })
    }

    pub(crate) fn bootstrap(problem: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::Bootstrap(Box::new(BootstrapError {
            problem: problem.into(),
            remedy: remedy.into(),
            missing: Vec::new(),
        }))
    }
}

#[cfg(all(feature = "jit", target_pointer_width = "64", target_endian = "little"))]
impl From<super::compile_error::CompileError> for Error {
    fn from(error: super::compile_error::CompileError) -> Self {
        Error::Compile(Box::new(error))
    }
}

macro_rules! boxed_variants {
    ($($variant:ident($ty:ident)),*) => {$(
        impl From<$ty> for Error {
            fn from(error: $ty) -> Self {
                Error::$variant(Box::new(error))
            }
        }
    )*};
}
boxed_variants!(
    Usage(UsageError),
    Mismatch(MismatchError),
    Peer(PeerError),
    Timeout(TimeoutError),
    System(SystemError),
    Bootstrap(BootstrapError),
    LibraryNotFound(NotFound),
    MissingFunction(MissingFunction),
    Library(LibraryError),
    Unsupported(UnsupportedError),
    Object(ObjectError)
);

/// An argument that cannot be right, seen before anything was started.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum UsageError {
    /// A buffer has the wrong number of elements.
    #[error("{operation}: the {buffer} buffer has {actual} elements, it needs {expected} ({rule})")]
    Length {
        /// The operation.
        operation: &'static str,
        /// Which buffer: `send` or `recv`.
        buffer: &'static str,
        /// Elements it has.
        actual: usize,
        /// Elements it needs.
        expected: usize,
        /// Where the number comes from.
        rule: &'static str,
    },
    /// The buffers of one call have elements of different types.
    #[error(
        "{operation}: the send buffer has elements of type {send}, the recv buffer of type {recv}; they must be the same"
    )]
    Types {
        /// The operation.
        operation: &'static str,
        /// Type of the send buffer's elements.
        send: DType,
        /// Type of the recv buffer's elements.
        recv: DType,
    },
    /// A length that must be a multiple of the number of ranks is not.
    #[error(
        "{operation}: the {buffer} buffer has {actual} elements, which {world_size} ranks cannot share \
         evenly; pad it, or use {operation}_v"
    )]
    Indivisible {
        /// The operation.
        operation: &'static str,
        /// Which buffer.
        buffer: &'static str,
        /// Elements it has.
        actual: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// A rank (root, peer) is not in the communicator.
    #[error("{operation}: {role} {rank} does not exist; the ranks are 0 to {}", world_size - 1)]
    Rank {
        /// The operation.
        operation: &'static str,
        /// `root`, `peer`, …
        role: &'static str,
        /// The rank that was named.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// An access to elements that a rank's memory does not have.
    #[error(
        "{operation}: {count} elements from index {at} on are not in the {len} elements that each rank has; access fewer, or \
         allocate more"
    )]
    Range {
        /// The operation.
        operation: &'static str,
        /// The first element.
        at: usize,
        /// Elements from the first to the last.
        count: usize,
        /// Elements of each rank.
        len: usize,
    },
    /// A list of counts does not have one entry per rank.
    #[error("{operation}: {actual} {list} were given, one per rank is needed: {world_size}")]
    Counts {
        /// The operation.
        operation: &'static str,
        /// Which list.
        list: &'static str,
        /// Entries it has.
        actual: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// A size does not fit the address space.
    #[error("{operation}: {what} overflows ({value}); the limit is {limit}")]
    Overflow {
        /// The operation.
        operation: &'static str,
        /// What was computed.
        what: &'static str,
        /// Its operands.
        value: String,
        /// The largest value allowed.
        limit: String,
    },
    /// The number of ranks is not possible.
    #[error("{world_size} ranks are not possible; choose 1 to {limit}")]
    WorldSize {
        /// Ranks asked for.
        world_size: usize,
        /// The most a region holds.
        limit: usize,
    },
    /// A setting (environment variable or builder) has a value that makes no sense.
    #[error("{name}={value:?} is not valid: expected {expected}")]
    Setting {
        /// The variable or setting.
        name: String,
        /// Its value.
        value: String,
        /// What it may be.
        expected: String,
    },
    /// The communicator has ended, through another handle or in the middle of the call.
    #[error(
        "the communicator has ended: finalize or abort was called through a handle of this rank; make a new one (split, init)"
    )]
    Ended,
    /// An event handle that this communicator did not make, or that was destroyed.
    #[error("event {event} does not exist; create_event makes one and destroy_event ends it")]
    Event {
        /// The handle.
        event: u64,
    },
    /// A stream handle that this communicator does not know.
    #[error("stream {stream:#x} is not known to the communicator; Comm::on makes a stream known")]
    Stream {
        /// The handle.
        stream: u64,
    },
    /// A buffer is in memory that the communicator cannot use.
    #[error("the buffer is in {memory}, the communicator works on {wanted}; {remedy}")]
    Memory {
        /// Where the buffer is.
        memory: String,
        /// Where it would have to be.
        wanted: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A call that is not possible while a CUDA graph is captured from the stream.
    #[error(
        "{what} on a stream that is captured, where nothing is carried out before the graph is launched; {remedy}"
    )]
    Captured {
        /// What was to be done.
        what: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A null pointer with a count that is not zero.
    #[error("{operation}: the {buffer} pointer is null but {count} elements were announced")]
    NullPointer {
        /// The operation.
        operation: &'static str,
        /// Which buffer.
        buffer: &'static str,
        /// Elements announced.
        count: usize,
    },
    /// Raw buffers of one call that overlap.
    #[error(
        "{operation}: the send buffer ({send_bytes} bytes at {send:#x}) and the recv buffer ({recv_bytes} bytes at {recv:#x}) \
         overlap; {rule}"
    )]
    Overlap {
        /// The operation that was called.
        operation: &'static str,
        /// Where the send buffer starts.
        send: u64,
        /// How long it is, in bytes.
        send_bytes: usize,
        /// Where the recv buffer starts.
        recv: u64,
        /// How long it is, in bytes.
        recv_bytes: usize,
        /// The allowed overlap.
        rule: &'static str,
    },
    /// A kernel that is not there, or arguments that do not fit it.
    #[error("kernel {kernel}: {problem}; {remedy}")]
    Kernel {
        /// The kernel.
        kernel: String,
        /// What is wrong, with the value and the limit.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A message to or from this rank itself that no other call can match.
    #[error("{operation}: rank {rank} cannot exchange with itself outside a group or send_recv")]
    SelfExchange {
        /// The operation.
        operation: &'static str,
        /// This rank.
        rank: usize,
    },
}

impl UsageError {
    /// The error for a rank that waits for more signals of its own than it has given.
    pub(crate) fn own_signals(count: u64, given: u64) -> UsageError {
        let expected = format!("at most {given}: a rank that waits for itself gives no more");
        UsageError::Setting { name: "wait_signals: count".into(), value: count.to_string(), expected }
    }
}

/// Two ranks made different calls where the same was needed. A list of counts is shown as its sum and a
/// fingerprint (`× 12, counts #1f2e3d4c`): if these differ, so do the lists.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "mismatched call: rank {rank} called {theirs} where rank {other_rank} called {ours} \
     (operation number {sequence} of the communicator); every rank must make the same calls in the \
     same order"
)]
pub struct MismatchError {
    /// One of the ranks that differ: the higher one.
    pub rank: usize,
    /// What `rank` called, with its arguments.
    pub theirs: String,
    /// The rank it was compared with: the lower one.
    pub other_rank: usize,
    /// What `other_rank` called, with its arguments.
    pub ours: String,
    /// The number of the operation on this communicator, from 1.
    pub sequence: u64,
}

/// What happened to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum PeerEvent {
    /// Its process ended without leaving the communicator: killed, crashed or exited.
    #[error("its process ended without leaving the communicator (killed, crashed or exited)")]
    Died = 0,
    /// It dropped its communicator, or its thread returned, while others still needed it.
    #[error("it left the communicator while others still needed it")]
    Left = 1,
    /// Its thread panicked with the communicator in hand.
    #[error("its thread panicked")]
    Panicked = 2,
    /// Its operating system refused something that the operation needs. [`PeerError::refusal`] and that
    /// rank's log say what.
    #[error("its operating system refused what the operation needs (that rank's own error and log say what)")]
    Refused = 3,
    /// Its process has been stopped (SIGSTOP) for longer than `PHALANX_STOPPED_TIMEOUT`.
    #[error("its process is stopped (SIGSTOP or Ctrl-Z; PHALANX_STOPPED_TIMEOUT allows for longer stops)")]
    Stopped = 4,
    /// No sign of life from its process, on another host, for longer than `PHALANX_HEARTBEAT_TIMEOUT`.
    #[error("nothing is heard of it (its process is stopped, or its host is cut off from the network)")]
    Unreachable = 5,
}

/// A peer died, left, or gave up.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} is gone: {event}; {}{}", self.where_noticed(), self.refusal_text())]
pub struct PeerError {
    /// The rank that is gone.
    pub rank: usize,
    /// What happened to it.
    pub event: PeerEvent,
    /// The rank that noticed.
    pub reporter: usize,
    /// The operation in which the reporter waited, with its arguments.
    pub operation: String,
    /// The number of that operation on this communicator, from 1; of a message, from 1 between the two ranks.
    pub sequence: u64,
    /// How long the reporter had waited.
    pub waited: Duration,
    /// What the operating system refused, and the remedy: on the rank that it [refused](PeerEvent::Refused)
    /// it.
    pub refusal: Option<String>,
}

impl PeerError {
    fn where_noticed(&self) -> String {
        let PeerError { rank, reporter, operation, sequence, waited, .. } = self;
        if rank == reporter {
            return format!("it was in {operation} (operation number {sequence})");
        }
        format!(
            "rank {reporter} needed it in {operation} (operation number {sequence}) and had waited {waited:.1?}"
        )
    }

    fn refusal_text(&self) -> String {
        self.refusal.as_ref().map_or_else(String::new, |refusal| format!("; {refusal}"))
    }
}

/// A deadline passed before all ranks arrived.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "timeout after {waited:.1?} in {operation} (operation number {sequence}) on rank {reporter}: \
     waiting for {}; raise PHALANX_TIMEOUT or Builder::timeout if they are only slow",
    describe_missing(missing)
)]
pub struct TimeoutError {
    /// The operation in which the reporter waited, with its arguments.
    pub operation: String,
    /// The number of that operation on this communicator, from 1; of a message, from 1 between the two ranks.
    pub sequence: u64,
    /// The rank whose deadline passed first.
    pub reporter: usize,
    /// How long the reporter had waited.
    pub waited: Duration,
    /// The ranks that have not arrived, each with its last known operation; empty where the backend does not
    /// know.
    pub missing: Vec<MissingRank>,
}

/// A rank that did not arrive in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRank {
    /// The rank.
    pub rank: usize,
    /// Its last known operation or state.
    pub last_seen: String,
}

fn describe_missing(missing: &[MissingRank]) -> String {
    if missing.is_empty() {
        return "other ranks (which ones is not known here)".to_owned();
    }
    let ranks: Vec<String> = missing.iter().map(|m| format!("rank {} ({})", m.rank, m.last_seen)).collect();
    ranks.join(", ")
}

/// A C library refused a call, or failed in one.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{library}: {function} answered {code} ({text}){}", self.place())]
pub struct LibraryError {
    /// Its name, with the version where it is known.
    pub library: String,
    /// The C function.
    pub function: &'static str,
    /// Its answer.
    pub code: i32,
    /// What the library says about it.
    pub text: String,
    /// This rank, the operation and its number on the communicator (from 1), where there are any.
    pub context: Option<(usize, String, u64)>,
    /// Whether the communicator has failed: every later call gives the same answer.
    pub fatal: bool,
}

impl LibraryError {
    /// This error, as one that fails the communicator.
    pub(crate) fn fatal(mut self) -> Error {
        self.fatal = true;
        self.into()
    }

    fn place(&self) -> String {
        match &self.context {
            Some((rank, operation, sequence)) => {
                format!(", on rank {rank} in {operation} (operation number {sequence})")
            }
            None => String::new(),
        }
    }
}

/// The operating system refused a call.
#[derive(Clone, thiserror::Error)]
#[error("{call} failed: {source}; {remedy}")]
pub struct SystemError {
    /// The system call or library function.
    pub call: &'static str,
    /// The system's answer.
    #[source]
    pub source: SharedIoError,
    /// What to do about it.
    pub remedy: String,
}

/// An [`io::Error`] that can be cloned, so that one failure can be answered many times.
#[derive(Clone, thiserror::Error)]
#[error(transparent)]
pub struct SharedIoError(#[from] std::sync::Arc<io::Error>);

impl From<io::Error> for SharedIoError {
    fn from(error: io::Error) -> Self {
        SharedIoError(std::sync::Arc::new(error))
    }
}

impl SharedIoError {
    /// The kind of the system's error.
    pub fn kind(&self) -> io::ErrorKind {
        self.0.kind()
    }
}

/// The ranks could not find each other.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; {remedy}")]
pub struct BootstrapError {
    /// What is wrong, with the value and its source.
    pub problem: String,
    /// What to do about it.
    pub remedy: String,
    /// The ranks that never arrived, where that is known.
    pub missing: Vec<usize>,
}
