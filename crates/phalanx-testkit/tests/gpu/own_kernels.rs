//! phalanx's own kernels under NCCL's backend: on the machine's GPUs if a trial has enough of them, else on emulated ones
//! with the emulator's model of the kernels.
//!
//! Here are the cases that only they have: many ranks, every alignment, long blocks, graphs, crossed orders, images
//! for other GPUs. The contract suite has all types and reductions (`nccl/own/`). Trials of this suite that are not
//! about NCCL alone run again with own kernels: `own_kernels/again/`.

use crate::failures::SLACK;
use crate::world::{done, download, must, new_stream, stream};
use crate::{
    communicators, exits, failures, freeing, groups, init_all, kept_errors, memory, messages, signals,
    streams, usage, watchdog,
};
use libtest_mimic::{Failed, Trial};
use phalanx::cudarc::driver::result::mem_get_info;
use phalanx::cudarc::driver::sys::{CUresult, cuStreamQuery};
use phalanx::cudarc::driver::{CudaSlice, DeviceRepr};
use phalanx::nccl::{Config, GpuAlgorithm, Graph};
use phalanx::{BackendKind, Comm, PreMulSum, ReduceOp, bf16};
use phalanx_testkit::emulated::{EMULATED, Emulated, on_own_kernels};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::random::{self, Random};
use phalanx_testkit::reference::{self, Combine};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("own_kernels/shapes", shapes),
    Scenario::rank("own_kernels/long", long),
    Scenario::rank("own_kernels/graphs", graphs),
    Scenario::rank("own_kernels/messages", messages_of_all_sizes),
    Scenario::rank("own_kernels/exchanges", exchanges),
    Scenario::rank("own_kernels/messages_on_streams", messages_on_streams),
    Scenario::rank("own_kernels/messages_beside_the_library", messages_beside_the_library),
    Scenario::rank("own_kernels/groups_beside_the_library", groups_beside_the_library),
    Scenario::rank("own_kernels/streams", on_streams),
    Scenario::rank("own_kernels/synced", synced),
    Scenario::rank("own_kernels/crossed", crossed),
    Scenario::rank("own_kernels/groups", in_groups),
    Scenario::rank("own_kernels/aborted_graph", aborted_graph),
    Scenario::rank("own_kernels/memory", memory_given_back),
    Scenario::rank("own_kernels/memory_of_many", memory_of_many),
    Scenario::process("own_kernels/setting", |_| setting()),
];

/// A trial's scenario, and its worlds: an algorithm, the kind of the ranks, and their number.
type Worlds = (&'static str, &'static [(&'static str, &'static str, usize)]);

const WORLDS: [Worlds; 14] = [
    (
        "shapes",
        &[
            ("ll", "threads", 2),
            ("ll128", "processes", 2),
            ("two_hops_ll", "threads", 4),
            ("two_hops_ll128", "processes", 4),
            ("auto", "threads", 8),
            ("ll", "threads", 16),
            ("two_hops_ll128", "threads", 16),
        ],
    ),
    (
        "long",
        &[
            ("ll", "threads", 2),
            ("ll128", "processes", 2),
            ("ll128", "threads", 3),
            ("two_hops_ll", "threads", 3),
        ],
    ),
    ("graphs", &[("ll", "threads", 2), ("ll128", "processes", 3), ("auto", "threads", 4)]),
    (
        "messages",
        &[("ll", "threads", 2), ("auto", "processes", 2), ("ll128", "processes", 3), ("auto", "threads", 4)],
    ),
    ("exchanges", &[("ll", "processes", 2), ("ll128", "threads", 3), ("auto", "threads", 4)]),
    ("messages_on_streams", &[("auto", "threads", 2), ("ll128", "processes", 2), ("auto", "threads", 3)]),
    ("messages_beside_the_library", &[("auto", "threads", 2), ("auto", "processes", 2)]),
    ("groups_beside_the_library", &[("auto", "threads", 3), ("ll128", "processes", 3)]),
    ("streams", &[("ll", "processes", 2), ("ll128", "threads", 4)]),
    ("synced", &[("auto", "threads", 2), ("auto", "processes", 2)]),
    ("crossed", &[("ll", "threads", 2), ("ll128", "threads", 4), ("ll", "processes", 3)]),
    ("groups", &[("ll", "threads", 3), ("ll128", "processes", 2)]),
    ("aborted_graph", &[("ll", "threads", 2), ("ll128", "processes", 3)]),
    ("memory", &[("ll", "threads", 2), ("ll", "processes", 3)]),
];

