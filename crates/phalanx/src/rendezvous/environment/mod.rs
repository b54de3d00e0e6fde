//! Environment variables: those of launchers, and `PHALANX_*`.

mod launcher;
mod nesting;

pub use launcher::Launcher;
pub(crate) use launcher::Place;

use crate::contract::BackendKind;
use crate::rendezvous::store::Token;
use crate::types::error::{Error, UsageError};
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Default deadline of a wait: five minutes.
///
/// It ends waits for peers that are stopped or far behind. A peer that died or left is noticed at once.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// The environment variables of this process, or those of a test. A variable with an empty value is not set.
#[derive(Debug, Clone, Default)]
pub(crate) struct Environment {
    variables: HashMap<String, String>,
    ancestors: nesting::Ancestors,
}

/// The longest deadline that a variable sets, in seconds. Longer than any clock, so it never passes.
const MOST_SECONDS: f64 = 1e19;

/// Reads the deadline: `PHALANX_TIMEOUT` in seconds or `none`, or the default.
pub fn timeout_from_environment() -> Result<Duration, UsageError> {
    seconds_from_environment("PHALANX_TIMEOUT").map(|seconds| seconds.unwrap_or(DEFAULT_TIMEOUT))
}

/// A variable of this process; `None` if it is not set or empty.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(|value| value.to_string_lossy().into_owned())
}

/// Reads how long a peer may be stopped: `PHALANX_STOPPED_TIMEOUT` in seconds, if set.
pub(crate) fn stopped_timeout_from_environment() -> Result<Option<Duration>, UsageError> {
    seconds_from_environment("PHALANX_STOPPED_TIMEOUT")
}

/// Reads the number of cores of the ranks: `PHALANX_CORES`, if set.
pub(crate) fn cores_from_environment() -> Result<Option<usize>, UsageError> {
    number_from_environment("PHALANX_CORES", 1..=usize::MAX, "a number of cores greater than 0")
}

/// Reads a variable that must be one of the allowed numbers, if it is set.
pub(crate) fn number_from_environment(
    name: &str,
    allowed: RangeInclusive<usize>,
    expected: &str,
) -> Result<Option<usize>, UsageError> {
    let Some(value) = variable(name) else { return Ok(None) };
    match value.trim().parse() {
        Ok(number) if allowed.contains(&number) => Ok(Some(number)),
        _ => Err(setting(name, &value, expected)),
    }
}

fn seconds_from_environment(name: &str) -> Result<Option<Duration>, UsageError> {
    variable(name).map(|value| parse_seconds(name, &value)).transpose()
}

/// Reads whether calls are compared before they move data: `PHALANX_CHECK`.
pub(crate) fn check_from_environment() -> Result<bool, UsageError> {
    Ok(switch_from_environment("PHALANX_CHECK")?.unwrap_or(false))
}

/// Reads whether contributions are combined in rank order between hosts, too: `PHALANX_REPRODUCIBLE`.
pub(crate) fn reproducible_from_environment() -> Result<bool, UsageError> {
    Ok(switch_from_environment("PHALANX_REPRODUCIBLE")?.unwrap_or(false))
}

/// Reads a variable that must be 0 or 1, if it is set.
pub(crate) fn switch_from_environment(name: &str) -> Result<Option<bool>, UsageError> {
    switch(name, variable(name).as_deref())
}

/// Parses the value of a variable that must be 0 or 1.
pub(crate) fn switch(name: &str, value: Option<&str>) -> Result<Option<bool>, UsageError> {
    match value {
        None | Some("") => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        Some(other) => Err(setting(name, other, "0 or 1")),
    }
}

/// Parses a deadline: seconds, or `none` for one that never comes.
fn parse_seconds(name: &str, value: &str) -> Result<Duration, UsageError> {
    if value.trim() == "none" {
        return Ok(Duration::MAX);
    }
    let allowed = |seconds: &f64| *seconds > 0.0 && *seconds <= MOST_SECONDS;
    let seconds = value.trim().parse().ok().filter(allowed).map(Duration::from_secs_f64);
    // A tiny number rounds to nothing.
    seconds.filter(|seconds| !seconds.is_zero()).ok_or_else(|| {
        let expected = format!(
            "a number of seconds, greater than 0 and at most {MOST_SECONDS:e}; or none, to wait for ever"
        );
        setting(name, value, expected)
    })
}

/// Names for the settings of [`Builder::place`](crate::Builder::place), which no environment variable has.
mod place {
    pub const RANK: &str = "Builder::place(rank)";
    pub const WORLD_SIZE: &str = "Builder::place(world_size)";
    pub const JOB: &str = "Builder::place(job)";
    pub const LOCAL_WORLD_SIZE: &str = "Builder::store(ranks of this host)";
}

/// Number of restarts of the job. Takes precedence over torchrun's count.
pub(crate) const RESTART_COUNT: &str = "PHALANX_RESTART_COUNT";

