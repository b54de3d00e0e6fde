//! Every release of NCCL from 2.18 on: emulated ones, which say their version and lack the functions that
//! came later. What a release lacks is a typed error, or is built from what it has.

use crate::world::{both, done, download, expect, launch, must, upload, value, values};
use crate::{collectives, messages, signals, streams};
use libtest_mimic::{Failed, Trial};
use phalanx::nccl::{
    CollectiveConfig, Config, DeviceRequirements, MemoryStatistic, Registration, TeamKind, encrypt_sockets,
};
use phalanx::{BackendKind, Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::scenario::{Body, Outcome};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("release", release),
    Scenario::process("setting", setting),
    Scenario::process("several_ids", several_ids),
    Scenario::rank("ids_by_size", works),
    Scenario::process("ends", ends),
    Scenario::process("encryption", encryption),
    Scenario::process("different_settings", different_settings),
    Scenario::rank("configured", configured),
];

/// Releases in which what belongs to a process is tried.
const IN_A_PROCESS: [&str; 3] = ["2.18.1", "2.27.3", "2.32.3"];

/// One of each set of functions.
const RELEASES: [&str; 8] = ["2.18.1", "2.19.3", "2.23.4", "2.27.3", "2.28.9", "2.29.2", "2.30.7", "2.32.3"];

/// What the oldest one does as any other.
const OLDEST: [(&[Scenario], &str); 6] = [
    (collectives::SCENARIOS, "in_place"),
    (collectives::SCENARIOS, "vectors"),
    (collectives::SCENARIOS, "vectors_in_place"),
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
    for version in ["2.30.7", "2.31.2"] {
        let title = format!("releases/{version}/signals");
        trials.push(Trial::test(title, move || perform(signals::SCENARIOS[0], 1, version, "2")));
    }
    trials.push(Trial::test("releases/ids_by_size", ids_by_size));
    for version in IN_A_PROCESS {
        for scenario in SCENARIOS.iter().filter(|scenario| matches!(scenario.body, Body::Process(_))) {
            let title = format!("releases/{version}/{}", scenario.name);
            trials.push(Trial::test(title, move || perform(*scenario, 1, version, version)));
        }
    }
    trials
}

/// What the release that is loaded here does.
pub fn of_the_loaded_one(gpus: usize) -> Vec<Trial> {
    let is_of_ranks = |scenario: &&Scenario| scenario.name == "configured";
    SCENARIOS.iter().filter(is_of_ranks).flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect()
}

fn perform(scenario: Scenario, ranks: usize, version: &str, arg: &str) -> Result<(), Failed> {
    let emulated = Emulated::nccl(version)?;
    let reports = emulated.launch(launch(scenario, ranks, arg)).reports();
    Ok(reports.map(drop).map_err(|problems| format!("NCCL {version}:{problems}"))?)
}

/// Whether a version is at least another.
pub fn is_since(version: &str, since: &str) -> bool {
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
    since(nccl.register(upload(&comm, &[1.0f32])?).map(drop), "ncclCommRegister", "2.19.3")?;
    if is_since(version, "2.19.3") {
        since(alloc(Registration::Symmetric), "ncclCommWindowRegister", "2.27.3")?;
        let best = must("alloc", nccl.alloc::<f32>(1000))?.registration();
        let windows = is_since(version, "2.27.3");
        assert_eq!(best, if windows { Registration::Symmetric } else { Registration::Local });
    }
    let mut block = upload(&comm, &[1.0f32])?;
    let estimate = nccl.estimate(|g| g.all_reduce_in_place(&mut block, ReduceOp::Sum));
    since(estimate.map(drop), "ncclGroupSimulateEnd", "2.22.3")?;
    since(nccl.memory(MemoryStatistic::Total).map(drop), "ncclCommMemStats", "2.29.7")?;
    since(nccl.device_comm(&DeviceRequirements::default()).map(drop), "ncclDevCommCreate", "2.28.3")?;
    since(nccl.team(TeamKind::World).map(drop), "ncclTeamWorld", "2.28.3")?;
    since(nccl.all_to_all_slots(1, 1).map(drop), "ncclLLA2ACalcSlots", "2.28.3")?;
    since(nccl.properties().map(drop), "ncclCommQueryProperties", "2.29.2")?;
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
    configured(comm, args)
}

