//! Device communicators: what kernels of a program's own need of a communicator of NCCL's.

use crate::releases::is_since;
use crate::world::{are_emulated, both, done, elements, expect, launch, must, stream, value, values};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use libtest_mimic::{Failed, Trial};
use phalanx::jit::{Image, Module, Program, device_comm, value as argument, writes};
use phalanx::nccl::{DeviceComm, DeviceRequirements, GinConnection, Nccl, Registration, Resource, TeamKind};
use phalanx::{Comm, Error};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use std::sync::Arc;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("device_comm", device_communicators),
    Scenario::rank("device_comm_ends", ends),
    Scenario::rank("device_comm_refused", refused),
    Scenario::rank("device_comm_differs", differs),
    Scenario::rank("device_comm_absent", absent),
    Scenario::rank("device_comm_kernel", kernel),
];

/// Releases in which device communicators are laid out differently.
const RELEASES: [&str; 7] = ["2.28.3", "2.28.9", "2.29.2", "2.29.7", "2.30.7", "2.31.2", "2.32.3"];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let [plain @ .., differs, absent, kernel] = SCENARIOS else { unreachable!("six scenarios") };
    let mut trials: Vec<_> = plain.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect();
    trials.extend([differs, absent].into_iter().flat_map(|scenario| both(*scenario, 2, gpus, &[""])));
    let of_kernels = both(*kernel, 1, gpus, &[""]).into_iter();
    trials.extend(of_kernels.map(|trial| trial.only_if(!are_emulated(), "emulated GPUs have no kernels")));
    trials
}

/// With emulated releases.
pub fn of_releases() -> Vec<Trial> {
    let perform = |version: &'static str, scenario: Scenario| {
        let title = format!("releases/{version}/{}", scenario.name);
        Trial::test(title, move || -> Result<(), Failed> {
            let emulated = Emulated::nccl(version)?;
            Ok(emulated.launch(launch(scenario, 2, "")).reports().map(drop)?)
        })
    };
    let of_each = |version| [perform(version, SCENARIOS[0]), perform(version, SCENARIOS[2])];
    RELEASES.into_iter().flat_map(of_each).collect()
}

/// The size of `ncclDevComm`, as the releases' headers say.
fn size(version: &str) -> usize {
    let sizes = [("2.28.3", 88), ("2.28.7", 200), ("2.29.7", 224), ("2.30.3", 240), ("2.31.0", 248)];
    sizes.iter().rev().find(|(since, _)| is_since(version, since)).map_or(0, |(_, size)| *size)
}

/// One made, or `None` where a rank alone has no symmetric memory (2.28.3).
fn make(comm: &Comm, asked: &DeviceRequirements) -> Result<Option<DeviceComm>, String> {
    let nccl = comm.nccl().ok_or("NCCL")?;
    match nccl.device_comm(asked) {
        Err(error)
            if comm.world_size() == 1 && error.to_string().contains("does not support symmetric memory") =>
        {
            Ok(None)
        }
        made => must("device_comm", made).map(Some),
    }
}

/// Everything of it but what goes over the network.
fn requirements(nccl: &Nccl<'_>) -> Result<DeviceRequirements, Error> {
    let mut asked = DeviceRequirements::default();
    let team = nccl.team(TeamKind::Lsa)?;
    asked.lsa_barriers = 3;
    asked.resources = vec![
        Resource::Buffer { bytes: 1000, align: 256 },
        Resource::LsaBarriers { team, count: 2 },
        Resource::AllToAllSlots { blocks: 2, slots: nccl.all_to_all_slots(100, 12)? },
        Resource::Buffer { bytes: 8, align: 8 },
    ];
    Ok(asked)
}

