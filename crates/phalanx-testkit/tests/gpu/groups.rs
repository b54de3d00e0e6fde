//! What a group has borrowed is dropped, or overwritten, as soon as Rust lets it be: while the group's
//! operations are in flight, and where the group came to nothing. Who gets the memory next has it for
//! himself.

use crate::streams::{hold_up, len, sum};
use crate::world::{DEADLINE, both, done, expect, must, stream, upload, value, values};
use libtest_mimic::Trial;
use phalanx::cudarc::driver::{CudaSlice, CudaStream};
use phalanx::nccl::Registration;
use phalanx::{Comm, Error, ReduceOp, Target, View};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("group_in_flight/alone", |comm, _| in_flight(&comm, Shape::Alone)),
    Scenario::rank("group_in_flight/two_communicators", |comm, _| in_flight(&comm, Shape::TwoCommunicators)),
    Scenario::rank("group_in_flight/nested", |comm, _| in_flight(&comm, Shape::Nested)),
    Scenario::rank("group_in_flight/error", |comm, _| broken_off(&comm, BreakOff::Error)),
    Scenario::rank("group_in_flight/panic", |comm, _| broken_off(&comm, BreakOff::Panic)),
    Scenario::rank("group_in_flight/inner_panic", |comm, _| inner_panic(&comm)),
    Scenario::rank("group_in_flight/not_all_started", |comm, _| not_all_started(&comm)),
    Scenario::rank("group_in_flight/peer_gone", |comm, _| peer_gone(&comm)),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect()
}

/// Two communicators of all ranks, and a stream for each.
struct Pair {
    comms: [Comm; 2],
    streams: [Arc<CudaStream>; 2],
}

impl Pair {
    fn of(comm: &Comm) -> Result<Pair, String> {
        let part = || must("split", comm.split(Some(0), 0))?.ok_or_else(|| "everybody is in it".to_owned());
        let new_stream = || stream(comm).context().new_stream().map_err(|e| e.to_string());
        Ok(Pair { comms: [part()?, part()?], streams: [new_stream()?, new_stream()?] })
    }

    fn views(&self) -> Result<[View<'_>; 2], String> {
        let [first, second] = [0, 1].map(|index| must("on", self.comms[index].on(&self.streams[index])));
        Ok([first?, second?])
    }

    fn sync(&self) -> Result<(), String> {
        self.comms.iter().try_for_each(|comm| must("sync", comm.sync()))
    }
}

#[derive(Clone, Copy)]
enum Shape {
    Alone,
    TwoCommunicators,
    Nested,
}

/// What the operations of a group deliver.
struct Delivered {
    sum: CudaSlice<f32>,
    most: CudaSlice<f32>,
    message: CudaSlice<f32>,
}

/// Starts a group that reads `own` twice and sends `message`; the stream of one of the operations is late.
fn start<B: Target<Elem = f32>>(
    shape: Shape,
    pair: &Pair,
    (own, sent): (&B, &B),
    to: &mut Delivered,
) -> Result<(), String> {
    let [a, b] = pair.views()?;
    let (rank, ranks) = (a.rank(), a.world_size());
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let Delivered { sum, most, message } = to;
    hold_up(&pair.streams[0])?;
    let started = match shape {
        Shape::Alone => a.group(|group| {
            group.all_reduce(own, sum, ReduceOp::Sum)?;
            group.all_reduce(own, most, ReduceOp::Max)?;
            group.send(sent, right)?;
            group.recv(message, left)
        }),
        Shape::TwoCommunicators => phalanx::group(|group| {
            group.on(&a).all_reduce(own, sum, ReduceOp::Sum)?;
            group.on(&b).all_reduce(own, most, ReduceOp::Max)?;
            group.on(&a).send(sent, right)?;
            group.on(&a).recv(message, left)
        }),
        Shape::Nested => a.group(|outer| {
            outer.all_reduce(own, sum, ReduceOp::Sum)?;
            b.group(|inner| inner.all_reduce(own, most, ReduceOp::Max))?;
            outer.send(sent, right)?;
            outer.recv(message, left)
        }),
    };
    must("group", started)
}

/// Memory that is handed out next, filled, which nobody else may write to.
fn hand_out_again(comm: &Comm) -> Result<[CudaSlice<f32>; 3], String> {
    let [first, second, third] = [(); 3].map(|()| upload(comm, &vec![f32::MIN; len()]));
    Ok([first?, second?, third?])
}

/// What the slice's stream reads, which cudarc puts behind the operations on others.
fn read(comm: &Comm, slice: &CudaSlice<f32>) -> Result<Vec<f32>, String> {
    stream(comm).clone_dtoh(slice).map_err(|e| e.to_string())
}

fn expect_unharmed(comm: &Comm, handed_out: &[CudaSlice<f32>]) -> Result<(), String> {
    handed_out.iter().try_for_each(|slice| {
        let got = read(comm, slice)?;
        expect("memory that was handed out again", &got, |_| f32::MIN)
    })
}

fn most(ranks: usize) -> impl Fn(usize) -> f32 {
    move |index| (0..ranks).map(|rank| value(rank, index)).max().unwrap_or(0) as f32
}

