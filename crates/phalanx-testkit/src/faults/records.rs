//! Flight records: written by every survivor of a failure, by a rank that panics, and by ranks that hang when
//! they are asked.

use super::Case;
use super::common::{DEADLINE, has, one_verdict, report};
use crate::fault::Fault;
use crate::full_disk;
use crate::processes::{Launch, describe, phase};
use crate::scenario::{Outcome, Scenario, recorded};
use phalanx::{Comm, ReduceOp};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("records/work", work),
    Scenario::rank("records/hang", |comm, _| hang(&comm)),
    Scenario::rank("records/access", |comm, _| access(&comm)),
    Scenario::process("records/the_last_1024", |_| the_last_1024()),
    Scenario::process("records/full_disk", without_room),
];

pub fn cases() -> Vec<Case> {
    if !cfg!(target_os = "linux") {
        return Vec::new();
    }
    vec![
        Case::new("processes/records/on_failure", on_failure),
        Case::new("processes/records/of_an_access", of_an_access),
        Case::new("processes/records/on_a_signal", on_a_signal),
        Case::new("processes/records/the_last_1024", || {
            Launch::new("records/the_last_1024", 2).deadline(DEADLINE).reports().map(drop)
        }),
        Case::new("processes/records/on_a_full_disk", on_a_full_disk).ignored(full_disk::cannot_mount()),
    ]
}

/// A folder that goes when it is no longer needed.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        Folder(std::env::temp_dir().join(format!("phalanx-{name}-{}", std::process::id())))
    }

    /// The records in it, in the order of their ranks. They are for their user alone.
    fn records(&self) -> Result<Vec<String>, String> {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(&self.0)
            .map_err(|error| format!("{}: {error}", self.0.display()))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
            .collect();
        paths.sort_by_key(|path| path.to_string_lossy().split("-rank").last().map(str::to_owned));
        let read = |path: &PathBuf| {
            let record = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
            match mode(path).map_err(|error| error.to_string())? {
                0o600 => Ok(record),
                mode => Err(format!("{} has mode {mode:o}", path.display())),
            }
        };
        paths.iter().map(read).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(unix)]
fn mode(path: &Path) -> std::io::Result<u32> {
    use std::os::unix::fs::PermissionsExt;
    Ok(std::fs::metadata(path)?.permissions().mode() & 0o777)
}

#[cfg(not(unix))]
fn mode(_path: &Path) -> std::io::Result<u32> {
    Ok(0o600)
}

fn contains(record: &str, part: &str) -> Result<(), String> {
    if record.contains(part) { Ok(()) } else { Err(format!("{part} is not in {record}")) }
}

/// Three sums, a split and a message; then rank 1 panics, or in the part, and the others go on.
fn work(comm: Comm, _: &[String]) -> Outcome {
    let text = |error: phalanx::Error| error.to_string();
    let mut buffer = vec![1f32; 5000];
    for _ in 0..3 {
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Max).map_err(text)?;
    }
    let part = comm.split(Some(7), 0).map_err(text)?;
    let (next, previous) = ((comm.rank() + 1) % comm.world_size(), comm.rank() + comm.world_size() - 1);
    comm.send_recv(&buffer[..10], next, &mut [0f32; 10], previous % comm.world_size()).map_err(text)?;
    if comm.rank() == 1 {
        panic!("this rank was told to panic");
    }
    let since = Instant::now();
    let error = comm.broadcast_in_place(&mut buffer[..17], 1).expect_err("rank 1 is gone");
    drop(part);
    Ok(report(comm, &error, since.elapsed())?.to_string())
}

fn on_failure() -> Result<(), String> {
    let folder = Folder::new("records");
    let launch = Launch::new("records/work", 3).env("PHALANX_TRACE_DIR", &folder.0.to_string_lossy());
    let ended = launch.deadline(DEADLINE).run()?;
    let reports: Vec<String> = ended.into_iter().filter_map(|rank| rank.outcome.ok()).collect();
    let verdict = one_verdict(&reports, 2)?;
    // Three sums, and a split takes three numbers.
    has(&verdict, "sequence", 7)?;
    let records = folder.records()?;
    let wholes: Vec<&String> = records.iter().filter(|record| !record.contains("/4.7\"")).collect();
    let [zero, one, two] = wholes[..] else {
        return Err(format!("{} records of the whole: {records:#?}", wholes.len()));
    };
    contains(one, "\"reason\":\"panic\"")?;
    contains(
        one,
        "\"operation\":\"send\",\"sequence\":1,\"state\":\"completed\",\"dtype\":\"f32\",\"count\":10,",
    )?;
    for (rank, record) in [(0, zero), (2, two)] {
        contains(record, &format!("\"rank\":{rank},\"world_size\":3"))?;
        contains(record, "\"reason\":\"failure\",\"error\":{\"kind\":\"panicked\",\"ranks\":[1]")?;
        contains(record, "\"operation\":\"all_reduce\",\"sequence\":3,\"state\":\"completed\",")?;
        contains(
            record,
            "\"operation\":\"broadcast\",\"sequence\":7,\"state\":\"failed\",\"dtype\":\"f32\",\"count\":17,\"root\":1,",
        )?;
    }
    Ok(())
}

