//! The flight records of all other ranks are on disk before any of them is ended.

use super::common::say;
use super::rank::launch;
use libtest_mimic::{Failed, Trial};

pub fn trials() -> Vec<Trial> {
    const FAULTS: &[&str] = &["kill", "segfault", "exit 3", "panic"];
    let waiting = FAULTS.iter().map(|fault| {
        let name = format!("records::the_others_flight_records_are_written::{}", fault.replace(' ', "_"));
        Trial::test(name, move || are_written(&format!("{fault}@10:1")))
    });
    let computing = Trial::test("records::a_rank_that_calls_nothing_writes_its_flight_record_too", || {
        are_written("kill late@10:1,compute@10:0")
    });
    waiting.chain([computing]).collect()
}

fn are_written(faults: &str) -> Result<(), Failed> {
    for _ in 0..2 {
        let folder = tempfile::tempdir()?;
        let records = folder.path().join("records");
        let mut command = launch("-n 4", "fail", faults, folder.path());
        command.env("PHALANX_TRACE_DIR", &records);
        let said = say(command);
        for rank in [0, 2, 3] {
            let of_rank = format!("-rank{rank}-");
            let names = std::fs::read_dir(&records)?.map(|entry| entry.map(|entry| entry.file_name()));
            let names = names.collect::<Result<Vec<_>, _>>()?;
            let is_there = |name: &std::ffi::OsString| {
                name.to_string_lossy().contains(&of_rank) && name.to_string_lossy().ends_with(".json")
            };
            if !names.iter().any(is_there) {
                return Err(format!("rank {rank} has no record in {names:?}:\n{}", said.stderr).into());
            }
        }
    }
    Ok(())
}