fn in_flight(comm: &Comm, shape: Shape) -> Outcome {
    let pair = Pair::of(comm)?;
    let nccl = comm.nccl().ok_or("NCCL")?;
    let compute = stream(comm);
    let slice = |content: &[f32]| upload(comm, content);
    drop_in_flight(comm, &pair, shape, &slice)?;
    overwrite_in_flight(comm, &pair, shape, &slice, |slice| compute.memset_zeros(slice))?;
    for registration in [Registration::Plain, Registration::Local, Registration::Symmetric] {
        let buffer = |content: &[f32]| {
            let mut buffer = must("alloc", nccl.alloc_as::<f32>(content.len(), registration))?;
            compute.memcpy_htod(content, &mut buffer.view_mut()).map_err(|e| e.to_string())?;
            Ok(buffer)
        };
        drop_in_flight(comm, &pair, shape, &buffer)?;
        overwrite_in_flight(comm, &pair, shape, &buffer, |buffer| {
            compute.memset_zeros(&mut buffer.view_mut())
        })?;
    }
    pair.sync()?;
    done()
}

type Make<'a, B> = &'a dyn Fn(&[f32]) -> Result<B, String>;

/// What was sent is dropped; what was received is, too, the second time.
fn drop_in_flight<B: Target<Elem = f32>>(
    comm: &Comm,
    pair: &Pair,
    shape: Shape,
    make: Make<'_, B>,
) -> Result<(), String> {
    for receives in [true, false] {
        let own = values::<f32>(comm.rank(), len());
        let (lent, sent) = (make(&own)?, make(&own)?);
        let mut delivered = delivered_to(comm)?;
        start(shape, pair, (&lent, &sent), &mut delivered)?;
        drop((lent, sent));
        let results = if receives { Some(delivered) } else { None };
        let handed_out = hand_out_again(comm)?;
        if let Some(delivered) = results {
            expect_delivered(comm, &delivered)?;
        }
        pair.sync()?;
        expect_unharmed(comm, &handed_out)?;
    }
    Ok(())
}

/// What was sent is overwritten on the slice's stream.
fn overwrite_in_flight<B: Target<Elem = f32>, E: std::fmt::Display>(
    comm: &Comm,
    pair: &Pair,
    shape: Shape,
    make: Make<'_, B>,
    overwrite: impl Fn(&mut B) -> Result<(), E>,
) -> Result<(), String> {
    let own = values::<f32>(comm.rank(), len());
    let (mut lent, mut sent) = (make(&own)?, make(&own)?);
    let mut delivered = delivered_to(comm)?;
    start(shape, pair, (&lent, &sent), &mut delivered)?;
    for buffer in [&mut lent, &mut sent] {
        overwrite(buffer).map_err(|e| e.to_string())?;
    }
    expect_delivered(comm, &delivered)
}

fn delivered_to(comm: &Comm) -> Result<Delivered, String> {
    let empty = || stream(comm).alloc_zeros::<f32>(len()).map_err(|e| e.to_string());
    Ok(Delivered { sum: empty()?, most: empty()?, message: empty()? })
}

fn expect_delivered(comm: &Comm, delivered: &Delivered) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let left = (rank + ranks - 1) % ranks;
    expect("the sum", &read(comm, &delivered.sum)?, sum(ranks))?;
    expect("the largest", &read(comm, &delivered.most)?, most(ranks))?;
    expect("the message", &read(comm, &delivered.message)?, |index| value(left, index) as f32)
}

#[derive(Clone, Copy, PartialEq)]
enum BreakOff {
    Error,
    Panic,
}

/// A group's closure ends early, and its caller with it, whose buffers are dropped: those of a group inside
/// of it, whose operations are in flight, and its own, whose operations are never started.
fn broken_off(comm: &Comm, by: BreakOff) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let pair = Pair::of(comm)?;
    let [a, b] = pair.views()?;
    let own = values::<f32>(rank, len());
    for _ in 0..2 {
        let mut untouched = upload(comm, &own)?;
        let mut summed = upload(comm, &own)?;
        let caller = |untouched: &mut CudaSlice<f32>, summed: &mut CudaSlice<f32>| {
            let [lent, outer] = [upload(comm, &own)?, upload(comm, &own)?];
            let [mut written, mut received] = [upload(comm, &own)?, upload(comm, &own)?];
            hold_up(&pair.streams[1])?;
            let group = phalanx::group(|group| {
                group.on(&a).all_reduce(&outer, untouched, ReduceOp::Prod)?;
                group.on(&a).recv(&mut received, (rank + 1) % ranks)?;
                b.group(|inner| {
                    inner.all_reduce(&lent, summed, ReduceOp::Sum)?;
                    inner.all_reduce_in_place(&mut written, ReduceOp::Max)
                })?;
                match by {
                    BreakOff::Error => group.on(&a).send(&outer, ranks),
                    BreakOff::Panic => resume_unwind(Box::new("on purpose")),
                }
            });
            group.map_err(|error| error.to_string())
        };
        let ended = catch_unwind(AssertUnwindSafe(|| caller(&mut untouched, &mut summed)));
        match (by, ended) {
            (BreakOff::Error, Ok(Err(error))) if error.contains("does not exist") => {}
            (BreakOff::Panic, Err(payload)) if payload.is::<&str>() => {}
            (_, other) => return Err(format!("{other:?}")),
        }
        let handed_out = hand_out_again(comm)?;
        expect("what had been started", &read(comm, &summed)?, sum(ranks))?;
        expect("what had not", &read(comm, &untouched)?, |index| own[index])?;
        pair.sync()?;
        expect_unharmed(comm, &handed_out)?;
        // No level of a group is left open.
        must("afterwards", a.all_reduce_in_place(&mut untouched, ReduceOp::Sum))?;
        expect("the sum afterwards", &read(comm, &untouched)?, sum(ranks))?;
    }
    done()
}

