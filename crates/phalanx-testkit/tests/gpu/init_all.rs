//! One process makes all ranks (`init_all`), as its environment says.

use crate::world::{done, download, expect, must, upload, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[Scenario::process("init_all_as_told", init_all_as_told)];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let as_told = Trial::test("processes/init_all_as_told", init_all_by_environment);
    vec![as_told.only_if(gpus >= 2, "it takes two GPUs")]
}

/// A value that makes no sense is refused.
fn init_all_by_environment() -> Result<(), Failed> {
    let alone = Launch::alone("init_all_as_told").on_gpus();
    let told = |timeout: &str, check: &str| {
        alone.clone().env("PHALANX_TIMEOUT", timeout).env("PHALANX_CHECK", check).reports()
    };
    told("7", "1")?;
    for (timeout, check, wrong) in [("soon", "1", "PHALANX_TIMEOUT"), ("7", "maybe", "PHALANX_CHECK")] {
        let refused = told(timeout, check).expect_err(wrong);
        assert!(refused.contains(wrong), "{refused}");
    }
    Ok(())
}

fn init_all_as_told(_: &[String]) -> Outcome {
    let comms = must("init_all", phalanx::nccl::init_all([0, 1]))?;
    let mut buffers = Vec::new();
    for comm in &comms {
        assert_eq!(comm.timeout(), Duration::from_secs(7));
        buffers.push(upload(comm, &values::<f32>(comm.rank(), 1000))?);
    }
    // On the thread that made them nobody can wait for the others to compare calls.
    let together = phalanx::group(|group| {
        let mut both = comms.iter().zip(&mut buffers);
        both.try_for_each(|(comm, buffer)| group.on(comm).all_reduce_in_place(buffer, ReduceOp::Sum))
    });
    must("group", together)?;
    let sum = |index: usize| (0..2).map(|rank| value(rank, index)).sum::<i32>() as f32;
    for (comm, buffer) in comms.iter().zip(&buffers) {
        expect("the sum", &download(comm, buffer)?, sum)?;
    }
    let mut messages: Vec<_> = buffers.iter().map(|buffer| buffer.slice(..10)).collect();
    let (first, mut second) = (messages.remove(0), upload(&comms[1], &[0.0f32; 10])?);
    let message = phalanx::group(|group| {
        group.on(&comms[0]).send(&first, 1)?;
        group.on(&comms[1]).recv(&mut second, 0)
    });
    must("a message", message)?;
    expect("the message", &download(&comms[1], &second)?, sum)?;
    drop(messages);
    // Threads of their own compare them.
    let differ = |comm: Comm| {
        // The ranks know each other for operations like this, and would not meet otherwise.
        let mut buffer = upload(&comm, &vec![1.0f32; 1000 - comm.rank()]).expect("memory");
        let summed = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum);
        summed.and_then(|()| comm.sync()).expect_err("they differ")
    };
    let threads: Vec<_> = comms.into_iter().map(|comm| std::thread::spawn(move || differ(comm))).collect();
    for thread in threads {
        let error = thread.join().map_err(|_| "a panic")?;
        assert!(matches!(error, Error::Mismatch(_)), "{error:?}");
    }
    done()
}
