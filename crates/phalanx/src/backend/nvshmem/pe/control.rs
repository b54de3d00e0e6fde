//! What the PEs tell each other beside the library: who is there, and whether they call the same.
//!
//! NVSHMEM's collective functions wait for ever for a PE that is missing, and corrupt the heap if the PEs pass different
//! arguments. So where the PEs met through a `Comm`, they meet on a communicator of their own before each of
//! them, and a wait for the library looks at the peers meanwhile.

use crate::control::witness::Subject;
use crate::control::witness::Witness;
use crate::contract::Backend;
use crate::contract::Call;
use crate::contract::Departure;
use crate::contract::Operation;
use crate::api::comm::Comm;
use crate::types::error::Error;
use crate::types::error::MismatchError;
use crate::types::error::Result;
use crate::types::error::UnsupportedError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Waits of the witness are limited by those who wait.
const NO_LIMIT: Duration = Duration::from_secs(u32::MAX as u64);

/// One PE's end of it.
pub(crate) struct Control {
    comm: Comm,
    /// Notices who is gone, where the backend has a channel of the host.
    witness: Option<Witness>,
}

/// A collective call of the library, as it is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    function: u64,
    arguments: [u64; 3],
}

/// The functions that are compared, by number.
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

impl Step {
    pub fn new(function: &'static str, arguments: [u64; 3]) -> Step {
        let number = FUNCTIONS.iter().position(|name| *name == function);
        Step { function: number.expect("in the list") as u64, arguments }
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

impl Control {
    /// Collective over the communicator.
    pub fn new(of: &Comm) -> Result<Control> {
        of.requests.wait_for_collectives();
        let name = format!("{}/nvshmem", of.recorder.name());
        // SAFETY: this thread has the communicator, which is not `Sync`, and no job is under way.
        unsafe { Control::between(&*of.backend, name) }
    }

    /// Between the ranks of a backend's communicator. Collective.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    pub unsafe fn between(of: &dyn Backend, name: String) -> Result<Control> {
        // SAFETY: the caller's contract.
        let channels = unsafe { (of.host_channel()?, of.host_channel()?) };
        let (backend, witness): (Arc<dyn Backend>, _) = match channels {
            (Some(meetings), channel) => {
                let meetings = Arc::new(meetings);
                let witness = channel.map(|channel| Witness::new(channel, meetings.clone()));
                (meetings, witness)
            }
            (None, _) => {
                // SAFETY: as above.
                let part = unsafe { of.split(Some(0), of.rank() as i64) }?;
                (part.expect("everybody has a colour").into(), None)
            }
        };
        if let Some(witness) = &witness {
            witness.set_timeout(NO_LIMIT);
        }
        Ok(Control { comm: Comm::new(backend, name), witness })
    }

    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Waits until all PEs have come to the same call.
    pub(crate) fn meet(&self, number: u64, step: &Step) -> Result<()> {
        let own = [number, step.function, step.arguments[0], step.arguments[1], step.arguments[2]];
        let mut all = vec![0u64; own.len() * self.comm.world_size()];
        self.comm.all_gather(&own, &mut all)?;
        let read = |pe: usize| {
            let words = &all[pe * own.len()..];
            (words[0], Step { function: words[1], arguments: [words[2], words[3], words[4]] })
        };
        match (1..self.comm.world_size()).find(|pe| read(*pe) != read(0)) {
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

    /// Whether all PEs could do something; an error that names the first that could not.
    pub fn agree(&self, could: bool, what: &str) -> Result<()> {
        let mut all = vec![0u8; self.comm.world_size()];
        self.comm.all_gather(&[u8::from(could)], &mut all)?;
        match all.iter().position(|could| *could == 0) {
            None => Ok(()),
            Some(pe) => Err(Error::from(UnsupportedError {
                what: "NVSHMEM".into(),
                why: format!("PE {pe} could not {what}"),
                remedy: "see that PE's error".into(),
            })),
        }
    }

    /// Gives bytes and gets everybody's, in PE order.
    pub fn tell_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut lens = vec![0u64; self.comm.world_size()];
        self.comm.all_gather(&[own.len() as u64], &mut lens)?;
        let lens: Vec<usize> = lens.iter().map(|len| *len as usize).collect();
        let mut all = vec![0u8; lens.iter().sum()];
        self.comm.all_gather_v(own, &mut all, &lens)?;
        let mut rest = &all[..];
        Ok(lens.iter().map(|len| rest.split_off(..*len).expect("there are as many").to_vec()).collect())
    }

    /// An error if a peer is gone while this PE waits.
    pub fn look(&self, since: Instant) -> Result<()> {
        let Some(witness) = &self.witness else { return Ok(()) };
        // No number: what PEs do on their streams needs no counterpart.
        witness.look(&Subject::call(0, &Call::empty(Operation::Init)), since)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if let Some(witness) = &self.witness {
            let panicking = std::thread::panicking();
            witness.depart(if panicking { Departure::Panicked } else { Departure::Left });
        }
    }
}
