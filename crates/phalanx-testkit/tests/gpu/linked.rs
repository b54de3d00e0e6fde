//! Communicators of the ranks whose GPUs NVLink connects.

use crate::world::{DEADLINE, done, must};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("linked/split", split),
    Scenario::rank("linked/not_said", not_said),
    Scenario::rank("linked/on_the_host", on_the_host),
];

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("linked/all", || split_of(None, "0 1 2 3", |launch| launch)),
        Trial::test("linked/pairs", || split_of(Some(2), "0 1, 2 3", |launch| launch)),
        Trial::test("linked/pairs_of_threads", || split_of(Some(2), "0 1, 2 3", Launch::on_threads)),
        Trial::test("linked/none", || split_of(Some(1), "0, 1, 2, 3", |launch| launch)),
        // GPU r is rank r's in any order, and rank 3 sees none but its own.
        Trial::test("linked/not_seen", || {
            split_of(Some(2), "0 1, 2 3", |launch| launch.env_of(3, "CUDA_VISIBLE_DEVICES", Some("3")))
        }),
        Trial::test("linked/one_each", || {
            let one_each = |launch: Launch, rank: usize| {
                launch.env_of(rank, "CUDA_VISIBLE_DEVICES", Some(&rank.to_string()))
            };
            split_of(None, "0, 1, 2, 3", |launch| (0..4).fold(launch, one_each))
        }),
        Trial::test("linked/not_said", || {
            let launch = of_nccl("linked/not_said", 2).env_of(
                1,
                "EMULATED_FAIL",
                Some("cuDeviceGetP2PAttribute:*:801"),
            );
            Ok(Emulated::new()?.launch(launch).reports().map(drop)?)
        }),
        Trial::test("linked/on_the_host", || {
            let launch =
                Launch::new("linked/on_the_host", 2).deadline(DEADLINE).env("PHALANX_BACKEND", "host");
            Ok(launch.reports().map(drop)?)
        }),
    ]
}

fn of_nccl(scenario: &'static str, ranks: usize) -> Launch {
    Launch::new(scenario, ranks).deadline(DEADLINE).env("PHALANX_BACKEND", "nccl")
}

/// Four GPUs, so many of them linked with each other, make these parts.
fn split_of(linked: Option<usize>, parts: &str, launch: impl Fn(Launch) -> Launch) -> Result<(), Failed> {
    let emulated =
        linked.into_iter().fold(Emulated::new()?, |emulated, linked| emulated.set("NVLINK", linked));
    let launch = launch(of_nccl("linked/split", 4).arg(parts));
    Ok(emulated.launch(launch).reports().map(drop)?)
}

/// Argument: the ranks of each part.
fn split(comm: Comm, args: &[String]) -> Outcome {
    let rank = comm.rank();
    let parts = args[0].split(',');
    let parts =
        parts.map(|part| part.split(' ').filter_map(|rank| rank.parse().ok()).collect::<Vec<usize>>());
    let own = parts.into_iter().find(|part| part.contains(&rank)).ok_or("a part has this rank")?;
    let linked = must("split_by_gpu_link", comm.split_by_gpu_link())?;
    let members = must("the members", linked.all_gather_object(&rank))?;
    if members != own || members[linked.rank()] != rank {
        return Err(format!("{members:?} instead of {own:?}"));
    }
    done()
}

/// The driver of one rank does not say how its GPU is linked: no rank splits, and all go on.
fn not_said(comm: Comm, _: &[String]) -> Outcome {
    let Err(error @ Error::Unsupported(_)) = comm.split_by_gpu_link() else {
        return Err("it was split".into());
    };
    let text = error.to_string();
    let named =
        ["split_by_gpu_link on the nccl backend", "rank 1", "cuDeviceGetP2PAttribute", "split_by_host"];
    assert!(named.iter().all(|part| text.contains(part)), "{text}");
    must("barrier", comm.barrier())?;
    done()
}

fn on_the_host(comm: Comm, _: &[String]) -> Outcome {
    let Err(error @ Error::Unsupported(_)) = comm.split_by_gpu_link() else {
        return Err("it was split".into());
    };
    assert!(error.to_string().contains("no GPUs of NVIDIA's"), "{error}");
    must("barrier", comm.barrier())?;
    done()
}
