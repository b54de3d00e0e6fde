//! Worlds of PEs with a GPU each, and memory to fill and check.

use libtest_mimic::Trial;
use phalanx::cudarc::driver::DeviceRepr;
use phalanx::nvshmem::{Context, Symmetric};
use phalanx::{Comm, Error};
use phalanx_testkit::processes::{Launch, ranks_per_gpu};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, gpus};
use std::time::Duration;

/// What a trial may take; the PEs' own deadline is half of it.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Most PEs of a world.
const MOST: usize = 4;

/// Set where the GPUs are emulated, to the folder of the libraries (not `PHALANX_…`: those are taken from
/// rank processes).
pub const EMULATED: &str = "TESTKIT_EMULATED_NVSHMEM";

pub fn are_emulated() -> bool {
    std::env::var_os(EMULATED).is_some()
}

/// How many PEs can have a GPU (where they share it, MPS has to run), or why none can.
pub fn gpus() -> Result<usize, String> {
    phalanx::nvshmem::version().map_err(|error| error.to_string())?;
    Ok(MOST.min(gpus::count()? * ranks_per_gpu()))
}

/// Processes that are PEs; they meet through shared memory.
pub fn launch(scenario: &str, pes: usize) -> Launch {
    Launch::new(scenario, pes)
        .deadline(DEADLINE)
        .on_gpus()
        .env("PHALANX_BACKEND", if pes == 1 { "solo" } else { "host" })
}

/// A scenario with every number of PEs.
pub fn trial(scenario: Scenario, gpus: usize) -> Trial {
    Trial::test(scenario.name, move || {
        for pes in 1..=gpus {
            let reports = launch(scenario.name, pes).reports();
            reports.map_err(|problems| format!("{pes} PEs:{problems}"))?;
        }
        Ok(())
    })
}

/// The GPU that a PE has, as processes number them that see all.
pub fn gpu_of(pe: usize) -> usize {
    pe % gpus::count().unwrap_or(1)
}

/// A context for a communicator.
pub fn context(comm: &Comm) -> Result<Context, String> {
    must("Context::init", Context::init(comm))
}

/// Symmetric memory with these values on this PE, there when this returns.
pub fn upload<'c, T: Number + DeviceRepr>(
    context: &'c Context,
    values: &[T],
) -> Result<Symmetric<'c, T>, String> {
    let mut memory = must("alloc", context.alloc::<T>(values.len()))?;
    write(&mut memory, values)?;
    Ok(memory)
}

/// Writes this PE's part.
pub fn write<T: Number + DeviceRepr>(memory: &mut Symmetric<'_, T>, values: &[T]) -> Result<(), String> {
    if values.is_empty() {
        return Ok(());
    }
    let stream = memory.context().stream().clone();
    stream.memcpy_htod(values, &mut memory.view_mut()).context(|| "upload".into())?;
    must("sync", memory.context().sync(&stream))
}

/// What this PE's part holds when the work on the context's stream is complete.
pub fn read<T: Number + DeviceRepr>(memory: &Symmetric<'_, T>) -> Result<Vec<T>, String> {
    if memory.is_empty() {
        return Ok(Vec::new());
    }
    let stream = memory.context().stream();
    let values = stream.clone_dtoh(&memory.view()).context(|| "download".into())?;
    must("sync", memory.context().sync(stream))?;
    Ok(values)
}

/// Frees them, in this order on all PEs.
pub fn free<'c, T: Number>(memory: impl IntoIterator<Item = Symmetric<'c, T>>) -> Result<(), String> {
    memory.into_iter().try_for_each(|memory| must("free", memory.free()))
}

/// All PEs have come here, and what they put has come where it belongs.
pub fn barrier(context: &Context) -> Result<(), String> {
    must("barrier", context.world().barrier())
}

/// Small whole numbers, different on every PE, whose sums and products every type has exactly.
pub fn value(pe: usize, index: usize) -> i32 {
    ((pe + index) % 3) as i32
}

pub fn values<T: Number>(pe: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::from_small(value(pe, index))).collect()
}

/// An error that names the first difference.
pub fn expect<T: Number>(
    what: impl std::fmt::Display,
    actual: &[T],
    expected: impl Fn(usize) -> T,
) -> Result<(), String> {
    for (index, value) in actual.iter().enumerate() {
        if !value.same(expected(index)) {
            return Err(format!(
                "{what}: element {index} of {} is {value:?}, expected {:?}",
                actual.len(),
                expected(index)
            ));
        }
    }
    Ok(())
}

/// A scenario's part that must succeed.
pub fn must<T>(what: &str, result: phalanx::Result<T>) -> Result<T, String> {
    result.context(|| what.to_owned())
}

/// A scenario's part that must be refused, with a text that names something.
pub fn refused<T>(what: &str, result: phalanx::Result<T>, names: &[&str]) -> Result<Error, String> {
    let Err(error) = result else { return Err(format!("{what} was not refused")) };
    let text = error.to_string();
    match names.iter().find(|name| !text.contains(**name)) {
        None => Ok(error),
        Some(name) => Err(format!("{what}: the error does not name {name:?}: {text}")),
    }
}

/// Nothing to report.
pub fn done() -> Outcome {
    Ok(String::new())
}
