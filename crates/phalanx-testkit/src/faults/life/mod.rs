//! Lives with a fault in them: ranks that do a random program, and one that goes in some way at a random
//! moment.
//!
//! A [`Plan`] follows from a seed, so that every rank knows it and a run can be done again. The rank that
//! something happens to does it to itself, before a step of the program or at any moment during it; the
//! others must get one verdict that names it, in time, with right data in everything that succeeded before,
//! go on without it, and leave nothing behind.

//!
//! On MPI it is the job that ends, and what is left on standard error that must name who it was: `mpi.rs`.

mod act;
mod judge;
mod mpi;
mod rank;
mod surroundings;

use super::{Backend, Case};
use crate::no_threads;
use crate::processes::Launch;
use crate::random::Random;
use crate::scenario::Scenario;
use act::Act;
use std::time::Duration;
use surroundings::Surroundings;

pub use mpi::cases as mpi_cases;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("life/rank", |args| rank::clean_process(&Plan::of(args)?)),
    Scenario::process("life/threads", |args| rank::threads(&Plan::of(args)?)),
    Scenario::process("life/mpi", |args| mpi::rank(&Plan::of(args)?)),
];

/// The communicators' deadline.
const TIMEOUT: Duration = Duration::from_secs(1);
/// What the issue allows beyond it.
const GRACE: Duration = Duration::from_secs(1);
/// Who is gone is noticed at once, whatever the deadline; this much is for a machine with much else to do.
const NOTICED: Duration = Duration::from_secs(2);
/// A world that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(40);

/// How a rank goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Kill,
    Stop,
    Exit,
    Panic,
    Leave,
    Abort,
    Late,
}

impl Way {
    const ALL: [(Way, &'static str); 7] = [
        (Way::Kill, "kill"),
        (Way::Stop, "stop"),
        (Way::Exit, "exit"),
        (Way::Panic, "panic"),
        (Way::Leave, "leave"),
        (Way::Abort, "abort"),
        (Way::Late, "late"),
    ];

    fn name(self) -> &'static str {
        Way::ALL[self as usize].1
    }

    /// Whether it happens to a whole process, and so at any moment.
    fn is_of_process(self) -> bool {
        matches!(self, Way::Kill | Way::Stop | Way::Exit)
    }

    /// Whether the rank is there again, too late.
    fn comes_back(self) -> bool {
        matches!(self, Way::Stop | Way::Late)
    }
}

pub fn cases(backend: Backend) -> Vec<Case> {
    let mut cases = Vec::new();
    if !cfg!(target_os = "linux") {
        return cases;
    }
    for (way, name) in Way::ALL {
        cases.push(Case::seeded(format!("processes/life/{name}"), move |random| {
            judge::processes(&Plan::new(random.next_u64(), way, true, backend))
        }));
        if !way.is_of_process() {
            cases.push(Case::seeded(format!("threads/life/{name}"), move |random| {
                judge::threads(&Plan::new(random.next_u64(), way, false, backend))
            }));
        }
    }
    cases
}

/// What happens, and to whom.
#[derive(Debug, Clone)]
struct Plan {
    seed: u64,
    way: Way,
    backend: Backend,
    ranks: usize,
    acts: Vec<Act>,
    victim: usize,
    /// At which act; `None` while the ranks meet.
    at: Option<usize>,
    /// So long after the act has begun; `None` before it.
    delay: Option<Duration>,
    surroundings: Surroundings,
}

impl Plan {
    fn new(seed: u64, way: Way, processes: bool, backend: Backend) -> Plan {
        let mut random = Random::new(seed);
        let ranks = 2 + random.below(4);
        let mut acts: Vec<Act> =
            (0..2 + random.below(5)).map(|_| Act::random(&mut random, backend)).collect();
        acts.push(Act::Finalize);
        let victim = random.below(ranks);
        let meeting = processes && matches!(way, Way::Kill | Way::Exit | Way::Stop | Way::Late);
        let at = random.below(acts.len() + usize::from(meeting));
        let delay = Duration::from_micros(random.below([30, 300, 3000][random.clone().below(3)]) as u64);
        let inside = way.is_of_process() && random.below(3) > 0;
        let at = (at < acts.len()).then_some(at);
        let surroundings = match Surroundings::random(&mut random) {
            // The ranks must have met, as processes that no MPI holds; and one that is stopped cannot be told from one that is frozen.
            Surroundings::Frozen
                if !processes || backend != Backend::Host || way == Way::Stop || at.is_none() =>
            {
                Surroundings::Usual
            }
            // On MPI, standard error is what tells who was at fault.
            Surroundings::FullDisk if backend == Backend::Mpi => Surroundings::Usual,
            // Thread ranks are threads, and so is much of what MPI and NCCL do themselves.
            Surroundings::NoThreads
                if !processes || backend != Backend::Host || no_threads::cannot_refuse().is_some() =>
            {
                Surroundings::Usual
            }
            surroundings => surroundings,
        };
        let mut delay = inside.then_some(delay);
        if surroundings == Surroundings::NoThreads {
            // A request is a thread's work, and it takes a thread to strike while another waits.
            acts.iter_mut().filter(|act| matches!(act, Act::Request(_))).for_each(|act| *act = Act::Barrier);
            delay = None;
        }
        Plan { seed, way, backend, ranks, acts, victim, at, delay, surroundings }
    }

    /// From a scenario's arguments.
    fn of(args: &[String]) -> Result<Plan, String> {
        let [seed, way, processes, backend] = args else { return Err("four arguments are needed".into()) };
        let seed = seed.parse().map_err(|_| "no seed")?;
        let way = Way::ALL.into_iter().find(|(_, name)| name == way).ok_or("no such way")?.0;
        let backend = Backend::from_name(backend).ok_or("no such backend")?;
        Ok(Plan::new(seed, way, processes == "true", backend))
    }

    /// What [`of`](Plan::of) makes it from.
    fn args(&self, processes: bool) -> [String; 4] {
        [self.seed.to_string(), self.way.name().into(), processes.to_string(), self.backend.name().into()]
    }

    fn launch(&self, launch: Launch, processes: bool) -> Launch {
        let launch = launch.env("PHALANX_TIMEOUT", &self.meeting().as_secs_f64().to_string());
        self.surroundings.launch(self.args(processes).iter().fold(launch, Launch::arg).deadline(PATIENCE))
    }

    /// Something happens now: MPI's jobs are told when.
    fn mark(&self) {
        if self.backend == Backend::Mpi {
            crate::mpi::mark().expect("a rank can write to its job's folder");
        }
    }

    /// The communicators' deadline. What the emulator computes on a few cores takes its time.
    fn timeout(&self) -> Duration {
        if self.backend == Backend::Nccl { 3 * TIMEOUT } else { TIMEOUT }
    }

    /// How long the ranks wait for each other when they meet: with a library to start, for longer.
    fn meeting(&self) -> Duration {
        match self.backend {
            Backend::Host | Backend::Ucx => TIMEOUT,
            Backend::Mpi | Backend::Nccl if self.at.is_none() => 4 * TIMEOUT,
            Backend::Mpi => 20 * TIMEOUT,
            Backend::Nccl => 10 * TIMEOUT,
        }
    }

    fn is_last(&self) -> bool {
        self.at == Some(self.acts.len() - 1)
    }
}