/// A group inside of another panics, which the outer one catches, and goes on.
fn inner_panic(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let pair = Pair::of(comm)?;
    let [a, b] = pair.views()?;
    let own = values::<f32>(rank, len());
    let mut summed = upload(comm, &own)?;
    let mut handed_out = None;
    let group = a.group(|outer| {
        outer.all_reduce_in_place(&mut summed, ReduceOp::Sum)?;
        let inner = catch_unwind(AssertUnwindSafe(|| {
            let lent = upload(comm, &own).expect("upload");
            let mut written = upload(comm, &own).expect("upload");
            b.group(|inner| -> phalanx::Result<()> {
                inner.all_reduce(&lent, &mut written, ReduceOp::Sum)?;
                resume_unwind(Box::new("on purpose"))
            })
        }));
        assert!(inner.is_err_and(|payload| payload.is::<&str>()));
        handed_out = Some(hand_out_again(comm).expect("upload"));
        Ok(())
    });
    must("the outer group", group)?;
    expect("the sum", &read(comm, &summed)?, sum(ranks))?;
    pair.sync()?;
    expect_unharmed(comm, &handed_out.ok_or("set above")?)?;
    done()
}

/// One of two communicators refuses its part at the group's end: whether the other's has been started or not,
/// its buffers can be dropped.
fn not_all_started(comm: &Comm) -> Outcome {
    let pair = Pair::of(comm)?;
    let [a, b] = pair.views()?;
    let own = values::<f32>(comm.rank(), len());
    match pair.comms[1].nccl().ok_or("NCCL")?.suspend() {
        Err(Error::MissingFunction(_)) => return Ok("the library cannot suspend".into()),
        suspended => must("suspend", suspended)?,
    }
    for _ in 0..2 {
        let lent = upload(comm, &own)?;
        let [mut written, mut refused] = [upload(comm, &own)?, upload(comm, &own)?];
        hold_up(&pair.streams[0])?;
        let group = phalanx::group(|group| {
            group.on(&a).all_reduce(&lent, &mut written, ReduceOp::Sum)?;
            group.on(&b).all_reduce_in_place(&mut refused, ReduceOp::Sum)
        });
        drop((lent, written, refused));
        let error = group.expect_err("of a communicator that is suspended").to_string();
        assert!(error.contains("suspended"), "{error}");
        let handed_out = hand_out_again(comm)?;
        must("sync", a.sync())?;
        expect_unharmed(comm, &handed_out)?;
    }
    must("resume", pair.comms[1].nccl().ok_or("NCCL")?.resume())?;
    let mut summed = upload(comm, &own)?;
    must("afterwards", b.all_reduce_in_place(&mut summed, ReduceOp::Sum))?;
    expect("the sum afterwards", &read(comm, &summed)?, sum(comm.world_size()))?;
    done()
}

/// A rank leaves instead of coming to the group; the others have dropped what they gave it before they are
/// told.
fn peer_gone(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if ranks == 1 {
        return done();
    }
    let pair = Pair::of(comm)?;
    let own = values::<f32>(rank, len());
    let mut delivered = delivered_to(comm)?;
    // The library has connected the ranks: what comes next is enqueued without waiting for them.
    start(Shape::TwoCommunicators, &pair, (&upload(comm, &own)?, &upload(comm, &own)?), &mut delivered)?;
    expect_delivered(comm, &delivered)?;
    if rank == 0 {
        let [first, second] = pair.comms;
        first.abort();
        second.abort();
    } else {
        let (lent, sent) = (upload(comm, &own)?, upload(comm, &own)?);
        // Enqueued, or too late for that.
        let started = start(Shape::TwoCommunicators, &pair, (&lent, &sent), &mut delivered);
        drop((lent, sent, delivered));
        let handed_out = hand_out_again(comm)?;
        // Rank 0 aborts one after the other.
        let since = Instant::now();
        while pair.comms.iter().any(|comm| comm.sync().is_ok()) {
            assert!(since.elapsed() < DEADLINE / 4, "a communicator has not failed, after {started:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        expect_unharmed(comm, &handed_out)?;
    }
    let mut summed = upload(comm, &own)?;
    must("the others' communicator", comm.all_reduce_in_place(&mut summed, ReduceOp::Sum))?;
    expect("the sum afterwards", &read(comm, &summed)?, sum(ranks))?;
    done()
}
