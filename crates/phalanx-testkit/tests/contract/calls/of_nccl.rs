//! What only NCCL has, and since which release.

use super::list::SUM;
use super::{cells, cells_of, compare_table};
use libtest_mimic::Failed;
use phalanx::nccl::{CollectiveConfig, DeviceRequirements, MemoryStatistic, Nccl, Registration};
use phalanx::{Comm, Error};
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::path::Path;

/// Releases of NCCL that came with functions, from the oldest that is supported.
pub const RELEASES: [&str; 8] =
    ["2.18.1", "2.19.3", "2.22.3", "2.27.3", "2.28.3", "2.29.2", "2.29.7", "2.31.0"];

/// What only NCCL has, and the release from which on it works. Before, the error is typed.
type OfNccl = (&'static [&'static str], &'static str, fn(&Comm, &Nccl<'_>) -> phalanx::Result<bool>);

const OF_NCCL: &[OfNccl] = &[
    (&["alloc"], "GPU memory in the best form that the library has", |_, nccl| {
        nccl.alloc::<u32>(4).map(|_| true)
    }),
    (&["alloc_as"], "a symmetric window (`Registration::Symmetric`)", |_, nccl| {
        let buffer = nccl.alloc_as::<u32>(4, Registration::Symmetric)?;
        Ok(buffer.registration() == Registration::Symmetric)
    }),
    (&["estimate"], "the time of a collective", |_, nccl| {
        let mut buffer = nccl.alloc::<u32>(4)?;
        nccl.estimate(|group| group.all_reduce_in_place(&mut buffer, SUM)).map(|_| true)
    }),
    (&["device_comm", "team"], "for your own kernels", |_, nccl| {
        nccl.device_comm(&DeviceRequirements::default()).map(|_| true)
    }),
    (&["put_signal", "signal", "wait_signals"], "between symmetric windows", |comm, nccl| {
        let [source, target] = [nccl.alloc::<u32>(4)?, nccl.alloc::<u32>(4)?];
        let peer = 1 - comm.rank();
        nccl.put_signal(&source, 0..4, peer, &target, 0)?;
        nccl.wait_signals(&[(peer, 1)])?;
        comm.sync()?;
        comm.barrier()?;
        Ok(true)
    }),
    (&["properties"], "what the communicator can", |_, nccl| nccl.properties().map(|_| true)),
    (&["memory", "suspend", "resume"], "gives GPU memory back for a while", |_, nccl| {
        nccl.memory(MemoryStatistic::Total)?;
        nccl.suspend()?;
        nccl.resume()?;
        Ok(true)
    }),
    (&["configured"], "settings of single collectives", |_, nccl| {
        nccl.configured(&CollectiveConfig::default()).map(|_| true)
    }),
];

/// Writes which calls of NCCL's work, as [`report`](super::report) does.
pub fn report(comm: &Comm, folder: &str) -> Outcome {
    let nccl = comm.nccl().ok_or("no NCCL")?;
    let works = OF_NCCL.iter().map(|(names, _, call)| match call(comm, &nccl) {
        Ok(works) => Ok(if works { "works" } else { "older" }),
        Err(Error::MissingFunction(_) | Error::Unsupported(_)) => Ok("older"),
        Err(error) => Err(format!("{}: {error}", names[0])),
    });
    let works = works.collect::<Result<Vec<_>, _>>()?.join("\n");
    std::fs::write(cells_of(Path::new(folder), comm.rank()), works).context(|| "the answers".into())?;
    Ok(String::new())
}

/// Tries NCCL's own calls on every release that came with functions.
pub fn since() -> Result<(), Failed> {
    let works_on = |release: &&str| {
        let emulated = Emulated::nccl(release)?;
        let launch = |folder: &str| emulated.launch(Launch::new("calls/of_nccl", 2).arg(folder));
        cells(&emulated, 2, |folder| launch(folder).env("PHALANX_BACKEND", "nccl").reports().map(drop))
    };
    let works = RELEASES.iter().map(works_on).collect::<Result<Vec<_>, Failed>>()?;
    let row = |(number, (names, text, _)): (usize, &OfNccl)| {
        let without = works.iter().rposition(|works| works[number] == "older");
        let since = RELEASES.get(without.map_or(0, |last| last + 1)).expect("the newest release has all");
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        vec![names.join(", "), (*text).to_owned(), since.trim_end_matches(".0").to_owned()]
    };
    compare_table(&["of NCCL alone", "what it does", "since NCCL"], |_| {
        OF_NCCL.iter().enumerate().map(row).collect()
    })
}