/// Collectives with settings of their own: all of them, out of place and in place, in groups and on other
/// streams.
fn configured(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks, nccl) = (comm.rank(), comm.world_size(), comm.nccl().ok_or("NCCL")?);
    let version = nccl.version();
    let version = version.as_str();
    let mut config = CollectiveConfig::default();
    config.max_ctas = Some(2);
    config.algorithms = Some("ring".into());
    // There is none of that name for all_to_all, for one.
    config.algorithms_may_differ = true;
    config.profiler_tag = 7;
    let comm = match nccl.configured(&config) {
        Ok(configured) if is_since(version, "2.31.0") => configured,
        Err(error @ Error::Unsupported(_)) if !is_since(version, "2.31.0") => {
            let text = error.to_string();
            assert!(
                [version, "2.31.0", "single collectives"].iter().all(|part| text.contains(part)),
                "{text}"
            );
            return done();
        }
        other => return Err(format!("settings in {version}: {other:?}")),
    };
    let of = |rank: usize, index: usize| value(rank, index) as f32;
    let sum = |index: usize| (0..ranks).map(|rank| of(rank, index)).sum::<f32>();
    let (len, root) = (1021, ranks - 1);
    let send = upload(&comm, &values::<f32>(rank, len * ranks))?;
    let mut all = upload(&comm, &values::<f32>(7, len * ranks))?;
    let mut block = upload(&comm, &values::<f32>(7, len))?;
    must("all_reduce", comm.all_reduce(&send, &mut all, ReduceOp::Sum))?;
    expect("all_reduce", &download(&comm, &all)?, sum)?;
    must("reduce", comm.reduce(&send, &mut all, ReduceOp::Max, root))?;
    must("reduce_scatter", comm.reduce_scatter(&send, &mut block, ReduceOp::Sum))?;
    expect("reduce_scatter", &download(&comm, &block)?, |index| sum(rank * len + index))?;
    must("all_gather", comm.all_gather(&send.slice(..len), &mut all))?;
    expect("all_gather", &download(&comm, &all)?, |index| of(index / len, index % len))?;
    must("all_to_all", comm.all_to_all(&send, &mut all))?;
    expect("all_to_all", &download(&comm, &all)?, |i| of(i / len, rank * len + i % len))?;
    must("all_to_all_in_place", comm.all_to_all_in_place(&mut all))?;
    must("gather", comm.gather(&send.slice(..len), &mut all, root))?;
    must("scatter", comm.scatter(&send, &mut block, root))?;
    expect("scatter", &download(&comm, &block)?, |index| of(root, rank * len + index))?;
    must("broadcast", comm.broadcast_in_place(&mut block, root))?;
    expect("broadcast", &download(&comm, &block)?, |index| of(root, root * len + index))?;
    let lens: Vec<usize> = (0..ranks).map(|rank| rank + 1).collect();
    let mut own = upload(&comm, &values::<f32>(7, lens[rank]))?;
    let vectors = send.slice(..lens.iter().sum::<usize>());
    must("reduce_scatter_v", comm.reduce_scatter_v(&vectors, &mut own, &lens, ReduceOp::Sum))?;
    let stream = must("stream", comm.cuda_stream())?.context().new_stream().map_err(|e| e.to_string())?;
    let elsewhere = must("on another stream", comm.on(&stream))?;
    let in_group = elsewhere.group(|group| {
        group.all_reduce(&send, &mut all, ReduceOp::Sum)?;
        group.broadcast_in_place(&mut block, 0)
    });
    must("a group", in_group)?;
    must("sync", comm.sync())?;
    expect("all_reduce in a group", &download(&comm, &all)?, sum)?;

    // What is wrong with settings the library says, of the function that takes them; NCCL does not look at
    // them for one rank.
    let nccl = comm.nccl().ok_or("NCCL")?;
    let mut wrong = CollectiveConfig::default();
    wrong.algorithms = Some("nonsense".into());
    let configured = must("settings", nccl.configured(&wrong))?;
    match configured.all_reduce_in_place(&mut block, ReduceOp::Sum) {
        Err(Error::Library(error)) => assert_eq!((error.function, error.code), ("ncclAllReduceConfig", 4)),
        Ok(()) if ranks == 1 => {}
        other => return Err(format!("nonsense: {other:?}")),
    }
    config.algorithms_may_differ = false;
    let insisting = must("settings", nccl.configured(&config))?;
    match insisting.all_to_all(&send, &mut all) {
        Err(Error::Library(error)) => assert_eq!((error.function, error.code), ("ncclAlltoAllConfig", 4)),
        other => return Err(format!("all_to_all in a ring: {other:?}")),
    }
    done()
}

