//! GPU memory in operations of MPI: on an emulated GPU, whose memory any MPI can read, and phalanx is told
//! that the library takes it; and, where there is a GPU and a CUDA-aware MPI, on the machine's GPUs, and the
//! library is asked.

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Bitwise, Comm, DType, Error, Loan, Logical, ReduceOp, Source, Stream, Target};
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::halo::Spread;
use phalanx_testkit::mpi::{Installation, Job};
use phalanx_testkit::program::{Place, Step};
use phalanx_testkit::random::{NO_NAN, Random};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite;
use phalanx_testkit::{Number, Scenario};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("cuda/programs", |comm, args| programs(&comm, args)),
    Scenario::rank("cuda/messages", |comm, _| messages(&comm)),
    Scenario::rank("cuda/plain", |comm, _| plain(&comm)),
    Scenario::rank("cuda/combined_on_host", |comm, _| combined_on_host(&comm)),
    Scenario::rank("cuda/halos", |comm, _| halos(&comm)),
    Scenario::rank("cuda/streams", |comm, _| streams(&comm)),
    Scenario::rank("cuda/late_stream", |comm, _| late_stream(&comm)),
    Scenario::rank("cuda/refused", |comm, args| refused(&comm, args)),
];

/// A name, the number of ranks, and what makes the job one that tries it.
type Test = (&'static str, usize, fn(Job) -> Job);

const TESTS: [Test; 8] = [
    ("programs", 2, |job| aware(job).scenario("cuda/programs", &["1"]).scenario("cuda/streams", &[""])),
    ("programs", 3, |job| aware(job).scenario("cuda/programs", &["2"])),
    // Every collective in its non-blocking form.
    ("checked", 2, |job| aware(job).env("PHALANX_CHECK", "1").scenario("cuda/programs", &["3"])),
    ("pieces", 2, |job| {
        let job = aware(job).env("PHALANX_MPI_MAX_BYTES", "4000");
        job.scenario("cuda/programs", &["4"]).scenario("cuda/messages", &[""])
    }),
    ("messages", 2, |job| aware(job).scenario("cuda/messages", &[""]).scenario("cuda/plain", &[""])),
    ("halos", 2, |job| aware(job).scenario("cuda/halos", &[""])),
    ("late_stream", 2, |job| {
        aware(job).env("EMULATED_DELAY_US", "3000000..3000000").scenario("cuda/late_stream", &[""])
    }),
    ("told_not_to", 2, |job| {
        job.env("PHALANX_MPI_CUDA", "0").scenario("cuda/refused", &["PHALANX_MPI_CUDA=0"])
    }),
];

/// On real GPUs.
const ON_GPUS: [Test; 4] = [
    ("programs", 2, |job| job.scenario("cuda/programs", &["5"]).scenario("cuda/streams", &[""])),
    ("checked", 2, |job| job.env("PHALANX_CHECK", "1").scenario("cuda/programs", &["6"])),
    ("pieces", 2, |job| {
        job.env("PHALANX_MPI_MAX_BYTES", "4000")
            .scenario("cuda/programs", &["7"])
            .scenario("cuda/messages", &[""])
    }),
    ("messages", 2, |job| job.scenario("cuda/messages", &[""])),
];

/// What a library without CUDA answers, or that it cannot be asked.
const REFUSALS: [(&str, &str); 4] = [
    ("intel_mpi", "MPIX_Query_cuda_support answers 0"),
    ("open_mpi", "MPIX_Query_cuda_support answers 0"),
    ("mpich", "MPIX_Query_cuda_support answers 0"),
    ("standard_abi", "cannot be asked"),
];

fn aware(job: Job) -> Job {
    job.env("PHALANX_MPI_CUDA", "1")
}

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (installation, found) in Installation::all() {
        trials.extend(on_gpus(installation, found.clone()));
        let mut add = |name: String, ranks: usize, job: Box<dyn Fn(Job) -> Job + Send>| {
            let name = format!("mpi/{installation}/cuda/{name}/{ranks}");
            trials.push(match found.clone() {
                Ok(installation) => Trial::test(name, move || on_emulated_gpus(job(installation.job(ranks)))),
                Err(reason) => suite::ignored(name, reason),
            });
        };
        for (name, ranks, job) in TESTS {
            add(name.to_owned(), ranks, Box::new(job));
        }
        let words = REFUSALS.iter().find(|(name, _)| *name == installation).map_or("", |(_, words)| *words);
        add("refused".to_owned(), 2, Box::new(move |job| job.scenario("cuda/refused", &[words])));
    }
    trials
}

