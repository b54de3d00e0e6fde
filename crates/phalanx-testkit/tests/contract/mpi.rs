//! The contract on MPI: the same scenarios as the ranks of an MPI job, under each MPI that is installed.
//!
//! What is not here, because MPI does not have it: the detection of mismatched calls, results in rank order
//! (so from three ranks on the inputs are such that any order is right), tags above 32766, worlds of several
//! jobs in one process.

use crate::world::all_equal;
use crate::{
    any_source, awaiting, communicators, files, float_modes, members, messages, objects, one_sided,
    operations, peers, plain, portable, prepared, requests, scans, topologies, values, vectors,
};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::Scenario;
use phalanx_testkit::mpi::{Installation, Job};
use phalanx_testkit::suite;
use std::time::Duration;

/// Jobs are slow where ranks spin and there are more of them than cores.
const DEADLINE: Duration = Duration::from_secs(120);

/// Scenarios that one job performs.
struct Group {
    name: &'static str,
    add: fn(Job) -> Job,
    /// Numbers of ranks.
    ranks: &'static [usize],
    /// More of them, where ranks that wait let others have the core: an operation of three spinning ranks on
    /// two cores takes milliseconds.
    crowded: &'static [usize],
}

pub const MATRIX: [&str; 8] =
    ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"];

const GROUPS: [Group; 18] = [
    Group { name: "matrix", add: matrix, ranks: &[2], crowded: &[3] },
    Group { name: "vectors", add: |job| all(job, vectors::SCENARIOS), ranks: &[2, 3, 4], crowded: &[] },
    Group { name: "plain", add: |job| all(job, plain::SCENARIOS), ranks: &[2, 3], crowded: &[] },
    Group { name: "scans", add: scans, ranks: &[2, 3], crowded: &[] },
    Group { name: "any_source", add: |job| all(job, any_source::SCENARIOS), ranks: &[2, 3], crowded: &[] },
    Group { name: "peers", add: |job| all(job, peers::SCENARIOS), ranks: &[2, 3], crowded: &[] },
    Group { name: "messages", add: |job| all(job, messages::SCENARIOS), ranks: &[2, 4], crowded: &[] },
    Group { name: "requests", add: requests, ranks: &[2, 3], crowded: &[] },
    // Every collective compared first, and in its non-blocking form.
    Group { name: "checked", add: checked, ranks: &[2], crowded: &[3] },
    Group {
        name: "communicators",
        add: |job| {
            let job = all(all(job, communicators::SCENARIOS), members::SCENARIOS);
            job.scenario("members/named_in_errors", &[""])
        },
        ranks: &[2],
        crowded: &[4],
    },
    Group { name: "portable", add: |job| all(job, portable::SCENARIOS), ranks: &[2], crowded: &[3] },
    Group { name: "objects", add: objects, ranks: &[2, 3], crowded: &[] },
    Group { name: "one_sided", add: one_sided, ranks: &[1, 2, 3], crowded: &[8] },
    // As between hosts: MPI moves the data. Open MPI 4.1's other component crashes in MPI_Compare_and_swap.
    Group {
        name: "one_sided_by_mpi",
        add: |job| one_sided(job.env("PHALANX_MPI_MAP_WINDOWS", "0").env("OMPI_MCA_osc", "ucx")),
        ranks: &[2, 3],
        crowded: &[],
    },
    Group { name: "files", add: |job| all(job, files::SCENARIOS), ranks: &[3], crowded: &[] },
    Group { name: "programs", add: |job| programs(job, ["1", "2"]), ranks: &[2, 4], crowded: &[] },
    // Every collective and message in pieces of 4000 bytes.
    Group { name: "pieces", add: pieces, ranks: &[2], crowded: &[3] },
    Group {
        name: "checked_pieces",
        add: |job| pieces(job.env("PHALANX_CHECK", "1")),
        ranks: &[2],
        crowded: &[3],
    },
];

fn matrix(job: Job) -> Job {
    MATRIX.iter().fold(job, |job, operation| job.scenario("matrix", &[operation]))
}

fn programs(job: Job, [short, long]: [&str; 2]) -> Job {
    job.scenario("programs/short_blocks", &[short]).scenario("programs/long_blocks", &[long])
}

fn all(job: Job, scenarios: &[Scenario]) -> Job {
    scenarios.iter().fold(job, |job, scenario| job.scenario(scenario.name, &[""]))
}

fn one_sided(job: Job) -> Job {
    all(all(job, one_sided::SCENARIOS), one_sided::SHARED)
}

fn requests(job: Job) -> Job {
    all(all(job, requests::SCENARIOS), requests::AMONG_MESSAGES)
}

fn objects(job: Job) -> Job {
    let scenarios = [
        objects::SCENARIOS,
        values::SCENARIOS,
        topologies::SCENARIOS,
        awaiting::SCENARIOS,
        prepared::SCENARIOS,
    ];
    scenarios.into_iter().fold(job, all)
}

fn scans(job: Job) -> Job {
    all(all(job, scans::SCENARIOS), operations::SCENARIOS)
}

fn checked(job: Job) -> Job {
    let job = requests(all(matrix(job.env("PHALANX_CHECK", "1")), vectors::SCENARIOS));
    all(all(job, scans::SCENARIOS), communicators::SCENARIOS)
}

fn pieces(job: Job) -> Job {
    let job = programs(job.env("PHALANX_MPI_MAX_BYTES", "4000"), ["3", "4"]);
    requests(all(all(all(job, vectors::SCENARIOS), plain::SCENARIOS), messages::SCENARIOS))
}

/// Why windows that MPI serves are not tried on Open MPI.
const NOT_BY_OPEN_MPI: &str = "Open MPI 4.1 adds floats as integers (osc/ucx), or crashes (osc/rdma)";

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (installation, found) in Installation::all() {
        for group in &GROUPS {
            let crowded = if installation == "open_mpi" { group.crowded } else { &[] };
            for ranks in group.ranks.iter().chain(crowded) {
                let name = format!("mpi/{installation}/{}/{ranks}", group.name);
                trials.push(match &found {
                    Ok(_) if installation == "open_mpi" && group.name == "one_sided_by_mpi" => {
                        suite::ignored(name, NOT_BY_OPEN_MPI)
                    }
                    Ok(installation) => {
                        let job = (group.add)(installation.job(*ranks)).env("PHALANX_BACKEND", "mpi");
                        Trial::test(name, move || {
                            Ok::<(), Failed>(job.deadline(DEADLINE).succeed().map(drop)?)
                        })
                    }
                    Err(reason) => suite::ignored(name, reason),
                });
            }
        }
        for ranks in [2, 3] {
            let name = format!("mpi/{installation}/float_modes/{ranks}");
            trials.push(match &found {
                Ok(installation) => {
                    let job = all(installation.job(ranks), float_modes::SCENARIOS);
                    Trial::test(name, move || float_modes_of(&job.env("PHALANX_BACKEND", "mpi")))
                }
                Err(reason) => suite::ignored(name, reason),
            });
        }
    }
    trials
}

/// Whatever mode a rank's thread is in, all ranks have the same results.
fn float_modes_of(job: &Job) -> Result<(), Failed> {
    let ended = job.clone().deadline(DEADLINE).succeed()?;
    let results: Vec<String> = ended.outcomes.into_iter().filter_map(Result::ok).collect();
    all_equal(&results)
}
