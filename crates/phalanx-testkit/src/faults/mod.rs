//! The fault suite: what happens when something goes wrong. Ranks that die, stop, panic, leave or do
//! something else than the others; wrong arguments, wrong environments and small limits. Never a hang, never
//! silence, the same verdict on every rank, and nothing left behind.
//!
//! A [`Case`] is written once. `tests/faults` does each of them once, in a short form; the program
//! (`cargo run --release -p phalanx-testkit -- faults`) does them at length, with seeds: see [`program`].

mod common;
mod deadline;
mod environment;
mod gone;
mod grow;
mod holdings;
mod hosts;
mod leaks;
mod life;
mod limits;
mod mismatch;
mod mpi;
mod one_sided;
pub mod program;
mod records;
mod shrink;
mod special;
mod usage;

pub use common::OWN_KERNELS;
pub use special::FORK;

use crate::Scenario;
use crate::random::Random;

/// What carries the data of the ranks that are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Shared memory of one host.
    Host,
    /// Each MPI that is installed.
    Mpi,
    /// The emulated NCCL, on emulated GPUs.
    Nccl,
    /// UCX, on hosts with a network.
    Ucx,
}

impl Backend {
    /// All of them.
    pub const ALL: [Backend; 4] = [Backend::Host, Backend::Mpi, Backend::Nccl, Backend::Ucx];

    /// Its name, as `PHALANX_BACKEND` has it.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Host => "host",
            Backend::Mpi => "mpi",
            Backend::Nccl => "nccl",
            Backend::Ucx => "ucx",
        }
    }

    /// The backend with this name.
    pub fn from_name(name: &str) -> Option<Backend> {
        Backend::ALL.into_iter().find(|backend| backend.name() == name)
    }

    /// Everything that is tried on it.
    pub fn cases(self) -> Vec<Case> {
        match self {
            Backend::Host => host_cases(),
            Backend::Mpi => {
                let cases = [
                    life::mpi_cases(),
                    deadline::mpi_cases(),
                    mismatch::mpi_cases(),
                    mpi::cases(),
                    one_sided::mpi_cases(),
                ];
                cases.into_iter().flatten().collect()
            }
            Backend::Nccl => nccl_cases(),
            Backend::Ucx => hosts::cases(),
        }
    }
}

/// How much of a case is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// What a test can wait for.
    Short,
    /// What the suite's program does.
    Full,
}

type Run = Box<dyn Fn(&mut Random, Effort) -> Result<(), String> + Send + Sync>;

/// Something that is broken on purpose, and what must come of it.
pub struct Case {
    /// Its name, unique on a backend; it begins with `processes/`, `threads/` or the name of an MPI: what its
    /// ranks are.
    pub name: String,
    /// Whether every seed makes another case of it.
    pub seeded: bool,
    /// Why it cannot be done here, if it cannot.
    pub ignored: Option<String>,
    run: Run,
}

impl Case {
    /// Always the same.
    pub fn new(
        name: impl Into<String>,
        run: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Case {
        Case { name: name.into(), seeded: false, ignored: None, run: Box::new(move |_, _| run()) }
    }

    /// Another one for every seed.
    pub fn seeded(
        name: impl Into<String>,
        run: impl Fn(&mut Random) -> Result<(), String> + Send + Sync + 'static,
    ) -> Case {
        Case { name: name.into(), seeded: true, ignored: None, run: Box::new(move |random, _| run(random)) }
    }

    /// One that takes its time if it may.
    pub fn soak(
        name: impl Into<String>,
        run: impl Fn(Effort) -> Result<(), String> + Send + Sync + 'static,
    ) -> Case {
        Case { name: name.into(), seeded: false, ignored: None, run: Box::new(move |_, effort| run(effort)) }
    }

    /// Not here, for this reason.
    pub fn ignored(self, reason: Option<impl Into<String>>) -> Case {
        Case { ignored: reason.map(Into::into), ..self }
    }

    /// Does it.
    pub fn run(&self, seed: u64, effort: Effort) -> Result<(), String> {
        (self.run)(&mut Random::new(seed), effort)
    }
}

/// What rank processes may be told to do: for [`processes::serve`](crate::processes::serve).
pub fn scenarios() -> Vec<Scenario> {
    [
        gone::SCENARIOS,
        mismatch::SCENARIOS,
        usage::SCENARIOS,
        environment::SCENARIOS,
        limits::SCENARIOS,
        leaks::SCENARIOS,
        life::SCENARIOS,
        shrink::SCENARIOS,
        special::SCENARIOS,
        records::SCENARIOS,
        deadline::SCENARIOS,
        grow::SCENARIOS,
        hosts::SCENARIOS,
        mpi::SCENARIOS,
        one_sided::SCENARIOS,
    ]
    .concat()
}

fn host_cases() -> Vec<Case> {
    let cases = [
        gone::cases(),
        mismatch::cases(Backend::Host),
        usage::cases(),
        environment::cases(),
        limits::cases(),
        leaks::cases(),
        life::cases(Backend::Host),
        shrink::cases(),
        special::cases(),
        records::cases(),
        deadline::cases(Backend::Host),
        grow::cases(Backend::Host),
        one_sided::cases(),
    ];
    cases.into_iter().flatten().collect()
}

fn nccl_cases() -> Vec<Case> {
    let cases = [
        mismatch::cases(Backend::Nccl),
        life::cases(Backend::Nccl),
        special::nccl_cases(),
        deadline::cases(Backend::Nccl),
    ];
    cases.into_iter().flatten().collect()
}
