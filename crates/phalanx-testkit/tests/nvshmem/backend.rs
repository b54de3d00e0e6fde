//! NVSHMEM as a backend of `Comm`, on GPU memory: any memory, symmetric memory, and both. (The contract suite
//! has host memory.)

use crate::world::{DEADLINE, done, expect, gpu_of, must, refused, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::cudarc::driver::{CudaSlice, CudaView, DeviceRepr};
use phalanx::nvshmem::Buffer;
use phalanx::{BackendKind, Comm, Error, PreMulSum, ReduceOp, f16};
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::fault::Fault;
use phalanx_testkit::processes::{Launch, phase};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use phalanx_testkit::{Number, Scenario};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("backend/any_memory", any_memory),
    Scenario::rank("backend/symmetric_memory", symmetric_memory),
    Scenario::rank("backend/mixed_memory", mixed_memory),
    Scenario::rank("backend/messages", messages),
    Scenario::rank("backend/streams", streams),
    Scenario::rank("backend/parts", parts),
    Scenario::rank("backend/portable", portable),
    Scenario::process("backend/again", again),
];

pub const OTHERS: &[Scenario] = &[
    Scenario::rank("backend/direct", direct),
    Scenario::rank("backend/mismatch", mismatch),
    Scenario::rank("backend/counts", counts),
    Scenario::rank("backend/lengths_of_messages", lengths_of_messages),
    Scenario::rank("backend/missing", missing),
    Scenario::rank("backend/endless", endless),
    Scenario::rank("backend/waiting_for_a_message", waiting_for_a_message),
    Scenario::process("backend/threads", threads),
];

/// The ranks' deadline where something is missing.
const TIMEOUT: Duration = Duration::from_secs(4);
/// What comes on top, at most.
const SLACK: Duration = Duration::from_secs(4);

