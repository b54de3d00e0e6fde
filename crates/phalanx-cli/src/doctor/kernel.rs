//! The system calls that ranks need, each tried: containers refuse some of them with filters that cannot be read.

use super::finding::{Finding, Status};
use super::section::Section;

/// A system call that was tried.
pub struct Trial {
    call: &'static str,
    /// What ranks need it for.
    purpose: &'static str,
    /// The result if the call is refused.
    without: (Status, &'static str),
    refused: Option<String>,
}

/// The details: all calls.
pub fn section(trials: &[Trial]) -> Section {
    let line = |trial: &Trial| {
        let text = match &trial.refused {
            None => "OK".to_owned(),
            Some(why) => format!("refused ({why}): {}", trial.without.1),
        };
        (trial.call.to_owned(), text)
    };
    Section::new("Kernel", trials.iter().map(line).collect())
}

/// The summary: a line for all that work, and one for each that is refused.
pub fn findings(trials: &[Trial]) -> Vec<Finding> {
    let works: Vec<&str> =
        trials.iter().filter(|trial| trial.refused.is_none()).map(|trial| trial.call).collect();
    let refused = trials.iter().filter_map(|trial| {
        let (status, consequence) = trial.without;
        let why = trial.refused.as_ref()?;
        Some(Finding::new(status, trial.purpose, format!("{} is refused ({why}): {consequence}", trial.call)))
    });
    let all = (!works.is_empty()).then(|| Finding::new(Status::Ok, "kernel", works.join(", ")));
    all.into_iter().chain(refused).collect()
}

#[cfg(target_os = "linux")]
pub fn trials() -> Vec<Trial> {
    use rustix::fs::MemfdFlags;
    use rustix::process::PidfdFlags;
    use rustix::thread::MembarrierCommand;

    let no_processes = (Status::Failed, "ranks cannot be processes");
    let errno = |error: rustix::io::Errno| error.to_string();
    let memfd = rustix::fs::memfd_create("phalanx-doctor", MemfdFlags::CLOEXEC).err();
    let pidfd = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).err();
    let barrier = rustix::thread::membarrier(MembarrierCommand::RegisterGlobalExpedited).err();
    vec![
        Trial {
            call: "memfd_create",
            purpose: "memory that processes share",
            without: no_processes,
            refused: memfd.map(errno),
        },
        Trial {
            call: "pidfd_open",
            purpose: "noticing a process's end",
            without: no_processes,
            refused: pidfd.map(errno),
        },
        Trial {
            call: "membarrier",
            purpose: "small messages",
            without: (Status::Slow, "they take longer"),
            refused: barrier.map(errno),
        },
        Trial {
            call: "process_vm_readv",
            purpose: "reads between processes",
            without: (Status::Slow, "long all_to_alls between processes may take longer"),
            refused: super::reading::between_processes().err(),
        },
    ]
}

#[cfg(not(target_os = "linux"))]
pub fn trials() -> Vec<Trial> {
    vec![Trial {
        call: "processes as ranks",
        purpose: "processes as ranks",
        without: (Status::Missing, "ranks are threads here"),
        refused: Some("they need Linux".to_owned()),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(call: &'static str, status: Status, refused: Option<&str>) -> Trial {
        Trial { call, purpose: "speed", without: (status, "slower"), refused: refused.map(str::to_owned) }
    }

    #[test]
    fn what_works_is_one_line() {
        let trials = [
            trial("a", Status::Slow, None),
            trial("b", Status::Failed, None),
            trial("c", Status::Slow, Some("EPERM")),
        ];
        let expected = [
            Finding::new(Status::Ok, "kernel", "a, b"),
            Finding::new(Status::Slow, "speed", "c is refused (EPERM): slower"),
        ];
        assert_eq!(findings(&trials), expected);
        assert_eq!(findings(&trials[2..]), expected[1..]);
        assert_eq!(section(&trials).lines.len(), 3);
    }
}
