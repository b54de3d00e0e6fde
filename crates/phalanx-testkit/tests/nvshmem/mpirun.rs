//! PEs that an MPI's own mpirun starts on one host: they find each other without a port.

use crate::world::{are_emulated, barrier, context, done, expect, gpu_of, must, read, upload, values};
use libtest_mimic::{Failed, Trial};
use phalanx::nvshmem::Context;
use phalanx_sys::mpi::Mpi;
use phalanx_sys::nvshmem::plugin;
use phalanx_testkit::Scenario;
use phalanx_testkit::mpi::{Installation, Job};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::sockets::listening;
use phalanx_testkit::suite;
use phalanx_testkit::suite::Condition;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("mpirun/no_port", no_port),
    Scenario::process("mpirun/by_environment", by_environment),
];

/// What carries the meeting: whatever is chosen where ranks have GPUs, shared memory, MPI.
const BACKENDS: [&str; 3] = ["auto", "host", "mpi"];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let of_each = |(name, found): (&'static str, Result<Installation, String>)| {
        let without_port = BACKENDS.map(|backend| {
            let mpi = match &found {
                Ok(_) if !are_emulated() => {
                    Err("the library of a machine with GPUs opens ports of its own".into())
                }
                found => found.clone(),
            };
            trial(format!("mpirun/{name}/{backend}/no_port"), gpus, mpi, move |mpi| {
                mpi.job(2).scenario("mpirun/no_port", &[]).env("PHALANX_BACKEND", backend)
            })
        });
        let mpi = match &found {
            Ok(_) if are_emulated() && name == "open_mpi" => {
                Err("the emulated library speaks PMI-1, and Open MPI's mpirun PMIx".into())
            }
            // What the library has for it fits some releases of PMIx only.
            Ok(_) if name == "open_mpi" => pmix().and(found.clone()),
            found => found.clone(),
        };
        let by_environment = trial(format!("mpirun/{name}/by_environment"), gpus, mpi, move |mpi| {
            let job = mpi.job(2).scenario("mpirun/by_environment", &[]);
            job.env("NVSHMEM_BOOTSTRAP_PMI", mpi.process_manager())
        });
        without_port.into_iter().chain([by_environment])
    };
    Installation::all().into_iter().flat_map(of_each).collect()
}

/// Whether the library's plugin for PMIx loads on this machine.
fn pmix() -> Result<(), String> {
    let library = phalanx::nvshmem::path().map_err(|error| error.to_string())?;
    plugin::PMIX.load(library).map_err(|error| error.to_string())
}

/// A job that succeeds; ignored, for a reason, where it cannot be started.
fn trial(
    name: String,
    gpus: usize,
    found: Result<Installation, String>,
    job: impl Fn(&Installation) -> Job + Send + 'static,
) -> Trial {
    match found {
        Ok(mpi) => Trial::test(name, move || Ok::<(), Failed>(job(&mpi).succeed().map(drop)?))
            .only_if(gpus >= 2, "it takes two GPUs"),
        Err(reason) => suite::ignored(name, reason),
    }
}

/// A context in which a PE gets what its neighbour has. MPI, which opens ports of its own, is there before.
fn no_port(_: &[String]) -> Outcome {
    let mpi = Mpi::load().map_err(|error| error.to_string())?;
    let (mut provided, null) = (-1, std::ptr::null_mut());
    // SAFETY: once, before any other use of MPI.
    let code = unsafe {
        (mpi.functions.init_thread)(null, null.cast(), mpi.constants.thread_multiple, &raw mut provided)
    };
    assert_eq!(code, 0, "MPI_Init_thread");
    let before = listening();
    let comm = must("init", phalanx::init())?;
    let context = context(&comm)?;
    let memory = upload(&context, &values::<f32>(comm.rank(), 100))?;
    let mut copy = must("alloc", context.alloc::<f32>(100))?;
    barrier(&context)?;
    must("get", context.get(&mut copy, &memory, 1 - comm.rank()))?;
    let of_peer = values::<f32>(1 - comm.rank(), 100);
    expect("the neighbour's", &read(&copy)?, |index| of_peer[index])?;
    assert_eq!(listening(), before, "with PHALANX_BACKEND={:?}", std::env::var("PHALANX_BACKEND"));
    must("free", memory.free())?;
    must("free", copy.free())?;
    must("finalize", context.finalize())?;
    must("finalize", comm.finalize())?;
    // SAFETY: the last call of MPI, as the application's duty.
    assert_eq!(unsafe { (mpi.functions.finalize)() }, 0, "MPI_Finalize");
    done()
}

/// PEs that find each other by mpirun's process manager, without phalanx's bootstrap or MPI; twice in a
/// process. One of them ends later than the others.
fn by_environment(_: &[String]) -> Outcome {
    for round in 0..2 {
        let context = must("init_from_environment", Context::init_from_environment())?;
        let (pe, pes) = (context.my_pe(), context.n_pes());
        assert!(pes == 2 && pe < 2, "PE {pe} of {pes} in round {round}");
        assert_eq!(context.cuda_context().ordinal(), gpu_of(pe));
        let memory = upload(&context, &values::<f32>(pe + round, 100))?;
        let mut copy = must("alloc", context.alloc::<f32>(100))?;
        barrier(&context)?;
        must("get", context.get(&mut copy, &memory, 1 - pe))?;
        let of_peer = values::<f32>(1 - pe + round, 100);
        expect("the neighbour's", &read(&copy)?, |index| of_peer[index])?;
        barrier(&context)?;
        must("free", memory.free())?;
        must("free", copy.free())?;
        must("finalize", context.finalize())?;
        // An mpirun ends the ranks of one that is gone without its process manager's leave.
        if pe == pes - 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
    }
    must("version", phalanx::nvshmem::version())
}