pub const DEADLINE: Duration = Duration::from_secs(120);

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (scenario, worlds) in WORLDS {
        for (algorithm, kind, ranks) in worlds {
            let name = format!("own_kernels/{scenario}/{algorithm}/{kind}/{ranks}");
            trials.push(Trial::test(name, move || {
                Ok(on_own_kernels(algorithm, *ranks, launch(scenario, kind, *ranks)).map(drop)?)
            }));
        }
    }
    // PTX, and cubins where there are some.
    for capability in ["7.5", "8.0", "8.6", "10.0"] {
        trials.push(Trial::test(format!("own_kernels/images/{capability}"), move || {
            let emulated = Emulated::new()?.own_kernels("ll").set("COMPUTE_CAPABILITY", capability);
            perform(&emulated, launch("groups", "threads", 2))
        }));
    }
    trials.push(Trial::test("own_kernels/another_algorithm", another_algorithm));
    trials.push(Trial::test("own_kernels/old_driver", old_driver));
    trials.push(Trial::test("own_kernels/memory_of_many", || {
        // Few channels: they are what takes NCCL long to make.
        let launch =
            launch("memory_of_many", "processes", 2).env("NCCL_MAX_CTAS", "1").env("NCCL_MIN_CTAS", "1");
        Ok(on_own_kernels("ll", 2, launch).map(drop)?)
    }));
    // The library enqueues its part in a thread of its own, later.
    trials.push(Trial::test("own_kernels/messages_beside_the_library/non_blocking", || {
        let launch = launch("messages_beside_the_library", "threads", 2).env("NCCL_COMM_BLOCKING", "0");
        Ok(on_own_kernels("auto", 2, launch).map(drop)?)
    }));
    trials.push(Trial::test("own_kernels/setting", || {
        perform(
            &Emulated::new()?.own_kernels("nccl"),
            Launch::alone("own_kernels/setting").deadline(DEADLINE),
        )
    }));
    trials.push(Trial::test("own_kernels/not_opened", not_opened));
    trials.push(Trial::test("own_kernels/group_fails_before_it_frees", group_fails_before_it_frees));
    trials
}

fn launch(scenario: &str, kind: &str, ranks: usize) -> Launch {
    let name = format!("own_kernels/{scenario}");
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name).expect("a scenario");
    let launch =
        Launch::new(scenario.name, ranks).arg(kind).deadline(DEADLINE).env("PHALANX_BACKEND", "nccl");
    if kind == "threads" { launch.on_threads() } else { launch }
}

fn perform(emulated: &Emulated, launch: Launch) -> Result<(), Failed> {
    Ok(emulated.launch(launch).reports().map(drop)?)
}

/// A rank that was told something else: NCCL carries all out.
fn another_algorithm() -> Result<(), Failed> {
    let emulated = Emulated::new()?.own_kernels("ll");
    let launch = emulated.launch(launch("groups", "processes", 3));
    Ok(launch.env_of(1, "PHALANX_GPU_ALGORITHM", Some("ll128")).reports().map(drop)?)
}

/// A driver that cannot share memory between processes: NCCL carries all out.
fn old_driver() -> Result<(), Failed> {
    let emulated = Emulated::without(&["cuIpcGetMemHandle"])?.own_kernels("ll");
    perform(&emulated, launch("groups", "processes", 2))
}

/// One rank cannot open a peer's memory, and the others have: nobody frees what is open, and NCCL carries all out.
fn not_opened() -> Result<(), Failed> {
    let emulated = Emulated::new()?.own_kernels("ll");
    let launch = emulated.launch(launch("groups", "processes", 3));
    Ok(launch.env_of(1, "EMULATED_FAIL", Some("cuIpcOpenMemHandle_v2:2:201")).reports().map(drop)?)
}

/// These trials of the suite, with own kernels, each in a process of its own.
pub fn again(names: impl Iterator<Item = String>) -> Vec<Trial> {
    const ALGORITHMS: [&str; 4] = ["ll", "ll128", "auto", "two_hops_ll128"];
    let trial = |(place, name): (usize, String)| {
        let algorithm = ALGORITHMS[place % ALGORITHMS.len()];
        // In one word, so that by default these do not run in place of NCCL's own trials.
        let word = name.replace('/', "-");
        Trial::test(format!("own_kernels/again/{algorithm}/{word}"), move || {
            passes(&Emulated::new()?.own_kernels(algorithm), &name)
        })
    };
    // Emulated GPUs have no 8 GiB for a large one.
    let is_tried = |name: &String| !OF_NCCL.contains(&&**name) && !name.ends_with("/large");
    names.filter(is_tried).enumerate().map(trial).collect()
}

/// Whether a trial passes on these emulated GPUs, in a process of its own.
fn passes(emulated: &Emulated, name: &str) -> Result<(), Failed> {
    let mut suite = emulated.command(std::env::current_exe()?);
    let ended = suite.args(["--exact", name]).env(EMULATED, "1").output()?;
    let (out, err) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    match ended.status.success() && out.contains("1 passed") {
        true => Ok(()),
        false => Err(format!("{}: {out}{err}", ended.status).into()),
    }
}

/// A rank that frees a failed communicator waits for the GPUs of ranks that may wait for it in another one. So all of a group's
/// communicators fail before any is freed.
fn group_fails_before_it_frees() -> Result<(), Failed> {
    let emulated = Emulated::new()?.own_kernels("auto").set("DEVICES", 2).set("DESTROY", "slow");
    passes(&emulated, "threads/group_with_one_that_failed_before")
}

