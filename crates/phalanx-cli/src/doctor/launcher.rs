//! The launcher's environment variables, and what `phalanx::init()` makes of them.

use super::finding::{Finding, Status};
use super::section::Section;
use phalanx::{BackendKind, Choice};
use std::env;

const INIT: &str = "phalanx::init()";

/// Prefixes of the variables that launchers set, and of this library's own.
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

/// Variables with a secret: a process that knows a job's id may join it.
const SECRET: [&str; 3] = ["PHALANX_JOB", "PHALANX_TOKEN", "TORCHELASTIC_RUN_ID"];

/// What `phalanx::init()` makes of the launcher's variables.
pub struct Start {
    /// The details: the variables.
    pub section: Section,
    pub finding: Finding,
    /// Whether ranks are connected by MPI.
    pub is_mpi: bool,
}

impl Start {
    pub fn find() -> Start {
        let mut lines = set_variables();
        // `init` itself would wait for the other ranks, or disturb them.
        let chosen = phalanx::choose();
        let is_mpi = chosen.as_ref().is_ok_and(|choice| choice.backend == BackendKind::Mpi);
        let finding = match &chosen {
            Ok(choice) => {
                lines.extend(recognised(choice));
                Finding::new(Status::Ok, INIT, describe(choice))
            }
            Err(error) => Finding::new(Status::Failed, INIT, error.to_string()),
        };
        Start { section: Section::new("Launcher", lines), finding, is_mpi }
    }
}

fn recognised(choice: &Choice) -> Option<(String, String)> {
    let launcher = choice.launcher.as_ref()?;
    let mut text = format!("{}, by {}", launcher.name, launcher.recognised_by.join(", "));
    if !launcher.ignored.is_empty() {
        text += &format!("; it comes before {}", launcher.ignored.join(", "));
    }
    Some(("recognised".to_owned(), text))
}

fn describe(choice: &Choice) -> String {
    let backend = format!("on the backend {}: {}", choice.backend, choice.reason);
    let Some(launcher) = &choice.launcher else {
        let alone = "a world of one rank (no launcher's variables are set)";
        return if choice.backend == BackendKind::Solo {
            alone.to_owned()
        } else {
            format!("{alone}, {backend}")
        };
    };
    let ranks = launcher.world_size.map_or("as many as MPI says".to_owned(), |size| size.to_string());
    format!("rank {} of {ranks}, as {} says, {backend}", launcher.rank, launcher.name)
}

/// The launcher's variables that are set, sorted by name, with their values unless these are secret.
fn set_variables() -> Vec<(String, String)> {
    let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
    let all = env::vars_os().map(|(name, value)| (text(name), text(value)));
    let mut shown: Vec<_> = all
        .filter(|(name, _)| SHOWN.iter().any(|start| name.starts_with(start)))
        .map(|(name, value)| {
            let secret = SECRET.contains(&&*name);
            (name, if secret { "(set)".to_owned() } else { value })
        })
        .collect();
    shown.sort_unstable();
    shown
}