/// What ranks with different settings are told, where calls are compared.
fn different_settings(args: &[String]) -> Outcome {
    let version = args[0].as_str();
    if !is_since(version, "2.31.0") {
        return done();
    }
    let errors = Comm::builder().backend(BackendKind::Nccl).check(true).run(2, |comm| {
        let mut config = CollectiveConfig::default();
        config.profiler_tag = comm.rank() as u64;
        let mut sum = [1.0f32; 8];
        let nccl = comm.nccl().expect("NCCL");
        // A tag is a rank's own.
        nccl.configured(&config)?.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
        config.max_ctas = Some(1 + comm.rank() as i32);
        nccl.configured(&config)?.all_reduce_in_place(&mut sum, ReduceOp::Sum)
    });
    for error in must("ranks", errors)? {
        let Err(Error::Mismatch(mismatch)) = error else { return Err(format!("{error:?}")) };
        assert_eq!(mismatch.sequence, 2, "{mismatch}");
        assert!(mismatch.ours.contains("settings") && mismatch.ours != mismatch.theirs, "{mismatch}");
    }
    done()
}

/// However ranks end their communicators, nobody waits for another: one thread drops those of all GPUs; two
/// ranks drop two communicators in different orders; one leaves long before the other.
fn ends(_: &[String]) -> Outcome {
    // Less than the library is given to come back.
    let soon = Duration::from_secs(5);
    let timed = |what: &str, since: Instant| match since.elapsed() {
        taken if taken < soon => Ok(()),
        taken => Err(format!("{what} took {taken:?}")),
    };
    let builder = || Comm::builder().backend(BackendKind::Nccl);
    let since = Instant::now();
    let mut comms = must("init_all", phalanx::nccl::init_all(0..3))?;
    comms.swap(0, 1);
    drop(comms);
    timed("dropping all from one thread", since)?;

    let since = Instant::now();
    let crossed = builder().run(2, |comm| {
        let part = comm.split(Some(0), 0)?.expect("all have a colour");
        match comm.rank() {
            0 => drop((comm, part)),
            _ => drop((part, comm)),
        }
        Ok::<(), Error>(())
    });
    must("ranks", crossed)?.into_iter().try_for_each(|result| must("split", result))?;
    timed("dropping in different orders", since)?;

    let alone = builder().run(2, |comm| {
        let since = Instant::now();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
        }
        comm.barrier().or_else(|error| match error {
            // The other has left.
            Error::Peer(_) => Ok(()),
            error => Err(error),
        })?;
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
        }
        drop(comm);
        Ok::<_, Error>(since.elapsed())
    });
    let alone = must("ranks", alone)?.into_iter().collect::<Result<Vec<_>, _>>();
    let taken = must("barrier", alone)?;
    assert!(taken.iter().all(|taken| *taken < soon), "{taken:?}");

    // Their GPUs can be used at once.
    let again = must("ranks", builder().run(3, |comm| comm.barrier()))?;
    again.into_iter().try_for_each(|result| must("barrier", result))?;
    done()
}

/// A key for sockets: before the first communicator, long enough, in a library that knows it.
fn encryption(args: &[String]) -> Outcome {
    let version = args[0].as_str();
    let long = "k".repeat(32);
    if !is_since(version, "2.32.0") {
        return match encrypt_sockets(&long) {
            Err(Error::MissingFunction(missing)) if missing.function == "ncclSetEncryption" => done(),
            other => Err(format!("{version}: {other:?}")),
        };
    }
    let short = encrypt_sockets("short").expect_err("a short key").to_string();
    assert!(short.contains("at least 32 bytes"), "{short}");
    must("a key", encrypt_sockets(&long))?;
    let ranks = Comm::builder().backend(BackendKind::Nccl).run(2, |comm| comm.barrier());
    must("ranks", ranks)?.into_iter().try_for_each(|result| must("barrier", result))?;
    match encrypt_sockets(&long) {
        Err(error @ Error::Unsupported(_)) if error.to_string().contains("before phalanx::init") => done(),
        other => Err(format!("behind a communicator: {other:?}")),
    }
}