/// Modules whose trials run again.
pub const OF_THE_SUITE: [fn(usize) -> Vec<Trial>; 13] = [
    messages::trials,
    communicators::trials,
    freeing::trials,
    exits::trials,
    streams::trials,
    groups::trials,
    memory::trials,
    kept_errors::trials,
    init_all::trials,
    failures::trials,
    watchdog::trials,
    signals::trials,
    usage::trials,
];

/// Trials of what only NCCL does: a group's end waits for all ranks.
const OF_NCCL: [&str; 2] = ["threads/absent_in_a_group", "threads/group_with_a_failed_one"];

/// A part of GPU memory that begins so many elements behind an aligned address.
fn shifted<T: Number + DeviceRepr>(comm: &Comm, values: &[T], shift: usize) -> Result<CudaSlice<T>, String> {
    let mut all = vec![T::from_small(7); shift];
    all.extend(values);
    all.extend(vec![T::from_small(7); 3]);
    stream(comm).clone_htod(&all).context(|| "upload".into())
}

/// The values in that part. Nothing around them was written to.
fn unshifted<T: Number + DeviceRepr>(
    comm: &Comm,
    slice: &CudaSlice<T>,
    shift: usize,
) -> Result<Vec<T>, String> {
    let all = download(comm, slice)?;
    let (before, rest) = all.split_at(shift);
    let (values, behind) = rest.split_at(rest.len() - 3);
    let is_kept = before.iter().chain(behind).all(|value| value.same(T::from_small(7)));
    if is_kept { Ok(values.to_vec()) } else { Err("it wrote beside its buffer".into()) }
}

fn same<T: Number>(what: impl std::fmt::Display, got: &[T], expected: &[T]) -> Result<(), String> {
    crate::world::expect(what, got, |index| expected[index])
}

/// Blocks of every alignment and around the sizes of steps, against the reference: its bits, in rank order.
fn shapes(comm: Comm, _: &[String]) -> Outcome {
    let shapes = [(1, 3), (3, 129), (1, 1000), (0, 1), (2, 120), (0, 128), (0, 4099)];
    if comm.world_size() > 8 {
        // They share this machine's cores.
        shapes[..3].iter().try_for_each(|(shift, len)| shape::<f32>(&comm, *len, *shift))?;
        return done();
    }
    for (shift, len) in shapes {
        shape::<f32>(&comm, len, shift)?;
        shape::<bf16>(&comm, len, shift)?;
        shape::<u8>(&comm, len, shift)?;
    }
    shape::<i64>(&comm, 20_000, 1)?;
    shape::<i16>(&comm, 70_001, 1)?;
    done()
}

fn shape<T: Number + DeviceRepr>(comm: &Comm, len: usize, shift: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = len % ranks;
    let what = |operation: &str| format!("{operation} of {len} {} at {shift}", T::DTYPE);
    let inputs: Vec<Vec<T>> = (0..ranks).map(|rank| random::values((len + rank) as u64, len)).collect();
    let blocks: Vec<Vec<T>> =
        (0..ranks).map(|rank| random::values((len + rank) as u64, len * ranks)).collect();
    let part = shift..shift + len;
    let wide = shift..shift + len * ranks;
    let send = shifted(comm, &inputs[rank], shift)?;
    let all = shifted(comm, &blocks[rank], shift)?;
    let empty = |len: usize| shifted(comm, &vec![T::from_small(3); len], shift);
    for combine in Combine::<T>::all(ranks) {
        let expected = &reference::all_reduce(&inputs, &combine)[rank];
        let mut recv = empty(len)?;
        let (from, mut to) = (send.slice(part.clone()), recv.slice_mut(part.clone()));
        must("all_reduce", comm.all_reduce(&from, &mut to, combine.reduction(rank)))?;
        same(what("all_reduce"), &unshifted(comm, &recv, shift)?, expected)?;
        let mut own = shifted(comm, &inputs[rank], shift)?;
        let mut buffer = own.slice_mut(part.clone());
        must("in place", comm.all_reduce_in_place(&mut buffer, combine.reduction(rank)))?;
        same(what("all_reduce in place"), &unshifted(comm, &own, shift)?, expected)?;
        let mut recv = empty(len)?;
        let (from, mut to) = (all.slice(wide.clone()), recv.slice_mut(part.clone()));
        must("reduce_scatter", comm.reduce_scatter(&from, &mut to, combine.reduction(rank)))?;
        let expected = &reference::reduce_scatter(&blocks, &vec![len; ranks], &combine)[rank];
        same(what("reduce_scatter"), &unshifted(comm, &recv, shift)?, expected)?;
    }
    let mut gathered = empty(len * ranks)?;
    let (from, mut to) = (send.slice(part.clone()), gathered.slice_mut(wide.clone()));
    must("all_gather", comm.all_gather(&from, &mut to))?;
    same(what("all_gather"), &unshifted(comm, &gathered, shift)?, &inputs.concat())?;
    let mut recv = empty(len)?;
    let (from, mut to) = (send.slice(part.clone()), recv.slice_mut(part.clone()));
    must("broadcast", comm.broadcast(&from, &mut to, root))?;
    same(what("broadcast"), &unshifted(comm, &recv, shift)?, &inputs[root])?;
    let mut exchanged = empty(len * ranks)?;
    let (from, mut to) = (all.slice(wide.clone()), exchanged.slice_mut(wide));
    must("all_to_all", comm.all_to_all(&from, &mut to))?;
    let theirs: Vec<T> =
        blocks.iter().flat_map(|block| block[rank * len..(rank + 1) * len].to_vec()).collect();
    same(what("all_to_all"), &unshifted(comm, &exchanged, shift)?, &theirs)
}