fn device_communicators(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    let version = nccl.version();
    let asked = match requirements(&nccl) {
        Err(Error::MissingFunction(missing)) if !is_since(&version, "2.28.3") => {
            return Ok(missing.to_string());
        }
        asked => must("requirements", asked)?,
    };
    let team = |kind| must("team", nccl.team(kind));
    let [world, lsa, rail] = [team(TeamKind::World)?, team(TeamKind::Lsa)?, team(TeamKind::Rail)?];
    assert_eq!((world.ranks, world.rank, world.stride), (ranks, rank, 1));
    assert_eq!(lsa.ranks * rail.ranks, ranks, "{lsa:?}, {rail:?}");
    for other in 0..lsa.ranks {
        let number = must("rank_in_world", nccl.rank_in_world(lsa, other))?;
        assert_eq!(number, rank - lsa.rank + other);
        assert_eq!(must("rank_in_lsa", nccl.rank_in_lsa(world, number))?, other);
    }
    assert!(nccl.rank_in_world(lsa, lsa.ranks).is_err());

    let mut made = Vec::new();
    for _ in 0..3 {
        let Some(device) = make(&comm, &asked)? else { return done() };
        assert_eq!(device.as_bytes().len(), size(&version), "of {version}");
        let word = |at: usize| u32::from_ne_bytes(device.as_bytes()[at..at + 4].try_into().expect("4 bytes"));
        // Behind magic and version, where it has them.
        let start = if is_since(&version, "2.30.3") { 8 } else { 0 };
        assert_eq!((word(start), word(start + 4)), (rank as u32, ranks as u32));
        let [buffer, barriers, slots, small] = device.resources() else {
            return Err("four resources".into());
        };
        assert!(buffer.buffer() % 2 == 0 && small.buffer() != buffer.buffer(), "{:?}", device.resources());
        assert_eq!(barriers.words()[1], 2);
        // 100 elements of 12 bytes are 200 slots.
        assert_eq!(slots.words()[1], 200);
        assert!(device.multimem().is_empty());
        made.push(device);
    }
    // One that is not the last.
    drop(made.remove(1));
    let again = must("device_comm", nccl.device_comm(&DeviceRequirements::default()))?;
    assert!(again.resources().is_empty());
    windows(&comm, &nccl, &again)?;
    properties(&nccl)?;
    must("sync", made[0].sync())?;
    done()
}

/// Where the windows of all ranks are.
fn windows(comm: &Comm, nccl: &Nccl<'_>, device: &DeviceComm) -> Result<(), String> {
    let (rank, ranks, version) = (comm.rank(), comm.world_size(), nccl.version());
    let buffer = must("alloc", nccl.alloc::<f32>(1000))?;
    if buffer.registration() == Registration::Symmetric {
        assert_ne!(must("window", buffer.window())?, 0);
    } else if ranks > 1 {
        return Err(format!("{buffer:?}"));
    } else {
        return Ok(());
    }
    let plain = must("alloc", nccl.alloc_as::<f32>(10, Registration::Plain))?;
    let refused = plain.window().expect_err("no window").to_string();
    assert!(refused.contains("as a window") && refused.contains("Registration::Symmetric"), "{refused}");
    if !is_since(&version, "2.29.2") {
        let missing = nccl.peer_pointer(&buffer, 0, rank).expect_err("older").to_string();
        assert!(missing.contains("ncclGetPeerDevicePointer") && missing.contains(&version), "{missing}");
        return Ok(());
    }
    let start = must("window_start", nccl.window_start(&buffer))?;
    let lsa = must("team", nccl.team(TeamKind::Lsa))?;
    for peer in 0..ranks {
        let at = |offset| must("peer_pointer", nccl.peer_pointer(&buffer, offset, peer));
        let Some(first) = at(0)? else { continue };
        assert_eq!(at(999)?, Some(first + 999 * 4));
        let lsa_rank =
            must("rank_in_lsa", nccl.rank_in_lsa(must("team", nccl.team(TeamKind::World))?, peer))?;
        assert_eq!(must("lsa_pointer", nccl.lsa_pointer(&buffer, 0, lsa_rank))?, first);
    }
    assert!(nccl.lsa_pointer(&buffer, 0, lsa.ranks).is_err());
    let behind = nccl.peer_pointer(&buffer, 1000, rank).expect_err("behind the end").to_string();
    assert!(behind.contains("1001"), "{behind}");
    assert!(nccl.peer_pointer(&buffer, 0, ranks).is_err());
    let without = device.lsa_multimem_pointer(&buffer, 0).expect_err("not asked for").to_string();
    assert!(without.contains("lsa_multimem"), "{without}");
    assert_ne!(start, 0);
    if is_since(&version, "2.29.7") {
        let ordered = must("alloc", nccl.alloc_as::<f32>(10, Registration::SymmetricOrdered))?;
        assert_eq!(ordered.registration(), Registration::SymmetricOrdered);
    }
    Ok(())
}

