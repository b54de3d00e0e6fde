//! The tables of calls in phalanx's front page (`src/lib.rs`): which call takes which memory on which backend, tried on two
//! ranks of each, with emulated GPUs; and from which NCCL on its own calls work.
//!
//! `PHALANX_UPDATE=1 cargo test --workspace --test contract -- calls/` writes the tables.

mod attempt;
mod list;
mod of_nccl;

use self::list::{CALLS, Call};
use self::of_nccl::RELEASES;
use crate::cuda;
use crate::world::all_equal;
use libtest_mimic::{Failed, Trial};
use phalanx::Comm;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::hosts::Elsewhere;
use phalanx_testkit::mpi::Installation;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Scenario, suite, ucx};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("calls", |comm, args| report(&comm, &args[0])),
    Scenario::rank("calls/of_nccl", |comm, args| of_nccl::report(&comm, &args[0])),
];

/// Set to write the table instead of comparing with it.
const UPDATE: &str = "PHALANX_UPDATE";

/// The columns of backends, after the calls and what they do.
const BACKENDS: [&str; 6] = ["solo", "host", "ucx", "mpi", "nccl", "nvshmem"];

/// Methods of [`Comm`] that move nothing: settings, questions, other views of it, and its end.
const OTHER: &[&str] = &[
    "abort",
    "backend",
    "beside_computing",
    "builder",
    "configured",
    "cuda_stream",
    "drop",
    "finalize",
    "fmt",
    "gpu",
    "hip_stream",
    "host_topology",
    "into_raw_communicator",
    "name",
    "nccl",
    "nvshmem",
    "object_limit",
    "on",
    "rank",
    "rank_group",
    "rccl",
    "set_name",
    "set_object_limit",
    "set_timeout",
    "share",
    "sync",
    "timeout",
    "within",
    "world_size",
    "write_flight_record",
];

/// Not in every build of the documentation, which cannot link them.
const OF_FEATURES: &[&str] = &[
    "alloc_gpu",
    "open_gpu",
    "read_tensor_at_all",
    "register_gpu",
    "split_by_gpu_link",
    "write_tensors_at_all",
];

/// Writes this rank's cells into a file of the folder. (A launch of thread ranks has no reports.)
fn report(comm: &Comm, folder: &str) -> Outcome {
    let (gpu, folder) = (cuda::gpu(comm.gpu().unwrap_or(comm.rank()))?, Path::new(folder));
    let cells = CALLS.iter().map(|call| call.cell(comm, &gpu, folder));
    let cells = cells.collect::<Result<Vec<_>, _>>()?.join("\n");
    std::fs::write(cells_of(folder, comm.rank()), cells).context(|| "the cells".into())?;
    Ok(String::new())
}

fn cells_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("cells-{rank}"))
}

/// Runs so many ranks, which all report the same cells.
fn cells(
    emulated: &Emulated,
    ranks: usize,
    run: impl FnOnce(&str) -> Result<(), String>,
) -> Result<Vec<String>, Failed> {
    let folder = tempfile::tempdir_in(emulated.folder())?;
    run(&folder.path().to_string_lossy())?;
    let reports = (0..ranks).map(|rank| std::fs::read_to_string(cells_of(folder.path(), rank)));
    let reports = reports.collect::<Result<Vec<_>, _>>()?;
    all_equal(&reports)?;
    Ok(reports[0].lines().map(str::to_owned).collect())
}

pub fn trials() -> Vec<Trial> {
    let newest = || Ok::<_, Failed>(Emulated::new()?);
    let no_ucx = ucx::missing().or_else(|| Elsewhere::enter().err());
    let mut trials = vec![
        Trial::test("calls/all_are_listed", all_are_listed),
        Trial::test("calls/solo", move || {
            compare("solo", &launched(&newest()?, 1, |launch| launch.env("PHALANX_BACKEND", "solo"))?)
        }),
        Trial::test("calls/host", move || compare("host", &threads_and_processes(&newest()?, "host")?)),
        match no_ucx {
            None => Trial::test("calls/ucx", move || {
                compare(
                    "ucx",
                    &launched(&newest()?, 2, |launch| launch.on_hosts(2).env("PHALANX_BACKEND", "ucx"))?,
                )
            }),
            Some(reason) => suite::ignored("calls/ucx", reason),
        },
        Trial::test("calls/nccl_newest", move || {
            compare("nccl", &threads_and_processes(&newest()?, "nccl")?)
        }),
        Trial::test("calls/nccl_oldest", || {
            compare("nccl", &threads_and_processes(&Emulated::nccl(RELEASES[0])?, "nccl")?)
        }),
        Trial::test("calls/nccl_since", of_nccl::since),
        Trial::test("calls/nvshmem", move || {
            compare("nvshmem", &launched(&newest()?, 2, |launch| launch.env("PHALANX_BACKEND", "nvshmem"))?)
        }),
    ];
    for (name, found) in Installation::all() {
        let name = format!("calls/{name}");
        trials.push(match found {
            Ok(installation) => Trial::test(name, move || on_mpi(&installation)),
            Err(reason) => suite::ignored(name, reason),
        });
    }
    trials
}

fn launched(
    emulated: &Emulated,
    ranks: usize,
    set: impl FnOnce(Launch) -> Launch,
) -> Result<Vec<String>, Failed> {
    cells(emulated, ranks, |folder| {
        let launch = emulated.launch(Launch::new("calls", ranks).arg(folder));
        set(launch).reports().map(drop)
    })
}

