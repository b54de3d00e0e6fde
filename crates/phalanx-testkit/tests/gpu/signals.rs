//! Signals that differ in index or context.

use crate::releases::is_since;
use crate::world::{BACKEND, DEADLINE, done, expect, launch, must, stream};
use libtest_mimic::{Failed, Trial};
use phalanx::nccl::{Config, Nccl, Signal};
use phalanx::{Comm, Error};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[Scenario::process("signals", signals)];

/// The release from which on there is more than the first signal of the first context.
const SEVERAL_SINCE: &str = "2.31.0";

pub fn trials(gpus: usize) -> Vec<Trial> {
    let trial = Trial::test("threads/signals", move || {
        let reports = launch(SCENARIOS[0], 1, &gpus.to_string()).reports();
        Ok::<(), Failed>(reports.map(drop)?)
    });
    vec![trial.only_if(gpus >= 2, "it takes two GPUs")]
}

/// In a process of its own: the ranks are threads, as many as the argument says.
fn signals(args: &[String]) -> Outcome {
    let ranks = args[0].parse().context(|| "ranks".into())?;
    let made_with = |signals, contexts, body: fn(&Comm) -> Outcome| {
        let mut config = Config::default();
        (config.rma_signals, config.rma_contexts) = (signals, contexts);
        let builder = Comm::builder().backend(BACKEND).nccl(config).timeout(DEADLINE / 4);
        for outcome in must("ranks", builder.run(ranks, |comm| body(&comm)))? {
            outcome?;
        }
        done()
    };
    made_with(None, None, |comm| refused(comm, [1, 1]))?;
    let version = must("version", phalanx::nccl::version())?;
    if !is_since(&version, "2.29.2") {
        return done();
    }
    if !is_since(&version, SEVERAL_SINCE) {
        return made_with(None, Some(3), |comm| refused(comm, [1, 1]));
    }
    made_with(Some(2), Some(3), |comm| {
        refused(comm, [2, 3])?;
        independent(comm)?;
        counted(comm)
    })
}

/// What is behind the last signal, and the last context, is refused, and nothing is enqueued: the
/// communicator goes on.
fn refused(comm: &Comm, [signals, contexts]: [usize; 2]) -> Outcome {
    let (nccl, peer) = (comm.nccl().ok_or("NCCL")?, 0);
    let window = must("alloc", nccl.alloc::<f32>(8))?;
    let behind_the_last = [
        (Signal { index: signals, ..Signal::from(peer) }, "index", signals),
        (Signal { context: contexts, ..Signal::from(peer) }, "context", contexts),
        (Signal { index: usize::MAX, ..Signal::from(peer) }, "index", signals),
    ];
    for (signal, part, limit) in behind_the_last {
        let value = if part == "index" { signal.index } else { signal.context };
        let attempts = [
            ("put_signal", nccl.put_signal(&window, 0..8, signal, &window, 0)),
            ("signal", nccl.signal(signal)),
            ("wait_signals", nccl.wait_signals(&[(Signal::from(peer), 1), (signal, 1)])),
        ];
        for (operation, attempt) in attempts {
            let text = match attempt {
                Err(Error::MissingFunction(_)) => continue,
                Err(error @ Error::Usage(_)) => error.to_string(),
                other => return Err(format!("{operation} of {part} {value}: {other:?}")),
            };
            let has_several = is_since(&nccl.version(), SEVERAL_SINCE);
            let (limit, remedy) = match (has_several, part) {
                (false, _) => ("only one".to_owned(), "load NCCL 2.31"),
                (true, "index") => (format!("less than {limit}"), "nccl::Config::rma_signals"),
                (true, _) => (format!("less than {limit}"), "nccl::Config::rma_contexts"),
            };
            for part in [operation, part, &value.to_string(), &limit, remedy] {
                assert!(text.contains(part), "{part:?} is not in {text:?}");
            }
        }
    }
    // A signal that was raised or awaited above would be one too many or too few, or waited for in vain.
    must("sync", comm.sync())?;
    must("barrier", comm.barrier())?;
    done()
}

/// All signals of the communicator, between these ranks.
fn all(peer: usize) -> impl Iterator<Item = Signal> + Clone {
    (0..2).flat_map(move |index| (0..3).map(move |context| Signal { peer, index, context }))
}

/// Each to the next rank: the first of these operations is for all ranks.
fn connected(comm: &Comm, nccl: Nccl<'_>) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    must("signal", nccl.signal((rank + 1) % ranks))?;
    must("wait_signals", nccl.wait_signals(&[((rank + ranks - 1) % ranks, 1)]))?;
    must("sync", comm.sync())
}

/// How often rank 1 has looked whether its wait goes on; a barrier would wait for what it waits for.
static LOOKS: AtomicUsize = AtomicUsize::new(0);

/// Who waits for one signal is not served by another, which is still there afterwards.
fn independent(comm: &Comm) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let _window = must("alloc", nccl.alloc::<f32>(8))?;
    connected(comm, nccl)?;
    for (looks, awaited) in all(0).enumerate() {
        let others = all(0).filter(|other| *other != awaited);
        // From rank 0, to rank 1.
        let to_one = |signal| Signal { peer: 1, ..signal };
        if comm.rank() == 0 {
            others.clone().try_for_each(|other| must("the others", nccl.signal(to_one(other))))?;
        }
        must("the others are raised", comm.barrier())?;
        if comm.rank() == 0 {
            while LOOKS.load(Ordering::Acquire) <= looks {
                must("rank 1", nccl.async_error())?;
            }
            must("the one", nccl.signal(to_one(awaited)))?;
        }
        if comm.rank() == 1 {
            must("wait_signals", nccl.wait_signals(&[(awaited, 1)]))?;
            let reached = stream(comm).record_event(None).map_err(|e| e.to_string())?;
            std::thread::sleep(Duration::from_millis(50));
            assert!(!reached.is_complete(), "{awaited:?} came with another one");
            LOOKS.store(looks + 1, Ordering::Release);
            must("the others", nccl.wait_signals(&others.map(|other| (other, 1)).collect::<Vec<_>>()))?;
        }
        must("all have come", comm.barrier())?;
    }
    done()
}

/// Data with each signal, and several of each.
fn counted(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let nccl = comm.nccl().ok_or("NCCL")?;
    let mut source = must("alloc", nccl.alloc::<f32>(1))?;
    let target = must("alloc", nccl.alloc::<f32>(6))?;
    stream(comm).memcpy_htod(&[1.0 + rank as f32], &mut source.view_mut()).map_err(|e| e.to_string())?;
    for (place, signal) in all(right).enumerate() {
        must("put_signal", nccl.put_signal(&source, 0..1, signal, &target, place))?;
        (0..place).try_for_each(|_| must("signal", nccl.signal(signal)))?;
    }
    let counts: Vec<_> = all(left).enumerate().map(|(place, signal)| (signal, 1 + place as u32)).collect();
    must("wait_signals", nccl.wait_signals(&counts))?;
    must("sync", comm.sync())?;
    let got = stream(comm).clone_dtoh(&target.view()).map_err(|e| e.to_string())?;
    expect("what the left neighbour put", &got, |_| 1.0 + left as f32)?;
    must("barrier", comm.barrier())?;
    done()
}
