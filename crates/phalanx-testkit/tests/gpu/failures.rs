//! What goes wrong is an error that names the rank, on all ranks, within the deadline; GPUs are usable
//! afterwards.

use crate::world::{
    BACKEND, Slice, done, download, elements, expect, launch, library_alone, must, stream, upload, values,
};
use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Builder, Comm, Error, PeerEvent, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::fault::Fault;
use phalanx_testkit::processes::{Launch, World, phase};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use phalanx_testkit::threads::Busy;
use std::panic::AssertUnwindSafe;
use std::sync::Barrier;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("endless", endless),
    Scenario::process("missing_at_init", missing_at_init),
    Scenario::rank("held_up", held_up),
];

/// An argument of the first: more operations at once than a stream takes, so that the driver lets the thread wait.
const AHEAD: &str = "ahead";

/// The ranks' deadline here.
pub const TIMEOUT: Duration = Duration::from_secs(5);
/// What comes on top, at most: noticing, aborting, and a GPU that has to finish.
pub const SLACK: Duration = Duration::from_secs(4);

pub fn trials(gpus: usize) -> Vec<Trial> {
    let trials = [
        Trial::test("threads/absent", move || absent(gpus)),
        Trial::test("threads/panic", move || panic(gpus)),
        Trial::test("threads/panic_with_a_request", move || panic_with_a_request(gpus)),
        Trial::test("threads/abort", move || abort(gpus)),
        Trial::test("threads/mismatch", move || mismatch(gpus)),
        Trial::test("threads/checked", move || checked(gpus)),
        Trial::test("threads/group_with_a_failed_one", move || group_with_a_failed_one(gpus)),
        Trial::test("threads/group_with_one_that_failed_before", move || {
            group_with_one_that_failed_before(gpus)
        }),
        Trial::test("threads/dropped_early", move || dropped_early(gpus)),
        Trial::test("processes/killed", move || killed(gpus, |launch| launch)),
        Trial::test("processes/killed_with_full_streams", move || killed(gpus, |launch| launch.arg(AHEAD))),
        Trial::test("processes/killed_with_full_streams_of_nccl", move || {
            killed(gpus, |launch| launch.arg(AHEAD).env("PHALANX_GPU_ALGORITHM", "nccl"))
        })
        .only_if(BACKEND == BackendKind::Nccl, "RCCL has no other algorithm"),
        Trial::test("processes/stopped", move || stopped(gpus, |launch| launch)),
        Trial::test("processes/stopped_with_full_streams", move || stopped(gpus, |launch| launch.arg(AHEAD))),
        Trial::test("processes/stopped_together", move || stopped_together(gpus)),
        Trial::test("processes/missing_at_init", move || missing(gpus)),
    ];
    trials.into_iter().map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs")).collect()
}

pub fn world<R: Send>(gpus: usize, f: impl Fn(Comm) -> R + Sync) -> Result<Vec<R>, Failed> {
    world_of(Comm::builder().backend(BACKEND), gpus, f)
}

/// Ranks that these settings make.
pub fn world_of<R: Send>(
    builder: Builder,
    gpus: usize,
    f: impl Fn(Comm) -> R + Sync,
) -> Result<Vec<R>, Failed> {
    Ok(must("run", builder.timeout(TIMEOUT).run(gpus, f))?)
}

/// The GPU does what it should, in a communicator of its own.
pub fn still_works(gpu: usize) -> Result<(), String> {
    let builder = Comm::builder().backend(BACKEND).gpu(gpu).timeout(TIMEOUT);
    let results = must(
        "a new communicator",
        builder.run(1, |comm| -> Result<(), String> {
            let mut buffer = upload(&comm, &values::<f32>(1, 1000))?;
            must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
            expect("afterwards", &download(&comm, &buffer)?, |index| values::<f32>(1, 1000)[index])
        }),
    )?;
    results.into_iter().collect()
}

/// One rank does not come to the operation: the others say which one, and all GPUs work afterwards.
fn absent(gpus: usize) -> Result<(), Failed> {
    let (late, others) = (gpus - 1, Busy::new(gpus - 1));
    let errors = world(gpus, |comm| {
        if comm.rank() == late {
            others.wait(TIMEOUT + SLACK);
            return comm.barrier().err();
        }
        let _busy = others.one();
        let mut buffer = upload(&comm, &vec![1.0f32; 100_000]).ok()?;
        let since = Instant::now();
        let enqueued = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum);
        let error = enqueued.and_then(|()| comm.sync()).err();
        assert!(since.elapsed() < TIMEOUT + SLACK, "after {:?}", since.elapsed());
        error
    })?;
    errors.into_iter().try_for_each(|error| names(error, late, "all_reduce(f32 × 100000, sum"))?;
    Ok((0..gpus).try_for_each(still_works)?)
}

