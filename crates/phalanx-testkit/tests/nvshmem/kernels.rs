//! Kernels beside the library, and kernels that call it.
//!
//! The emulated driver knows the kernels of atomic operations and no others, so all but `kernels/overlap`
//! need GPUs, NVRTC, nvJitLink and NVSHMEM's device code.

use crate::world::{self, barrier, context, done, expect, free, must, read, upload, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::Comm;
use phalanx::cudarc::driver::LaunchConfig;
use phalanx::jit::{Module, Program, value as argument, writes};
use phalanx::nvshmem::Context;
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("kernels/overlap", overlap),
    Scenario::rank("kernels/load_again", load_again),
    Scenario::rank("kernels/peer", peer),
];

const RING: &str = include_str!("../../../phalanx/examples/kernels/ring.cu");
const EXAMPLES: [&str; 3] = ["nvshmem_ring", "nvshmem_halo", "nvshmem_fused"];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let [overlap, others @ ..] = SCENARIOS else { unreachable!("there are several") };
    let mut trials = vec![world::trial(*overlap, gpus)];
    let objection = if world::are_emulated() {
        Some("the emulated driver has no such kernels".to_owned())
    } else {
        let image = Program::new("ring.cu", RING).nvshmem().compile("sm_90");
        image.err().map(|error| error.to_string())
    };
    let unless = |objection: &Option<String>, trial: Trial| match objection {
        Some(reason) => trial.only_if(false, reason),
        None => trial,
    };
    trials.extend(others.iter().map(|scenario| unless(&objection, world::trial(*scenario, gpus))));
    for name in EXAMPLES {
        let program = built(name);
        let missing = program.is_none().then(|| format!("cargo build --example {name} first"));
        let objection =
            objection.clone().or_else(|| (gpus < 2).then(|| "it needs two GPUs".into())).or(missing);
        let trial = Trial::test(format!("examples/{name}"), move || runs(program.unwrap_or_default()));
        trials.push(unless(&objection, trial));
    }
    trials
}

/// Where an example is, of the profile that this suite was built with.
fn built(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let program = own.parent()?.parent()?.join("examples").join(name);
    program.is_file().then_some(program)
}