fn properties(nccl: &Nccl<'_>) -> Result<(), String> {
    let version = nccl.version();
    match nccl.properties() {
        Err(Error::MissingFunction(missing)) if !is_since(&version, "2.29.2") => {
            assert_eq!(missing.function, "ncclCommQueryProperties");
        }
        properties => {
            let known = must("properties", properties)?;
            assert!(known.device_api, "{known:?}");
            assert_eq!(known.lsa_teams.is_some(), is_since(&version, "2.29.7"));
            assert_eq!(known.comm_hash.is_some(), is_since(&version, "2.31.0"));
            assert_eq!(known.cft.is_some(), is_since(&version, "2.32.0"));
        }
    }
    Ok(())
}

/// Whoever gives one back waits for the streams it was launched on; one may outlive its communicator, and
/// then is of no use.
fn ends(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let asked = must("requirements", requirements(&nccl))?;
    let Some(device) = make(&comm, &asked)? else { return done() };
    let elsewhere = stream(&comm).context().new_stream().context(|| "a stream".into())?;
    let mut large = elsewhere.alloc_zeros::<f32>(elements(1 << 24)).context(|| "memory".into())?;
    must("argument", device.argument(&elsewhere))?;
    for _ in 0..50 {
        elsewhere.memset_zeros(&mut large).context(|| "memset".into())?;
    }
    drop(device);
    assert!(is_idle(&elsewhere)?, "the kernels of a device communicator that was given back");

    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let nccl = part.nccl().ok_or("NCCL")?;
    let [first, second] = [nccl.device_comm(&asked), nccl.device_comm(&asked)];
    let (first, second) = (must("device_comm", first)?, must("device_comm", second)?);
    must("argument", first.argument(&elsewhere))?;
    elsewhere.memset_zeros(&mut large).context(|| "memset".into())?;
    must("finalize", part.finalize())?;
    assert!(is_idle(&elsewhere)?, "the kernels of a communicator that has ended");
    let late = second.argument(&elsewhere).expect_err("has ended").to_string();
    assert!(late.contains("its communicator has ended"), "{late}");
    drop(first);
    must("barrier", comm.barrier())?;
    done()
}

fn is_idle(stream: &CudaStream) -> Result<bool, String> {
    stream.context().bind_to_thread().context(|| "the context".into())?;
    // SAFETY: a stream that lives.
    let state = unsafe { cudarc::driver::sys::cuStreamQuery(stream.cu_stream()) };
    Ok(state == cudarc::driver::sys::CUresult::CUDA_SUCCESS)
}

/// What the release or the arguments do not allow is told before the ranks meet.
fn refused(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let version = nccl.version();
    type Change = fn(&mut DeviceRequirements);
    let newer: [(&str, &str, Change); 9] = [
        ("barriers", "2.28.7", |asked| asked.barriers = 1),
        ("gin_signals", "2.28.7", |asked| asked.gin_signals = 1),
        ("gin_queue_depth", "2.29.7", |asked| asked.gin_queue_depth = Some(8)),
        ("rail", "2.29.7", |asked| asked.gin = Some(GinConnection::Rail)),
        ("world_gin_barriers", "2.30.3", |asked| asked.world_gin_barriers = 1),
        ("gin_traffic_class", "2.30.3", |asked| asked.gin_traffic_class = Some(1)),
        ("gin_strong_signals", "2.30.7", |asked| asked.gin_strong_signals = Some(false)),
        ("stride", "2.31.0", |asked| asked.gin = Some(GinConnection::Stride(2))),
        ("cft_barriers", "2.31.0", |asked| asked.cft_barriers = 1),
    ];
    for (setting, since, change) in newer {
        let mut asked = DeviceRequirements::default();
        change(&mut asked);
        if !is_since(&version, since) {
            let error = nccl.device_comm(&asked).expect_err(setting);
            assert!(matches!(error, Error::Unsupported(_)), "{error}");
            let text = error.to_string();
            assert!(text.contains(setting) && text.contains(since) && text.contains(&version), "{text}");
        }
    }
    let wrong: [(&str, Change); 3] = [
        ("-1", |asked| asked.lsa_barriers = -1),
        ("power of two", |asked| asked.resources = vec![Resource::Buffer { bytes: 1, align: 3 }]),
        ("-2", |asked| asked.resources = vec![Resource::AllToAllSlots { blocks: 1, slots: -2 }]),
    ];
    for (said, change) in wrong {
        let mut asked = DeviceRequirements::default();
        change(&mut asked);
        let error = nccl.device_comm(&asked).expect_err(said);
        assert!(matches!(error, Error::Usage(_)) && error.to_string().contains(said), "{error}");
    }
    // The communicator is none the worse for it.
    make(&comm, &DeviceRequirements::default())?;
    done()
}

