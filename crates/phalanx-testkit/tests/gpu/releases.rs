//! Every release of NCCL from 2.18 on: emulated ones, which say their version and lack the functions that came later.
//! What a release lacks is a typed error, or is built from what it has.

use crate::world::{done, download, expect, launch, must, upload, value, values};
use crate::{collectives, messages, streams};
use libtest_mimic::{Failed, Trial};
use phalanx::nccl::{Config, MemoryStatistic, Registration};
use phalanx::{BackendKind, Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("release", release),
    Scenario::process("setting", setting),
    Scenario::process("several_ids", several_ids),
];

/// One of each set of functions.
const RELEASES: [&str; 7] = ["2.18.1", "2.19.3", "2.23.4", "2.27.3", "2.28.9", "2.29.2", "2.30.7"];

/// What the oldest one does as any other.
const OLDEST: [(&[Scenario], &str); 5] = [
    (collectives::SCENARIOS, "in_place"),
    (collectives::SCENARIOS, "vectors"),
    (collectives::SCENARIOS, "host_memory"),
    (messages::SCENARIOS, "ring"),
    (streams::SCENARIOS, "many_streams"),
];

pub fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = RELEASES
        .iter()
        .map(|version| {
            Trial::test(format!("releases/{version}"), || perform(SCENARIOS[0], 2, version, version))
        })
        .collect();
    for (scenarios, name) in OLDEST {
        if let Some(scenario) = scenarios.iter().find(|scenario| scenario.name == name) {
            let title = format!("releases/{}/{name}", RELEASES[0]);
            trials.push(Trial::test(title, || perform(*scenario, 2, RELEASES[0], "")));
        }
    }
    for version in [RELEASES[0], "2.27.3"] {
        for scenario in &SCENARIOS[1..] {
            let title = format!("releases/{version}/{}", scenario.name);
            trials.push(Trial::test(title, move || perform(*scenario, 1, version, version)));
        }
    }
    trials
}

fn perform(scenario: Scenario, ranks: usize, version: &str, arg: &str) -> Result<(), Failed> {
    let emulated = Emulated::nccl(version)?;
    let reports = emulated.launch(launch(scenario, ranks, arg)).reports();
    Ok(reports.map(drop).map_err(|problems| format!("NCCL {version}:{problems}"))?)
}

/// Whether a version is at least another.
fn is_since(version: &str, since: &str) -> bool {
    let numbers =
        |text: &str| text.split('.').map(|number| number.parse().unwrap_or(0)).collect::<Vec<u32>>();
    numbers(version) >= numbers(since)
}

