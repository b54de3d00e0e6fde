//! PEs that an MPI's own mpirun starts on one host: they find each other without a port.

use crate::world::{are_emulated, barrier, context, done, expect, must, read, upload, values};
use libtest_mimic::{Failed, Trial};
use phalanx_sys::mpi::Mpi;
use phalanx_testkit::Scenario;
use phalanx_testkit::mpi::Installation;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::sockets::listening;

pub const SCENARIOS: &[Scenario] = &[Scenario::process("mpirun/no_port", no_port)];

/// What carries the meeting: whatever is chosen where ranks have GPUs, shared memory, MPI.
const BACKENDS: [&str; 3] = ["auto", "host", "mpi"];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let trial = |(name, found): (&str, Result<Installation, String>), backend: &'static str| {
        let name = format!("mpirun/{name}/{backend}/no_port");
        match found {
            // The library of a machine with GPUs opens ports of its own.
            Ok(_) if gpus < 2 || !are_emulated() => Trial::test(name, || Ok(())).with_ignored_flag(true),
            Ok(mpi) => Trial::test(name, move || {
                let job = mpi.job(2).scenario("mpirun/no_port", &[]).env("PHALANX_BACKEND", backend);
                Ok::<(), Failed>(job.succeed().map(drop)?)
            }),
            Err(reason) => Trial::test(name, || Ok(())).with_ignored_flag(true).with_kind(reason),
        }
    };
    let all = |installation: (&'static str, _)| BACKENDS.map(|backend| trial(installation.clone(), backend));
    Installation::all().into_iter().flat_map(all).collect()
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