/// All ranks ask for the same.
fn differs(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let mut asked = DeviceRequirements::default();
    asked.lsa_barriers = 1 + i32::from(comm.rank() == 1);
    let error = nccl.device_comm(&asked).expect_err("another number of barriers");
    assert!(matches!(error, Error::Mismatch(_)), "{error}");
    assert!(error.to_string().matches("device_comm(requirements #").count() == 2, "{error}");
    done()
}

/// A rank that does not come is named, and nobody waits for it inside of the library.
fn absent(comm: Comm, _: &[String]) -> Outcome {
    let timeout = Duration::from_secs(1);
    comm.set_timeout(timeout);
    if comm.rank() == 0 {
        std::thread::sleep(timeout + Duration::from_secs(2));
        return done();
    }
    let nccl = comm.nccl().ok_or("NCCL")?;
    let error = nccl.device_comm(&DeviceRequirements::default()).expect_err("rank 0 does not come");
    let text = error.to_string();
    assert!(matches!(error, Error::Timeout(_)), "{text}");
    assert!(text.contains("device_comm(requirements #") && text.contains("rank 0"), "{text}");
    done()
}

/// Sums what all ranks have in their windows and leaves it there: each rank sums a share, and stores it
/// everywhere.
const ALL_REDUCE: &str = r#"
#include <nccl_device.h>

