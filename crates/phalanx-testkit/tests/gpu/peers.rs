//! FIFOs for kernels of programs: made and given back on emulated GPUs too; used where there are real ones.

use crate::world::{BACKEND, DEADLINE, done, must, stream, upload};
use libtest_mimic::Trial;
use phalanx::cudarc::driver::LaunchConfig;
use phalanx::jit::{Kernel, Module, Program, peers, reads, value, writes};
use phalanx::{Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::{has_gpus_for, on_own_kernels};
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("peers/made", made),
    Scenario::rank("peers/refused", refused),
    Scenario::rank("peers/mismatch", mismatch),
    Scenario::rank("peers/kernels", kernels),
    Scenario::rank("peers/lost", lost),
];

/// A scenario, with an algorithm, the kind of the ranks, and their number.
const WORLDS: [(&str, &str, &str, usize); 11] = [
    ("made", "auto", "threads", 2),
    ("made", "auto", "processes", 3),
    ("made", "auto", "threads", 8),
    ("refused", "nccl", "processes", 2),
    ("mismatch", "auto", "threads", 2),
    ("kernels", "ll128", "processes", 2),
    ("kernels", "ll128", "threads", 2),
    ("kernels", "ll128", "processes", 3),
    ("kernels", "ll128", "processes", 4),
    ("lost", "ll128", "processes", 2),
    ("lost", "ll128", "threads", 2),
];

/// These launch kernels, which are not emulated.
const ON_GPUS: [&str; 2] = ["kernels", "lost"];

pub fn trials() -> Vec<Trial> {
    let trial = |(scenario, algorithm, kind, ranks)| {
        let trial = Trial::test(format!("peers/{scenario}/{algorithm}/{kind}/{ranks}"), move || {
            let launch = Launch::new(&format!("peers/{scenario}"), ranks).deadline(DEADLINE);
            let launch = launch.env("PHALANX_BACKEND", BACKEND.name()).env("PHALANX_TIMEOUT", "10");
            let launch = if kind == "threads" { launch.on_threads() } else { launch };
            Ok(on_own_kernels(algorithm, ranks, launch).map(drop)?)
        });
        let can = !ON_GPUS.contains(&scenario) || has_gpus_for(ranks);
        trial.only_if(can, "kernels of programs run on real GPUs alone")
    };
    WORLDS.into_iter().map(trial).collect()
}

/// Two at once, with an operation between; their memory comes back.
fn made(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let (first, second) = (must("peers", nccl.peers())?, must("peers", nccl.peers())?);
    assert_eq!(first.bytes(), 4_755_456 * (comm.world_size() - 1));
    let mut one = upload(&comm, &[1u32; 100])?;
    must("all_reduce", comm.all_reduce_in_place(&mut one, ReduceOp::Sum))?;
    must("argument", first.argument(stream(&comm)).map(drop))?;
    must("sync", first.sync())?;
    must("free", first.free())?;
    must("barrier", comm.barrier())?;
    must("free", second.free())?;
    // One that goes with the communicator.
    must("peers", nccl.peers().map(drop))?;
    must("finalize", comm.finalize())?;
    done()
}

/// Without own kernels every rank says what can be used instead.
fn refused(comm: Comm, _: &[String]) -> Outcome {
    match comm.nccl().ok_or("NCCL")?.peers() {
        Err(error @ Error::Unsupported(_)) => assert!(error.to_string().contains("device_comm"), "{error}"),
        other => return Err(format!("not refused: {other:?}")),
    }
    must("barrier", comm.barrier())?;
    done()
}

/// A rank that does something else ends the call on every rank, with both operations' names.
fn mismatch(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let called = if comm.rank() == 0 { nccl.peers().map(drop) } else { comm.barrier() };
    let error =
        called.and_then(|()| comm.barrier()).map_or_else(|error| error.to_string(), |()| String::new());
    assert!(error.contains("peers") && error.contains("barrier"), "{error:?}");
    done()
}

