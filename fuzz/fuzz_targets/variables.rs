//! Launchers' variables: any of them, with any values, name a launcher or are an error that names a variable; a place among
//! ranks is one that exists.
//!
//! The input is lines of `n=value`: the n-th of the names below, so that the fuzzer need not find the names themselves.
#![no_main]

use libfuzzer_sys::fuzz_target;
use phalanx::internal::launched;

const NAMES: [&str; 38] = [
    "PHALANX_RANK",
    "PHALANX_WORLD_SIZE",
    "PHALANX_LOCAL_RANK",
    "PHALANX_LOCAL_WORLD_SIZE",
    "PHALANX_JOB",
    "PHALANX_RESTART_COUNT",
    "PHALANX_STORE",
    "PHALANX_TOKEN",
    "PHALANX_BACKEND",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMIX_SERVER_URI2",
    "PALS_RANKID",
    "PALS_APID",
    "PALS_LOCAL_RANKID",
    "PALS_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "I_MPI_HYDRA_UUID",
    "SLURM_PROCID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
];

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let mut variables: Vec<(&str, &str)> = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter_map(|(name, value)| Some((*NAMES.get(name.parse::<usize>().ok()?)?, value)))
        .collect();
    // What phalanx asks for where there is no launcher's process to be asked.
    variables.extend([("SLURM_JOB_ID", "1"), ("SLURM_LOCALID", "0")]);
    match launched(&variables) {
        Ok(Some((rank, Some(ranks)))) => assert!(rank < ranks, "rank {rank} of {ranks}"),
        Ok(_) => {}
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
