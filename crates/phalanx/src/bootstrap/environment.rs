//! The variables that launchers set, and our own.

use crate::backend::BackendKind;
use crate::backend::host::MAX_RANKS;
use crate::error::{Error, UsageError};
use std::collections::HashMap;
use std::time::Duration;

/// The variables this module looks at, as they were found; or as a test says.
#[derive(Debug, Clone, Default)]
pub(crate) struct Environment(HashMap<String, String>);

/// Every variable that is read. `docs/environment.md` has them with their meaning.
const READ: [&str; 19] = [
    "PHALANX_RANK",
    "PHALANX_WORLD_SIZE",
    "PHALANX_LOCAL_RANK",
    "PHALANX_LOCAL_WORLD_SIZE",
    "PHALANX_JOB",
    "PHALANX_BACKEND",
    "PHALANX_STORE",
    "PHALANX_TOKEN",
    "PHALANX_TOKEN_FILE",
    "PHALANX_RESTART_COUNT",
    "PHALANX_HEARTBEAT_TIMEOUT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
];

/// Backends that are planned: their names are understood, and refused with a reason.
const PLANNED: [&str; 3] = ["rccl", "nvshmem", "mpi"];

/// This process's place among the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub launcher: &'static str,
    pub rank: usize,
    pub world_size: usize,
    /// What the ranks of this job have in common and no other job has.
    pub job: String,
    /// Whether all ranks are on this host, as far as the launcher says.
    pub one_host: bool,
}

/// The deadline: `PHALANX_TIMEOUT` in seconds, or the default.
pub(crate) fn timeout_from_environment() -> Result<Duration, UsageError> {
    seconds_from_environment("PHALANX_TIMEOUT").map(|seconds| seconds.unwrap_or(crate::comm::DEFAULT_TIMEOUT))
}

/// How long a peer may be stopped: `PHALANX_STOPPED_TIMEOUT` in seconds, if it is set.
pub(crate) fn stopped_timeout_from_environment() -> Result<Option<Duration>, UsageError> {
    seconds_from_environment("PHALANX_STOPPED_TIMEOUT")
}

fn seconds_from_environment(name: &str) -> Result<Option<Duration>, UsageError> {
    match std::env::var_os(name) {
        None => Ok(None),
        Some(value) => parse_seconds(name, &value.to_string_lossy()).map(Some),
    }
}

/// Whether calls are compared before they move anything: `PHALANX_CHECK`.
#[cfg(feature = "cuda")]
pub(crate) fn check_from_environment() -> Result<bool, UsageError> {
    match std::env::var_os("PHALANX_CHECK") {
        None => Ok(false),
        Some(value) => match &*value.to_string_lossy() {
            "" | "0" => Ok(false),
            "1" => Ok(true),
            other => Err(setting("PHALANX_CHECK", other, "0 or 1")),
        },
    }
}

fn parse_seconds(name: &str, value: &str) -> Result<Duration, UsageError> {
    let seconds = value.trim().parse().ok().filter(|seconds: &f64| *seconds > 0.0);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| setting(name, value, "a number of seconds greater than 0"))
}

pub(super) fn setting(name: &str, value: &str, expected: impl Into<String>) -> UsageError {
    UsageError::Setting { name: name.into(), value: value.into(), expected: expected.into() }
}

impl Environment {
    pub fn current() -> Environment {
        let read = |name: &&str| {
            // A value that is not Unicode is malformed, and shown as such when it is parsed.
            std::env::var_os(name).map(|value| ((*name).to_owned(), value.to_string_lossy().into_owned()))
        };
        Environment(READ.iter().filter_map(read).collect())
    }

