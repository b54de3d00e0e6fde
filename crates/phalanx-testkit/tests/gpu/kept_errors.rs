//! Errors of something else that cudarc keeps in the GPU's context until somebody asks (of a slice's end, for
//! example): they are answered to the program, and nothing of the communicator's own breaks by them.

use crate::failures::{SLACK, TIMEOUT, names, world};
use crate::flavour::emulated_as;
use crate::world::{are_emulated, both, done, download, expect, launch, must, stream, upload, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::cudarc::driver::sys::CUresult;
use phalanx::cudarc::driver::{DriverError, result};
use phalanx::nccl::Registration;
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use std::time::Instant;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("kept_error_of_memory", of_memory),
    Scenario::rank("kept_error_meanwhile", meanwhile),
    Scenario::process("kept_error_at_the_end", at_the_end),
    Scenario::rank("kept_error_held_inside", held_inside),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let mut trials: Vec<_> =
        SCENARIOS[..2].iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect();
    let nobody_waits = Trial::test("threads/kept_error_while_nobody_waits", move || nobody_waits(gpus));
    trials.push(nobody_waits.only_if(gpus >= 2, "it takes two GPUs"));
    trials
}

/// Those that need libraries with other ways.
pub fn emulated_trials() -> Vec<Trial> {
    vec![
        Trial::test("processes/kept_error_at_the_end", || {
            // An abort would be seen by its time, a communicator that is left by a crash.
            let emulated = Emulated::new()?.set("ABORT", "hang").set("EXIT", "crash");
            Ok(emulated.launch(launch(SCENARIOS[2], 2, "")).reports().map(drop)?)
        }),
        Trial::test("processes/kept_error_held_inside", || {
            let emulated = emulated_as("2.28.9")?.set("HANG_INSIDE", 2);
            Ok(emulated.launch(launch(SCENARIOS[3], 2, "")).reports().map(drop)?)
        }),
    ]
}

const KEPT: CUresult = CUresult::CUDA_ERROR_NOT_FOUND;

/// Something has failed that could not say so.
fn keep_error(comm: &Comm) {
    stream(comm).context().record_err::<()>(Err(DriverError(KEPT)));
}

/// Nobody was told of it meanwhile.
fn is_still_kept(comm: &Comm) -> Result<(), String> {
    match stream(comm).context().check_err() {
        Err(DriverError(KEPT)) => Ok(()),
        other => Err(format!("what was kept is {other:?}")),
    }
}

/// Memory goes back to the GPU, and registrations to the library.
fn of_memory(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let free = || -> Result<usize, String> {
        stream(&comm).context().bind_to_thread().map_err(|e| e.to_string())?;
        Ok(result::mem_get_info().map_err(|e| e.to_string())?.0)
    };
    for wanted in [Registration::Plain, Registration::Local, Registration::Symmetric] {
        let before = free()?;
        let mut buffer = must("alloc", nccl.alloc_as::<f32>(1 << 20, wanted))?;
        must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        keep_error(&comm);
        drop(buffer);
        is_still_kept(&comm)?;
        // A real library keeps what it allocates for itself.
        if are_emulated() {
            let now = free()?;
            // Communicators of the worlds before give memory back meanwhile, too.
            assert!(now >= before, "{wanted:?}: {now} bytes are free, before {before}");
        }
    }
    let registered = must("register", nccl.register(upload(&comm, &[1.0f32; 10])?))?;
    keep_error(&comm);
    let slice = must("into_slice", registered.into_slice())?;
    is_still_kept(&comm)?;
    expect("still there", &download(&comm, &slice)?, |_| 1.0)?;
    done()
}

/// What does not need cudarc's order goes on: host memory, barriers, splits, waits. cudarc's next call tells.
fn meanwhile(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32;
    let mut host = values::<f32>(rank, 1000);
    keep_error(&comm);
    must("all_reduce", comm.all_reduce_in_place(&mut host, ReduceOp::Sum))?;
    expect("the sum", &host, sum)?;
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut received = vec![0.0f32; 10];
    must("send_recv", comm.send_recv(&[rank as f32; 10], right, &mut received, left))?;
    expect("the message", &received, |_| left as f32)?;
    must("barrier", comm.barrier())?;
    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    must("barrier", part.barrier())?;
    must("finalize", part.finalize())?;
    must("sync", comm.sync())?;
    is_still_kept(&comm)
        .and_then(|()| upload(&comm, &host).map(drop))
        .and_then(|()| must("afterwards", comm.barrier()))?;
    done()
}

/// A communicator with work under way is finalized and destroyed.
fn at_the_end(_: &[String]) -> Outcome {
    let comm = must("init", phalanx::init())?;
    let mut buffer = upload(&comm, &vec![1.0f32; 100_000])?;
    must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
    let context = stream(&comm).context().clone();
    keep_error(&comm);
    let since = Instant::now();
    drop(comm);
    assert!(since.elapsed() < TIMEOUT, "after {:?}", since.elapsed());
    let kept = context.check_err();
    assert_eq!(kept, Err(DriverError(KEPT)));
    done()
}

/// The library holds the thread, and lets it go: nobody frees the communicator before.
fn held_inside(comm: Comm, _: &[String]) -> Outcome {
    comm.set_timeout(TIMEOUT);
    let mut buffer = upload(&comm, &[1.0f32; 1000])?;
    must("first", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()))?;
    let error = std::thread::scope(|scope| {
        let context = stream(&comm).context().clone();
        let keeps = scope.spawn(move || {
            // While the other is inside.
            std::thread::sleep(TIMEOUT / 2);
            context.record_err::<()>(Err(DriverError(KEPT)));
        });
        let error = comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap_err();
        keeps.join().map(|()| error)
    });
    let error = error.map_err(|_| "a panic")?;
    assert!(error.to_string().contains("all_reduce(f32 × 1000, sum)"), "{error}");
    is_still_kept(&comm)?;
    done()
}

/// Work that cannot end, and that no rank waits for: what the watchdog says is about that.
fn nobody_waits(gpus: usize) -> Result<(), Failed> {
    let late = gpus - 1;
    let errors = world(gpus, |comm| {
        let mut buffer = upload(&comm, &vec![1.0f32; 100_000]).ok()?;
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).and_then(|()| comm.sync()).ok()?;
        if comm.rank() != late {
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).ok()?;
            keep_error(&comm);
        }
        std::thread::sleep(TIMEOUT + SLACK);
        let error = comm.barrier().err();
        let _ = stream(&comm).context().check_err();
        error
    })?;
    errors.into_iter().try_for_each(|error| names(error, late, ""))
}