/// With the machine's GPUs: of an MPI that is here and can be made CUDA-aware.
fn on_gpus(name: &str, found: Result<Installation, String>) -> Vec<Trial> {
    let Some((installation, aware)) =
        found.ok().and_then(|found| found.cuda_aware.map(|aware| (found, aware)))
    else {
        return Vec::new();
    };
    let has_gpu = phalanx_testkit::gpus::count().is_ok();
    let trial = |(test, ranks, add): Test| {
        let (installation, name) = (installation.clone(), format!("mpi/{name}/gpus/{test}/{ranks}"));
        if !has_gpu {
            return suite::ignored(name, "there is no GPU");
        }
        Trial::test(name, move || {
            let job =
                aware.iter().fold(add(installation.job(ranks)), |job, (name, value)| job.env(name, value));
            let job = job.env("PHALANX_BACKEND", "mpi").env(NO_NAN, "1").deadline(Duration::from_secs(120));
            Ok(job.succeed().map(drop)?)
        })
    };
    ON_GPUS.map(trial).into()
}

fn on_emulated_gpus(job: Job) -> Result<(), Failed> {
    // The folder of the libraries is needed until the ranks have ended.
    let emulated = Emulated::new()?;
    let job = emulated.environment().iter().fold(job, |job, (name, value)| job.env(name, value));
    let job = job.env("PHALANX_BACKEND", "mpi").env(NO_NAN, "1").deadline(Duration::from_secs(120));
    Ok(job.succeed().map(drop)?)
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn expect(is: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if is { Ok(()) } else { Err(what()) }
}

/// The memory of a GPU; buffers without elements are the host's.
pub struct Gpu(Arc<CudaStream>);

/// Memory of the host or of a GPU.
pub enum Buffer<T: Number> {
    Host(Vec<T>),
    Device(CudaSlice<T>),
}

impl Place for Gpu {
    type Buffer<T: Number> = Buffer<T>;

    fn put<T: Number>(&self, _: &Comm, content: &[T]) -> phalanx::Result<Buffer<T>> {
        if content.is_empty() {
            return Ok(Buffer::Host(Vec::new()));
        }
        Ok(Buffer::Device(self.0.clone_htod(content)?))
    }

    fn get<T: Number>(&self, buffer: &Buffer<T>) -> Vec<T> {
        match buffer {
            Buffer::Host(vec) => vec.clone(),
            Buffer::Device(slice) => self.0.clone_dtoh(slice).expect("a copy of GPU memory"),
        }
    }
}

// SAFETY: what holds for either holds for both.
unsafe impl<T: Number> Source for Buffer<T> {
    type Elem = T;

    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn len(&self) -> usize {
        match self {
            Buffer::Host(vec) => vec.len(),
            Buffer::Device(slice) => slice.len(),
        }
    }

    fn lend<'a>(&'a self, stream: &'a Stream) -> phalanx::Result<Loan<'a>> {
        match self {
            Buffer::Host(vec) => vec.lend(stream),
            Buffer::Device(slice) => slice.lend(stream),
        }
    }
}

// SAFETY: as above.
unsafe impl<T: Number> Target for Buffer<T> {
    fn lend_mut<'a>(&'a mut self, stream: &'a Stream) -> phalanx::Result<Loan<'a>> {
        match self {
            Buffer::Host(vec) => vec.lend_mut(stream),
            Buffer::Device(slice) => slice.lend_mut(stream),
        }
    }
}

/// Of the GPUs that this process sees: some launchers give every rank one of its own.
pub fn gpu(number: usize) -> Result<Gpu, String> {
    let gpus = CudaContext::device_count().map_err(text)?.max(1) as usize;
    let context = CudaContext::new(number % gpus).map_err(text)?;
    Ok(Gpu(context.new_stream().map_err(text)?))
}

/// Random collectives of every type, on GPU memory; some ranks have their buffers on the host.
fn programs(comm: &Comm, args: &[String]) -> Outcome {
    let seed: u64 = args.first().and_then(|arg| arg.parse().ok()).ok_or("no seed was given")?;
    let mut random = Random::new(seed);
    let gpu = gpu(comm.gpu().unwrap_or(comm.rank()))?;
    for number in 0..250 {
        let step = Step::random(&mut random, 6000).on_gpus();
        let result = if random.below(8) == 0 && comm.rank() == 0 {
            step.perform(comm)
        } else {
            step.perform_in(comm, &gpu)
        };
        result.context(|| format!("seed {seed}, step {number}: {step:?}, rank {}", comm.rank()))?;
    }
    Ok(String::new())
}

/// Two words that belong together.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Pair {
    first: u32,
    second: [u32; 2],
}