/// More steps of a lane than its FIFO has slots, in each direction: credits, and the step of the factors before.
fn long(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let len = 1_300_003;
    let inputs: Vec<Vec<f32>> = (0..ranks).map(|rank| random::values(rank as u64, len)).collect();
    let send = shifted(&comm, &inputs[rank], 0)?;
    let factors: Vec<f32> = (0..ranks).map(|rank| rank as f32 + 2.0).collect();
    // As many steps of each lane as its FIFO has slots, LL's and LL128's: with the factors' one more.
    for len in [4 * 128 * 512 / 4, 4 * 1024 * 960 / 4] {
        let mut recv = shifted(&comm, &vec![0.0; len], 0)?;
        let factor = PreMulSum(factors[rank]);
        must("reduce", comm.reduce(&send.slice(..len), &mut recv.slice_mut(..len), factor, 0))?;
        if rank == 0 {
            let inputs: Vec<_> = inputs.iter().map(|input| input[..len].to_vec()).collect();
            let expected = reference::combined(&inputs, &Combine::PreMulSum(factors.clone()));
            same("reduce", &unshifted(&comm, &recv, 0)?, &expected)?;
        }
    }
    for _ in 0..2 {
        let mut recv = shifted(&comm, &vec![0.0; len], 0)?;
        for root in [0, ranks - 1] {
            must("broadcast", comm.broadcast(&send.slice(..len), &mut recv.slice_mut(..len), root))?;
            same("broadcast", &unshifted(&comm, &recv, 0)?, &inputs[root])?;
            let factor = PreMulSum(factors[rank]);
            must("reduce", comm.reduce(&send.slice(..len), &mut recv.slice_mut(..len), factor, root))?;
            if rank == root {
                let expected = reference::combined(&inputs, &Combine::PreMulSum(factors.clone()));
                same("reduce", &unshifted(&comm, &recv, 0)?, &expected)?;
            }
        }
        must(
            "all_reduce",
            comm.all_reduce(&send.slice(..len), &mut recv.slice_mut(..len), PreMulSum(factors[rank])),
        )?;
        let expected = reference::combined(&inputs, &Combine::PreMulSum(factors.clone()));
        same("all_reduce", &unshifted(&comm, &recv, 0)?, &expected)?;
    }
    done()
}

/// Replayed graphs with calls between the replays.
fn graphs(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let zeroes = |len: usize| stream(&comm).clone_htod(&vec![0u32; len]).context(|| "upload".into());
    let buffers = (zeroes(3000)?, zeroes(100 * ranks)?, zeroes(70_000)?);
    let mut graph = must(
        "capture",
        Graph::capture(&comm, buffers, |group, (sum, all, long)| {
            group.all_reduce_in_place(sum, ReduceOp::Sum)?;
            group.all_gather_in_place(all)?;
            group.broadcast_in_place(long, 1)
        }),
    )?;
    let mut between = zeroes(5000)?;
    for round in 0..6u32 {
        let value = |rank: usize| round * 100 + rank as u32 + 1;
        let total: u32 = (0..ranks).map(value).sum();
        let (sum, all, long) = graph.buffers_mut();
        let put = |slice: &mut CudaSlice<u32>| {
            let values = vec![value(rank); slice.len()];
            stream(&comm).memcpy_htod(&values, slice).context(|| "upload".into())
        };
        put(sum).and_then(|()| put(all)).and_then(|()| put(long)).and_then(|()| put(&mut between))?;
        must("launch", graph.launch())?;
        if round % 2 == 0 {
            must("between", comm.all_reduce_in_place(&mut between, ReduceOp::Sum))?;
            same("between", &download(&comm, &between)?, &[total; 5000])?;
        }
        let (sum, all, long) = graph.buffers();
        same("sum", &download(&comm, sum)?, &[total; 3000])?;
        let gathered: Vec<u32> = (0..ranks).flat_map(|rank| vec![value(rank); 100]).collect();
        same("all", &download(&comm, all)?, &gathered)?;
        same("broadcast", &download(&comm, long)?, &[value(1); 70_000])?;
    }
    done()
}

