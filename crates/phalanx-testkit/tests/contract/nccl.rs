//! The contract on NCCL: the same scenarios with a GPU for each rank, on the machine's GPUs (where NCCL is
//! missing, they fail), or without enough of them on emulated ones. Ranks are processes and threads, buffers
//! in host memory and on the GPU.
//!
//! What is not here, because NCCL does not have it: tags, results in rank order (so inputs are such that any
//! order is right), reductions of 16-bit integers, averages of integers whose sum overflows, a NaN that a
//! smallest or largest is made of, communicators of one GPU that several threads use at once (their
//! operations would wait for each other in different orders), a barrier or a collective between a receive and
//! the send that it waits for, receives that are over in another order than they were posted, and a send of another thread that a message under way waits for (all
//! operations are carried out in the order of the calls).
//!
//! `nccl/own/` is the same where phalanx's own kernels are forced; emulated GPUs have a model of them.
//! They combine in rank order, have 16-bit integers, and give the bits of host memory.

use crate::mpi::MATRIX;
use crate::{
    awaiting, communicators, members, messages, objects, one_sided, operations, plain, portable, prepared,
    requests, scans, topologies, values, vectors,
};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::emulated::{Emulated, on_own_kernels};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::random::{ANY_ORDER, NO_NAN};
use phalanx_testkit::{Scenario, gpus};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(240);

