//! Table of launchers: the variables by which each is recognised, and those with the rank, world size and
//! job.

use super::nesting::{Innermost, LAUNCHER};
use super::{Environment, place, setting};
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::{MAX_HOST_RANKS, MAX_RANKS};

/// The launcher that started this process, with the rank and the sizes from its variables.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launcher {
    /// Its name.
    pub name: &'static str,
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks. `None` if the launcher's variables do not have it, as under PMIx: MPI knows it.
    pub world_size: Option<usize>,
    /// This process's rank among the ranks of its host.
    pub local_rank: Option<usize>,
    /// The number of ranks on this host.
    pub local_world_size: Option<usize>,
    /// The variables it was recognised by.
    pub recognised_by: &'static [&'static str],
    /// Other launchers whose variables are set: those around this one, and those whose variables it sets, too.
    pub ignored: Vec<&'static str>,
    rule: &'static Rule,
    /// Whether the user names a store (`PHALANX_STORE`).
    has_store: bool,
}

/// This process's place among ranks that meet on one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub launcher: &'static str,
    pub rank: usize,
    pub world_size: usize,
    /// Identifies the job: equal on all its ranks, different for every other job.
    pub job: String,
    /// The job's name as all its hosts know it; empty if the launcher gives it none.
    pub known_as: String,
    /// Where the ranks of one host meet: a text derived from the job and, if it has one, its token. A secret like the token.
    pub meeting: String,
    /// Whether all ranks are on this host: see [`Launcher::is_one_host`].
    pub one_host: bool,
}

/// One launcher's variables. Where there are several names, the first that is set counts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) name: &'static str,
    /// Its name in `PHALANX_LAUNCHED_BY`.
    pub(super) id: &'static str,
    /// The launcher is recognised if all of these are set.
    evidence: &'static [&'static str],
    /// Variables that show when it ran, beside other launchers: see `nesting.rs`.
    pub(super) own: &'static [&'static str],
    /// Variables that no process has without the evidence, unless something went wrong.
    parts: &'static [&'static str],
    pub(super) rank: &'static str,
    pub(super) world_size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world_size: &'static [&'static str],
    /// Whether it starts MPI jobs.
    mpi: bool,
    /// Variables that identify the job. Empty: the launcher's process on this host identifies it.
    job: &'static [&'static str],
    /// Optional variables that identify the job further.
    job_more: &'static [&'static str],
    /// Variables with which the job has one name on all its hosts.
    everywhere: &'static [&'static str],
}

/// Id of the rule for [`Environment::placed`].
pub(super) const PROGRAM: &str = "program";
/// Id of the rule for `phalanx launch`.
pub(super) const PHALANX: &str = "phalanx";

/// Slurm's list of the number of tasks on each host of a step.
const SLURM_STEP_TASKS: &str = "SLURM_STEP_TASKS_PER_NODE";