/// An error that says that this rank has not come, and to what.
pub fn names(error: Option<Error>, rank: usize, operation: &str) -> Result<(), Failed> {
    let Some(Error::Timeout(timeout)) = error else { return Err(format!("{error:?}").into()) };
    let missing: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
    assert_eq!(missing, [rank], "{timeout}");
    assert!(timeout.operation.starts_with(operation), "{timeout}");
    Ok(())
}

fn panic(gpus: usize) -> Result<(), Failed> {
    rank_0_panics(gpus, |comm| {
        if comm.rank() == 0 {
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        let mut buffer = upload(&comm, &vec![1.0f32; 100_000]).expect("upload");
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync())
    })
}

/// Whoever panics does not wait for the messages that it has posted.
fn panic_with_a_request(gpus: usize) -> Result<(), Failed> {
    rank_0_panics(gpus, |comm| {
        comm.set_timeout(TIMEOUT * 10);
        if comm.rank() == 0 {
            let _request = comm.start_recv(vec![0.0f32; 100], 1).expect("start_recv");
            std::panic::resume_unwind(Box::new("on purpose"));
        }
        comm.barrier()
    })
}

/// The panic comes through, and the other ranks, whose answers these are, have learnt of it.
fn rank_0_panics(gpus: usize, rank: impl Fn(Comm) -> phalanx::Result<()> + Sync) -> Result<(), Failed> {
    let ended = std::panic::catch_unwind(AssertUnwindSafe(|| {
        world(gpus, |comm| {
            let result = rank(comm);
            let Err(Error::Peer(peer)) = result else { panic!("{result:?}") };
            assert_eq!((peer.rank, peer.event), (0, PeerEvent::Panicked));
        })
    }));
    assert!(
        ended.is_err_and(|panic| panic.downcast_ref::<&str>() == Some(&"on purpose")),
        "rank 0's own panic"
    );
    Ok((0..gpus).try_for_each(still_works)?)
}

fn abort(gpus: usize) -> Result<(), Failed> {
    let errors = world(gpus, |comm| {
        if comm.rank() == 1 {
            comm.abort();
            return None;
        }
        let mut buffer = upload(&comm, &vec![1.0f32; 100_000]).ok()?;
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()).err()
    })?;
    for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != 1) {
        assert!(matches!(error, Some(Error::Aborted { rank: 1 })), "rank {rank}: {error:?}");
    }
    Ok((0..gpus).try_for_each(still_works)?)
}

/// Different operations that wait for each other for ever are told apart, by name.
fn mismatch(gpus: usize) -> Result<(), Failed> {
    let errors = world(gpus, |comm| {
        let mut buffer = upload(&comm, &vec![1.0f32; elements(1 << 22)]).ok()?;
        let mut other = upload(&comm, &vec![1.0f32; elements(1 << 22)]).ok()?;
        // NCCL would never end this: each waits for the other's operation.
        let enqueued = if comm.rank() == 0 {
            comm.recv(&mut other, 1)
        } else {
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)
        };
        enqueued.and_then(|()| comm.sync()).err()
    })?;
    for error in errors {
        assert!(matches!(error, Some(Error::Timeout(_) | Error::Mismatch(_))), "{error:?}");
    }
    Ok((0..gpus).try_for_each(still_works)?)
}

