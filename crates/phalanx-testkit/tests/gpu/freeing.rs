//! Communicators and memory that end while other ranks of the process go on with something else. The driver frees memory only when
//! the GPUs that reach it are idle, so a rank that freed at once would wait for operations that wait for it.

use crate::world::{both, done, elements, expect, must, stream, upload};
use libtest_mimic::Trial;
use phalanx::nccl::Registration;
use phalanx::{Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("freeing/aborted", aborted),
    Scenario::rank("freeing/parts", parts),
    Scenario::rank("freeing/buffers", buffers),
];

/// Longer than any operation here takes, and shorter than the deadline.
const LONGEST: Duration = Duration::from_secs(3);

pub fn trials(gpus: usize) -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, 2, gpus, &[""])).collect()
}

/// A sum that all ranks of the communicator call, and that is right and soon there.
fn works(comm: &Comm, len: usize) -> Result<(), Error> {
    let since = Instant::now();
    let mut buffer = upload(comm, &vec![1.0f32; len]).expect("memory of the GPU");
    comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    comm.sync()?;
    let sums = stream(comm).clone_dtoh(&buffer).expect("memory of the GPU");
    expect("the sum", &sums, |_| comm.world_size() as f32).expect("a right sum");
    assert!(since.elapsed() < LONGEST, "rank {}: an operation took {:?}", comm.rank(), since.elapsed());
    Ok(())
}

/// Each rank in turn aborts a communicator of all, in which the others are in operations, and goes on in another one.
fn aborted(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for aborter in 0..ranks {
        let doomed = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
        for round in 0.. {
            if rank == aborter && round == 3 {
                doomed.abort();
                break;
            }
            match works(&doomed, elements(1 << 20)) {
                Ok(()) => {}
                Err(Error::Aborted { rank }) if rank == aborter => break,
                Err(error) => return Err(format!("aborted by {aborter}: {error}")),
            }
        }
        // The aborter is here first.
        (0..20).try_for_each(|_| must("all_reduce beside", works(&comm, 1000)))?;
    }
    done()
}

/// Some ranks drop a communicator of theirs, of which the others know nothing, and all go on.
fn parts(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for round in 0..10 {
        let outsider = round % ranks;
        let part = must("split", comm.split((rank != outsider).then_some(0), 0))?;
        if let Some(part) = part {
            must("all_reduce of a part", works(&part, 1000))?;
            // The part has memory of its own for it.
            must(
                "all_reduce of host memory",
                part.all_reduce_in_place(&mut [1.0f32; 1000][..], ReduceOp::Sum),
            )?;
            drop(part);
        }
        must("all_reduce of all", works(&comm, 1000))?;
    }
    done()
}

/// A rank drops registered memory and comes late to an operation that the others have begun.
fn buffers(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    for round in 0..10 {
        let buffer = must("alloc_as", nccl.alloc_as::<f32>(1000, Registration::Plain))?;
        must("all_reduce", works(&comm, 1000))?;
        if round % comm.world_size() == comm.rank() {
            // The others' operation is under way.
            std::thread::sleep(Duration::from_millis(10));
            drop(buffer);
        }
        must("all_reduce of all", works(&comm, 1000))?;
    }
    done()
}