const SOURCE: &str = include_str!("../../../phalanx/examples/kernels/epilogue.cu");

fn kernel(comm: &Comm, protocol: &str) -> Result<Kernel<'static>, String> {
    let gpu = comm.nccl().ok_or("NCCL")?.context();
    let program = Program::new("epilogue.cu", SOURCE).define("PROTOCOL", protocol).option("--fmad=false");
    let image = must("compile", program.compile_for(gpu))?;
    must("load", Module::load(gpu, &image).and_then(|module| module.kernel("sum_bias_gelu")))
}

/// GELU of values far from zero.
fn gelu(x: f32) -> f32 {
    x.max(0.0)
}

/// Random lengths by both protocols, one kernel behind the other, each against the sum of all ranks' values. Large values, of which
/// GELU leaves those above zero as they are.
fn kernels(comm: Comm, _: &[String]) -> Outcome {
    let ways = must("peers", comm.nccl().ok_or("NCCL")?.peers())?;
    let protocols: &[(&str, usize)] =
        if ways.has_ll128() { &[("Ll", 128), ("Ll128", 1024)] } else { &[("Ll", 128)] };
    let value_of =
        |at: usize, rank: usize, round: usize| ((at * 5 + rank * 11 + round * 3) % 97) as f32 * 16.0 - 512.0;
    for (protocol, lanes) in protocols {
        let kernel = kernel(&comm, protocol)?;
        for (round, len) in [1, 37, 2048, 2049, 70_000, 600_001, 3].into_iter().enumerate() {
            let own: Vec<f32> = (0..len).map(|at| value_of(at, comm.rank(), round)).collect();
            let (own, bias, mut out) =
                (upload(&comm, &own)?, upload(&comm, &[64.0f32])?, upload(&comm, &vec![0.0f32; len])?);
            let blocks = [1, lanes / 8, lanes / 4][round % 3] as u32;
            let config =
                LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
            let (count, columns) = (len as i64, 1i32);
            let arguments =
                [peers(&ways), reads(&own), reads(&bias), writes(&mut out), value(&count), value(&columns)];
            // SAFETY: the kernel's parameters; it stays within the buffers, and all ranks launch it alike.
            must("launch", unsafe { kernel.launch(stream(&comm), config, arguments) })?;
            must("sync", ways.sync())?;
            let out = stream(&comm).clone_dtoh(&out).context(|| "download".into())?;
            let sum =
                |at: usize| (0..comm.world_size()).map(|rank| value_of(at, rank, round)).sum::<f32>() + 64.0;
            if let Some(at) = (0..len).find(|at| out[*at] != gelu(sum(*at))) {
                return Err(format!("{protocol}, {len} values, {at}: {} is not {}", out[at], gelu(sum(at))));
            }
        }
    }
    must("free", ways.free())?;
    done()
}

/// A rank that does not come: the others' kernels leave at the deadline, the error names it, and the GPU works.
fn lost(comm: Comm, _: &[String]) -> Outcome {
    let ways = must("peers", comm.nccl().ok_or("NCCL")?.peers())?;
    let kernel = kernel(&comm, "Ll")?;
    let (own, bias) = (upload(&comm, &[1.0f32; 100])?, upload(&comm, &[0.0f32])?);
    let mut out = upload(&comm, &[0.0f32; 100])?;
    if comm.rank() == 0 {
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
        let arguments =
            [peers(&ways), reads(&own), reads(&bias), writes(&mut out), value(&100i64), value(&1i32)];
        // SAFETY: the kernel's parameters; it stays within the buffers.
        must("launch", unsafe { kernel.launch(stream(&comm), config, arguments) })?;
        let began = Instant::now();
        let error = ways.sync().expect_err("rank 1 launches nothing");
        assert!(error.to_string().contains("rank 1"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        let same = stream(&comm).clone_dtoh(&own).context(|| "the GPU afterwards".into())?;
        assert_eq!(same, [1.0; 100]);
    } else {
        std::thread::sleep(Duration::from_secs(13));
    }
    done()
}