/// Scenarios with their arguments, which one world performs.
type Group = (&'static str, fn() -> Vec<(&'static str, &'static str)>);

const MATRIX_ON_HOST: Group = ("matrix", || MATRIX.map(|operation| ("matrix", operation)).into());
const MATRIX_ON_GPU: Group = ("matrix_on_gpu", || MATRIX.map(|operation| ("matrix/gpu", operation)).into());
const VECTORS: Group = ("vectors", || promised(vectors::SCENARIOS));
const PLAIN: Group = ("plain", || {
    [promised(plain::SCENARIOS), vec![("cuda/plain", ""), ("cuda/combined_on_host", "")]].concat()
});
const SCANS: Group =
    ("scans", || [scans::SCENARIOS, operations::SCENARIOS].into_iter().flat_map(promised).collect());
const MESSAGES: Group = ("messages", || promised(messages::SCENARIOS));
const MESSAGES_OF_TWO: Group = ("messages_of_two", || vec![("cuda/messages", "")]);
const REQUESTS: Group = ("requests", || promised(requests::SCENARIOS));
const AMONG_MESSAGES: Group = ("requests_among_messages", || promised(requests::AMONG_MESSAGES));
const COMMUNICATORS: Group = ("communicators", || {
    let all = [communicators::SCENARIOS, members::SCENARIOS];
    // `agree` is host memory's.
    [all.into_iter().flat_map(promised).collect(), vec![("members/agree", "")]].concat()
});
const OBJECTS: Group = ("objects", || {
    [objects::SCENARIOS, values::SCENARIOS, topologies::SCENARIOS, awaiting::SCENARIOS, prepared::SCENARIOS]
        .into_iter()
        .flat_map(promised)
        .collect()
});
const ONE_SIDED: Group = ("one_sided", || {
    [one_sided::SCENARIOS, one_sided::SHARED, one_sided::COMPARED].into_iter().flat_map(promised).collect()
});
const PORTABLE: Group = ("portable", || promised(portable::SCENARIOS));
const PORTABLE_OF_TWO: Group = ("portable_of_two", || promised(portable::BOUNDED));
/// Collectives of every kind, the v-variants among them, in host memory and on the GPU.
const PROGRAMS: Group = ("programs", || {
    vec![("programs/short_blocks", "1"), ("programs/long_blocks", "2"), ("cuda/programs", "3")]
});

/// What ranks as processes and as threads perform. The matrix in host memory takes most of the time, and is
/// two processes'; the programs have every collective, too, in both kinds of memory.
const WORLDS: [(&str, usize, &[Group]); 4] = [
    (
        "processes",
        2,
        &[
            MATRIX_ON_HOST,
            MATRIX_ON_GPU,
            VECTORS,
            PLAIN,
            SCANS,
            MESSAGES,
            MESSAGES_OF_TWO,
            REQUESTS,
            AMONG_MESSAGES,
            COMMUNICATORS,
            PORTABLE,
            PORTABLE_OF_TWO,
            OBJECTS,
            ONE_SIDED,
            PROGRAMS,
        ],
    ),
    (
        "threads",
        2,
        &[
            MATRIX_ON_GPU,
            VECTORS,
            MESSAGES,
            MESSAGES_OF_TWO,
            REQUESTS,
            AMONG_MESSAGES,
            COMMUNICATORS,
            PORTABLE,
            PROGRAMS,
        ],
    ),
    ("processes", 4, &[VECTORS, COMMUNICATORS, PORTABLE, OBJECTS, PROGRAMS]),
    ("threads", 4, &[REQUESTS, OBJECTS, ONE_SIDED, PROGRAMS]),
];

/// The same by phalanx's own kernels, with the algorithm.
const OWN_KERNELS: [(&str, &str, usize, &[Group]); 6] = [
    (
        "ll",
        "processes",
        2,
        &[MATRIX_ON_GPU, VECTORS, MESSAGES, REQUESTS, AMONG_MESSAGES, COMMUNICATORS, PORTABLE, PROGRAMS],
    ),
    (
        "ll128",
        "threads",
        2,
        &[MATRIX_ON_GPU, VECTORS, REQUESTS, AMONG_MESSAGES, COMMUNICATORS, PORTABLE, PROGRAMS],
    ),
    ("ll128", "processes", 3, &[MATRIX_ON_GPU, VECTORS]),
    ("two_hops_ll", "threads", 3, &[MATRIX_ON_GPU, REQUESTS]),
    ("two_hops_ll128", "processes", 4, &[VECTORS, COMMUNICATORS, PORTABLE, PROGRAMS]),
    ("ll", "threads", 4, &[MATRIX_ON_GPU, COMMUNICATORS, PROGRAMS]),
];

const NOT_PROMISED: [&str; 10] = [
    "awaiting/waited_after_a_poll",
    "awaiting/dropped_after_a_poll",
    "awaiting/any",
    "awaiting/some",
    "messages/tags",
    "communicators/on_threads_at_once",
    "requests/behind_a_barrier",
    "portable/tags",
    "portable/gather_and_scatter_are_no_messages",
    "portable/called_while_another_waits",
];

fn promised(scenarios: &'static [Scenario]) -> Vec<(&'static str, &'static str)> {
    let promised = scenarios.iter().filter(|scenario| !NOT_PROMISED.contains(&scenario.name));
    promised.map(|scenario| (scenario.name, "")).collect()
}

fn launch(ranks: usize, kind: &str, scenarios: &[(&'static str, &'static str)]) -> Launch {
    let ((first, arg), others) = scenarios.split_first().expect("every group has scenarios");
    let launch = Launch::new(first, ranks).arg(arg);
    let launch = others.iter().fold(launch, |launch, (name, arg)| launch.then(name).arg(arg));
    let launch = launch.deadline(DEADLINE).on_gpus();
    let launch = if kind == "threads" { launch.on_threads() } else { launch };
    launch.env("PHALANX_BACKEND", "nccl")
}

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (kind, ranks, groups) in WORLDS {
        for (name, scenarios) in groups {
            let name = format!("nccl/{kind}/{name}/{ranks}");
            let launch = move || launch(ranks, kind, &scenarios()).env(ANY_ORDER, "1").env(NO_NAN, "1");
            trials.push(Trial::test(name, move || perform(&launch(), ranks)));
        }
    }
    for (algorithm, kind, ranks, groups) in OWN_KERNELS {
        for (name, scenarios) in groups {
            let name = format!("nccl/own/{algorithm}/{kind}/{name}/{ranks}");
            trials.push(Trial::test(name, move || {
                Ok(on_own_kernels(algorithm, ranks, launch(ranks, kind, &scenarios())).map(drop)?)
            }));
        }
    }
    trials
}

fn perform(launch: &Launch, ranks: usize) -> Result<(), Failed> {
    if let Some(gpus) = gpus::count().ok().filter(|gpus| *gpus >= ranks) {
        // Nobody would notice that it ran on others.
        phalanx::nccl::version().map_err(|error| format!("{gpus} GPUs that NCCL cannot use: {error}"))?;
        return Ok(launch.reports().map(drop)?);
    }
    // The folder of the libraries is needed until the ranks have ended.
    let emulated = Emulated::new()?;
    Ok(emulated.launch(launch.clone()).reports().map(drop)?)
}
