//! Training that goes on when a rank is lost.
//!
//! ```
//! use phalanx::{Comm, ReduceOp};
//! use phalanx_train::elastic::{Model, Recovery, Trainer};
//!
//! /// Counts the samples that all ranks have seen, 12 in each step.
//! struct Counter(u64);
//!
//! impl Model for Counter {
//!     fn step(&mut self, comm: &Comm, _step: u64) -> phalanx_train::Result<()> {
//!         let mut seen = [(0..12).skip(comm.rank()).step_by(comm.world_size()).count() as u64];
//!         comm.all_reduce_in_place(&mut seen, ReduceOp::Sum)?;
//!         self.0 += seen[0];
//!         Ok(())
//!     }
//!     fn save(&self, state: &mut Vec<u8>) -> phalanx_train::Result<()> {
//!         state.extend(self.0.to_le_bytes());
//!         Ok(())
//!     }
//!     fn load(&mut self, state: &[u8]) -> phalanx_train::Result<()> {
//!         self.0 = u64::from_le_bytes(state.try_into().expect("what was saved"));
//!         Ok(())
//!     }
//! }
//!
//! let counts = phalanx::try_run(3, |comm| {
//!     let mut counter = Counter(0);
//!     Trainer::new(Recovery::Shrink).run(comm, &mut counter, 10)?;
//!     Ok::<_, phalanx_train::Error>(counter.0)
//! })?;
//! assert_eq!(counts, [120; 3]);
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! A step that fails because a rank is lost is made again: the others come together ([`Recovery`]), agree on the last step that all of them
//! have made, take the state of that step from memory, and go on. A process that replaces a lost one (`phalanx launch --restarts`) gets the
//! state from the others, not from disk. Everything that a step changes belongs to the state: parameters, the optimizer's state, the sampler's
//! place, random numbers. It must be the same on every rank, or be made so by [`load`](Model::load): parts that only a lost rank had (sharded
//! state) come from a checkpoint.

use crate::{Error, Result};
use phalanx::Comm;
use std::time::Duration;

/// What is trained.
pub trait Model {
    /// Makes one step; steps count from 0. If it returns an error, the state may be half changed: it is loaded anew.
    ///
    /// How the work is divided among ranks is the model's choice, by `comm`, which may have fewer ranks or more than in the step before.
    ///
    /// # Errors
    /// An error of a communicator that is [fatal](phalanx::Error::is_fatal) begins a recovery; any other ends the training.
    fn step(&mut self, comm: &Comm, step: u64) -> Result<()>;

    /// Appends all state to `state`, which is empty.
    ///
    /// # Errors
    /// An error ends the training.
    fn save(&self, state: &mut Vec<u8>) -> Result<()>;

    /// Takes a state that [`save`](Model::save) has made, on this rank or on another.
    ///
    /// # Errors
    /// An error ends the training.
    fn load(&mut self, state: &[u8]) -> Result<()>;
}

/// Who goes on when a rank is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// The others, with fewer ranks ([`Comm::shrink`]; under `phalanx launch`, with `--keep-going`).
    Shrink,
    /// The others and a process that replaces the lost one ([`Comm::rebuild`]; `phalanx launch --restarts`).
    Rebuild,
    /// The same, but fewer ranks if no process has come within this time.
    RebuildOrShrink(Duration),
}

/// A loop of steps that survives the loss of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Trainer {
    recovery: Recovery,
    snapshot_every: u64,
    most_recoveries: usize,
}

/// How a training went.
#[derive(Debug)]
pub struct Outcome {
    /// The communicator of those who are left.
    pub comm: Comm,
    /// For each recovery, the step that had failed on this rank.
    pub recoveries: Vec<u64>,
}

/// The state before a step.
struct Snapshot {
    step: u64,
    state: Vec<u8>,
}

impl Trainer {
    /// A snapshot before every step, and any number of recoveries.
    pub fn new(recovery: Recovery) -> Trainer {
        Trainer { recovery, snapshot_every: 1, most_recoveries: usize::MAX }
    }

    /// Takes a snapshot before every n-th step only: a copy of the state. Up to 2 n - 1 steps are made again after a loss. The same on every rank.
    ///
    /// # Errors
    /// [`Error::Usage`] for 0.
    pub fn snapshot_every(mut self, steps: u64) -> Result<Trainer> {
        if steps == 0 {
            return Err(Error::usage("a snapshot every 0 steps: 1 at least"));
        }
        self.snapshot_every = steps;
        Ok(self)
    }

    /// Gives up at the next loss after so many recoveries.
    #[must_use]
    pub fn most_recoveries(mut self, recoveries: usize) -> Trainer {
        self.most_recoveries = recoveries;
        self
    }