/// In checked mode, calls that differ are an error before anything is enqueued, the same on all ranks.
fn checked(gpus: usize) -> Result<(), Failed> {
    type Differs = fn(&Comm, &mut Slice<f32>) -> phalanx::Result<()>;
    let cases: [(Differs, Differs, &str, &str); 8] = [
        (
            |comm, buffer| comm.all_reduce_in_place(buffer, ReduceOp::Sum),
            |comm, buffer| comm.all_reduce_in_place(&mut buffer.slice_mut(1..), ReduceOp::Sum),
            "all_reduce(f32 × 1200, sum)",
            "all_reduce(f32 × 1199, sum)",
        ),
        (
            |comm, buffer| comm.all_reduce_in_place(buffer, ReduceOp::Sum),
            |comm, buffer| comm.all_reduce_in_place(buffer, ReduceOp::Max),
            "all_reduce(f32 × 1200, sum)",
            "all_reduce(f32 × 1200, max)",
        ),
        (
            |comm, buffer| comm.broadcast_in_place(buffer, 0),
            |comm, buffer| comm.broadcast_in_place(buffer, 1),
            "broadcast(f32 × 1200, root 0)",
            "broadcast(f32 × 1200, root 1)",
        ),
        (
            |comm, buffer| comm.all_reduce_in_place(buffer, ReduceOp::Sum),
            |comm, buffer| comm.broadcast_in_place(buffer, 0),
            "all_reduce(f32 × 1200, sum)",
            "broadcast(f32 × 1200, root 0)",
        ),
        (
            |comm, buffer| comm.send(buffer, 1),
            |comm, buffer| match comm.rank() {
                1 => comm.recv(&mut buffer.slice_mut(1..), 0),
                _ => comm.barrier(),
            },
            "send(f32 × 1200, to rank 1)",
            "recv(f32 × 1199, from rank 0)",
        ),
        // One end has nothing to enqueue.
        (
            |comm, buffer| comm.send(&buffer.slice(..0), 1),
            |comm, buffer| if comm.rank() == 1 { comm.recv(buffer, 0) } else { comm.barrier() },
            "send(f32 × 0, to rank 1)",
            "recv(f32 × 1200, from rank 0)",
        ),
        (
            |comm, buffer| comm.send(buffer, 1),
            |comm, buffer| match comm.rank() {
                1 => comm.recv(&mut buffer.slice_mut(..0), 0),
                _ => comm.barrier(),
            },
            "send(f32 × 1200, to rank 1)",
            "recv(f32 × 0, from rank 0)",
        ),
        (
            |comm, buffer| all_to_all_v(comm, buffer, |peer| if peer == 1 { 7 } else { 5 }),
            |comm, buffer| all_to_all_v(comm, buffer, |_| 5),
            "all_to_all_v(f32 × 7, to rank 1)",
            "all_to_all_v(f32 × 5, from rank 0)",
        ),
    ];
    for (first, others, ours, theirs) in cases {
        let builder = Comm::builder().backend(BACKEND).timeout(TIMEOUT).check(true);
        let errors = must(
            "run",
            builder.run(gpus, |comm| -> Result<Option<Error>, String> {
                let mut buffer = upload(&comm, &vec![1.0f32; 1200])?;
                let call = if comm.rank() == 0 { first } else { others };
                // A rank that is slow hears the verdict in a call before.
                let called = comm
                    .all_reduce_in_place(&mut buffer, ReduceOp::Sum)
                    .and_then(|()| all_to_all_v(&comm, &buffer, |_| 3))
                    .and_then(|()| call(&comm, &mut buffer));
                Ok(called.err())
            }),
        )?;
        for error in errors {
            let Some(Error::Mismatch(mismatch)) = error? else {
                return Err(format!("no mismatch of {ours}").into());
            };
            assert_eq!((&*mismatch.ours, &*mismatch.theirs), (ours, theirs));
            // Messages have numbers of their own.
            let sequence = if ours.starts_with("send") { 1 } else { 3 };
            assert_eq!((mismatch.other_rank, mismatch.rank, mismatch.sequence), (0, 1, sequence));
        }
    }
    Ok((0..gpus).try_for_each(still_works)?)
}

/// So many elements to each rank, and from each as many as to oneself.
fn all_to_all_v(comm: &Comm, buffer: &Slice<f32>, to: impl Fn(usize) -> usize) -> phalanx::Result<()> {
    let ranks = comm.world_size();
    let (to, from) = ((0..ranks).map(&to).collect::<Vec<_>>(), vec![to(comm.rank()); ranks]);
    let mut received = stream(comm).alloc_zeros::<f32>(from.iter().sum())?;
    comm.all_to_all_v(&buffer.slice(..to.iter().sum::<usize>()), &to, &mut received, &from)
}

/// Nothing of a group is started if one of its communicators has failed: the others' ranks do not wait for
/// what was called in it, nor take what is called afterwards for it.
fn group_with_a_failed_one(gpus: usize) -> Result<(), Failed> {
    // The end of a group of own kernels does not wait for the other ranks.
    group_with_one_that_fails(library_alone(), gpus, false)
}

/// The same, where it has failed before the group queues anything for it.
fn group_with_one_that_failed_before(gpus: usize) -> Result<(), Failed> {
    group_with_one_that_fails(Comm::builder().backend(BACKEND), gpus, true)
}