pub(crate) fn setting(name: &str, value: &str, expected: impl Into<String>) -> UsageError {
    UsageError::Setting { name: name.into(), value: value.into(), expected: expected.into() }
}

impl Environment {
    pub fn current() -> Environment {
        let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
        // A value that is not Unicode fails when it is parsed, with an error that shows it.
        let variables = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
        Environment::new(variables, nesting::Ancestors::OfThisProcess)
    }

    pub fn of(variables: &[(&str, &str)]) -> Environment {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Environment::new(variables, nesting::Ancestors::default())
    }

    fn new(variables: impl Iterator<Item = (String, String)>, ancestors: nesting::Ancestors) -> Environment {
        Environment { variables: variables.collect(), ancestors }.without_outer_store()
    }

    /// This environment with the place that the program sets.
    pub fn placed(mut self, rank: usize, world_size: usize, job: &str) -> Environment {
        self.set(place::RANK, &rank.to_string());
        self.set(place::WORLD_SIZE, &world_size.to_string());
        self.set(place::JOB, job);
        self
    }

    /// This environment for ranks that meet at a store in rank 0.
    pub fn with_store(mut self, address: &str, token: &str) -> Environment {
        self.set("PHALANX_STORE", address);
        self.set("PHALANX_TOKEN", token);
        // The ranks find out at the store which of them share a host. Until then each counts itself only.
        self.set(place::LOCAL_WORLD_SIZE, "1");
        self
    }

    /// This environment for ranks that meet at the store of a `UniqueId`. The restart count is ignored, since
    /// an id is for one communicator and launchers that share it may have restarted differently often.
    pub fn with_id(self, address: &str, token: &str) -> Environment {
        let mut environment = self.with_store(address, token);
        environment.set(RESTART_COUNT, "0");
        environment
    }

    fn set(&mut self, name: &str, value: &str) {
        self.variables.insert(name.to_owned(), value.to_owned());
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<usize>, UsageError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value.trim().parse();
        number.map(Some).map_err(|_| setting(name, value, "a number, 0 or greater"))
    }

    /// The job's token: `PHALANX_TOKEN`, or the contents of `PHALANX_TOKEN_FILE`.
    pub(crate) fn token_if_set(&self) -> Result<Option<Token>, Error> {
        if let Some(token) = self.get("PHALANX_TOKEN") {
            let expected =
                || format!("a secret of at least {} characters, the same for all ranks", Token::MIN_LEN);
            return Ok(Some(
                Token::new(token).ok_or_else(|| setting("PHALANX_TOKEN", "(not shown)", expected()))?,
            ));
        }
        self.get("PHALANX_TOKEN_FILE").map(Token::from_file).transpose()
    }

    /// Reads the backend that `PHALANX_BACKEND` names.
    pub fn backend(&self) -> Result<Option<BackendKind>, Error> {
        match self.get("PHALANX_BACKEND") {
            None | Some("auto") => Ok(None),
            Some("solo") => Ok(Some(BackendKind::Solo)),
            Some("host") => Ok(Some(BackendKind::Host)),
            Some("mpi") => Ok(Some(BackendKind::Mpi)),
            Some("nccl") => Ok(Some(BackendKind::Nccl)),
            Some("rccl") => Ok(Some(BackendKind::Rccl)),
            Some("nvshmem") => Ok(Some(BackendKind::Nvshmem)),
            Some("ucx") => Ok(Some(BackendKind::Ucx)),
            Some(name) => {
                let known = "solo, host, mpi, ucx, nccl, rccl, nvshmem or auto";
                Err(setting("PHALANX_BACKEND", name, known).into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment of a test.
    pub fn environment(variables: &[(&str, &str)]) -> Environment {
        Environment::of(variables)
    }

    #[test]
    fn malformed_settings_are_named() {
        for backend in ["NVSHMEM", "NCCL", "transport-pigeon"] {
            let error = environment(&[("PHALANX_BACKEND", backend)]).backend().unwrap_err().to_string();
            assert!(error.contains("PHALANX_BACKEND") && error.contains(backend), "{error}");
        }
        for timeout in ["0", "-3", "soon", "inf", "NaN", "1e20", "1e300", "1e-30"] {
            let error = parse_seconds("PHALANX_TIMEOUT", timeout).unwrap_err().to_string();
            let says = ["PHALANX_TIMEOUT", timeout, "greater than 0 and at most 1e19", "or none"];
            assert!(says.iter().all(|part| error.contains(part)), "{error}");
        }
        assert_eq!(parse_seconds("PHALANX_TIMEOUT", " 2.5 ").unwrap(), Duration::from_millis(2500));
        assert_eq!(parse_seconds("PHALANX_TIMEOUT", "none").unwrap(), Duration::MAX);
        assert_eq!(environment(&[("PHALANX_BACKEND", "")]).backend().unwrap(), None);
    }
}
