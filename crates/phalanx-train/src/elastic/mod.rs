//! Training that goes on when ranks are lost, and when new ones come.
//!
//! ```
//! use phalanx::{Comm, ReduceOp};
//! use phalanx_train::elastic::{Trainer, Training};
//!
//! struct Sum(u64);
//!
//! impl Training for Sum {
//!     fn step(&mut self, comm: &Comm, step: u64) -> phalanx_train::Result<()> {
//!         let mut ranks = [1u64];
//!         comm.all_reduce_in_place(&mut ranks, ReduceOp::Sum)?;
//!         self.0 += step * ranks[0];
//!         Ok(())
//!     }
//!     fn snapshot(&self) -> phalanx_train::Result<Vec<u8>> {
//!         Ok(self.0.to_le_bytes().to_vec())
//!     }
//!     fn restore(&mut self, snapshot: &[u8]) -> phalanx_train::Result<()> {
//!         self.0 = u64::from_le_bytes(snapshot.try_into().expect("eight bytes"));
//!         Ok(())
//!     }
//! }
//!
//! let sums = phalanx::run(2, |comm| {
//!     let mut training = Sum(0);
//!     Trainer::new(comm).run(&mut training, 4)?;
//!     Ok::<_, phalanx_train::Error>(training.0)
//! })?;
//! for sum in sums {
//!     assert_eq!(sum?, 12); // (0 + 1 + 2 + 3) * 2
//! }
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! When a rank is lost, the others [shrink](Comm::shrink) the communicator, or [rebuild](Comm::rebuild) it and take in a process that
//! replaces it ([`Trainer::replacing`]). One rank may have ended a step in which another one failed. So all go back to the newest step that
//! all have in memory, and go on from there. A rank that is new gets the state from the first of the others, not from disk.
//!
//! The state is the same on every rank, as in data-parallel training. If it is sharded, what a lost rank had is lost with it: go
//! back to a [checkpoint](crate::checkpoint), or have whole copies on [replica groups](ReplicaGroups).

mod groups;

pub use groups::{ReplicaGroups, average};

use crate::checkpoint::exchange::agree;
use crate::{Error, Result};
use phalanx::Comm;
use std::collections::VecDeque;
use std::num::NonZeroU64;

/// What is trained.
pub trait Training {
    /// One step, of which the first is step 0. At least one operation of `comm` in it needs all ranks.
    ///
    /// # Errors
    /// If the communicator fails, the trainer goes back and on. Any other error ends the training on this rank, and the others go
    /// on without it.
    fn step(&mut self, comm: &Comm, step: u64) -> Result<()>;

    /// All that the steps to come depend on: parameters, the optimizer's states, the sampler.
    ///
    /// # Errors
    /// What the device says. It ends the training on this rank.
    fn snapshot(&self) -> Result<Vec<u8>>;

    /// Goes back to a snapshot, perhaps another rank's, on a communicator that may have other ranks.
    ///
    /// # Errors
    /// As [`snapshot`](Training::snapshot).
    fn restore(&mut self, snapshot: &[u8]) -> Result<()>;
}

/// Steps that a rank has in memory. Ranks are at most one step apart, since each step needs all of them.
const KEPT: usize = 2;

/// Makes steps, and goes on when ranks are lost.
#[derive(Debug)]
pub struct Trainer {
    comm: Comm,
    every: u64,
    replacing: bool,
    /// Snapshots by the number of steps made before them, the oldest first.
    snapshots: VecDeque<(u64, Vec<u8>)>,
}

impl Trainer {
    /// Ranks that are lost are done without. A rank that joins others that train already makes one as well, of the communicator of
    /// [`phalanx::join`], or of [`phalanx::init`] if the launcher started it.
    pub fn new(comm: Comm) -> Trainer {
        Trainer { comm, every: 1, replacing: false, snapshots: VecDeque::new() }
    }

    /// Ranks that are lost are replaced: the others wait for new ones ([`Comm::rebuild`]).
    pub fn replacing(self) -> Trainer {
        Trainer { replacing: true, ..self }
    }