/// Rank 1 panics, for whose signal the other waits: an access is no operation of the record, and its failure is in it.
fn access(comm: &Comm) -> Outcome {
    let text = |error: phalanx::Error| error.to_string();
    let mut memory = comm.symmetric::<u64>(1).map_err(text)?;
    let epoch = memory.epoch().map_err(text)?;
    if comm.rank() == 1 {
        panic!("this rank was told to panic");
    }
    let error = epoch.wait_signals(1, 1).expect_err("rank 1 is gone");
    recorded(&error)?;
    Ok(String::new())
}

fn of_an_access() -> Result<(), String> {
    let folder = Folder::new("access");
    let launch = Launch::new("records/access", 2).env("PHALANX_TRACE_DIR", &folder.0.to_string_lossy());
    let ended = launch.deadline(DEADLINE).run()?;
    ended[0].outcome.clone().map(drop)
}

/// Where the records go, on a disk without room.
fn full_folder() -> String {
    format!("{}/records", full_disk::FOLDER)
}

/// The same, where there is no room for the records.
fn without_room(args: &[String]) -> Outcome {
    full_disk::mount_here()?;
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let report = work(phalanx::init().map_err(|error| error.to_string())?, args)?;
    let left = std::fs::read_dir(full_folder()).map_err(|error| error.to_string())?;
    match left.filter_map(Result::ok).next() {
        None => Ok(report),
        Some(file) => Err(format!("a part of a record is left: {:?}", file.path())),
    }
}

/// The failure is the same, and the reason why there is no record is said.
fn on_a_full_disk() -> Result<(), String> {
    let launch = Launch::new("records/full_disk", 3).env("PHALANX_TRACE_DIR", &full_folder());
    let ended = launch.deadline(DEADLINE).run()?;
    if let Some(silent) = ended.iter().find(|rank| !rank.output.contains("no flight record: ")) {
        return Err(format!("rank {} does not say it:{}", silent.rank, describe(&ended)));
    }
    let reports: Vec<String> = ended.iter().filter_map(|rank| rank.outcome.clone().ok()).collect();
    let verdict = one_verdict(&reports, 2).map_err(|problem| format!("{problem}{}", describe(&ended)))?;
    has(&verdict, "rank", 1)?;
    has(&verdict, "event", "Panicked")
}

/// More operations than a record has room for.
fn the_last_1024() -> Outcome {
    const LAST: usize = 1024;
    const MORE: usize = 300;
    let text = |error: phalanx::Error| error.to_string();
    let comm = phalanx::init().map_err(text)?;
    let folder = Folder::new(&format!("last-{}", comm.rank()));
    (0..LAST + MORE).try_for_each(|_| comm.barrier()).map_err(text)?;
    comm.write_flight_record(&folder.0).map_err(text)?;
    let records = folder.records()?;
    let [record] = &records[..] else { return Err(format!("{} records", records.len())) };
    contains(record, &format!("\"made\":{},\"lost\":{MORE},", LAST + MORE))?;
    match record.matches("\"operation\":\"barrier\"").count() {
        LAST => Ok(String::new()),
        other => Err(format!("{other} operations")),
    }
}

/// Rank 0 does not come for a while.
fn hang(comm: &Comm) -> Outcome {
    if comm.rank() == 0 {
        phase("hanging");
        std::thread::sleep(Duration::from_millis(1500));
    } else {
        phase("hanging");
    }
    comm.all_reduce_in_place(&mut [1u64; 3], ReduceOp::Sum).map_err(|error| error.to_string())?;
    Ok(String::new())
}

fn on_a_signal() -> Result<(), String> {
    let folder = Folder::new("signal");
    let launch = Launch::new("records/hang", 2).env("PHALANX_TRACE_DIR", &folder.0.to_string_lossy());
    let mut world = launch.env("PHALANX_TRACE_SIGNAL", "USR1").deadline(DEADLINE).start()?;
    for rank in 0..2 {
        world.await_phase(rank, "hanging")?;
    }
    std::thread::sleep(Duration::from_millis(300));
    for rank in 0..2 {
        world.inject(rank, Fault::Ask)?;
    }
    await_files(&folder.0, 2)?;
    let records = folder.records()?;
    contains(&records[0], "\"made\":0,")?;
    contains(&records[1], "\"operation\":\"all_reduce\",\"sequence\":1,\"state\":\"started\",")?;
    // It was asked, and nothing else.
    let ended = world.finish();
    match ended.iter().find(|rank| rank.outcome.is_err()) {
        None => Ok(()),
        Some(rank) => Err(format!("{rank:?}")),
    }
}

fn await_files(folder: &Path, count: usize) -> Result<(), String> {
    let since = Instant::now();
    loop {
        let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
        if entries.filter(|entry| entry.path().extension().is_some_and(|e| e == "json")).count() == count {
            return Ok(());
        }
        if since.elapsed() > Duration::from_secs(1) {
            return Err(format!("no {count} files in {}", folder.display()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