fn group_with_one_that_fails(builder: Builder, gpus: usize, before: bool) -> Result<(), Failed> {
    let together = Barrier::new(gpus);
    let errors = world_of(builder, gpus, |comm| -> Result<Option<Error>, String> {
        let split = || must("split", comm.split(Some(0), 0))?.ok_or("everybody is in it".to_owned());
        let (one, other) = (split()?, split()?);
        let (mut a, mut b) = (vec![1.0f32; 1000], vec![1.0f32; 1000]);
        let mut other = Some(other);
        let mut fail = || other.take_if(|_| comm.rank() == 1).map(Comm::abort);
        if before {
            fail();
        }
        together.wait();
        if comm.rank() > 0 {
            // Rank 0 waits for the others in both.
            std::thread::sleep(Duration::from_millis(300));
            fail();
            let since = Instant::now();
            let error = one.all_reduce_in_place(&mut a, ReduceOp::Sum).err();
            // It was told at once, and not when a call that frees a communicator is given up, after 2 s.
            assert!(since.elapsed() < Duration::from_millis(1500), "after {:?}", since.elapsed());
            return Ok(error);
        }
        let other = other.ok_or("only rank 1 has none")?;
        let grouped = phalanx::group(|g| {
            g.on(&one).all_reduce_in_place(&mut a, ReduceOp::Sum)?;
            g.on(&other).all_reduce_in_place(&mut b, ReduceOp::Sum)
        });
        let Err(Error::Aborted { rank: 1 }) = grouped else { return Err(format!("{grouped:?}")) };
        Ok(one.all_reduce_in_place(&mut a, ReduceOp::Sum).err())
    })?;
    for (rank, error) in errors.into_iter().enumerate() {
        // The first knows why.
        let blamed = usize::from(rank == 0);
        let error = error?;
        assert!(matches!(error, Some(Error::Aborted { rank }) if rank == blamed), "{error:?}");
    }
    Ok((0..gpus).try_for_each(still_works)?)
}

/// A rank that leaves before the others need it no more.
fn dropped_early(gpus: usize) -> Result<(), Failed> {
    let errors = world(gpus, |comm| {
        if comm.rank() == 0 {
            return None;
        }
        let mut buffer = upload(&comm, &vec![1.0f32; 100_000]).ok()?;
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()).err()
    })?;
    for error in errors.into_iter().skip(1) {
        let Some(Error::Peer(peer)) = error else { return Err(format!("{error:?}").into()) };
        assert_eq!((peer.rank, peer.event), (0, PeerEvent::Left), "{peer}");
    }
    Ok((0..gpus).try_for_each(still_works)?)
}