/// A field of [`Config`]: how it is set, its name here and in C, the release that has it, and a value that it
/// can have.
type Setting = (fn(&mut Config, i32), &'static str, &'static str, &'static str, i32);

macro_rules! settings {
    ($($name:ident $c_name:literal since $since:literal, such as $value:expr;)*) => {
        [$((|config, value| config.$name = Some(value), stringify!($name), $c_name, $since, $value)),*]
    };
}

const SETTINGS: [Setting; 20] = settings! {
    cga_cluster_size "cgaClusterSize" since "2.17.1", such as 4;
    min_ctas "minCTAs" since "2.17.1", such as 2;
    max_ctas "maxCTAs" since "2.17.1", such as 4;
    split_share "splitShare" since "2.18.1", such as 1;
    traffic_class "trafficClass" since "2.26.2", such as 1;
    collnet_enable "collnetEnable" since "2.27.3", such as 0;
    cta_policy "CTAPolicy" since "2.27.3", such as 1;
    shrink_share "shrinkShare" since "2.27.3", such as 1;
    nvls_ctas "nvlsCTAs" since "2.27.3", such as 2;
    channels_per_net_peer "nChannelsPerNetPeer" since "2.28.3", such as 2;
    nvlink_centric_sched "nvlinkCentricSched" since "2.28.3", such as 1;
    graph_usage_mode "graphUsageMode" since "2.29.2", such as 1;
    rma_contexts "numRmaCtx" since "2.29.2", such as 2;
    max_p2p_peers "maxP2pPeers" since "2.30.3", such as 8;
    graph_stream_ordering "graphStreamOrdering" since "2.30.7", such as 1;
    launch_order_implicit "launchOrderImplicit" since "2.31.0", such as 1;
    rma_signals "numRmaSig" since "2.31.0", such as 2;
    rma_eager_init "rmaEagerInit" since "2.31.0", such as 1;
    host_cft_mode "hostCftMode" since "2.31.0", such as 2;
    nvls_host_mode "nvlsHostMode" since "2.32.0", such as i32::MAX;
};

/// A setting that came later is an error with its name, and the version that has it. One that is there
/// arrives as the field of that name: NCCL names it when the value is none that it can have.
fn setting(args: &[String]) -> Outcome {
    const NEVER: i32 = -7;
    let version = args[0].as_str();
    let made = |config: Config| {
        Comm::builder().backend(BackendKind::Nccl).nccl(config).run(1, |comm| comm.barrier())
    };
    let is_refused =
        |error: &Error, parts: &[&str]| parts.iter().all(|part| error.to_string().contains(part));
    for (set, name, c_name, since, value) in SETTINGS {
        let with = |value| {
            let mut config = Config::default();
            set(&mut config, value);
            made(config)
        };
        match (with(value), with(NEVER)) {
            (Ok(_), Err(error)) if is_since(version, since) => {
                assert!(is_refused(&error, &[c_name, "-7"]), "{name}: {error}");
            }
            (Err(error), Err(_)) if !is_since(version, since) => {
                assert!(is_refused(&error, &[name, since, version]), "{name}: {error}");
            }
            other => return Err(format!("{name} in {version}: {other:?}")),
        }
    }
    let mut config = Config::default();
    config.net_name = Some("Socket".into());
    must("net_name", made(config.clone()))?;
    config.comm_name = Some("name".into());
    match made(config) {
        Ok(_) if is_since(version, "2.27.3") => done(),
        Err(error) if !is_since(version, "2.27.3") => {
            assert!(is_refused(&error, &["comm_name", "2.27.3", version]), "{error}");
            done()
        }
        other => Err(format!("comm_name in {version}: {other:?}")),
    }
}

/// Without a setting, larger worlds have more unique ids: four ranks two, where one is for two. One id alone has no room for them.
fn ids_by_size() -> Result<(), Failed> {
    let emulated = Emulated::nccl("2.32.3")?.set("RANKS_OF_AN_ID", "2");
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == "ids_by_size").expect("it is listed");
    let start = || emulated.launch(launch(*scenario, 4, ""));
    let reports = start().env("PHALANX_TEST_RANKS_OF_AN_ID", "2").reports();
    reports.map_err(|problems| format!("with an id for two ranks:{problems}"))?;
    match start().reports() {
        Err(problems) if problems.to_string().contains("too many ranks for the roots of 1 ids") => Ok(()),
        other => Err(format!("with an id for 512 ranks: {other:?}").into()),
    }
}

/// The ranks compute something.
fn works(comm: Comm, _: &[String]) -> Outcome {
    let mut sum = [comm.rank() as u32 + 1];
    must("sum", comm.all_reduce_in_place(&mut sum, ReduceOp::Sum))?;
    assert_eq!(sum, [10]);
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