/// Messages around the sizes of steps, and longer than a FIFO, each way for itself and both at once.
fn messages_of_all_sizes(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for (len, shift) in [(1, 3), (959, 1), (961, 2), (4099, 0), (100_000, 1), (3_000_000, 0)] {
        let values = |from: usize| random::values::<u8>((len + from) as u64, len);
        let what = |how: &str| format!("{len} bytes at {shift}, {how}");
        let part = shift..shift + len;
        let send = shifted(&comm, &values(rank), shift)?;
        // In a group: both ways at once.
        let mut recv = shifted(&comm, &vec![3u8; len], shift)?;
        let (from, mut to) = (send.slice(part.clone()), recv.slice_mut(part.clone()));
        must(
            "ring",
            comm.group(|g| {
                g.send(&from, next)?;
                g.recv(&mut to, before)
            }),
        )?;
        same(what("both ways"), &unshifted(&comm, &recv, shift)?, &values(before))?;
        // One after another: rank 0 sends first, and the others receive first.
        let mut recv = shifted(&comm, &vec![3u8; len], shift)?;
        for sends in [rank == 0, rank != 0] {
            if sends {
                must("send", comm.send(&send.slice(part.clone()), next))?;
            } else {
                must("recv", comm.recv(&mut recv.slice_mut(part.clone()), before))?;
            }
        }
        same(what("one way"), &unshifted(&comm, &recv, shift)?, &values(before))?;
        // A collective between.
        let mut sum = shifted(&comm, &[rank as u8 + 1], 0)?;
        must("all_reduce", comm.all_reduce_in_place(&mut sum.slice_mut(..1), ReduceOp::Sum))?;
        same(what("between"), &unshifted(&comm, &sum, 0)?, &[(ranks * (ranks + 1) / 2) as u8])?;
    }
    done()
}

/// Messages of a group on several streams, each longer than the FIFOs: nothing waits for what is sent or received on another.
fn messages_on_streams(comm: Comm, _: &[String]) -> Outcome {
    const LEN: usize = 3_000_000;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let streams: Vec<_> = (0..2).map(|_| new_stream(&comm)).collect::<Result<_, _>>()?;
    let on: Vec<_> = streams.iter().map(|stream| must("on", comm.on(stream))).collect::<Result<_, _>>()?;
    let values = |from: usize, number: usize| random::values::<u8>((10 * from + number) as u64, LEN);
    let upload =
        |number: usize, values: &[u8]| streams[number].clone_htod(values).context(|| "upload".into());
    for round in 0..3 {
        let sent = [upload(0, &values(rank, round))?, upload(1, &values(rank, round + 1))?];
        let mut received = [upload(0, &[3; LEN])?, upload(1, &[3; LEN])?];
        let grouped = phalanx::group(|g| {
            for (on, (from, to)) in on.iter().zip(sent.iter().zip(&mut received)) {
                g.on(on).send(from, next)?;
                g.on(on).recv(to, before)?;
            }
            Ok(())
        });
        must("group", grouped)?;
        for (number, buffer) in received.iter().enumerate() {
            let got = streams[number].clone_dtoh(buffer).context(|| "download".into())?;
            same(format!("stream {number}, round {round}"), &got, &values(before, round + number))?;
        }
    }
    done()
}

/// A group on two streams, of which NCCL carries a part out: own kernels and NCCL do not wait for each other. Rank 1 makes the messages one by
/// one.
fn messages_beside_the_library(comm: Comm, _: &[String]) -> Outcome {
    const LONG: usize = 40 << 20;
    let rank = comm.rank();
    let streams: Vec<_> = (0..2).map(|_| new_stream(&comm)).collect::<Result<_, _>>()?;
    let on: Vec<_> = streams.iter().map(|stream| must("on", comm.on(stream))).collect::<Result<_, _>>()?;
    let values = |from: usize, len: usize| random::values::<u8>(from as u64, len);
    let upload =
        |number: usize, values: &[u8]| streams[number].clone_htod(values).context(|| "upload".into());
    for round in 0..3 {
        let short = upload(0, &values(rank, 1000))?;
        let mut received = upload(1, &[3; 1000])?;
        if rank == 0 {
            let long = upload(1, &values(round + 7, LONG))?;
            let grouped = phalanx::group(|g| {
                g.on(&on[0]).send(&short, 1)?;
                g.on(&on[1]).recv(&mut received, 1)?;
                g.on(&on[1]).send(&long, 1)
            });
            must("group", grouped)?;
        } else {
            let mut long = upload(1, &vec![3; LONG])?;
            must("long", on[1].recv(&mut long, 0))?;
            must("send", on[1].send(&short, 0))?;
            must("recv", on[1].recv(&mut received, 0))?;
            let got = streams[1].clone_dtoh(&long).context(|| "download".into())?;
            same(format!("the long one, round {round}"), &got, &values(round + 7, LONG))?;
        }
        let got = streams[1].clone_dtoh(&received).context(|| "download".into())?;
        same(format!("the short one, round {round}"), &got, &values(1 - rank, 1000))?;
    }
    done()
}