// SAFETY: three words, of which every bit pattern is valid.
unsafe impl DeviceRepr for Pair {}
// SAFETY: as above.
unsafe impl ValidAsZeroBits for Pair {}

/// Structs in GPU memory are moved as on the host.
fn plain(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let gpu = gpu(comm.gpu().unwrap_or(rank))?;
    for len in [1usize, 1000, 70_001] {
        let content = |rank: usize| {
            (0..len).map(|i| Pair { first: (i * 3 + rank) as u32, second: [i as u32, 7] }).collect::<Vec<_>>()
        };
        let send = gpu.0.clone_htod(&content(rank)).map_err(text)?;
        let mut all = gpu.0.alloc_zeros::<Pair>(ranks * len).map_err(text)?;
        comm.all_gather(&send, &mut all).map_err(text)?;
        let came = gpu.0.clone_dtoh(&all).map_err(text)?;
        expect(came == (0..ranks).flat_map(content).collect::<Vec<_>>(), || {
            format!("all_gather of {len} pairs")
        })?;

        let mut one = gpu.0.alloc_zeros::<Pair>(len).map_err(text)?;
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        comm.send_recv(&send, next, &mut one, previous).map_err(text)?;
        let came = gpu.0.clone_dtoh(&one).map_err(text)?;
        expect(came == content(previous), || format!("{len} pairs between GPUs"))?;
    }
    Ok(String::new())
}

