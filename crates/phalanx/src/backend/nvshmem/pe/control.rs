//! Channels beside the library: PEs compare their collective calls, and find missing peers.
//!
//! NVSHMEM's collective functions wait without limit for a missing PE, and corrupt the heap if the PEs pass
//! different arguments. So PEs that were made from a `Comm` compare each call on a channel of their own
//! before they make it, and check the peers while they wait for the library.

use crate::contract::{Backend, Blocks, Call, Departure, Operation};
use crate::control::control_channel::{AnnouncedCall, ControlChannel};
use crate::control::host_channel::HostChannel;
use crate::os::RunInstant;
use crate::types::dtype::Element;
use crate::types::error::{Error, MismatchError, Result, UnsupportedError};
use crate::watch::Recorder;
use std::sync::Arc;
use std::time::Duration;

/// Waits on the control channel have no limit of their own: the waiting call has one.
const NO_LIMIT: Duration = Duration::from_secs(u32::MAX as u64);

/// One PE's end of the channels.
pub(crate) struct PeControl {
    backend: Arc<dyn Backend>,
    recorder: Arc<Recorder>,
    /// Finds dead and missing peers, where the backend has a host channel.
    control_channel: Option<ControlChannel>,
}

/// A collective call of the library, as compared between PEs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CollectiveCall {
    function: u64,
    arguments: [u64; 3],
}

/// The compared functions, by number.
const FUNCTIONS: [&str; 8] = [
    "nvshmem_malloc",
    "nvshmem_align",
    "nvshmem_free",
    "nvshmemx_buffer_register_symmetric",
    "nvshmemx_buffer_unregister_symmetric",
    "nvshmem_team_split_strided",
    "nvshmem_team_split_2d",
    "nvshmemx_hostlib_finalize",
];

impl CollectiveCall {
    pub fn new(function: &'static str, arguments: [u64; 3]) -> CollectiveCall {
        let number = FUNCTIONS.iter().position(|name| *name == function);
        CollectiveCall { function: number.expect("in the list") as u64, arguments }
    }

    /// The C function.
    pub fn function(&self) -> &'static str {
        FUNCTIONS.get(self.function as usize).unwrap_or(&"an unknown function")
    }

    pub fn describe(&self) -> String {
        let [a, b, c] = self.arguments;
        format!("{}({a}, {b}, {c})", self.function())
    }
}

impl PeControl {
    /// Over two host channels: `host_channel` for comparing calls, `watch_channel` for finding missing peers.
    pub fn over(
        host_channel: Box<dyn HostChannel>,
        watch_channel: Box<dyn HostChannel>,
        name: String,
    ) -> PeControl {
        let host_channel: Arc<dyn HostChannel> = host_channel.into();
        let control_channel = ControlChannel::new(watch_channel, host_channel.clone());
        control_channel.set_timeout(NO_LIMIT);
        PeControl {
            recorder: PeControl::recorder(&*host_channel, name),
            backend: host_channel,
            control_channel: Some(control_channel),
        }
    }

    /// Over a backend whose ranks share no host channel: missing peers are found by the timeout.
    pub fn without_watch(backend: Arc<dyn Backend>, name: String) -> PeControl {
        PeControl { recorder: PeControl::recorder(&*backend, name), backend, control_channel: None }
    }

    fn recorder(backend: &dyn Backend, name: String) -> Arc<Recorder> {
        Recorder::new(backend.kind(), name, backend.rank(), backend.world_size())
    }

    pub fn rank(&self) -> usize {
        self.backend.rank()
    }

    pub fn world_size(&self) -> usize {
        self.backend.world_size()
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.backend.set_timeout(timeout);
    }

    /// Gathers a block from each PE, in their order.
    pub fn all_gather<T: Element>(&self, own: &[T], all: &mut [T]) -> Result<()> {
        assert_eq!(all.len(), own.len() * self.world_size(), "a block for each PE");
        let call = Call {
            operation: Operation::AllGather,
            dtype: T::DTYPE,
            send: own.as_ptr().cast(),
            recv: all.as_mut_ptr().cast(),
            blocks: Blocks::Equal(own.len()),
            ..Call::empty(Operation::AllGather)
        };
        let record = self.recorder.begin(&call);
        // SAFETY: the context, which has this, stays on one thread; the buffers have the lengths of the call.
        self.recorder.end(record, unsafe { self.backend.collective(&call) })
    }

    /// Waits until all PEs make the same call; an error if the calls differ.
    pub(crate) fn meet(&self, number: u64, step: &CollectiveCall) -> Result<()> {
        let own = [number, step.function, step.arguments[0], step.arguments[1], step.arguments[2]];
        let mut all = vec![0u64; own.len() * self.world_size()];
        self.all_gather(&own, &mut all)?;
        let read = |pe: usize| {
            let words = &all[pe * own.len()..];
            (words[0], CollectiveCall { function: words[1], arguments: [words[2], words[3], words[4]] })
        };
        match (1..self.world_size()).find(|pe| read(*pe) != read(0)) {
            None => Ok(()),
            Some(rank) => Err(MismatchError {
                rank,
                theirs: read(rank).1.describe(),
                other_rank: 0,
                ours: read(0).1.describe(),
                sequence: read(0).0,
            }
            .into()),
        }
    }

    /// Whether a step succeeded on all PEs; the error names the first that failed.
    pub fn agree(&self, could: bool, what: &str) -> Result<()> {
        let mut all = vec![0u8; self.world_size()];
        self.all_gather(&[u8::from(could)], &mut all)?;
        match all.iter().position(|could| *could == 0) {
            None => Ok(()),
            Some(pe) => Err(Error::from(UnsupportedError {
                what: "NVSHMEM".into(),
                why: format!("PE {pe} could not {what}"),
                remedy: "see that PE's error".into(),
            })),
        }
    }

    /// Gathers bytes of any length from all PEs, in their order.
    pub fn all_gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut lens = vec![0u64; self.world_size()];
        self.all_gather(&[own.len() as u64], &mut lens)?;
        let longest = lens.iter().copied().max().unwrap_or(0) as usize;
        let mut own = own.to_vec();
        own.resize(longest, 0);
        let mut all = vec![0u8; longest * lens.len()];
        self.all_gather(&own, &mut all)?;
        let of_pe = |(pe, len): (usize, &u64)| all[pe * longest..][..*len as usize].to_vec();
        Ok(lens.iter().enumerate().map(of_pe).collect())
    }

    /// An error if a peer is gone while this PE waits.
    pub fn look(&self, since: RunInstant) -> Result<()> {
        let Some(control_channel) = &self.control_channel else { return Ok(()) };
        // No number: work on streams has no counterpart on other PEs.
        control_channel.check_peers(&AnnouncedCall::call(0, &Call::empty(Operation::Init)), since)
    }
}

impl Drop for PeControl {
    fn drop(&mut self) {
        let departure = if std::thread::panicking() { Departure::Panicked } else { Departure::Left };
        match &self.control_channel {
            Some(control_channel) => control_channel.depart(departure),
            None => self.backend.depart(departure),
        }
    }
}