extern "C" __global__ void all_reduce(ncclDevComm comm, ncclWindow_t window, float* own, size_t len) {
  ncclCoopCta cta;
  ncclLsaBarrierSession<ncclCoopCta> barrier(cta, comm, ncclTeamTagLsa(), blockIdx.x);
  barrier.sync(cta, cuda::memory_order_acquire);
  size_t workers = (size_t)comm.lsaSize * gridDim.x * blockDim.x;
  size_t worker = ((size_t)comm.lsaRank * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  for (size_t i = worker; i < len; i += workers) {
    float sum = 0;
    for (int peer = 0; peer < comm.lsaSize; peer++) sum += ((float*)ncclGetLsaPointer(window, 0, peer))[i];
    for (int peer = 0; peer < comm.lsaSize; peer++) ((float*)ncclGetLsaPointer(window, 0, peer))[i] = sum;
  }
  barrier.sync(cta, cuda::memory_order_acq_rel);
  // The window is the program's own memory, at another address.
  if (own[0] != ((float*)ncclGetLocalPointer(window, 0))[0]) __trap();
}
"#;

/// Blocks, which wait for their like at the other ranks.
const BLOCKS: u32 = 16;

/// A kernel that reads and writes the memory of all ranks, compiled with the headers of the loaded library.
fn kernel(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let nccl = comm.nccl().ok_or("NCCL")?;
    let lsa = must("team", nccl.team(TeamKind::Lsa))?;
    if lsa.ranks < ranks {
        return Err(format!("{ranks} ranks of which {} reach each other's memory", lsa.ranks));
    }
    let program = Program::new("all_reduce.cu", ALL_REDUCE).nccl();
    let image = must("compile", program.compile_for(nccl.context()))?;
    let mut asked = DeviceRequirements::default();
    asked.lsa_barriers = BLOCKS as i32;
    let Some(device) = make(&comm, &asked)? else { return done() };
    let elsewhere = nccl.context().new_stream().context(|| "a stream".into())?;
    for len in [1usize, 1000, (1 << 20) + 3] {
        let mut buffer = must("alloc", nccl.alloc::<f32>(len))?;
        if buffer.registration() != Registration::Symmetric {
            return Ok("one rank has no window".into());
        }
        let window = must("window", buffer.window())?;
        let launcher = Launcher::new(&nccl, &image)?;
        for round in 0..4 {
            elsewhere
                .memcpy_htod(&values::<f32>(rank + round, len), &mut buffer.view_mut())
                .context(|| "upload".into())?;
            if round % 2 == 0 {
                // SAFETY: the arguments are the kernel's, which stays within the window; all ranks launch it,
                // and its blocks fit.
                let launched = unsafe {
                    launcher.kernel.launch(
                        &elsewhere,
                        config(),
                        [device_comm(&device), argument(&window), writes(&mut buffer), argument(&len)],
                    )
                };
                must("launch", launched)?;
            } else {
                launcher.launch_by_cudarc(&device, &elsewhere, window, &mut buffer.view_mut(), len)?;
            }
            must("sync", device.sync())?;
            // Nobody overwrites what others still sum.
            must("barrier", comm.barrier())?;
            let sum = |index: usize| (0..ranks).map(|rank| value(rank + round, index)).sum::<i32>() as f32;
            let got = elsewhere.clone_dtoh(&buffer.view()).context(|| "download".into())?;
            expect(format!("{len} elements, round {round}"), &got, sum)?;
            must("barrier", comm.barrier())?;
        }
    }
    // A parameter of another size is noticed.
    let wrong = Program::new("other.cu", "extern \"C\" __global__ void other(double comm) {}");
    let module =
        must("load", Module::load(nccl.context(), &must("compile", wrong.compile_for(nccl.context()))?))?;
    let other = must("kernel", module.kernel("other"))?;
    // SAFETY: a kernel that does nothing.
    let refused = unsafe { other.launch(&elsewhere, config(), [device_comm(&device)]) };
    let refused = refused.expect_err("a parameter of 8 bytes").to_string();
    assert!(refused.contains(&device.as_bytes().len().to_string()), "{refused}");
    // Dropped with a kernel in flight.
    let mut last = must("alloc", nccl.alloc::<f32>(1 << 22))?;
    let window = must("window", last.window())?;
    let launcher = Launcher::new(&nccl, &image)?;
    launcher.launch_by_cudarc(&device, &elsewhere, window, &mut last.view_mut(), 1 << 22)?;
    drop((device, last));
    assert!(is_idle(&elsewhere)?);
    must("barrier", comm.barrier())?;
    Ok(format!("NCCL {}", nccl.version()))
}

fn config() -> LaunchConfig {
    LaunchConfig { grid_dim: (BLOCKS, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 }
}

/// The kernel, for both ways to launch it.
struct Launcher {
    kernel: phalanx::jit::Kernel<'static>,
    function: CudaFunction,
}

impl Launcher {
    fn new(nccl: &Nccl<'_>, image: &Image) -> Result<Launcher, String> {
        let module = must("load", Module::load(nccl.context(), image))?;
        let kernel = must("kernel", module.kernel("all_reduce"))?;
        let module = nccl.context().load_module(Ptx::from_binary(image.as_bytes().to_vec()));
        let function =
            module.context(|| "load".into())?.load_function("all_reduce").context(|| "load".into())?;
        Ok(Launcher { kernel, function })
    }

    fn launch_by_cudarc(
        &self,
        device: &DeviceComm,
        stream: &Arc<CudaStream>,
        window: u64,
        own: &mut cudarc::driver::CudaViewMut<'_, f32>,
        len: usize,
    ) -> Result<(), String> {
        let comm = must("argument", device.argument(stream))?;
        let mut builder = stream.launch_builder(&self.function);
        builder.arg(comm).arg(&window).arg(own).arg(&len);
        // SAFETY: as of the other launch.
        unsafe { builder.launch(config()) }.map(drop).context(|| "launch".into())
    }
}

/// What the other modules' worlds do in their trials of failures.
pub fn exercise(nccl: &Nccl<'_>, stream: &Arc<CudaStream>) -> Result<(), Error> {
    let mut asked = DeviceRequirements::default();
    asked.lsa_barriers = 1;
    let device = nccl.device_comm(&asked)?;
    device.argument(stream)?;
    device.sync()
}
