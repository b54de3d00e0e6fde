//! What no rank waits for in the library: a peer that is missing while the others wait on their own, or in a
//! group, and a call that does not come back.

use crate::failures::{SLACK, TIMEOUT, names, still_works, world, world_of};
use crate::flavour::emulated_as;
use crate::world::{are_emulated, done, launch, library_alone, must, stream, upload};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::error_stream::{self, STREAMS};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use phalanx_testkit::threads::Busy;
use std::os::unix::process::ExitStatusExt;
use std::time::Instant;

pub const SCENARIOS: &[Scenario] = &[Scenario::rank("held_inside", held_inside)];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let on_several = [
        Trial::test("threads/nobody_waits", move || nobody_waits(gpus)),
        Trial::test("threads/absent_in_a_group", move || absent_in_a_group(gpus)),
        Trial::test("threads/absent_in_messages", move || absent_in_messages(gpus)),
    ];
    let emulated = [
        Trial::test("processes/held_inside", || held("2.28.9")),
        Trial::test("processes/held_inside/old", || held("2.27.3")),
    ];
    let without_words = STREAMS.map(|stream| {
        Trial::test(format!("processes/held_inside/error_stream/{stream}"), move || {
            held_without_words(stream)
        })
    });
    let on_several = on_several.into_iter().map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs"));
    // Only the emulated library can be told to hold a caller.
    let emulated = emulated
        .into_iter()
        .chain(without_words)
        .map(|trial| trial.only_if(are_emulated(), "only emulated libraries can be told so"));
    on_several.chain(emulated).collect()
}

/// A rank is missing, and the others wait for their stream without the library: it ends, and the next call
/// says why.
fn nobody_waits(gpus: usize) -> Result<(), Failed> {
    let (late, others) = (gpus - 1, Busy::new(gpus - 1));
    let errors = world(gpus, |comm| {
        let mut buffer = upload(&comm, &vec![1.0f32; 100_000]).ok()?;
        // The ranks know each other: only the second is enqueued while a rank is missing.
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()).ok()?;
        if comm.rank() == late {
            others.wait(TIMEOUT + SLACK);
            return comm.barrier().err();
        }
        let _busy = others.one();
        let since = Instant::now();
        let enqueued = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum);
        assert!(enqueued.is_ok() && since.elapsed() < TIMEOUT, "{enqueued:?} after {:?}", since.elapsed());
        let waited = stream(&comm).synchronize();
        assert!(
            waited.is_ok() && since.elapsed() < TIMEOUT + SLACK,
            "{waited:?} after {:?}",
            since.elapsed()
        );
        comm.barrier().err()
    })?;
    errors.into_iter().try_for_each(|error| names(error, late, "all_reduce(f32 × 100000, sum"))?;
    Ok((0..gpus).try_for_each(still_works)?)
}

/// In a group the ranks meet at its end; what was queued is dropped.
fn absent_in_a_group(gpus: usize) -> Result<(), Failed> {
    let (late, others) = (gpus - 1, Busy::new(gpus - 1));
    // The end of a group of own kernels does not wait for the other ranks.
    let errors = world_of(library_alone(), gpus, |comm| {
        if comm.rank() == late {
            others.wait(TIMEOUT + SLACK);
            return comm.barrier().err();
        }
        let _busy = others.one();
        let mut one = upload(&comm, &vec![1.0f32; 1000]).ok()?;
        let mut other = upload(&comm, &vec![1.0f32; 3000]).ok()?;
        let since = Instant::now();
        let grouped = phalanx::group(|group| {
            group.on(&comm).all_reduce_in_place(&mut one, ReduceOp::Sum)?;
            group.on(&comm).all_reduce_in_place(&mut other, ReduceOp::Max)
        });
        assert!(since.elapsed() < TIMEOUT + SLACK, "after {:?}", since.elapsed());
        grouped.err()
    })?;
    errors.into_iter().try_for_each(|error| names(error, late, "all_reduce(f32 × "))?;
    Ok((0..gpus).try_for_each(still_works)?)
}

/// A peer that does not come to its end of a message.
fn absent_in_messages(gpus: usize) -> Result<(), Failed> {
    let first = Busy::new(1);
    let errors = world(gpus, |comm| {
        if comm.rank() > 0 {
            first.wait(TIMEOUT + SLACK);
            return comm.barrier().err();
        }
        let _busy = first.one();
        // More than own kernels send ahead.
        let buffer = upload(&comm, &vec![1.0f32; 1_000_000]).ok()?;
        let since = Instant::now();
        let error = comm.send(&buffer, 1).and_then(|()| comm.sync()).err();
        assert!(since.elapsed() < TIMEOUT + SLACK, "after {:?}", since.elapsed());
        error
    })?;
    errors.into_iter().try_for_each(|error| names(error, 1, "send(f32 × 1000000, to rank 1)"))?;
    Ok((0..gpus).try_for_each(still_works)?)
}

/// The library does not come back from the second operation.
fn held_inside(comm: Comm, args: &[String]) -> Outcome {
    comm.set_timeout(TIMEOUT);
    let _open = (!args[0].is_empty()).then(|| error_stream::replace(&args[0])).transpose()?;
    let mut buffer = upload(&comm, &[1.0f32; 1000])?;
    must("first", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    must("first", comm.sync())?;
    let since = Instant::now();
    let error = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap_err();
    assert!(since.elapsed() < TIMEOUT + SLACK, "after {:?}", since.elapsed());
    assert!(error.to_string().contains("all_reduce(f32 × 1000, sum)"), "{error}");
    drop((buffer, comm));
    done()
}

/// A library with `ncclCommRevoke` lets go, and the call is an error; an older one cannot, and the process
/// ends.
fn held(version: &str) -> Result<(), Failed> {
    let emulated = emulated_as(version)?.set("HANG_INSIDE", 2);
    let ended = emulated.launch(launch(SCENARIOS[0], 2, "")).run()?;
    for one in ended {
        match (version, one.outcome) {
            ("2.28.9", outcome) => drop(outcome.map_err(|problem| format!("{problem}\n{}", one.output))?),
            (_, Ok(report)) => return Err(format!("went on: {report}").into()),
            (_, Err(_)) => assert!(one.output.contains("cannot be made to let go"), "{}", one.output),
        }
    }
    Ok(())
}

/// The process of an old library ends in time also where its error stream takes nothing.
fn held_without_words(stream: &str) -> Result<(), Failed> {
    let emulated = emulated_as("2.27.3")?.set("HANG_INSIDE", 2);
    let since = Instant::now();
    for one in emulated.launch(launch(SCENARIOS[0], 2, stream)).run()? {
        let signal = one.status.and_then(|status| status.signal());
        assert!(signal == Some(libc::SIGABRT), "{:?}\n{}", one.outcome, one.output);
    }
    assert!(since.elapsed() < TIMEOUT + 2 * SLACK, "after {:?}", since.elapsed());
    Ok(())
}
