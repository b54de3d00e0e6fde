//! A rank is killed while a checkpoint is written.

// Blocks are lists of ranges, of which most have one.
#![allow(clippy::single_range_in_vec_init)]

use libtest_mimic::Trial;
use phalanx::Comm;
use phalanx_testkit::fault::{self, Fault};
use phalanx_testkit::processes::{Launch, describe};
use phalanx_testkit::{Outcome, Scenario};
use phalanx_train::Error;
use phalanx_train::checkpoint::{Checkpoint, Progress, Saver, State};
use phalanx_train::device::Host;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[Scenario::rank("checkpoint/killed", |comm, args| killed(&comm, args))];

const RANKS: usize = 3;
/// 4.8 MB on each rank: several chunks.
const LEN: usize = 600_000;
const DEADLINE: Duration = Duration::from_secs(20);

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Saves step 1, and step 2 in which one of the ranks is killed.
fn killed(comm: &Comm, args: &[String]) -> Outcome {
    let (folder, point, victim) = (&args[0], args[1].clone(), args[2].parse() == Ok(comm.rank()));
    let step = Arc::new(AtomicU64::new(1));
    let now = step.clone();
    let mut saver = Saver::new(comm, folder).map_err(text)?.timeout(DEADLINE).on_progress(move |progress| {
        let here = match progress {
            Progress::Begin { .. } => "before",
            // The second chunk, not the last.
            Progress::Wrote { bytes } if (1 << 20..8 * LEN as u64).contains(bytes) => "in",
            Progress::Shard => "after",
            _ => "elsewhere",
        };
        if victim && here == point && now.load(Ordering::Relaxed) == 2 {
            let _ = fault::inject_here(Fault::Kill);
        }
    });
    let numbers = vec![comm.rank() as f64; LEN];
    let mut save = |number: u64| {
        step.store(number, Ordering::Relaxed);
        let mut state = State::new();
        let begin = comm.rank() * LEN;
        state.tensor::<_, f64>(
            "x",
            &[RANKS * LEN],
            std::slice::from_ref(&(begin..begin + LEN)),
            &Host,
            &numbers[..],
        );
        saver.save(number, state)?;
        saver.finish()
    };
    save(1).map_err(text)?;
    let since = Instant::now();
    match save(2) {
        Err(Error::Comm(error)) if since.elapsed() < DEADLINE => Ok(error.to_string()),
        other => Err(format!("{other:?} after {:?}", since.elapsed())),
    }
}

fn survive(point: &str, victim: usize) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(text)?;
    let path = folder.path().to_str().ok_or("a path that is no text")?;
    let launch = Launch::new("checkpoint/killed", RANKS).arg(path).arg(point).arg(victim);
    let ended = launch.run()?;
    for rank in &ended {
        let as_expected = match &rank.outcome {
            Ok(error) => rank.rank != victim && error.contains(&format!("rank {victim}")),
            Err(_) => rank.rank == victim,
        };
        if !as_expected {
            return Err(describe(&ended));
        }
    }
    let latest = Checkpoint::latest(path).map_err(text)?.ok_or("no checkpoint")?;
    latest.verify().map_err(text)?;
    assert_eq!(latest.step(), 1, "the one before");
    let last =
        latest.read::<f64>("x", std::slice::from_ref(&(RANKS * LEN - 1..RANKS * LEN))).map_err(text)?;
    assert_eq!(last, [RANKS as f64 - 1.0]);
    let error = text(Checkpoint::open(folder.path().join("step-000000002")).unwrap_err());
    let shard = format!("shard-{victim:05}-of-{RANKS:05}.safetensors");
    assert!(error.contains("step-000000002: it is incomplete") && error.contains("manifest.json"), "{error}");
    assert_eq!(error.contains(&shard), point != "after", "{error}");
    Ok(())
}

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for point in ["before", "in", "after"] {
        for victim in [0, 2] {
            let name = format!("checkpoint/rank_{victim}_is_killed_{point}_its_shard");
            trials.push(Trial::test(name, move || Ok(survive(point, victim)?)));
        }
    }
    trials
}