/// A group of exchanges of which NCCL carries a part out, with a sum between them by an own kernel.
fn groups_beside_the_library(comm: Comm, _: &[String]) -> Outcome {
    const SUM: usize = 50_000;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // On rank 2 own kernels carry all out.
    let count = |from: usize, to: usize| if (from, to) == (0, 1) { 33 << 20 } else { 1000 };
    let counts = |of: &dyn Fn(usize) -> usize| (0..ranks).map(of).collect::<Vec<_>>();
    let (sends, receives) = (counts(&|to| count(rank, to)), counts(&|from| count(from, rank)));
    let block = |seed: usize, from: usize, to: usize| {
        random::values::<u8>((seed * 100 + from * 10 + to) as u64, count(from, to))
    };
    let input = |seed: usize, rank: usize| random::values::<u32>((seed * 100 + rank) as u64, SUM);
    let upload = |values: &[u8]| stream(&comm).clone_htod(values).context(|| "upload".into());
    for round in 0..2 {
        let seeds = [2 * round, 2 * round + 1];
        let sent =
            seeds.map(|seed| upload(&(0..ranks).flat_map(|to| block(seed, rank, to)).collect::<Vec<_>>()));
        let [first, second] = sent;
        let (first, second) = (first?, second?);
        let zeroes = || upload(&vec![0; receives.iter().sum()]);
        let (mut to_first, mut to_second) = (zeroes()?, zeroes()?);
        let mut sum = stream(&comm).clone_htod(&input(round, rank)).context(|| "upload".into())?;
        let grouped = comm.group(|g| {
            g.all_to_all_v(&first, &sends, &mut to_first, &receives)?;
            g.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
            g.all_to_all_v(&second, &sends, &mut to_second, &receives)
        });
        must("group", grouped)?;
        let inputs: Vec<_> = (0..ranks).map(|rank| input(round, rank)).collect();
        for (seed, buffer) in seeds.into_iter().zip([&to_first, &to_second]) {
            let expected: Vec<_> = (0..ranks).flat_map(|from| block(seed, from, rank)).collect();
            same(format!("exchange {seed}"), &download(&comm, buffer)?, &expected)?;
        }
        let expected = reference::combined(&inputs, &Combine::Op(ReduceOp::Sum));
        same(format!("sum {round}"), &download(&comm, &sum)?, &expected)?;
    }
    done()
}

/// Several messages of a pair in a group, where the other side makes them one by one; blocks of unlike lengths, also in place.
fn exchanges(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let lens = [10, 5000, 0, 70_000, 1, 300];
    let values =
        |from: usize, number: usize| random::values::<u32>((100 * from + number) as u64, lens[number]);
    let upload = |values: &[u32]| stream(&comm).clone_htod(values).context(|| "upload".into());
    let peer = rank ^ 1;
    if peer < ranks {
        let sent = (0..6).map(|number| upload(&values(rank, number))).collect::<Result<Vec<_>, _>>()?;
        let mut received =
            lens.map(|len| upload(&vec![0; len])).into_iter().collect::<Result<Vec<_>, _>>()?;
        if rank % 2 == 0 {
            let grouped = comm.group(|g| {
                received.iter_mut().try_for_each(|buffer| g.recv(buffer, peer))?;
                sent.iter().try_for_each(|buffer| g.send(buffer, peer))
            });
            must("group", grouped)?;
        } else {
            for buffer in &mut received {
                must("recv", comm.recv(buffer, peer))?;
            }
            for buffer in &sent {
                must("send", comm.send(buffer, peer))?;
            }
        }
        for (number, buffer) in received.iter().enumerate() {
            same(format!("message {number}"), &download(&comm, buffer)?, &values(peer, number))?;
        }
    }
    for round in 0..3 {
        // Rank i sends rank j so many; some are too long for a kernel, and some are empty.
        let count = |i: usize, j: usize| [3, 0, 9000, 130_000][(i + j + round) % 4];
        let block = |i: usize, j: usize| random::values::<u32>((1000 * i + j + round) as u64, count(i, j));
        let counts = |of: &dyn Fn(usize) -> usize| (0..ranks).map(of).collect::<Vec<_>>();
        let (sends, receives) = (counts(&|j| count(rank, j)), counts(&|i| count(i, rank)));
        let send = upload(&(0..ranks).flat_map(|j| block(rank, j)).collect::<Vec<_>>())?;
        let expected: Vec<u32> = (0..ranks).flat_map(|i| block(i, rank)).collect();
        let mut recv = upload(&vec![0; expected.len()])?;
        must("all_to_all_v", comm.all_to_all_v(&send, &sends, &mut recv, &receives))?;
        same("all_to_all_v", &download(&comm, &recv)?, &expected)?;
        let mut both = send;
        must("in place", comm.all_to_all_v_in_place(&mut both, &sends))?;
        same("all_to_all_v in place", &download(&comm, &both)?, &expected)?;
    }
    done()
}