/// What only processors combine is refused for GPU memory before anything is enqueued, in groups too. Host memory takes it.
fn combined_on_host(comm: &Comm) -> Outcome {
    let gpu = gpu(comm.gpu().unwrap_or(comm.rank()))?;
    let mut bits = gpu.0.clone_htod(&[0b11u32, 0b101]).map_err(text)?;
    let refused = [
        comm.all_reduce_in_place(&mut bits, Bitwise::And),
        comm.reduce_in_place(&mut bits, Logical::Or, 0),
        comm.scan_in_place(&mut bits, ReduceOp::Sum),
        comm.group(|group| group.all_reduce_in_place(&mut bits, Bitwise::Xor)),
    ];
    for outcome in refused {
        let Err(error @ Error::Unsupported(_)) = outcome else {
            return Err(format!("bits in GPU memory: {outcome:?}"));
        };
        expect(error.to_string().contains("of GPU memory"), || error.to_string())?;
    }
    let untouched = gpu.0.clone_dtoh(&bits).map_err(text)?;
    expect(untouched == [0b11, 0b101], || format!("they are {untouched:?}"))?;
    let (mut one, mut other) = ([1u8 << comm.rank()], [1u64]);
    comm.group(|group| {
        group.all_reduce_in_place(&mut one, Bitwise::Or)?;
        group.scan_in_place(&mut other, ReduceOp::Sum)
    })
    .map_err(text)?;
    let expected = ((1u8 << comm.world_size()) - 1, comm.rank() as u64 + 1);
    expect((one[0], other[0]) == expected, || format!("a group of host memory: {one:?}, {other:?}"))?;
    let mut gradients =
        [gpu.0.clone_htod(&[1f32; 3]).map_err(text)?, gpu.0.clone_htod(&[2f32]).map_err(text)?];
    comm.all_reduce_coalesced(&mut gradients, ReduceOp::Sum).map_err(text)?;
    let sum = gpu.0.clone_dtoh(&gradients[1]).map_err(text)?;
    expect(sum == [2.0 * comm.world_size() as f32], || format!("coalesced: {sum:?}"))?;
    Ok(String::new())
}

/// Halos of arrays in GPU memory, where operations are on streams; on MPI a refusal.
fn halos(comm: &Comm) -> Outcome {
    let gpu = gpu(comm.gpu().unwrap_or(comm.rank()))?;
    let mut random = Random::new(3);
    for _ in 0..8 {
        let spread = Spread::random(&mut random, comm.world_size());
        let (grid, width) = (spread.grid(), spread.width());
        let place = grid.coordinates(comm.rank());
        let (shape, [before, expected]) = (spread.shape(&place), spread.part(&place));
        let mut array = gpu.0.clone_htod(&before).map_err(text)?;
        let exchanged = comm.exchange_halo(&grid, &mut array, &shape, &width);
        if comm.backend() == BackendKind::Mpi {
            let Err(error @ Error::Unsupported(_)) = exchanged else {
                return Err(format!("{spread:?}: {exchanged:?}"));
            };
            expect(error.to_string().contains("NCCL, RCCL or NVSHMEM"), || error.to_string())?;
            continue;
        }
        exchanged.map_err(text)?;
        let mut in_flight = gpu.0.clone_htod(&before).map_err(text)?;
        let halo = comm.start_exchange_halo(&grid, &in_flight, &shape, &width).map_err(text)?;
        halo.finish(&mut in_flight).map_err(text)?;
        for array in [&array, &in_flight] {
            let got = gpu.0.clone_dtoh(array).map_err(text)?;
            expect(got == expected, || format!("{spread:?} at {place:?}: {got:?}, expected {expected:?}"))?;
        }
    }
    Ok(String::new())
}

/// Messages between GPUs, between a GPU and the host, and of parts of buffers.
fn messages(comm: &Comm) -> Outcome {
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let gpu = gpu(comm.gpu().unwrap_or(rank))?;
    for len in [1usize, 1000, 70_001] {
        let content = |rank: usize| (0..len).map(|i| (i * 3 + rank) as u32).collect::<Vec<_>>();
        let send = gpu.0.clone_htod(&content(rank)).map_err(text)?;
        let mut recv = gpu.0.alloc_zeros::<u32>(len).map_err(text)?;
        comm.send_recv(&send, peer, &mut recv, peer).map_err(text)?;
        let came = gpu.0.clone_dtoh(&recv).map_err(text)?;
        expect(came == content(peer), || format!("{len} elements between GPUs"))?;

        let mut on_host = vec![0u32; len];
        if rank == 0 {
            comm.send(&send, peer).map_err(text)?;
            comm.recv(&mut on_host, peer).map_err(text)?;
            expect(on_host == content(peer), || format!("{len} elements to the host"))?;
        } else {
            let mut halves = gpu.0.alloc_zeros::<u32>(2 * len).map_err(text)?;
            comm.recv(&mut halves.slice_mut(len..), peer).map_err(text)?;
            let came = gpu.0.clone_dtoh(&halves).map_err(text)?;
            expect(came[..len].iter().all(|zero| *zero == 0), || "before the part".into())?;
            expect(came[len..] == content(peer), || format!("{len} elements in a part"))?;
            comm.send(&send.slice(..), peer).map_err(text)?;
        }
        comm.group(|group| {
            group.send(&send, peer)?;
            group.recv(&mut recv, peer)?;
            group.all_reduce_in_place(&mut on_host, ReduceOp::Max)
        })
        .map_err(text)?;
        let came = gpu.0.clone_dtoh(&recv).map_err(text)?;
        expect(came == content(peer), || format!("{len} elements in a group"))?;
    }
    Ok(String::new())
}

