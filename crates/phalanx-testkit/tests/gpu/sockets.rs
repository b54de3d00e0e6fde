//! NCCL's sockets, as between hosts: peer-to-peer and shared memory switched off, and ranks that believe to
//! be on hosts of their own.

use crate::{collectives, exits, failures, messages};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::gpus::GPU_ALGORITHM;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::suite::Condition;
use std::path::Path;

pub fn trials(gpus: usize) -> Vec<Trial> {
    let trials = [
        Trial::test("sockets/operations", move || operations(gpus)),
        Trial::test("sockets/killed", move || {
            let folder = tempfile::tempdir()?;
            failures::killed(gpus, |launch| on_hosts_of_their_own(launch, gpus, folder.path()))?;
            sockets_were_used(folder.path())
        }),
        Trial::test("sockets/exits", move || {
            let folder = tempfile::tempdir()?;
            exits::well(gpus, |launch| on_hosts_of_their_own(launch, gpus, folder.path()))?;
            exits::failed(gpus, |launch| on_hosts_of_their_own(launch, gpus, folder.path()))?;
            sockets_were_used(folder.path())
        }),
    ];
    let can_run = gpus >= 2 && !crate::world::are_emulated();
    let only = |trial: Trial| trial.only_if(can_run, "it takes two GPUs, and emulated ones use no sockets");
    trials.into_iter().map(only).collect()
}

fn operations(gpus: usize) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let all = [collectives::SCENARIOS, messages::SCENARIOS].concat();
    let names = ["movements", "in_place", "vectors", "vectors_in_place", "host_memory", "ring", "groups"];
    let mut scenarios = all.iter().filter(|scenario| names.contains(&scenario.name));
    let first = crate::world::launch(*scenarios.next().ok_or("no scenarios")?, gpus, "");
    let launch = scenarios.fold(first, |launch, scenario| launch.then(scenario.name).arg(""));
    on_hosts_of_their_own(launch, gpus, folder.path()).reports()?;
    sockets_were_used(folder.path())
}

/// With NCCL's log in a folder. Own kernels would carry short operations out, since the GPUs do reach each other.
fn on_hosts_of_their_own(launch: Launch, ranks: usize, folder: &Path) -> Launch {
    let launch = launch
        .env(GPU_ALGORITHM, "nccl")
        .env("NCCL_P2P_DISABLE", "1")
        .env("NCCL_SHM_DISABLE", "1")
        .env("NCCL_NET", "Socket")
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_FILE", &folder.join("nccl.%p").to_string_lossy());
    (0..ranks).fold(launch, |launch, rank| launch.env_of(rank, "NCCL_HOSTID", Some(&format!("host{rank}"))))
}

fn sockets_were_used(folder: &Path) -> Result<(), Failed> {
    for log in std::fs::read_dir(folder)? {
        let log = std::fs::read_to_string(log?.path())?;
        if log.contains("via NET/Socket") {
            return Ok(());
        }
    }
    Err("NCCL's log says nothing of sockets".into())
}