    #[cfg(test)]
    pub fn of(variables: &[(&str, &str)]) -> Environment {
        Environment(variables.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>, UsageError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value.trim().parse();
        number.map(Some).map_err(|_| setting(name, value, "a number, 0 or greater"))
    }

    /// A number that must be there, because another variable is.
    fn required(&self, name: &str, because: &str) -> Result<usize, UsageError> {
        let expected = || setting(name, "", format!("a number, since {because} is set"));
        self.number(name)?.ok_or_else(expected)
    }

    /// A number of ranks, which must be there and be possible.
    fn ranks(&self, name: &str, because: &str) -> Result<usize, UsageError> {
        match self.required(name, because)? {
            ranks @ 1..=MAX_RANKS => Ok(ranks),
            ranks => Err(setting(name, &ranks.to_string(), format!("1 to {MAX_RANKS} ranks"))),
        }
    }

    /// The backend that `PHALANX_BACKEND` asks for.
    pub fn backend(&self) -> Result<Option<BackendKind>, Error> {
        match self.get("PHALANX_BACKEND") {
            None | Some("" | "auto") => Ok(None),
            Some("solo") => Ok(Some(BackendKind::Solo)),
            Some("host") => Ok(Some(BackendKind::Host)),
            Some("nccl") => Ok(Some(BackendKind::Nccl)),
            Some(name) if PLANNED.contains(&name) => Err(Error::Unsupported {
                what: format!("the backend {name} (PHALANX_BACKEND)"),
                why: "this version has the backends solo, host and nccl".into(),
                remedy: "unset PHALANX_BACKEND, or set it to host".into(),
            }),
            Some(name) => Err(setting("PHALANX_BACKEND", name, "solo, host, nccl or auto").into()),
        }
    }

    /// This process's place, or `None` if no launcher said anything. The first that matches counts:
    /// `phalanx launch`, torchrun.
    pub fn place(&self) -> Result<Option<Place>, Error> {
        let place = if self.get("PHALANX_RANK").or(self.get("PHALANX_WORLD_SIZE")).is_some() {
            self.phalanx_launch()?
        } else if self.get("RANK").is_some() && self.get("WORLD_SIZE").is_some() {
            self.torchrun()?
        } else {
            return Ok(None);
        };
        if place.rank >= place.world_size {
            let name = if place.launcher == "torchrun" { "RANK" } else { "PHALANX_RANK" };
            let expected = format!("less than the number of ranks, {}", place.world_size);
            return Err(setting(name, &place.rank.to_string(), expected).into());
        }
        Ok(Some(place))
    }

    fn phalanx_launch(&self) -> Result<Place, Error> {
        let rank = self.required("PHALANX_RANK", "PHALANX_WORLD_SIZE")?;
        let world_size = self.ranks("PHALANX_WORLD_SIZE", "PHALANX_RANK")?;
        let one_host = self.one_host("PHALANX_LOCAL_RANK", "PHALANX_LOCAL_WORLD_SIZE", world_size)?;
        let job = self.get("PHALANX_JOB").unwrap_or("").to_owned();
        if job.is_empty() && world_size > 1 {
            let expected =
                "the job's id, the same for all ranks and for no other job (`phalanx launch` sets it)";
            return Err(setting("PHALANX_JOB", "", expected).into());
        }
        Ok(Place { launcher: "phalanx launch", rank, world_size, job, one_host })
    }

    fn torchrun(&self) -> Result<Place, Error> {
        let rank = self.required("RANK", "WORLD_SIZE")?;
        let world_size = self.ranks("WORLD_SIZE", "RANK")?;
        let one_host = self.one_host("LOCAL_RANK", "LOCAL_WORLD_SIZE", world_size)?;
        let part = |name: &str| self.get(name).unwrap_or("").to_owned();
        if world_size > 1 && (part("MASTER_ADDR").is_empty() || part("MASTER_PORT").is_empty()) {
            let name = if part("MASTER_ADDR").is_empty() { "MASTER_ADDR" } else { "MASTER_PORT" };
            let expected =
                "what torchrun sets: the ranks of a job know each other by MASTER_ADDR and MASTER_PORT";
            return Err(setting(name, "", expected).into());
        }
        // The port itself is torchrun's own store's: it only tells this job from others.
        let job = [
            "torchrun".to_owned(),
            part("MASTER_ADDR"),
            part("MASTER_PORT"),
            part("TORCHELASTIC_RUN_ID"),
            part("TORCHELASTIC_RESTART_COUNT"),
        ];
        Ok(Place { launcher: "torchrun", rank, world_size, job: job.join(" "), one_host })
    }

    /// Whether the launcher says that all ranks are on this host, or nothing about it. `local_rank` is for
    /// applications; it must make sense.
    fn one_host(&self, local_rank: &str, local: &str, world_size: usize) -> Result<bool, Error> {
        if let Some(rank) = self.number(local_rank)?.filter(|rank| *rank >= world_size) {
            let expected = format!("less than the number of ranks, {world_size}");
            return Err(setting(local_rank, &rank.to_string(), expected).into());
        }
        match self.number(local)? {
            Some(here) if here == 0 || here > world_size => {
                let expected = format!("1 to the number of ranks, {world_size}");
                Err(setting(local, &here.to_string(), expected).into())
            }
            Some(here) => Ok(here == world_size),
            None => Ok(true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Environment {
        Environment::of(variables)
    }

    #[test]
    fn nothing_set_is_a_world_of_one() {
        assert_eq!(environment(&[]).place().unwrap(), None);
        // A lone RANK is too common a name to mean anything.
        assert_eq!(environment(&[("RANK", "3")]).place().unwrap(), None);
    }

    #[test]
    fn launchers_are_recognised() {
        let ours = [("PHALANX_RANK", "1"), ("PHALANX_WORLD_SIZE", "4"), ("PHALANX_JOB", "abc")];
        let place = environment(&ours).place().unwrap().unwrap();
        assert_eq!((place.launcher, place.rank, place.world_size), ("phalanx launch", 1, 4));

        // As torchrun 2.11 sets them for `--standalone --nproc-per-node 2`.
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "0"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "34567"),
            ("TORCHELASTIC_RUN_ID", "9a5b"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
        ];
        let place = environment(&torchrun).place().unwrap().unwrap();
        assert_eq!((place.launcher, place.rank, place.world_size), ("torchrun", 1, 2));

        // Ours wins over torchrun's.
        let both: Vec<_> = ours.into_iter().chain(torchrun).collect();
        assert_eq!(environment(&both).place().unwrap().unwrap().launcher, "phalanx launch");
        // A restart is another job.
        let mut restarted = torchrun;
        restarted[8].1 = "1";
        assert_ne!(environment(&restarted).place().unwrap().unwrap().job, place.job);
    }

    #[test]
    fn malformed_variables_are_named() {
        let cases: [(&[(&str, &str)], &str); 6] = [
            (&[("PHALANX_RANK", "abc"), ("PHALANX_WORLD_SIZE", "2")], "PHALANX_RANK=\"abc\""),
            (&[("PHALANX_RANK", "-1"), ("PHALANX_WORLD_SIZE", "2")], "PHALANX_RANK=\"-1\""),
            (&[("PHALANX_RANK", "0")], "PHALANX_WORLD_SIZE"),
            (
                &[("PHALANX_RANK", "2"), ("PHALANX_WORLD_SIZE", "2"), ("PHALANX_JOB", "x")],
                "PHALANX_RANK=\"2\"",
            ),
            (&[("PHALANX_RANK", "0"), ("PHALANX_WORLD_SIZE", "2")], "PHALANX_JOB"),
            (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")], "MASTER_PORT"),
        ];
        for (variables, expected) in cases {
            let error = environment(variables).place().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        for backend in ["mpi", "NCCL"] {
            assert!(environment(&[("PHALANX_BACKEND", backend)]).backend().is_err());
        }
        for timeout in ["", "0", "-3", "soon", "inf", "1e300"] {
            assert!(parse_seconds("PHALANX_TIMEOUT", timeout).is_err(), "{timeout}");
        }
        assert_eq!(parse_seconds("PHALANX_TIMEOUT", " 2.5 ").unwrap(), Duration::from_millis(2500));
    }

    #[test]
    fn ranks_elsewhere_are_noticed() {
        let torchrun = |local| {
            let variables = [
                ("RANK", "1"),
                ("WORLD_SIZE", "4"),
                ("LOCAL_WORLD_SIZE", local),
                ("MASTER_ADDR", "alpha"),
                ("MASTER_PORT", "29500"),
            ];
            environment(&variables).place()
        };
        assert!(torchrun("4").unwrap().unwrap().one_host);
        assert!(!torchrun("2").unwrap().unwrap().one_host);
        assert!(torchrun("5").unwrap_err().to_string().contains("LOCAL_WORLD_SIZE=\"5\""));
    }
}