pub fn trials(gpus: usize, are_emulated: bool) -> Vec<Trial> {
    let mut trials: Vec<Trial> = SCENARIOS
        .iter()
        .map(|scenario| {
            let name = scenario.name;
            Trial::test(name, move || {
                (1..=gpus).try_for_each(|ranks| together(launch(name, ranks))).map_err(Failed::from)
            })
        })
        .collect();
    trials.push(Trial::test("backend/threads", || Ok(together(launch("backend/threads", 1))?)));
    let pairs = [
        Trial::test("backend/any_memory/pieces", move || {
            Ok(together(launch("backend/any_memory", gpus).env("PHALANX_NVSHMEM_STAGE", "16384"))?)
        }),
        Trial::test("backend/mismatch", || Ok(together(short(launch("backend/mismatch", 2)))?)),
        Trial::test("backend/counts", || Ok(together(short(launch("backend/counts", 2)))?)),
        Trial::test("backend/lengths_of_messages", || {
            Ok(together(short(launch("backend/lengths_of_messages", 2)))?)
        }),
        Trial::test("backend/missing", || Ok(together(short(launch("backend/missing", 2)))?)),
        Trial::test("backend/killed", || broken(launch("backend/endless", 2).arg("avg"), Fault::Kill)),
        Trial::test("backend/killed_in_a_reduction", || {
            broken(launch("backend/endless", 2).arg("sum"), Fault::Kill)
        }),
        Trial::test("backend/stopped", || broken(launch("backend/endless", 2).arg("avg"), Fault::Stop)),
        Trial::test("backend/killed_before_a_message", || {
            broken(launch("backend/waiting_for_a_message", 2), Fault::Kill)
        }),
        Trial::test("backend/stopped_before_a_message", || {
            broken(launch("backend/waiting_for_a_message", 2), Fault::Stop)
        }),
    ];
    trials.extend(pairs.into_iter().map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs")));
    trials.push(
        Trial::test("backend/direct", without_broadcast)
            .only_if(are_emulated, "only emulated libraries can be told so"),
    );
    trials
}

fn launch(scenario: &str, ranks: usize) -> Launch {
    Launch::new(scenario, ranks).deadline(DEADLINE).on_gpus().env("PHALANX_BACKEND", "nvshmem")
}

fn short(launch: Launch) -> Launch {
    launch.env("PHALANX_TIMEOUT", &TIMEOUT.as_secs().to_string()).deadline(TIMEOUT * 3 + SLACK)
}

fn together(launch: Launch) -> Result<(), String> {
    launch.reports().map(drop).map_err(|problems| problems.to_string())
}

/// Elements: one, small, odd, more than a piece of a small stage.
const LENGTHS: [usize; 4] = [1, 17, 1000, 30_001];

fn upload<T: Number + DeviceRepr>(comm: &Comm, values: &[T]) -> Result<CudaSlice<T>, String> {
    let stream = must("stream", comm.cuda_stream())?;
    stream.clone_htod(values).context(|| "upload".into())
}

fn download<T: Number + DeviceRepr>(comm: &Comm, view: &CudaView<'_, T>) -> Result<Vec<T>, String> {
    let values = must("stream", comm.cuda_stream())?.clone_dtoh(view).context(|| "download".into())?;
    must("sync", comm.sync())?;
    Ok(values)
}

fn symmetric<T: Number + DeviceRepr>(comm: &Comm, values: &[T]) -> Result<Buffer<T>, String> {
    let nvshmem = comm.nvshmem().ok_or("another backend")?;
    let mut buffer = must("alloc", nvshmem.alloc::<T>(values.len()))?;
    let stream = must("stream", comm.cuda_stream())?;
    stream.memcpy_htod(values, &mut buffer.view_mut()).context(|| "upload".into())?;
    Ok(buffer)
}

fn sum<T: Number>(ranks: usize, index: usize) -> T {
    T::from_small((0..ranks).map(|rank| value(rank, index)).sum())
}

/// Every operation, on slices of cudarc's.
fn any_memory(comm: Comm, _: &[String]) -> Outcome {
    assert_eq!((comm.backend(), comm.gpu()), (BackendKind::Nvshmem, Some(gpu_of(comm.rank()))));
    for len in LENGTHS {
        operations::<f32>(&comm, len)?;
        operations::<i16>(&comm, len)?;
    }
    operations::<u8>(&comm, 12_345)?;
    operations::<f64>(&comm, 100)?;
    operations::<f16>(&comm, 3000)?;
    must("finalize", comm.finalize())?;
    done()
}

fn operations<T: Number + DeviceRepr>(comm: &Comm, len: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = len % ranks;
    let own = upload(comm, &values::<T>(rank, len))?;
    let zeros = |len| upload(comm, &vec![T::from_small(0); len]);
    let get = |slice: &CudaSlice<T>| download(comm, &slice.as_view());
    let what = |name: &str| format!("{name} of {len} {}", T::DTYPE);

    let mut result = zeros(len)?;
    must("all_reduce", comm.all_reduce(&own, &mut result, ReduceOp::Sum))?;
    expect(what("all_reduce"), &get(&result)?, |index| sum(ranks, index))?;
    let mut buffer = upload(comm, &values::<T>(rank, len))?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
    let most = |index| T::from_small((0..ranks).map(|rank| value(rank, index)).max().unwrap_or(0));
    expect(what("all_reduce_in_place"), &get(&buffer)?, most)?;
    let mut buffer = upload(comm, &values::<T>(rank, len))?;
    must("pre-mul-sum", comm.all_reduce_in_place(&mut buffer, PreMulSum(T::from_small(2))))?;
    let doubled = |index| T::from_small((0..ranks).map(|rank| 2 * value(rank, index)).sum());
    expect(what("pre-mul-sum"), &get(&buffer)?, doubled)?;
    let mut buffer = upload(comm, &vec![T::from_small(3); len])?;
    must("average", comm.all_reduce_in_place(&mut buffer, ReduceOp::Avg))?;
    expect(what("average"), &get(&buffer)?, |_| T::from_small(3))?;

    let mut result = zeros(len)?;
    must("reduce", comm.reduce(&own, &mut result, ReduceOp::Sum, root))?;
    let expected = |index| if rank == root { sum(ranks, index) } else { T::from_small(0) };
    expect(what("reduce"), &get(&result)?, expected)?;
    must("broadcast", comm.broadcast(&own, &mut result, root))?;
    expect(what("broadcast"), &get(&result)?, |index| T::from_small(value(root, index)))?;

    let mut all = zeros(len * ranks)?;
    must("all_gather", comm.all_gather(&own, &mut all))?;
    let gathered = |index: usize| T::from_small(value(index / len, index % len));
    expect(what("all_gather"), &get(&all)?, gathered)?;
    let mut all = zeros(len * ranks)?;
    must("gather", comm.gather(&own, &mut all, root))?;
    let at_root = |index| if rank == root { gathered(index) } else { T::from_small(0) };
    expect(what("gather"), &get(&all)?, at_root)?;
    // In place, from what the other ranks' blocks held.
    let mut all = upload(comm, &values::<T>(rank, len * ranks))?;
    must("all_gather", comm.all_gather_in_place(&mut all))?;
    expect(what("all_gather_in_place"), &get(&all)?, |index| T::from_small(value(index / len, index)))?;

    let whole = upload(comm, &values::<T>(rank, len * ranks))?;
    let mut block = zeros(len)?;
    must("reduce_scatter", comm.reduce_scatter(&whole, &mut block, ReduceOp::Sum))?;
    expect(what("reduce_scatter"), &get(&block)?, |index| sum(ranks, rank * len + index))?;
    must("average", comm.reduce_scatter(&whole, &mut block, PreMulSum(T::from_small(1))))?;
    expect(what("reduce_scatter on the host"), &get(&block)?, |index| sum(ranks, rank * len + index))?;
    must("scatter", comm.scatter(&whole, &mut block, root))?;
    expect(what("scatter"), &get(&block)?, |index| T::from_small(value(root, rank * len + index)))?;
    let mut exchanged = zeros(len * ranks)?;
    must("all_to_all", comm.all_to_all(&whole, &mut exchanged))?;
    let theirs = |index: usize| T::from_small(value(index / len, rank * len + index % len));
    expect(what("all_to_all"), &get(&exchanged)?, theirs)?;
    let mut exchanged = upload(comm, &values::<T>(rank, len * ranks))?;
    must("all_to_all", comm.all_to_all_in_place(&mut exchanged))?;
    expect(what("all_to_all_in_place"), &get(&exchanged)?, theirs)?;

    let counts: Vec<usize> = (0..ranks).map(|rank| len * rank / ranks).collect();
    let total: usize = counts.iter().sum();
    let before = |rank: usize| counts[..rank].iter().sum::<usize>();
    let mut all = zeros(total)?;
    must("all_gather_v", comm.all_gather_v(&own.slice(..counts[rank]), &mut all, &counts))?;
    let owner = |index: usize| (0..ranks).rev().find(|rank| before(*rank) <= index && counts[*rank] > 0);
    let gathered = |index: usize| {
        let owner = owner(index).unwrap_or(0);
        T::from_small(value(owner, index - before(owner)))
    };
    expect(what("all_gather_v"), &get(&all)?, gathered)?;
    let mut block = zeros(counts[rank])?;
    let whole = whole.slice(..total);
    must("reduce_scatter_v", comm.reduce_scatter_v(&whole, &mut block, &counts, ReduceOp::Sum))?;
    expect(what("reduce_scatter_v"), &get(&block)?, |index| sum(ranks, before(rank) + index))?;

    // Some in host memory.
    let mut on_host = vec![T::from_small(0); len];
    must("all_reduce", comm.all_reduce(&own, &mut on_host[..], ReduceOp::Sum))?;
    expect(what("all_reduce to the host"), &on_host, |index| sum(ranks, index))?;
    let mut result = zeros(len)?;
    must("broadcast", comm.broadcast(&values::<T>(rank, len)[..], &mut result, root))?;
    expect(what("broadcast from the host"), &get(&result)?, |index| T::from_small(value(root, index)))
}

/// What the library does itself, and is enqueued.
fn symmetric_memory(comm: Comm, _: &[String]) -> Outcome {
    for len in LENGTHS {
        on_symmetric::<f32>(&comm, len)?;
        on_symmetric::<i16>(&comm, len)?;
    }
    must("finalize", comm.finalize())?;
    done()
}

fn on_symmetric<T: Number + DeviceRepr>(comm: &Comm, len: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = len % ranks;
    let mut small = symmetric(comm, &values::<T>(rank, len))?;
    let mut other = symmetric(comm, &vec![T::from_small(0); len])?;
    let mut large = symmetric(comm, &values::<T>(rank, len * ranks))?;
    let mut exchanged = symmetric(comm, &vec![T::from_small(0); len * ranks])?;
    let get = |buffer: &Buffer<T>| download(comm, &buffer.view());
    let what = |name: &str| format!("{name} of {len} {} of symmetric memory", T::DTYPE);
    // Twice: the second writes to what the first's results were read from.
    for _ in 0..2 {
        must("all_reduce", comm.all_reduce(&small, &mut other, ReduceOp::Sum))?;
        expect(what("all_reduce"), &get(&other)?, |index| sum(ranks, index))?;
        must("broadcast", comm.broadcast(&small, &mut other, root))?;
        expect(what("broadcast"), &get(&other)?, |index| T::from_small(value(root, index)))?;
        must("reduce_scatter", comm.reduce_scatter(&large, &mut other, ReduceOp::Sum))?;
        expect(what("reduce_scatter"), &get(&other)?, |index| sum(ranks, rank * len + index))?;
        must("all_gather", comm.all_gather(&small, &mut exchanged))?;
        let gathered = |index: usize| T::from_small(value(index / len, index % len));
        expect(what("all_gather"), &get(&exchanged)?, gathered)?;
        must("all_to_all", comm.all_to_all(&large, &mut exchanged))?;
        let theirs = |index: usize| T::from_small(value(index / len, rank * len + index % len));
        expect(what("all_to_all"), &get(&exchanged)?, theirs)?;
    }
    must("all_reduce", comm.all_reduce_in_place(&mut small, ReduceOp::Sum))?;
    expect(what("all_reduce_in_place"), &get(&small)?, |index| sum(ranks, index))?;
    // What the library cannot: in place.
    must("all_gather", comm.all_gather_in_place(&mut large))?;
    expect(what("all_gather_in_place"), &get(&large)?, |index| T::from_small(value(index / len, index)))?;
    must("broadcast", comm.broadcast_in_place(&mut large, root))?;
    for buffer in [small, other, large, exchanged] {
        must("free", buffer.free())?;
    }
    Ok(())
}

/// Symmetric memory on some ranks, or other memory on each: the ranks agree on a way.
fn mixed_memory(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let len = 5000;
    let mut one = symmetric(&comm, &values::<f32>(rank, len))?;
    let mut two = symmetric(&comm, &values::<f32>(rank, len))?;
    let mut slice = upload(&comm, &values::<f32>(rank, len))?;
    // Not the same place on all.
    let reduced = if rank == 0 {
        comm.all_reduce_in_place(&mut one, ReduceOp::Sum)
    } else {
        comm.all_reduce_in_place(&mut two, ReduceOp::Sum)
    };
    must("all_reduce", reduced)?;
    let result = download(&comm, &if rank == 0 { one.view() } else { two.view() })?;
    expect("memory at different places", &result, |index| sum(ranks, index))?;
    let untouched = download(&comm, &if rank == 0 { two.view() } else { one.view() })?;
    expect("memory beside it", &untouched, |index| value(rank, index) as f32)?;
    // Not symmetric on one.
    let mut all = symmetric(&comm, &vec![0.0f32; len * ranks])?;
    let mut other = upload(&comm, &vec![0.0f32; len * ranks])?;
    if rank == ranks - 1 {
        must("all_gather", comm.all_gather(&slice, &mut other))?;
    } else {
        must("all_gather", comm.all_gather(if rank == 0 { &two } else { &one }, &mut all))?;
    }
    let result = download(&comm, &if rank == ranks - 1 { other.as_view() } else { all.view() })?;
    expect("mixed memory", &result, |index| value(index / len, index % len) as f32)?;
    must("broadcast", comm.broadcast_in_place(&mut slice, 0))?;
    for buffer in [one, two, all] {
        must("free", buffer.free())?;
    }
    must("finalize", comm.finalize())?;
    done()
}

/// A ring, in GPU memory, of messages that have several parts; and between places.
fn messages(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for len in [0, 1, 1000, 700_001] {
        let send = upload(&comm, &values::<f32>(rank, len.max(1)))?;
        let mut recv = upload(&comm, &vec![-1.0f32; len.max(1)])?;
        let (send, mut recv_part) = (send.slice(..len), recv.slice_mut(..len));
        must("send_recv", comm.send_recv(&send, right, &mut recv_part, left))?;
        let got = download(&comm, &recv.slice(..len))?;
        expect(format!("a message of {len}"), &got, |index| value(left, index) as f32)?;
    }
    let len = 10_000;
    let mine = symmetric(&comm, &values::<f32>(rank, len))?;
    let mut on_host = vec![0.0f32; len];
    must(
        "send_recv",
        comm.group(|g| {
            g.send(&mine, right)?;
            g.recv(&mut on_host[..], left)
        }),
    )?;
    expect("a message to the host", &on_host, |index| value(left, index) as f32)?;
    must("free", mine.free())?;
    must("finalize", comm.finalize())?;
    done()
}

/// Operations of one communicator on several streams are in the order of the calls.
fn streams(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // Its collectives meet on the host, which no graph can.
    let capture = phalanx::nccl::Graph::capture(&comm, upload(&comm, &[1.0f32])?, |group, buffer| {
        group.all_reduce_in_place(buffer, ReduceOp::Sum)
    });
    let error = capture.map(drop).unwrap_err();
    assert!(error.to_string().contains("nvshmem") && matches!(error, Error::Unsupported(_)), "{error}");
    let stream = must("stream", comm.cuda_stream())?.context().new_stream().context(|| "stream".into())?;
    let mut buffer = symmetric(&comm, &values::<f32>(rank, 1000))?;
    for round in 0..20 {
        if round % 2 == 0 {
            must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
        } else {
            let view = must("on", comm.on(&stream))?;
            must("all_reduce", view.all_reduce_in_place(&mut buffer, ReduceOp::Max))?;
        }
    }
    let most = |index: usize| (0..ranks).map(|rank| value(rank, index)).max().unwrap_or(0) as f32;
    expect("20 reductions", &download(&comm, &buffer.view())?, most)?;
    must("free", buffer.free())?;
    must("finalize", comm.finalize())?;
    done()
}

/// Communicators of some ranks, in another order.
fn parts(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let color = (rank + 1 != ranks || ranks == 1).then_some(0);
    let part = must("split", comm.split(color, -(rank as i64)))?;
    assert_eq!(part.is_some(), color.is_some());
    if let Some(part) = part {
        let members = part.world_size();
        let mut buffer = upload(&part, &values::<f32>(rank, 5000))?;
        must("all_reduce", part.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        expect("a part's sum", &download(&part, &buffer.as_view())?, |index| sum(members, index))?;
        let mut all = vec![0u32; members];
        must("all_gather", part.all_gather(&[rank as u32], &mut all))?;
        assert_eq!(all, (0..members as u32).rev().collect::<Vec<_>>());
        if members != ranks {
            refused("alloc", part.nvshmem().ok_or("another")?.alloc::<f32>(10), &["a part of the PEs"])?;
        }
        must("finalize", part.finalize())?;
    }
    must("barrier", comm.barrier())?;
    must("finalize", comm.finalize())?;
    done()
}

/// By addresses.
fn portable(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut buffer = symmetric(&comm, &values::<f32>(rank, 1000))?;
    let stream = must("stream", comm.cuda_stream())?.clone();
    let address = buffer.device_ptr();
    stream.synchronize().context(|| "synchronize".into())?;
    let comm = comm.into_raw_communicator();
    // SAFETY: the address of so many elements of device memory, which live until the end.
    must("all_reduce", unsafe { comm.all_reduce(address, 1000, phalanx::DType::F32, ReduceOp::Sum) })?;
    must("sync", comm.sync())?;
    let sums = stream.clone_dtoh(&buffer.view_mut().as_view()).context(|| "download".into())?;
    stream.synchronize().context(|| "synchronize".into())?;
    expect("by address", &sums, |index| sum(ranks, index))?;
    must("barrier", comm.barrier())?;
    std::mem::forget(buffer);
    done()
}

/// The library is ended with the communicator, and can begin again.
fn again(_: &[String]) -> Outcome {
    for round in 0..2 {
        let comm = must("init", phalanx::init())?;
        let mut sum = [comm.rank() as u64 + round];
        must("all_reduce", comm.all_reduce_in_place(&mut sum, ReduceOp::Sum))?;
        // A second communicator of the process needs the first's library.
        refused("init", phalanx::nvshmem::Context::builder().gpu(0).init_from_environment(), &["second"])?;
        must("finalize", comm.finalize())?;
        if std::env::var("PHALANX_RANK").is_ok() && round == 0 {
            // The job's rendezvous is for one world.
            return done();
        }
    }
    done()
}

fn without_broadcast() -> Result<(), Failed> {
    let emulated = Emulated::without(&["nvshmemx_broadcastmem_on_stream"])?;
    Ok(emulated.launch(launch("backend/direct", 2)).reports().map(drop)?)
}

/// The library's own broadcast is what symmetric memory needs, and other memory does not.
fn direct(comm: Comm, _: &[String]) -> Outcome {
    let rank = comm.rank();
    let source = symmetric(&comm, &values::<f32>(rank, 1000))?;
    let mut target = symmetric(&comm, &vec![0.0f32; 1000])?;
    let mut slice = upload(&comm, &vec![0.0f32; 1000])?;
    must("broadcast", comm.broadcast(&source, &mut slice, 1))?;
    expect("broadcast", &download(&comm, &slice.as_view())?, |index| value(1, index) as f32)?;
    must("broadcast", comm.broadcast_in_place(&mut target, 1))?;
    let name = "nvshmemx_broadcastmem_on_stream";
    let error = refused("broadcast", comm.broadcast(&source, &mut target, 1), &[name])?;
    assert!(matches!(error, Error::MissingFunction(_)), "{error}");
    done()
}

/// Different calls: both ranks are told the same, before anything moved.
fn mismatch(comm: Comm, _: &[String]) -> Outcome {
    let len = 100 + comm.rank();
    let mut buffer = upload(&comm, &vec![7.0f32; len])?;
    let error = refused("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum), &["100", "101"])?;
    assert!(matches!(error, Error::Mismatch(_)) && error.is_fatal(), "{error}");
    let again = refused("barrier", comm.barrier(), &["100", "101"])?;
    assert_eq!(again.to_string(), error.to_string());
    let values = must("stream", comm.cuda_stream())?.clone_dtoh(&buffer).context(|| "download".into())?;
    expect("nothing moved", &values, |_| 7.0)?;
    Ok(String::new())
}

fn counts(comm: Comm, _: &[String]) -> Outcome {
    let rank = comm.rank();
    let (send, mut recv) = (vec![1u32; 5], vec![0u32; 5]);
    // Rank 0 gives rank 1 three, which expects two.
    let (sent, received) = if rank == 0 { ([2, 3], [2, 3]) } else { ([3, 2], [3, 2]) };
    let received = if rank == 1 { [2, 2] } else { received };
    let recv = &mut recv[..received.iter().sum()];
    let all = comm.all_to_all_v(&send[..sent.iter().sum()], &sent, recv, &received);
    let error = refused("all_to_all_v", all, &["u32 × 3", "u32 × 2"])?;
    assert!(matches!(error, Error::Mismatch(_)), "{error}");
    Ok(String::new())
}

fn lengths_of_messages(comm: Comm, _: &[String]) -> Outcome {
    let error = if comm.rank() == 0 {
        must("send", comm.send(&[1.0f32; 10], 1))?;
        refused("barrier", comm.barrier(), &["f32 × 10", "f32 × 11"])?
    } else {
        refused("recv", comm.recv(&mut [0.0f32; 11], 0), &["f32 × 10", "f32 × 11"])?
    };
    assert!(matches!(error, Error::Mismatch(_)), "{error}");
    Ok(String::new())
}

/// Rank 1 does not come.
fn missing(comm: Comm, _: &[String]) -> Outcome {
    let since = Instant::now();
    if comm.rank() == 1 {
        std::thread::sleep(TIMEOUT + Duration::from_secs(1));
        refused("barrier", comm.barrier(), &["timeout", "rank 1"])?;
        return Ok(String::new());
    }
    let mut buffer = upload(&comm, &vec![1.0f32; 1000])?;
    let error = refused(
        "all_reduce",
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum),
        &["all_reduce(f32 × 1000"],
    )?;
    let Error::Timeout(timeout) = &error else { return Err(error.to_string()) };
    assert_eq!(timeout.missing.iter().map(|missing| missing.rank).collect::<Vec<_>>(), [1], "{timeout}");
    assert!(since.elapsed() < TIMEOUT + SLACK, "{:?}", since.elapsed());
    Ok(String::new())
}

/// Operations without end, until a rank breaks: the library's, or on the host.
fn endless(comm: Comm, args: &[String]) -> Outcome {
    let op = ReduceOp::from_name(&args[0]).ok_or("no such reduction")?;
    let all_reduce = || comm.all_reduce_in_place(&mut vec![1.0f32; 5000], op);
    must("all_reduce", all_reduce())?;
    phase("working");
    let error = loop {
        if let Err(error) = all_reduce() {
            break error;
        }
    };
    told(error)
}

fn waiting_for_a_message(comm: Comm, _: &[String]) -> Outcome {
    must("barrier", comm.barrier())?;
    phase("working");
    if comm.rank() == 1 {
        std::thread::sleep(Duration::from_secs(600));
    }
    let error = comm.recv(&mut [0u8; 100], 1).err().ok_or("a message came")?;
    told(error)
}

fn told(error: Error) -> Outcome {
    assert!(matches!(&error, Error::Peer(peer) if peer.rank == 1) && error.is_fatal(), "{error}");
    phase("told");
    // The exit handlers of CUDA would wait for the GPU.
    std::process::abort()
}

/// Rank 1 breaks while both work: rank 0 is told who it was.
fn broken(launch: Launch, fault: Fault) -> Result<(), Failed> {
    let mut world = launch.deadline(TIMEOUT * 3).start()?;
    world.await_phase(1, "working")?;
    world.await_phase(0, "working")?;
    std::thread::sleep(Duration::from_millis(300));
    let since = Instant::now();
    world.inject(1, fault)?;
    world.await_phase(0, "told")?;
    let elapsed = since.elapsed();
    world.inject(1, Fault::Kill)?;
    drop(world.finish());
    if elapsed < SLACK { Ok(()) } else { Err(format!("told after {elapsed:?}").into()) }
}

/// Ranks that are threads are refused.
fn threads(_: &[String]) -> Outcome {
    let error = Comm::builder().backend(BackendKind::Nvshmem).run(1, |_| ()).err();
    let error = error.ok_or("threads were made PEs")?;
    assert!(error.to_string().contains("its ranks are processes"), "{error}");
    done()
}
