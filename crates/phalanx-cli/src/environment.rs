//! The variables by which a launcher tells a process that it is a rank, for showing them. What they mean is the
//! library's business: [`phalanx::choose`].

use std::env;

/// Beginnings of the names of variables that say something about ranks, and libraries that carry them.
const SHOWN: [&str; 15] = [
    "PHALANX_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "TORCHELASTIC_R",
    "OMPI_COMM_WORLD_",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "MPI_LOCAL",
    "PALS_",
    "SLURM_STEP_",
];

/// Those whose value is not for everybody: whoever knows the id of a job is let in.
const SECRET: [&str; 3] = ["PHALANX_JOB", "PHALANX_TOKEN", "TORCHELASTIC_RUN_ID"];

/// The variables that are set, by name, with the values that may be shown.
pub fn set_variables() -> Vec<(String, String)> {
    let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
    let all = env::vars_os().map(|(name, value)| (text(name), text(value)));
    let mut shown: Vec<_> = all
        .filter(|(name, _)| SHOWN.iter().any(|start| name.starts_with(start)))
        .map(|(name, value)| {
            let secret = SECRET.contains(&&*name);
            (name, if secret { "(set)".to_owned() } else { value })
        })
        .collect();
    shown.sort();
    shown
}