/// The cells of process ranks, which say so where threads have others.
fn threads_and_processes(emulated: &Emulated, backend: &str) -> Result<Vec<String>, Failed> {
    let processes = launched(emulated, 2, |launch| launch.env("PHALANX_BACKEND", backend))?;
    let threads = launched(emulated, 2, |launch| launch.on_threads().env("PHALANX_BACKEND", backend))?;
    let merged = processes.into_iter().zip(threads).zip(CALLS).map(|((processes, threads), call)| {
        match (&*processes, &*threads) {
            (processes, threads) if processes == threads => Ok(threads.to_owned()),
            ("yes", "–") => Ok("processes".to_owned()),
            _ => Err(format!("{}: {threads} on threads, {processes} on processes", call.names[0]).into()),
        }
    });
    merged.collect()
}

fn on_mpi(installation: &Installation) -> Result<(), Failed> {
    let emulated = Emulated::new()?;
    let cells = cells(&emulated, 2, |folder| {
        let job = installation.job(2).scenario("calls", &[folder]);
        let job = emulated.environment().iter().fold(job, |job, (name, value)| job.env(name, value));
        job.env("PHALANX_BACKEND", "mpi").env("PHALANX_MPI_CUDA", "1").succeed().map(drop)
    })?;
    compare("mpi", &cells)
}

/// Of the package.
fn file_of_phalanx(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../phalanx").join(name)
}

/// The first two columns: links to the calls, and what they do.
fn begins(call: &Call) -> [String; 2] {
    let link = |name: &&str| match OF_FEATURES.contains(name) {
        true => format!("`{name}`"),
        false => format!("[`{name}`](Comm::{name})"),
    };
    [call.names.iter().map(link).collect::<Vec<_>>().join(", "), call.text.to_owned()]
}

/// Compares a backend's column of the table, or writes it.
fn compare(backend: &str, cells: &[String]) -> Result<(), Failed> {
    let column = 2 + BACKENDS.iter().position(|name| *name == backend).expect("a backend of the table");
    compare_table(&[&["call", "what it does"], &BACKENDS[..]].concat(), |old| {
        let row = |(call, cell): (&Call, &String)| {
            let begins = begins(call);
            let found = old.iter().find(|row| row[0] == begins[0]);
            let of_others = |column| found.and_then(|row| row.get(column)).map_or("?", |cell| *cell);
            let of_backends =
                (2..2 + BACKENDS.len()).map(|at| if at == column { cell } else { of_others(at) });
            begins.iter().map(|text| &**text).chain(of_backends).map(str::to_owned).collect()
        };
        CALLS.iter().zip(cells).map(row).collect()
    })
}

/// Compares a table with its rows, which are made from those that it has, or writes it.
fn compare_table(header: &[&str], rows: impl FnOnce(&[Vec<&str>]) -> Vec<Vec<String>>) -> Result<(), Failed> {
    static FILE: Mutex<()> = Mutex::new(());
    let _alone = FILE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = file_of_phalanx("src/lib.rs");
    let text = std::fs::read_to_string(&path)?;
    let begin = text.find(&format!("//! | {} |", header[0])).ok_or("lib.rs lacks a table")?;
    let (before, table) = text.split_at(begin);
    let lines = table.split_inclusive('\n').take_while(|line| line.starts_with("//! |"));
    let (table, after) = table.split_at(lines.map(str::len).sum());
    let cells = |line| str::trim_start_matches(line, "//! ").trim_matches('|').split('|').map(str::trim);
    let old: Vec<Vec<&str>> = table.lines().map(|line| cells(line).collect()).collect();
    let rows = rows(&old).into_iter().map(|row| format!("//! | {} |\n", row.join(" | ")));
    let dashes = "---|".repeat(header.len());
    let new = format!("//! | {} |\n//! |{dashes}\n", header.join(" | ")) + &rows.collect::<String>();
    if std::env::var_os(UPDATE).is_some_and(|value| value == "1") {
        return Ok(std::fs::write(&path, format!("{before}{new}{after}"))?);
    }
    if new == table {
        return Ok(());
    }
    let differs: Vec<&str> = new.lines().filter(|line| !table.lines().any(|old| old == *line)).collect();
    Err(format!("{} is not as {UPDATE}=1 writes it:\n{}", path.display(), differs.join("\n")).into())
}

/// Every method of [`Comm`] is in a row, or in [`OTHER`]. Forms that are started, prepared or in place count as their plain form.
fn all_are_listed() -> Result<(), Failed> {
    let public = std::fs::read_to_string(file_of_phalanx("public-api.txt"))?;
    let names = public.lines().filter_map(|line| line.strip_prefix("pub fn phalanx::Comm::"));
    let names = names.filter_map(|line| line.split(['(', '<']).next());
    let plain = names.map(|name| {
        let name = name.strip_prefix("start_").or_else(|| name.strip_prefix("prepare_")).unwrap_or(name);
        name.replace("_in_place", "")
    });
    let listed: BTreeSet<&str> = CALLS.iter().flat_map(|call| call.names).chain(OTHER).copied().collect();
    let missing: BTreeSet<String> = plain.filter(|name| !listed.contains(&**name)).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("in no row of the table: {missing:?}").into()) }
}