/// Buffers of several streams, and of two GPUs: what they hold is what had been enqueued.
fn streams(comm: &Comm) -> Outcome {
    let ranks = comm.world_size();
    let (first, second) = (gpu(0)?, gpu(1)?);
    for round in 0..50u32 {
        let mut send = first.0.alloc_zeros::<u32>(5000).map_err(text)?;
        let mut recv = second.0.alloc_zeros::<u32>(5000).map_err(text)?;
        // Late, as all work of the emulated GPU.
        first.0.memcpy_htod(&vec![round + 1; 5000], &mut send).map_err(text)?;
        second.0.memcpy_htod(&vec![9; 5000], &mut recv).map_err(text)?;
        comm.all_reduce(&send, &mut recv, ReduceOp::Sum).map_err(text)?;
        let sum = second.0.clone_dtoh(&recv).map_err(text)?;
        let expected = (round + 1) * ranks as u32;
        expect(sum.iter().all(|sum| *sum == expected), || format!("{} instead of {expected}", sum[0]))?;
    }
    Ok(String::new())
}

/// A stream that does not come to its end in time.
fn late_stream(comm: &Comm) -> Outcome {
    comm.barrier().map_err(text)?;
    if comm.rank() == 0 {
        let gpu = gpu(0)?;
        let mut buffer = gpu.0.alloc_zeros::<f32>(100).map_err(text)?;
        let since = Instant::now();
        match comm.within(Duration::from_millis(300)).all_reduce_in_place(&mut buffer, ReduceOp::Sum) {
            Err(Error::Timeout(timeout)) => {
                expect(timeout.operation.contains("the work of GPU 0"), || timeout.to_string())?;
            }
            other => return Err(format!("a stream that is late: {other:?}")),
        }
        expect(since.elapsed() < Duration::from_secs(2), || format!("{:?}", since.elapsed()))?;
        expect(comm.barrier().is_err(), || "the communicator has not failed".into())?;
    }
    Ok(String::new())
}

/// Without CUDA in MPI: who says so, and what can be done. Nothing was started.
fn refused(comm: &Comm, args: &[String]) -> Outcome {
    let gpu = gpu(comm.rank())?;
    let mut buffer = gpu.0.alloc_zeros::<f32>(100).map_err(text)?;
    let library = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum);
    let message = comm.send(&buffer, 1 - comm.rank());
    for result in [library, message] {
        let Err(error @ Error::Unsupported(_)) = result else {
            return Err(format!("GPU memory without a CUDA-aware MPI: {result:?}"));
        };
        let error = error.to_string();
        let parts = ["memory of GPU", "PHALANX_MPI_CUDA=1", "PHALANX_BACKEND=nccl", "copy the buffer"];
        for part in parts.into_iter().chain(args.iter().map(String::as_str)) {
            expect(error.contains(part), || format!("{part:?} is missing in {error}"))?;
        }
        let named = ["Open MPI", "MPICH", "Intel(R) MPI"].iter().any(|name| error.contains(name));
        expect(named, || format!("no library is named in {error}"))?;
    }
    comm.barrier().map_err(text)?;
    Ok(String::new())
}