    /// A snapshot after so many steps; by default after each. Up to as many steps are made again after a loss.
    pub fn snapshot_every(self, steps: NonZeroU64) -> Trainer {
        Trainer { every: steps.get(), ..self }
    }

    /// The communicator of the ranks that there are now.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Takes in `joiners` new ranks, between two runs: [`Comm::grow`]. In the next run they get the others' state. Collective.
    ///
    /// # Errors
    /// Those of `grow`; the trainer goes on with the ranks that it has.
    pub fn grow(&mut self, joiners: usize) -> Result<()> {
        self.comm = self.comm.grow(joiners)?;
        Ok(())
    }

    /// Trains until `steps` steps are made, counted from the first run of the first ranks. Collective.
    ///
    /// When it returns, all ranks have made them: none is needed any more.
    ///
    /// # Errors
    /// An error of [`Training`] that is not of the communicator; [`Error::Comm`] if it cannot go on: this rank was left behind, no rank comes in
    /// place of a lost one by the deadline, or threads cannot be replaced.
    pub fn run(&mut self, training: &mut impl Training, steps: u64) -> Result<()> {
        let mut ended = self.attempt(training, steps);
        loop {
            match ended {
                Err(Error::Comm(error)) if error.is_fatal() => {}
                ended => return ended,
            }
            self.comm = if self.replacing { self.comm.rebuild()? } else { self.comm.shrink()? };
            ended = self.attempt(training, steps);
        }
    }

    /// From the newest common step to the end, on this communicator.
    fn attempt(&mut self, training: &mut impl Training, steps: u64) -> Result<()> {
        let mut made = self.synchronize(training)?;
        while made < steps {
            training.step(&self.comm, made)?;
            made += 1;
            if made.is_multiple_of(self.every) {
                self.keep(made, training.snapshot()?);
            }
        }
        if self.snapshots.back().is_some_and(|(newest, _)| *newest != made) {
            self.keep(made, training.snapshot()?);
        }
        Ok(self.comm.barrier()?)
    }

    fn keep(&mut self, made: u64, snapshot: Vec<u8>) {
        self.snapshots.push_back((made, snapshot));
        while self.snapshots.len() > KEPT {
            self.snapshots.pop_front();
        }
    }

    /// Brings all ranks to the newest step that all have which have any; how many steps were made then. Collective.
    fn synchronize(&mut self, training: &mut impl Training) -> Result<u64> {
        let own: Vec<u64> = self.snapshots.iter().map(|(made, _)| *made).collect();
        let all = agree(&self.comm, Ok(own))?;
        let old = all.iter().filter(|steps| !steps.is_empty());
        let Some(first) = all.iter().position(|steps| !steps.is_empty()) else {
            // The beginning: every rank has the same state.
            self.keep(0, training.snapshot()?);
            return Ok(0);
        };
        let common = all[first].iter().rev().find(|step| old.clone().all(|steps| steps.contains(step)));
        let Some(common) = common.copied() else {
            let newest: Vec<_> = old.filter_map(|steps| steps.last()).collect();
            return Err(Error::Mismatch(format!(
                "ranks have no step in common (the newest are {newest:?}): every step must have an operation that needs all ranks"
            )));
        };
        // Nothing is forgotten before all have it: a rank may be lost meanwhile, and then all begin again.
        let own = self.snapshots.iter().find(|(made, _)| *made == common);
        let mut snapshot = own.map_or(Vec::new(), |(_, snapshot)| snapshot.clone());
        if all.iter().any(|steps| steps.is_empty()) {
            let mut len = [snapshot.len() as u64];
            self.comm.broadcast_in_place(&mut len, first)?;
            snapshot.resize(len[0] as usize, 0);
            self.comm.broadcast_in_place(&mut snapshot, first)?;
        }
        training.restore(&snapshot)?;
        self.snapshots.clear();
        self.keep(common, snapshot);
        Ok(common)
    }
}
