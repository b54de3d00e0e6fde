//! Launchers inside launchers: which of them started this process.
//!
//! For example, a rank of `phalanx launch -n 2 -- mpirun -n 2 PROGRAM` has the variables of both. It is a rank of mpirun, the innermost
//! launcher: mpirun itself was started with the variables of `phalanx launch`, and without its own. So a variable was set by the process
//! below the nearest ancestor that was started without it, and the launcher whose variables were set last is the innermost.
//!
//! If that cannot be seen (an ancestor of another user, a container), launchers that agree on the rank and the number of ranks are taken
//! for one launcher: `srun --mpi=pmi2` sets Slurm's variables and PMI's. If they do not agree, `PHALANX_LAUNCHED_BY` has to decide.

use super::Environment;
use super::launcher::{PHALANX, PROGRAM, RULES, Rule};
use crate::types::error::{Error, Result};
use std::borrow::Cow;
use std::collections::HashMap;

/// The variable that names the launcher.
pub(super) const LAUNCHER: &str = "PHALANX_LAUNCHED_BY";

/// What `phalanx launch` sets for its own ranks: no other launcher's ranks meet there.
const OF_PHALANX_LAUNCH: [&str; 3] = ["PHALANX_STORE", "PHALANX_TOKEN", super::RESTART_COUNT];

/// The environments that the ancestors of a process were started with, its parent's first.
#[derive(Debug, Clone)]
pub(super) enum Ancestors {
    /// Read when they are needed.
    OfThisProcess,
    Known(Vec<HashMap<String, String>>),
}

impl Default for Ancestors {
    fn default() -> Ancestors {
        Ancestors::Known(Vec::new())
    }
}

impl Ancestors {
    fn environments(&self) -> Cow<'_, [HashMap<String, String>]> {
        match self {
            Ancestors::OfThisProcess => Cow::Owned(crate::os::ancestor_environments()),
            Ancestors::Known(environments) => Cow::Borrowed(environments),
        }
    }
}

/// The rule of the launcher that started this process, and the names of the others whose variables are set.
pub(super) struct Innermost {
    pub rule: &'static Rule,
    pub ignored: Vec<&'static str>,
}

impl Environment {
    /// Finds the launcher that started this process.
    pub(super) fn innermost(&self) -> Result<Option<Innermost>> {
        let recognised: Vec<&'static Rule> = RULES.iter().filter(|rule| rule.is_in(self)).collect();
        let rule = match (&recognised[..], self.get(LAUNCHER)) {
            ([first, ..], _) if first.id == PROGRAM => first,
            (_, Some("none")) => return Ok(None),
            (_, Some(id)) => {
                let named = RULES.iter().find(|rule| rule.id == id && id != PROGRAM);
                let known: Vec<_> = RULES.iter().map(|rule| rule.id).filter(|id| *id != PROGRAM).collect();
                let rule = named.ok_or_else(|| {
                    super::setting(LAUNCHER, id, format!("one of {}, none", known.join(", ")))
                })?;
                rule.check_complete(self, LAUNCHER)?;
                rule
            }
            ([], None) => {
                RULES.iter().try_for_each(|rule| rule.check_whole(self))?;
                return Ok(None);
            }
            ([first, ..], None) => {
                // No other launcher sets these.
                let phalanx = RULES.iter().find(|rule| rule.id == PHALANX);
                phalanx.map_or(Ok(()), |rule| rule.check_evidence(self))?;
                if recognised.len() == 1 { first } else { self.set_last(&recognised)? }
            }
        };
        let others = recognised.iter().filter(|other| other.id != rule.id);
        Ok(Some(Innermost { rule, ignored: others.map(|other| other.name).collect() }))
    }

    /// The launcher whose variables were set last. Of those that one process set, the first of the table.
    fn set_last(&self, recognised: &[&'static Rule]) -> Result<&'static Rule> {
        let ancestors = self.ancestors.environments();
        let ages: Vec<usize> = recognised.iter().map(|rule| self.age_of(rule, &ancestors)).collect();
        let least = ages.iter().min().copied().unwrap_or_default();
        let last: Vec<&Rule> =
            recognised.iter().zip(&ages).filter(|(_, age)| **age == least).map(|(rule, _)| *rule).collect();
        let first = recognised.iter().find(|rule| rule.id == last[0].id).expect("one of them");
        match last.iter().find(|other| !self.agree(first, other)) {
            None => Ok(first),
            Some(other) => Err(Error::bootstrap(
                format!(
                    "the variables of two launchers are set, which contradict each other: {} and {}; which of the two started this process \
                     cannot be seen",
                    self.describe(first),
                    self.describe(other),
                ),
                format!(
                    "set {LAUNCHER} to {} or {}, whichever started the ranks, or unset the variables of the other",
                    first.id, other.id
                ),
            )),
        }
    }

    /// How many ancestors were started with the launcher's latest variable as it is now.
    fn age_of(&self, rule: &Rule, ancestors: &[HashMap<String, String>]) -> usize {
        let set = rule.own.iter().filter(|name| self.get(name).is_some());
        set.map(|name| self.age(name, ancestors)).min().unwrap_or(usize::MAX)
    }

    fn age(&self, name: &str, ancestors: &[HashMap<String, String>]) -> usize {
        let has_it =
            |ancestor: &&HashMap<String, String>| ancestor.get(name).map(String::as_str) == self.get(name);
        ancestors.iter().take_while(has_it).count()
    }

    /// Whether two launchers say the same rank, and the same number of ranks where both say it.
    fn agree(&self, one: &Rule, other: &Rule) -> bool {
        let rank = |rule: &Rule| self.get(rule.rank).map(str::trim);
        let size =
            |rule: &Rule| self.first_set(rule.world_size).and_then(|name| self.get(name)).map(str::trim);
        let same_size = size(one).zip(size(other)).is_none_or(|(one, other)| one == other);
        rank(one) == rank(other) && same_size
    }

    fn describe(&self, rule: &Rule) -> String {
        let value = |name: &str| format!("{name}={}", self.get(name).unwrap_or_default());
        let variables: Vec<String> =
            [Some(rule.rank), self.first_set(rule.world_size)].into_iter().flatten().map(value).collect();
        format!("{} ({})", rule.name, variables.join(", "))
    }

    /// This environment without the store of a `phalanx launch` whose rank started another launcher.
    pub(super) fn without_outer_store(mut self) -> Environment {
        let is_set = OF_PHALANX_LAUNCH.iter().any(|name| self.get(name).is_some());
        let Some(phalanx) = RULES.iter().find(|rule| rule.id == PHALANX && is_set && rule.is_in(&self))
        else {
            return self;
        };
        // An error is reported where the launcher is needed.
        if self.innermost().ok().flatten().is_none_or(|innermost| innermost.rule.id == PHALANX) {
            return self;
        }
        let ancestors = self.ancestors.environments().into_owned();
        let age = self.age_of(phalanx, &ancestors);
        for name in OF_PHALANX_LAUNCH {
            // A later one is of the inner launcher or its user.
            if self.age(name, &ancestors) >= age {
                self.variables.remove(name);
            }
        }
        self
    }
}
