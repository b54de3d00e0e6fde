//! Failures amid what only NCCL has: symmetric memory, CUDA graphs.

use crate::failures::{SLACK, TIMEOUT, still_works, world};
use crate::world::{are_emulated, launch, stream};
use libtest_mimic::{Failed, Trial};
use phalanx::nccl::{Graph, Registration};
use phalanx::{Comm, Error, PeerEvent, ReduceOp};
use phalanx_testkit::faults::FORK;
use phalanx_testkit::suite::Condition;
use phalanx_testkit::threads::Busy;
use std::time::Instant;

pub fn trials(gpus: usize) -> Vec<Trial> {
    let trials = [
        Trial::test("threads/absent_at_alloc", move || absent_at_alloc(gpus)),
        Trial::test("threads/graph_alive", move || graph_alive(gpus)),
        Trial::test("threads/missing_signal", move || missing_signal(gpus)),
        Trial::test("processes/fork", move || Ok(launch(FORK, gpus, "").reports().map(drop)?)),
    ];
    trials.into_iter().map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs")).collect()
}

/// NCCL's abort waits for the graphs that captured the communicator, and those who wait for the abort have
/// them.
fn graph_alive(gpus: usize) -> Result<(), Failed> {
    let outcomes = world(gpus, |comm| -> Result<_, Error> {
        comm.set_timeout(TIMEOUT);
        let buffer = stream(&comm).clone_htod(&vec![1.0f32; 100_000])?;
        let mut step =
            Graph::capture(&comm, buffer, |group, buffer| group.all_reduce_in_place(buffer, ReduceOp::Max))?;
        step.launch()?;
        let complete = comm.sync();
        if comm.rank() == 0 {
            return complete.map(|()| None);
        }
        let since = Instant::now();
        // A rank that is slow learns of it before.
        let error = complete.and_then(|()| step.launch()).and_then(|()| comm.sync()).err();
        let (again, taken) = (step.launch().err(), since.elapsed());
        let buffer = step.into_buffers();
        // It is the program's again.
        stream(&comm).clone_dtoh(&buffer)?;
        Ok(Some((error, again, taken)))
    })?;
    for outcome in outcomes.into_iter().skip(1) {
        let (error, again, taken) = outcome?.ok_or("an outcome")?;
        let Some(Error::Peer(peer)) = &error else { return Err(format!("{error:?}").into()) };
        assert_eq!((peer.rank, peer.event), (0, PeerEvent::Left), "{peer}");
        assert_eq!(again.map(|error| error.to_string()), Some(peer.to_string()));
        assert!(taken < TIMEOUT + SLACK, "{taken:?}");
    }
    Ok((0..gpus).try_for_each(still_works)?)
}

/// The library waits for all ranks when they allocate memory together, without a deadline: one that does not
/// come, calls something else, or wants another length, is named.
fn absent_at_alloc(gpus: usize) -> Result<(), Failed> {
    fn alloc(comm: &Comm, len: usize) -> Option<Error> {
        comm.nccl()?.alloc_as::<f32>(len, Registration::Symmetric).err()
    }
    let others = Busy::new(gpus - 1);
    let errors = world(gpus, |comm| {
        comm.set_timeout(TIMEOUT);
        if comm.rank() == 0 {
            others.wait(TIMEOUT + SLACK);
            return None;
        }
        let _busy = others.one();
        alloc(&comm, 1000)
    })?;
    for error in errors.into_iter().skip(1) {
        let text = error.ok_or("an error")?.to_string();
        assert!(text.contains("alloc(f32 × 1000)") && text.contains("rank 0"), "{text}");
    }
    let others: [fn(&Comm) -> Option<Error>; 2] =
        [|comm| alloc(comm, 1001), |comm| comm.split(Some(0), 0).err()];
    for call in others {
        let errors = world(gpus, |comm| {
            comm.set_timeout(TIMEOUT);
            if comm.rank() == 0 { call(&comm) } else { alloc(&comm, 1000) }
        })?;
        for error in errors {
            let error = error.ok_or("an error")?;
            assert!(matches!(error, Error::Mismatch(_)), "{error}");
            assert!(error.to_string().contains("alloc(f32 × 1000)"), "{error}");
        }
    }
    Ok((0..gpus).try_for_each(still_works)?)
}

/// A signal that does not come: the rank that was to raise it is named, on all ranks, though all have made
/// the same calls. NCCL's abort (2.32.3) waits for it for ever, and with it what is on the GPU: only the
/// emulated one works afterwards.
fn missing_signal(gpus: usize) -> Result<(), Failed> {
    let first = Busy::new(1);
    let errors = world(gpus, |comm| -> Result<_, Error> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let nccl = comm.nccl().expect("NCCL");
        // From 2.31 on there are no signals before the first window.
        let _window = nccl.alloc::<f32>(1000)?;
        // The library connects the ranks in the first, for which all come.
        if let Err(Error::MissingFunction(_)) = nccl.signal((rank + 1) % ranks) {
            return Ok(None);
        }
        nccl.wait_signals(&[((rank + ranks - 1) % ranks, 1)])?;
        comm.sync()?;
        comm.barrier()?;
        if rank != 0 {
            first.wait(TIMEOUT + SLACK);
            return Ok(comm.barrier().err());
        }
        let _busy = first.one();
        nccl.wait_signals(&[(1, 2)])?;
        Ok(comm.sync().err())
    })?;
    for error in errors {
        let error = match error? {
            None => continue,
            Some(error) => error,
        };
        let Error::Timeout(timeout) = &error else { return Err(format!("{error:?}").into()) };
        let missing: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
        assert_eq!((missing, timeout.operation.as_str()), (vec![1], "wait_signals"), "{timeout}");
    }
    if are_emulated() {
        (0..gpus).try_for_each(still_works)?;
    }
    Ok(())
}
