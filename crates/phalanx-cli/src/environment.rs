//! The variables by which a launcher tells a process that it is a rank.
//!
//! Only what the program has to know before `phalanx::init()` reads the same variables in full.

use std::env;

/// Variables that say something about ranks, and whether their value may be shown.
const VARIABLES: [(&str, bool); 19] = [
    ("PHALANX_RANK", true),
    ("PHALANX_WORLD_SIZE", true),
    ("PHALANX_LOCAL_RANK", true),
    ("PHALANX_LOCAL_WORLD_SIZE", true),
    // Whoever knows the id of a job is let in.
    ("PHALANX_JOB", false),
    ("PHALANX_NODE_RANK", true),
    ("PHALANX_NNODES", true),
    ("PHALANX_RESTART_COUNT", true),
    ("PHALANX_STORE", true),
    ("PHALANX_TOKEN", false),
    ("PHALANX_TOKEN_FILE", true),
    ("PHALANX_HEARTBEAT_TIMEOUT", true),
    ("PHALANX_BACKEND", true),
    ("PHALANX_TIMEOUT", true),
    ("RANK", true),
    ("WORLD_SIZE", true),
    ("MASTER_ADDR", true),
    ("MASTER_PORT", true),
    ("TORCHELASTIC_RUN_ID", false),
];

/// A launcher that the library recognises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    Phalanx,
    Torchrun,
}

impl Launcher {
    /// The launcher that started this process, if any: the library's own comes first.
    pub fn found() -> Option<Launcher> {
        Launcher::among(|name| env::var_os(name).is_some())
    }

    fn among(is_set: impl Fn(&str) -> bool) -> Option<Launcher> {
        if is_set("PHALANX_RANK") || is_set("PHALANX_WORLD_SIZE") {
            Some(Launcher::Phalanx)
        } else if is_set("RANK") && is_set("WORLD_SIZE") {
            Some(Launcher::Torchrun)
        } else {
            None
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Launcher::Phalanx => "phalanx launch",
            Launcher::Torchrun => "torchrun",
        }
    }

    /// The variables for the rank and for the number of ranks.
    pub fn variables(self) -> (&'static str, &'static str) {
        match self {
            Launcher::Phalanx => ("PHALANX_RANK", "PHALANX_WORLD_SIZE"),
            Launcher::Torchrun => ("RANK", "WORLD_SIZE"),
        }
    }
}

/// The variables that are set, with the values that may be shown.
pub fn set_variables() -> impl Iterator<Item = (&'static str, String)> {
    VARIABLES.into_iter().filter_map(|(name, shown)| {
        let value = env::var_os(name)?;
        let value = if shown { value.to_string_lossy().into_owned() } else { "(set)".to_owned() };
        Some((name, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_told_apart() {
        let found = |set: &[&str]| Launcher::among(|name| set.contains(&name));
        assert_eq!(found(&[]), None);
        assert_eq!(found(&["RANK"]), None);
        assert_eq!(found(&["RANK", "WORLD_SIZE"]), Some(Launcher::Torchrun));
        assert_eq!(found(&["RANK", "WORLD_SIZE", "PHALANX_RANK"]), Some(Launcher::Phalanx));
    }
}