fn release(comm: Comm, args: &[String]) -> Outcome {
    let version = args[0].as_str();
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    assert_eq!(nccl.version(), version);
    // There, or missing with the function's name, the version and the file.
    let since = |what: Result<(), Error>, function: &str, since: &str| match what {
        Ok(()) if is_since(version, since) => Ok(()),
        Err(Error::MissingFunction(missing)) if !is_since(version, since) => {
            assert_eq!((missing.function, &*missing.version), (function, version));
            assert!(missing.path.ends_with("libnccl.so.2"), "{missing}");
            Ok(())
        }
        other => Err(format!("{function} of {version}: {other:?}")),
    };
    let alloc = |registration| nccl.alloc_as::<f32>(1000, registration).map(drop);
    since(alloc(Registration::Plain), "ncclMemAlloc", "2.19.3")?;
    since(alloc(Registration::Local), "ncclMemAlloc", "2.19.3")?;
    if is_since(version, "2.19.3") {
        since(alloc(Registration::Symmetric), "ncclCommWindowRegister", "2.27.3")?;
        let best = must("alloc", nccl.alloc::<f32>(1000))?.registration();
        let windows = is_since(version, "2.27.3");
        assert_eq!(best, if windows { Registration::Symmetric } else { Registration::Local });
    }
    since(nccl.memory(MemoryStatistic::Total).map(drop), "ncclCommMemStats", "2.29.7")?;
    since(nccl.suspend(), "ncclCommSuspend", "2.29.7")?;
    since(nccl.resume(), "ncclCommResume", "2.29.7")?;
    since(nccl.signal(1 - rank), "ncclSignal", "2.29.2")?;
    since(nccl.wait_signals(&[(1 - rank, 1)]), "ncclWaitSignal", "2.29.2")?;

    // These came with 2.28.3, and are messages before.
    let of = |rank: usize, index: usize| value(rank, index) as f32;
    let (len, root) = (4099, 1);
    let send = upload(&comm, &values::<f32>(rank, len * ranks))?;
    let mut all = upload(&comm, &values::<f32>(7, len * ranks))?;
    must("all_to_all", comm.all_to_all(&send, &mut all))?;
    expect("all_to_all", &download(&comm, &all)?, |i| of(i / len, rank * len + i % len))?;
    must("gather", comm.gather(&send.slice(..len), &mut all, root))?;
    if rank == root {
        expect("gather", &download(&comm, &all)?, |index| of(index / len, index % len))?;
    }
    let mut block = upload(&comm, &values::<f32>(7, len))?;
    must("scatter", comm.scatter(&send, &mut block, root))?;
    expect("scatter", &download(&comm, &block)?, |index| of(root, rank * len + index))?;

    // fp8 can be moved by any release, and reduced from 2.24 on.
    let mut small = upload(&comm, &values::<phalanx::F8E4M3>(rank, len))?;
    must("broadcast of fp8", comm.broadcast_in_place(&mut small, root))?;
    match comm.all_reduce_in_place(&mut small, ReduceOp::Sum) {
        Ok(()) if is_since(version, "2.24.3") => {}
        Err(Error::Library(error)) if !is_since(version, "2.24.3") => {
            assert_eq!((error.function, error.code), ("ncclAllReduce", 4), "{error}");
        }
        other => return Err(format!("a sum of fp8 by {version}: {other:?}")),
    }
    done()
}

/// A setting that came later is an error with its name, and the version that has it.
fn setting(args: &[String]) -> Outcome {
    let version = args[0].as_str();
    /// What is set, its name, and the release that has it.
    type Setting = (fn(&mut Config), &'static str, &'static str);
    let settings: [Setting; 4] = [
        (|config| config.traffic_class = Some(1), "traffic_class", "2.26.2"),
        (|config| config.comm_name = Some("name".into()), "comm_name", "2.27.3"),
        (|config| config.channels_per_net_peer = Some(2), "channels_per_net_peer", "2.28.3"),
        (|config| config.graph_usage_mode = Some(1), "graph_usage_mode", "2.29.2"),
    ];
    for (change, name, since) in settings {
        let mut config = Config::default();
        change(&mut config);
        match Comm::builder().backend(BackendKind::Nccl).nccl(config).run(1, |comm| comm.barrier()) {
            Ok(_) if is_since(version, since) => {}
            Err(error @ Error::Unsupported(_)) if !is_since(version, since) => {
                let text = error.to_string();
                assert!([name, since, version].iter().all(|part| text.contains(part)), "{text}");
            }
            other => return Err(format!("{name} in {version}: {other:?}")),
        }
    }
    done()
}

/// A communicator whose ranks are spread over several unique ids.
fn several_ids(args: &[String]) -> Outcome {
    let version = args[0].as_str();
    let sums = |ids, ranks| {
        let mut config = Config::default();
        config.unique_ids = Some(ids);
        let sum = |comm: Comm| {
            let mut sum = [comm.rank() as u32 + 1];
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map(|()| sum[0])
        };
        Comm::builder().backend(BackendKind::Nccl).nccl(config).run(ranks, sum)
    };
    for ids in 2..=3 {
        match sums(ids, 3) {
            Ok(sums) if is_since(version, "2.23.4") => {
                assert!(sums.iter().all(|sum| matches!(sum, Ok(6))), "{sums:?}");
            }
            Err(Error::MissingFunction(missing)) if !is_since(version, "2.23.4") => {
                assert_eq!(missing.function, "ncclCommInitRankScalable");
            }
            other => return Err(format!("{ids} ids in {version}: {other:?}")),
        }
    }
    for ids in [0, 3] {
        let error = sums(ids, 2).expect_err("neither none nor more than ranks").to_string();
        assert!(error.contains("unique_ids") && error.contains("1 to the number of ranks, 2"), "{error}");
    }
    done()
}