/// Calls on several streams, which share the FIFOs.
fn on_streams(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let streams: Vec<_> = (0..3).map(|_| new_stream(&comm)).collect::<Result<_, _>>()?;
    let on: Vec<_> = streams.iter().map(|stream| must("on", comm.on(stream))).collect::<Result<_, _>>()?;
    let mut random = Random::new(3);
    let mut buffers = Vec::new();
    for round in 0..40u64 {
        let (number, len) = (random.below(3), 1 + random.below(20_000));
        let mut buffer =
            streams[number].clone_htod(&vec![round + rank as u64; len]).context(|| "upload".into())?;
        // Every other one by NCCL.
        let beside = on[number].beside_computing();
        let comm: &Comm = if round % 2 == 0 { &on[number] } else { &beside };
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        buffers.push((buffer, len, (0..ranks as u64).map(|rank| round + rank).sum::<u64>()));
    }
    must("sync", comm.sync())?;
    for (round, (buffer, len, sum)) in buffers.iter().enumerate() {
        same(format!("round {round}"), &download(&comm, buffer)?, &vec![*sum; *len])?;
    }
    done()
}

/// `sync` waits for NCCL's operations and for own kernels, on whatever stream the last call was.
fn synced(comm: Comm, _: &[String]) -> Outcome {
    let (busy, idle) = (new_stream(&comm)?, new_stream(&comm)?);
    let (on_busy, on_idle) = (must("on", comm.on(&busy))?, must("on", comm.on(&idle))?);
    // NCCL's, and an own kernel's.
    let mut long = busy.alloc_zeros::<u8>(9 << 20).context(|| "alloc".into())?;
    let mut short = idle.alloc_zeros::<u8>(100).context(|| "alloc".into())?;
    for round in 0..4 {
        if round % 2 == 0 {
            must("long", on_busy.all_reduce_in_place(&mut long, ReduceOp::Max))?;
            must("short", on_idle.all_reduce_in_place(&mut short, ReduceOp::Max))?;
        } else {
            must("short", on_idle.all_reduce_in_place(&mut short, ReduceOp::Max))?;
            must("long", on_busy.all_reduce_in_place(&mut long, ReduceOp::Max))?;
        }
        must("sync", comm.sync())?;
        for stream in [&busy, &idle] {
            // SAFETY: a stream that is alive; nothing but a question.
            let state = unsafe { cuStreamQuery(stream.cu_stream()) };
            assert_eq!(state, CUresult::CUDA_SUCCESS, "round {round}");
        }
    }
    done()
}

/// Communicators on streams of their own, called in another order on each rank.
fn crossed(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let split = |_| must("split", comm.split(Some(0), 0))?.ok_or("everybody is in it".to_owned());
    let comms: Vec<Comm> = (0..4).map(split).collect::<Result<_, _>>()?;
    let streams: Vec<_> = comms.iter().map(new_stream).collect::<Result<_, _>>()?;
    let mut random = Random::new(rank as u64);
    for round in 0..30u32 {
        let mut order = [0, 1, 2, 3];
        (1..4).for_each(|last| order.swap(last, random.below(last + 1)));
        let mut results = Vec::new();
        for number in order {
            let len = [1, 1000, 20_000, 300][(number + round as usize) % 4];
            let on = must("on", comms[number].on(&streams[number]))?;
            let mut buffer = streams[number]
                .clone_htod(&vec![round + (rank + number) as u32; len])
                .context(|| "upload".into())?;
            must("all_reduce", on.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
            results.push((number, buffer, len));
        }
        for (number, buffer, len) in results {
            let sum = (0..ranks).map(|rank| round + (rank + number) as u32).sum::<u32>();
            same(format!("round {round}, {number}"), &download(&comms[number], &buffer)?, &vec![sum; len])?;
        }
    }
    done()
}

/// Groups of several operations and communicators; host memory, too.
fn in_groups(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let other = must("split", comm.split(Some(0), (ranks - rank) as i64))?.ok_or("in it")?;
    let other_stream = new_stream(&other)?;
    let total: u64 = (0..ranks as u64).sum();
    for round in 0..4u64 {
        let upload = |len: usize| stream(&comm).clone_htod(&vec![rank as u64 + round; len]);
        let upload = |len: usize| upload(len).context(|| "upload".into());
        let (mut sum, mut root, mut of_other) = (upload(1000)?, upload(5)?, upload(3000)?);
        let mut on_host = vec![rank as u64 + round; 200];
        let on_other = must("on", other.on(&other_stream))?;
        let grouped = phalanx::group(|g| {
            g.on(&comm).all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
            g.on(&on_other).all_reduce_in_place(&mut of_other, ReduceOp::Sum)?;
            g.on(&comm).broadcast_in_place(&mut root, 1)?;
            g.on(&comm).all_reduce_in_place(&mut on_host, ReduceOp::Sum)
        });
        must("group", grouped)?;
        let expected = total + round * ranks as u64;
        same("sum", &download(&comm, &sum)?, &[expected; 1000])?;
        same("of the other", &download(&other, &of_other)?, &[expected; 3000])?;
        same("broadcast", &download(&comm, &root)?, &[1 + round; 5])?;
        same("on the host", &on_host, &[expected; 200])?;
    }
    done()
}

/// One rank does not launch the graph again: the others' kernels leave, the error names that rank, and the GPU works.
fn aborted_graph(comm: Comm, _: &[String]) -> Outcome {
    let (late, timeout) = (comm.world_size() - 1, Duration::from_secs(2));
    let gpu = comm.gpu().ok_or("a GPU")?;
    comm.set_timeout(timeout);
    let buffer = stream(&comm).clone_htod(&[1u32; 100_000]).context(|| "upload".into())?;
    let mut graph = must(
        "capture",
        Graph::capture(&comm, buffer, |group, buffer| group.all_reduce_in_place(buffer, ReduceOp::Max)),
    )?;
    must("launch", graph.launch().and_then(|()| comm.sync()))?;
    let since = Instant::now();
    let error = if comm.rank() == late {
        std::thread::sleep(timeout + SLACK / 2);
        comm.barrier().err()
    } else {
        graph.launch().and_then(|()| comm.sync()).err()
    };
    assert!(since.elapsed() < timeout + SLACK, "after {:?}", since.elapsed());
    failures::names(error, late, "all_reduce(u32 × 100000, max").map_err(|failed| format!("{failed:?}"))?;
    drop(graph);
    drop(comm);
    failures::still_works(gpu)?;
    done()
}

/// Bytes that are free on the communicator's GPU.
pub fn free_bytes(comm: &Comm) -> Result<usize, String> {
    // A buffer that was dropped is free once its stream has come to that.
    stream(comm).context().synchronize().context(|| "synchronize".into())?;
    Ok(mem_get_info().context(|| "mem_get_info".into())?.0)
}

/// A program that makes and drops communicators all the time has the memory of few of them.
fn memory_of_many(comm: Comm, _: &[String]) -> Outcome {
    const ROUNDS: usize = 60;
    must("barrier", comm.barrier())?;
    let before = free_bytes(&comm)?;
    let (mut of_one, mut of_all) = (0, 0);
    for round in 0..ROUNDS {
        let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
        let mut buffer = stream(&part).clone_htod(&[1u64; 3]).context(|| "upload".into())?;
        must("all_reduce", part.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| part.sync()))?;
        if round == 0 {
            of_one = before - free_bytes(&comm)?;
        }
        drop(part);
        must("barrier", comm.barrier())?;
        of_all += before - free_bytes(&comm)?.min(before);
    }
    assert!(2 * of_all < 3 * ROUNDS * of_one, "{} of {of_one} bytes on average", of_all / ROUNDS);
    done()
}