    /// Makes steps 0 to `steps` - 1 on all ranks, with the state in `model` at first the same on every rank. Collective. A process that
    /// replaces a lost one calls the same.
    ///
    /// # Errors
    /// The model's errors, and those of a recovery that fails.
    pub fn run(self, comm: Comm, model: &mut impl Model, steps: u64) -> Result<Outcome> {
        let mut run = Run { snapshots: vec![take(model, 0)?], step: 0, has_made_steps: false };
        let mut outcome = Outcome { comm, recoveries: Vec::new() };
        loop {
            let result = run.go_on(&outcome.comm, model, steps, self.snapshot_every);
            let Err(Error::Comm(error)) = result else {
                return result.map(|()| outcome);
            };
            if !error.is_fatal() || outcome.recoveries.len() == self.most_recoveries {
                return Err(error.into());
            }
            outcome.recoveries.push(run.step);
            outcome.comm = self.recover(&outcome.comm)?;
        }
    }

    fn recover(&self, comm: &Comm) -> Result<Comm> {
        match self.recovery {
            Recovery::Shrink => Ok(comm.shrink()?),
            Recovery::Rebuild => Ok(comm.rebuild()?),
            Recovery::RebuildOrShrink(timeout) => {
                let rebuilt = comm.within(timeout).rebuild();
                Ok(rebuilt.or_else(|_| comm.shrink())?)
            }
        }
    }
}

struct Run {
    /// The last two.
    snapshots: Vec<Snapshot>,
    /// The next step.
    step: u64,
    /// Whether this process has finished a step, or taken another's state.
    has_made_steps: bool,
}

impl Run {
    fn go_on(&mut self, comm: &Comm, model: &mut impl Model, steps: u64, every: u64) -> Result<()> {
        self.agree(comm, model)?;
        while self.step < steps {
            if self.step.is_multiple_of(every) && self.newest().step != self.step {
                // The older one's memory is used again.
                let memory =
                    if self.snapshots.len() == 2 { self.snapshots.remove(0).state } else { Vec::new() };
                self.snapshots.push(take_into(memory, model, self.step)?);
            }
            model.step(comm, self.step)?;
            self.step += 1;
            self.has_made_steps = true;
        }
        // Whoever has made the last step waits for those who may have to make it again.
        Ok(comm.barrier()?)
    }

    fn newest(&self) -> &Snapshot {
        self.snapshots.last().expect("the first is taken before anything else")
    }

    /// Brings all ranks to the last snapshot that all have who have made steps; the others take it from one of these.
    fn agree(&mut self, comm: &Comm, model: &mut impl Model) -> Result<()> {
        // What each rank has: its newest snapshot, or nothing of its own.
        let own = if self.has_made_steps { self.newest().step + 1 } else { 0 };
        let mut newest = vec![0u64; comm.world_size()];
        comm.all_gather(&[own], &mut newest)?;
        let Some(common) = newest.iter().filter(|newest| **newest > 0).min().map(|newest| newest - 1) else {
            self.step = 0;
            let snapshot = &self.newest().state;
            return model.load(snapshot);
        };
        // Ranks are at most one snapshot apart, since no rank gets further while another is missing; so all who have made steps have it.
        let source = newest.iter().position(|newest| *newest > 0).expect("one has made steps");
        if newest.contains(&0) {
            // Into a copy: a broadcast that fails may leave anything in it.
            let own = self.snapshots.iter().find(|snapshot| own > 0 && snapshot.step == common);
            let mut state = own.map_or(Vec::new(), |snapshot| snapshot.state.clone());
            let mut len = [state.len() as u64];
            comm.broadcast_in_place(&mut len, source)?;
            state.resize(len[0] as usize, 0);
            comm.broadcast_in_place(&mut state, source)?;
            if own.is_none() {
                self.snapshots = vec![Snapshot { step: common, state }];
            }
        }
        self.snapshots.retain(|snapshot| snapshot.step <= common);
        self.has_made_steps = true;
        self.step = common;
        match self.snapshots.last() {
            Some(snapshot) if snapshot.step == common => model.load(&snapshot.state),
            _ => Err(Error::Mismatch(format!(
                "this rank has no state of step {common}, from which the others go on: take snapshots of the same steps on all ranks"
            ))),
        }
    }
}

fn take(model: &impl Model, step: u64) -> Result<Snapshot> {
    take_into(Vec::new(), model, step)
}

fn take_into(mut state: Vec<u8>, model: &impl Model, step: u64) -> Result<Snapshot> {
    state.clear();
    model.save(&mut state)?;
    Ok(Snapshot { step, state })
}