/// An example with two PEs, which looks at its results itself.
fn runs(program: PathBuf) -> Result<(), Failed> {
    let job = format!("nvshmem-examples-{}-{:?}", std::process::id(), Instant::now());
    let start = |rank: &str| {
        Command::new(&program)
            .envs([("PHALANX_RANK", rank), ("PHALANX_LOCAL_RANK", rank), ("PHALANX_JOB", &job)])
            .envs([("PHALANX_WORLD_SIZE", "2"), ("PHALANX_LOCAL_WORLD_SIZE", "2"), ("PHALANX_TIMEOUT", "60")])
            .env("PHALANX_BACKEND", "host")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    };
    let mut pes = [start("0")?, start("1")?];
    let since = Instant::now();
    while pes.iter_mut().any(|pe| matches!(pe.try_wait(), Ok(None))) {
        if since.elapsed() > Duration::from_secs(180) {
            pes.iter_mut().try_for_each(|pe| pe.kill())?;
            return Err("it was still running after 180 s".into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    for pe in pes {
        let output = pe.wait_with_output()?;
        if !output.status.success() {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            return Err(format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr)).into());
        }
    }
    Ok(())
}

/// Kernels on one stream, puts on another: each does what it does alone.
fn overlap(comm: Comm, _: &[String]) -> Outcome {
    const ROUNDS: usize = 20;
    const LEN: usize = 10_007;
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (left, right) = ((me + pes - 1) % pes, (me + 1) % pes);
    let source = upload(&context, &values::<i32>(me, LEN))?;
    let inbox = must("alloc", context.alloc::<i32>(LEN * ROUNDS))?;
    let counted = must("alloc", context.alloc::<u64>(2))?;
    let [kernels, puts] = [0; 2].map(|_| context.cuda_context().new_stream());
    let (kernels, puts) = (kernels.context(|| "stream".into())?, puts.context(|| "stream".into())?);
    barrier(&context)?;
    for round in 0..ROUNDS {
        must("atomic_add", context.atomic_add(&counted, 0, 1, me, &kernels))?;
        let part = inbox.slice(round * LEN..(round + 1) * LEN);
        must("put_on_stream", context.put_on_stream(&part, &source, right, &puts))?;
        must("atomic_add", context.atomic_add(&counted, 1, me as u64 + 1, right, &kernels))?;
    }
    must("sync", context.sync(&puts))?;
    must("sync", context.sync(&kernels))?;
    barrier(&context)?;
    expect("put beside kernels", &read(&inbox)?, |index| value(left, index % LEN))?;
    let rounds = ROUNDS as u64;
    expect("counted beside puts", &read(&counted)?, |index| [rounds, rounds * (left as u64 + 1)][index])?;
    barrier(&context)?;
    free([source, inbox])?;
    must("free", counted.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// Kernels that call NVSHMEM get the state of each context after the other.
fn load_again(comm: Comm, _: &[String]) -> Outcome {
    for _ in 0..2 {
        let context = context(&comm)?;
        gather(&context)?;
        // Once more, with the same context.
        gather(&context)?;
        must("finalize", context.finalize())?;
    }
    done()
}

fn gather(context: &Context) -> Result<(), String> {
    const COUNT: usize = 10_007;
    const BLOCKS: usize = 4;
    let (me, pes, stream) = (context.my_pe(), context.n_pes(), context.stream());
    let program = Program::new("ring.cu", RING).nvshmem();
    let image = must("compile", program.compile_for(context.cuda_context()))?;
    let ring = must("kernel", must("load", context.load(&image))?.kernel("ring"))?;
    let mut mine = vec![0f32; pes * COUNT];
    mine[me * COUNT..][..COUNT].copy_from_slice(&values::<f32>(me, COUNT));
    let mut all = upload(context, &mine)?;
    let mut arrived = must("alloc", context.alloc::<u64>(BLOCKS * pes))?;
    barrier(context)?;
    let config =
        LaunchConfig { grid_dim: (BLOCKS as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
    let arguments = [writes(&mut all), writes(&mut arrived), argument(&COUNT)];
    // SAFETY: the kernel's parameters; it writes within the two buffers on every PE, and nobody else does.
    must("launch", unsafe { ring.launch_cooperative(stream, config, arguments) })?;
    must("sync", context.sync(stream))?;
    expect("gathered by kernels", &read(&all)?, |at| value(at / COUNT, at % COUNT) as f32)?;
    barrier(context)?;
    must("free", all.free())?;
    must("free", arrived.free())
}

/// A kernel that stores to another PE's part.
fn peer(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let source = "extern \"C\" __global__ void store(float* to, float what, int n) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = what;
    }";
    let image = must("compile", Program::new("store.cu", source).compile_for(context.cuda_context()))?;
    let store = must("kernel", must("load", Module::load(context.cuda_context(), &image))?.kernel("store"))?;
    let memory = must("alloc", context.alloc::<f32>(1000))?;
    barrier(&context)?;
    let right = must("peer", memory.peer((me + 1) % pes))?.ok_or("it cannot be reached")?;
    let part = right.slice(100..900);
    let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (128, 1, 1), shared_mem_bytes: 0 };
    let own = me as f32 + 1.0;
    let arguments = [(&part).into(), argument(&own), argument(&800i32)];
    // SAFETY: the kernel's parameters; it stays within the part, which nobody else uses.
    must("launch", unsafe { store.launch(context.stream(), config, arguments) })?;
    must("sync", context.sync(context.stream()))?;
    barrier(&context)?;
    let left = ((me + pes - 1) % pes) as f32 + 1.0;
    expect("stored", &read(&memory)?, |index| if (100..900).contains(&index) { left } else { 0.0 })?;
    barrier(&context)?;
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}