/// A program's setting comes before the environment's, which is NCCL here. Only own kernels reduce 16-bit integers.
fn setting() -> Outcome {
    for (algorithm, is_own) in
        [(Some(GpuAlgorithm::Ll), true), (Some(GpuAlgorithm::Nccl), false), (None, false)]
    {
        let mut config = Config::default();
        config.gpu_algorithm = algorithm;
        let ranks = Comm::builder().backend(BackendKind::Nccl).nccl(config).run(2, |comm| {
            let mut buffer = stream(&comm).clone_htod(&[3i16; 9]).context(|| "upload".into())?;
            match comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum) {
                Ok(()) => same("sum", &download(&comm, &buffer)?, &[6; 9]).map(|()| true),
                Err(_) => Ok(false),
            }
        });
        for used in must("run", ranks)? {
            if used? != is_own {
                return Err(format!("with {algorithm:?} own kernels are used: {}", !is_own));
            }
        }
    }
    done()
}

/// The FIFOs' memory comes back, of communicators that end well and of those that fail.
fn memory_given_back(comm: Comm, _: &[String]) -> Outcome {
    let free = || free_bytes(&comm);
    let make_and_drop = |fails: bool| -> Result<usize, String> {
        let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
        let mut buffer = stream(&part).clone_htod(&[1u64; 3000]).context(|| "upload".into())?;
        must("all_reduce", part.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| part.sync()))?;
        let within = free()?;
        must("barrier", part.barrier())?;
        drop(buffer);
        if fails {
            part.abort()
        } else {
            drop(part)
        }
        Ok(within)
    };
    // The first makes the driver and NCCL take what they keep.
    make_and_drop(true)?;
    must("barrier", comm.barrier())?;
    let before = settled(&free)?;
    must("barrier", comm.barrier())?;
    for fails in [false, true, false] {
        assert!(make_and_drop(fails)? < before, "the FIFOs take memory");
    }
    let since = Instant::now();
    while free()? < before {
        assert!(since.elapsed() < Duration::from_secs(20), "{} bytes are left", before - free()?);
        std::thread::sleep(Duration::from_millis(10));
    }
    must("barrier", comm.barrier())?;
    done()
}

/// A number, once it has not changed for a while.
fn settled(number: &impl Fn() -> Result<usize, String>) -> Result<usize, String> {
    let (mut last, mut since) = (number()?, Instant::now());
    while since.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(10));
        let now = number()?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last)
}