/// The launchers. The innermost counts; of several whose variables one process sets, the first: Open MPI also sets the
/// variables of PMIx, PALS those of PMI, and Slurm's steps those of PMI or PMIx.
pub(super) static RULES: [Rule; 9] = [
    Rule {
        // See `Environment::placed`.
        name: "the program itself",
        id: PROGRAM,
        evidence: &[place::RANK],
        own: &[place::RANK],
        parts: &[],
        rank: place::RANK,
        world_size: &[place::WORLD_SIZE],
        local_rank: &[],
        local_world_size: &[place::LOCAL_WORLD_SIZE],
        mpi: false,
        job: &[place::JOB],
        job_more: &[],
        everywhere: &[place::JOB],
    },
    Rule {
        name: "phalanx launch",
        id: PHALANX,
        evidence: &["PHALANX_RANK", "PHALANX_WORLD_SIZE"],
        own: &["PHALANX_RANK", "PHALANX_WORLD_SIZE", "PHALANX_JOB"],
        parts: &["PHALANX_RANK", "PHALANX_WORLD_SIZE", "PHALANX_LOCAL_RANK", "PHALANX_LOCAL_WORLD_SIZE"],
        rank: "PHALANX_RANK",
        world_size: &["PHALANX_WORLD_SIZE"],
        local_rank: &["PHALANX_LOCAL_RANK"],
        local_world_size: &["PHALANX_LOCAL_WORLD_SIZE"],
        mpi: false,
        job: &["PHALANX_JOB"],
        job_more: &[],
        everywhere: &["PHALANX_JOB"],
    },
    Rule {
        name: "torchrun",
        id: "torchrun",
        // RANK alone is too common a name.
        evidence: &["RANK", "WORLD_SIZE"],
        own: &["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"],
        parts: &["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
        rank: "RANK",
        world_size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_world_size: &["LOCAL_WORLD_SIZE"],
        mpi: false,
        // The port belongs to torchrun's own store. Here it only identifies the job.
        job: &["MASTER_ADDR", "MASTER_PORT"],
        job_more: &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
        everywhere: &["TORCHELASTIC_RUN_ID"],
    },
    Rule {
        name: "Open MPI",
        id: "openmpi",
        evidence: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        own: &[
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
        parts: &[
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ],
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        mpi: true,
        job: &["PMIX_NAMESPACE"],
        job_more: &["PMIX_SERVER_URI2"],
        everywhere: &["PMIX_NAMESPACE"],
    },
    Rule {
        name: "Cray PALS",
        id: "pals",
        evidence: &["PALS_RANKID"],
        own: &["PALS_RANKID", "PALS_APID"],
        parts: &["PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"],
        rank: "PALS_RANKID",
        world_size: &["PMI_SIZE"],
        local_rank: &["PALS_LOCAL_RANKID"],
        local_world_size: &["PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"],
        mpi: true,
        job: &["PALS_APID"],
        job_more: &[],
        everywhere: &["PALS_APID"],
    },
    Rule {
        name: "Intel MPI",
        id: "intelmpi",
        evidence: &["PMI_RANK", "PMI_SIZE", "I_MPI_HYDRA_UUID"],
        own: &["I_MPI_HYDRA_UUID"],
        parts: &[],
        rank: "PMI_RANK",
        world_size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        local_world_size: &["MPI_LOCALNRANKS"],
        mpi: true,
        job: &["I_MPI_HYDRA_UUID"],
        job_more: &[],
        everywhere: &["I_MPI_HYDRA_UUID"],
    },
    Rule {
        // MPICH's Hydra, Slurm with --mpi=pmi2, and others.
        name: "MPICH or another launcher with PMI",
        id: "pmi",
        evidence: &["PMI_RANK", "PMI_SIZE"],
        own: &["PMI_RANK", "PMI_SIZE", "PMI_FD"],
        parts: &["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        rank: "PMI_RANK",
        world_size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"],
        local_world_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", SLURM_STEP_TASKS],
        mpi: true,
        job: &[],
        job_more: &[],
        everywhere: &[],
    },
    Rule {
        name: "PMIx",
        id: "pmix",
        evidence: &["PMIX_RANK", "PMIX_NAMESPACE"],
        own: &["PMIX_RANK", "PMIX_NAMESPACE"],
        parts: &["PMIX_RANK", "PMIX_NAMESPACE"],
        rank: "PMIX_RANK",
        world_size: &[],
        local_rank: &["SLURM_LOCALID"],
        local_world_size: &[],
        mpi: true,
        job: &["PMIX_NAMESPACE"],
        job_more: &["PMIX_SERVER_URI2"],
        everywhere: &["PMIX_NAMESPACE"],
    },
    Rule {
        name: "Slurm",
        id: "slurm",
        // SLURM_JOB_ID is also set in an interactive allocation, and SLURM_PROCID in a batch script.
        evidence: &["SLURM_STEP_NODELIST", "SLURM_PROCID"],
        own: &["SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"],
        parts: &["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"],
        rank: "SLURM_PROCID",
        world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_world_size: &[SLURM_STEP_TASKS],
        mpi: false,
        job: &["SLURM_JOB_ID"],
        job_more: &["SLURM_STEP_ID"],
        everywhere: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

impl Rule {
    /// Whether the launcher is recognised.
    pub(super) fn is_in(&self, environment: &Environment) -> bool {
        self.evidence.iter().all(|name| environment.get(name).is_some())
    }

    /// An error that names the first variable of the evidence that is missing, although `because` is set.
    pub(super) fn check_complete(&self, environment: &Environment, because: &str) -> Result<()> {
        let missing = self.evidence.iter().find(|name| environment.get(name).is_none());
        let Some(missing) = missing else { return Ok(()) };
        let expected = format!(
            "a value, since {because} is set: {} sets both. A process that no launcher started is told so by {LAUNCHER}=none",
            self.name
        );
        Err(setting(missing, "", expected).into())
    }

    /// An error if some of the launcher's variables are set, and others are not.
    pub(super) fn check_whole(&self, environment: &Environment) -> Result<()> {
        self.check_beside(self.parts, environment)
    }

    /// An error if some of the evidence is set, and the rest is not.
    pub(super) fn check_evidence(&self, environment: &Environment) -> Result<()> {
        self.check_beside(self.evidence, environment)
    }

    fn check_beside(&self, parts: &[&str], environment: &Environment) -> Result<()> {
        let present = parts.iter().find(|name| environment.get(name).is_some());
        present.map_or(Ok(()), |present| self.check_complete(environment, present))
    }
}

impl Environment {
    /// Finds the launcher that started this process: of several, the innermost.
    ///
    /// # Errors
    /// A variable that is missing or malformed; two launchers that contradict each other, if the innermost is not known.
    pub fn launcher(&self) -> Result<Option<Launcher>> {
        let Some(Innermost { rule, ignored }) = self.innermost()? else { return Ok(None) };
        let because = rule.evidence[0];
        let rank = self.required(rule.rank, because)?;
        let world_size = match self.first_set(rule.world_size) {
            Some(name) => Some(self.required(name, because)?),
            // PALS may not set it.
            None if rule.mpi => None,
            None => Some(self.required(rule.world_size[0], because)?),
        };
        if world_size == Some(0) {
            return Err(setting(rule.world_size[0], "0", "1 rank or more").into());
        }
        if let Some(world_size) = world_size.filter(|size| rank >= *size) {
            let expected = format!("less than the number of ranks, {world_size}");
            return Err(setting(rule.rank, &rank.to_string(), expected).into());
        }
        let local_rank = match self.first_set(rule.local_rank) {
            Some(name) => self.local_rank(name, world_size)?,
            None => None,
        };
        Ok(Some(Launcher {
            name: rule.name,
            rank,
            world_size,
            local_rank,
            local_world_size: self.local_world_size(rule)?,
            recognised_by: rule.evidence,
            ignored,
            rule,
            // For a place that the program sets, the program says whether there is a store.
            has_store: rule.id != PROGRAM && self.get("PHALANX_STORE").is_some(),
        }))
    }

    pub(super) fn first_set(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| self.get(name).is_some())
    }

    /// Reads a number that must be set, since the variable `because` is.
    fn required(&self, name: &str, because: &str) -> Result<usize> {
        let expected = || setting(name, "", format!("a number, since {because} is set"));
        Ok(self.number(name)?.ok_or_else(expected)?)
    }

    /// Reads the local rank, which only applications use, and checks it.
    fn local_rank(&self, name: &str, world_size: Option<usize>) -> Result<Option<usize>> {
        let rank = self.number(name)?;
        match (rank, world_size) {
            (Some(rank), Some(world_size)) if rank >= world_size => {
                let expected = format!("less than the number of ranks, {world_size}");
                Err(setting(name, &rank.to_string(), expected).into())
            }
            _ => Ok(rank),
        }
    }

    fn local_world_size(&self, rule: &Rule) -> Result<Option<usize>> {
        let Some(name) = self.first_set(rule.local_world_size) else { return Ok(None) };
        let value = self.get(name).unwrap_or_default();
        let Some(hosts) = ranks_of_hosts(value) else {
            return Err(
                setting(name, value, "a number, 0 or greater, or one for each host (2(x3), 3,2)").into()
            );
        };
        let own = if name == SLURM_STEP_TASKS { self.number("SLURM_NODEID")?.unwrap_or(0) } else { 0 };
        let here = hosts.iter().flat_map(|(ranks, times)| std::iter::repeat_n(*ranks, *times)).nth(own);
        // If SLURM_NODEID does not fit the list, take the first host.
        Ok(Some(here.unwrap_or(hosts[0].0)))
    }
}

/// Parses Slurm's list of ranks per host into pairs (ranks, hosts). `2(x3),1` is `[(2, 3), (1, 1)]`.
fn ranks_of_hosts(list: &str) -> Option<Vec<(usize, usize)>> {
    let entry = |entry: &str| match entry.trim().strip_suffix(')') {
        Some(entry) => {
            entry.split_once("(x").and_then(|(n, times)| Some((n.parse().ok()?, times.parse().ok()?)))
        }
        None => Some((entry.trim().parse().ok()?, 1)),
    };
    list.split(',').map(entry).collect()
}

impl Launcher {
    /// Whether all ranks are on this host. If the launcher does not say how many are: whether no `PHALANX_STORE` is
    /// set, at which ranks of several hosts would meet.
    pub fn is_one_host(&self) -> bool {
        match (self.local_world_size, self.world_size) {
            (Some(here), Some(all)) => here == all,
            (_, Some(1)) => true,
            _ => !self.has_store,
        }
    }

    /// Whether it starts MPI jobs.
    pub fn starts_mpi(&self) -> bool {
        self.rule.mpi
    }

    /// Whether the ranks find each other over MPI: they may be on several hosts, and the user names no store.
    pub(crate) fn meets_over_mpi(&self, environment: &Environment) -> bool {
        let has_store = environment.get("PHALANX_STORE").is_some();
        self.starts_mpi() && (self.world_size.is_none() || !(self.is_one_host() || has_store))
    }

    /// This launcher with the world size that MPI reports.
    pub(crate) fn with_world_size(&self, world_size: usize) -> Launcher {
        Launcher { world_size: Some(world_size), ..self.clone() }
    }

    /// This process's place among ranks that share the memory of this host.
    pub(crate) fn place(&self, environment: &Environment) -> Result<Place> {
        let Some(world_size) = self.world_size else {
            return Err(Error::from(UnsupportedError {
                what: format!("the host backend under {}", self.name),
                why: "its variables do not say how many ranks there are".into(),
                remedy: "unset PHALANX_BACKEND, or set it to mpi".into(),
            }));
        };
        let limit = if self.is_one_host() { MAX_HOST_RANKS } else { MAX_RANKS };
        if world_size > limit {
            let name = environment.first_set(self.rule.world_size).unwrap_or("the number of ranks");
            return Err(setting(name, &world_size.to_string(), format!("1 to {limit} ranks")).into());
        }
        if let Some(here) = self.local_world_size.filter(|here| *here == 0 || *here > world_size) {
            let name = environment.first_set(self.rule.local_world_size).unwrap_or_default();
            let expected = format!("1 to the number of ranks, {world_size}");
            return Err(setting(name, &here.to_string(), expected).into());
        }
        let job = if world_size > 1 { self.job(environment)? } else { String::new() };
        let one_host = self.is_one_host();
        // A token in the environment is not for a place that the program sets, unless it sets the store as well.
        let has_token = self.rule.id != PROGRAM || environment.get(place::LOCAL_WORLD_SIZE).is_some();
        let token = if has_token && world_size > 1 { environment.token_if_set()? } else { None };
        let meeting = token.map_or_else(|| job.clone(), |token| token.derive(&job));
        let known_as = self.rule.everywhere.iter().filter_map(|name| environment.get(name));
        let known_as = known_as.collect::<Vec<_>>().join(".");
        Ok(Place { launcher: self.name, rank: self.rank, world_size, job, known_as, meeting, one_host })
    }

    /// The text that identifies the job.
    fn job(&self, environment: &Environment) -> Result<String> {
        let mut job = vec![self.name.to_owned()];
        for name in self.rule.job {
            match (environment.get(name), environment.get("PHALANX_STORE")) {
                (Some(value), _) => job.push(value.to_owned()),
                // The store and its token tell the job. Rank 0 may know the store by another name.
                (None, Some(store)) if self.has_store => {
                    job.push(format!("{name} at port {}", store.rsplit(':').next().unwrap_or_default()));
                }
                (None, _) => {
                    let expected =
                        format!("what {} sets: the ranks of a job know each other by it", self.name);
                    return Err(setting(name, "", expected).into());
                }
            }
        }
        let more = self.rule.job_more.iter();
        job.extend(more.map(|name| environment.get(name).unwrap_or_default().to_owned()));
        if self.rule.job.is_empty() {
            job.push(launcher_process(self.name)?);
        }
        Ok(job.join(" "))
    }
}

/// Identifies the launcher's process on this host, the ancestor of all its ranks: process id and start time.
#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn launcher_process(launcher: &str) -> Result<String> {
    let found = phalanx_sys::mpi::launcher_process().and_then(|(process, _)| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // `pid (name) state parent …`: the start is the 22nd field, the 20th behind the name.
        let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.to_owned();
        Some(format!("{process} {started}"))
    });
    found.ok_or_else(|| {
        Error::from(UnsupportedError {
            what: format!("the host backend under {launcher}"),
            why: "neither its variables nor the processes above this one tell its jobs apart".into(),
            remedy: "unset PHALANX_BACKEND, or set it to mpi; or start the ranks with `phalanx launch`"
                .into(),
        })
    })
}

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn launcher_process(launcher: &str) -> Result<String> {
    Err(Error::from(UnsupportedError {
        what: format!("the host backend under {launcher}"),
        why: "its variables do not tell its jobs apart".into(),
        remedy: "start the ranks with `phalanx launch`".into(),
    }))
}

#[cfg(test)]
mod tests;
