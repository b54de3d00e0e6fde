//! The launcher's environment variables, and what `phalanx::init()` makes of them.

use super::section::Section;
use phalanx::Choice;
use std::env;

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

/// The launcher's variables, and what `phalanx::init()` makes of them. Returns whether it makes a
/// communicator.
pub fn launcher() -> (Section, bool) {
    let mut lines = set_variables();
    // `init` itself would wait for the other ranks, or disturb them.
    let chosen = phalanx::choose();
    let succeeds = chosen.is_ok();
    let made = match chosen {
        Ok(choice) => {
            lines.extend(recognised(&choice));
            describe(&choice)
        }
        Err(error) => format!("FAILED: {error}"),
    };
    lines.push(("phalanx::init() makes".to_owned(), made));
    (Section::new("Launcher", lines), succeeds)
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
        return format!("a world of one rank (no launcher's variables are set), {backend}");
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