/// all_reduce after all_reduce, until something happens; reports the error, how long it took to notice and
/// whether the GPU works.
fn endless(comm: Comm, args: &[String]) -> Outcome {
    comm.set_timeout(TIMEOUT);
    let gpu = comm.gpu().ok_or("a GPU")?;
    let (len, at_once) = if args.contains(&AHEAD.into()) { (1000, 5000) } else { (elements(1 << 24), 20) };
    let mut buffer = upload(&comm, &vec![1.0f32; len])?;
    must("warm-up", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
    must("warm-up", comm.sync())?;
    phase("running");
    let (error, waited) = loop {
        let since = Instant::now();
        let result = (0..at_once).try_for_each(|_| comm.all_reduce_in_place(&mut buffer, ReduceOp::Max));
        if let Err(error) = result.and_then(|()| comm.sync()) {
            break (error, since.elapsed());
        }
    };
    phase("noticed");
    // The same verdict for every later call, and the buffer can be used and freed.
    let again = comm.all_reduce_in_place(&mut buffer, ReduceOp::Max).unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
    stream(&comm).clone_dtoh(&buffer).map_err(|e| e.to_string())?;
    drop(buffer);
    go_on(&comm, &error)?;
    drop(comm);
    still_works(gpu)?;
    Ok(format!("{}\t{error}", waited.as_secs_f64()))
}

/// The survivors have a new communicator, without the rank that was named.
fn go_on(comm: &Comm, error: &Error) -> Result<(), String> {
    let Error::Peer(lost) = error else { return Err(format!("not about a rank: {error}")) };
    let shrunk = comm.shrink();
    if comm.rank() == lost.rank {
        return match shrunk {
            Err(Error::LeftBehind { .. }) => Ok(()),
            other => Err(format!("the rank that was given up: {:?}", other.map(|comm| comm.world_size()))),
        };
    }
    let survivors = must("shrink", shrunk)?;
    assert_eq!(survivors.world_size(), comm.world_size() - 1);
    let own = upload(&survivors, &values::<f32>(survivors.rank(), 1000))?;
    let mut all = upload(&survivors, &vec![0.0f32; 1000 * survivors.world_size()])?;
    must("all_gather", survivors.all_gather(&own, &mut all))?;
    let gathered = download(&survivors, &all)?;
    expect("among the survivors", &gathered, |index| values::<f32>(index / 1000, 1000)[index % 1000])
}

/// Starts the endless scenario, and lets it run for a moment.
fn running(gpus: usize, prepare: impl FnOnce(Launch) -> Launch) -> Result<World, Failed> {
    let mut world = prepare(launch(SCENARIOS[0], gpus, "")).start()?;
    for rank in 0..gpus {
        world.await_phase(rank, "running")?;
    }
    std::thread::sleep(Duration::from_millis(300));
    Ok(world)
}

/// Rank 1 is killed, in processes that are prepared for something.
pub fn killed(gpus: usize, prepare: impl FnOnce(Launch) -> Launch) -> Result<(), Failed> {
    let mut world = running(gpus, prepare)?;
    world.inject(1, Fault::Kill)?;
    for ended in world.finish().into_iter().filter(|ended| ended.rank != 1) {
        let report = ended.outcome.map_err(|problem| format!("{problem}\n{}", ended.output))?;
        let (waited, error) = report.split_once('\t').ok_or("two fields")?;
        assert!(waited.parse::<f64>()? < TIMEOUT.as_secs_f64(), "{report}");
        assert!(error.contains("rank 1 is gone: its process ended"), "{report}");
    }
    Ok(())
}

fn stopped(gpus: usize, prepare: impl FnOnce(Launch) -> Launch) -> Result<(), Failed> {
    let mut world = running(gpus, prepare)?;
    world.inject(0, Fault::Stop)?;
    for rank in 1..gpus {
        world.await_phase(rank, "noticed")?;
    }
    world.inject(0, Fault::Continue)?;
    for ended in world.finish() {
        let report = ended.outcome.map_err(|problem| format!("{problem}\n{}", ended.output))?;
        let (waited, error) = report.split_once('\t').ok_or("two fields")?;
        assert!(waited.parse::<f64>()? < (TIMEOUT + 2 * SLACK).as_secs_f64(), "{report}");
        assert!(error.contains("rank 0") && error.contains("stopped"), "{report}");
    }
    Ok(())
}

/// The deadline of a job that is stopped as a whole, for longer.
const SHORT: Duration = Duration::from_secs(2);
const HELD_UP: Duration = Duration::from_secs(3);

/// An operation for which the others wait for rank 1 while the job is stopped.
fn held_up(comm: Comm, _: &[String]) -> Outcome {
    let mut buffer = upload(&comm, &values::<f32>(0, 1000))?;
    comm.barrier().map_err(|error| error.to_string())?;
    comm.set_timeout(SHORT);
    phase("working");
    if comm.rank() == 1 {
        std::thread::sleep(SHORT / 4);
    }
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    must("sync", comm.sync())?;
    done()
}

/// A job that is stopped as a whole, inside an operation, blames nobody when it goes on.
fn stopped_together(gpus: usize) -> Result<(), Failed> {
    let mut world = launch(SCENARIOS[2], gpus, "").start()?;
    (0..gpus).try_for_each(|rank| world.await_phase(rank, "working"))?;
    (0..gpus).try_for_each(|rank| world.inject(rank, Fault::Stop))?;
    std::thread::sleep(HELD_UP);
    // Those who wait go on first.
    for rank in (0..gpus).filter(|rank| *rank != 1).chain([1]) {
        world.inject(rank, Fault::Continue)?;
        std::thread::sleep(Duration::from_millis(100));
    }
    for ended in world.finish() {
        ended.outcome.map_err(|problem| format!("{problem}\n{}", ended.output))?;
    }
    Ok(())
}

/// A process that has to say that a rank never came.
fn missing_at_init(_: &[String]) -> Outcome {
    let since = Instant::now();
    let error = Comm::builder().timeout(TIMEOUT).init().map(drop).unwrap_err();
    assert!(since.elapsed() < TIMEOUT + SLACK, "after {:?}", since.elapsed());
    assert!(error.to_string().contains("have not come: [1]"), "{error}");
    done()
}

fn missing(gpus: usize) -> Result<(), Failed> {
    let launch = launch(SCENARIOS[1], gpus, "").without_rank(1);
    Ok(launch.reports().map(drop)?)
}
