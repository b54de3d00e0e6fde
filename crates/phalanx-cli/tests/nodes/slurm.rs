//! Steps of a real Slurm on three hosts that `.ci/hosts` makes.

use super::hosts::{Hosts, obstacle, trial};
use super::node::Node;
use super::rank::PART;
use libtest_mimic::{Failed, Trial};
use std::sync::OnceLock;

/// What the trials need; in CI they fail without it.
const NEEDED: [&str; 6] = ["slurmctld", "slurmd", "munged", "mpirun.mpich", "mpirun.openmpi", "nsenter"];

pub fn trials() -> Vec<Trial> {
    let obstacle = obstacle(&NEEDED);
    let trial = |name: &str, run: fn(&Slurm) -> Result<(), Failed>| {
        trial(format!("slurm/{name}"), obstacle.as_ref(), move || run(&Slurm::get()?))
    };
    vec![
        trial("a_step_on_one_host_shares_memory", one_host),
        trial("a_step_without_mpi_is_told_what_to_do", without_mpi),
        trial("a_step_with_pmi2_uses_mpi", |slurm| with_mpi(slurm, "pmi2", 3)),
        trial("a_step_with_pmix_uses_mpi", |slurm| with_mpi(slurm, "pmix", 3)),
        trial("unlike_numbers_of_ranks", |slurm| with_mpi(slurm, "pmi2", 4)),
        trial("a_killed_rank_ends_the_step", killed_rank),
        trial("launchers_in_a_step_meet", launchers),
    ]
}

/// The hosts, with a Slurm that is started for the first trial.
struct Slurm(&'static Hosts);

impl Slurm {
    fn get() -> Result<Slurm, Failed> {
        static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
        let hosts = Hosts::get()?;
        STARTED.get_or_init(|| hosts.perform("slurm", &["2"])).clone()?;
        Ok(Slurm(hosts))
    }

    /// `srun` on the first host, with this test program as ranks that call `init`.
    fn srun(&self, options: &str) -> Result<(Option<i32>, String), Failed> {
        let program = std::env::current_exe()?;
        self.step(options, &[program.to_str().ok_or("a path that is text")?])
    }

    fn step(&self, options: &str, program: &[&str]) -> Result<(Option<i32>, String), Failed> {
        let mut command = self.0.command("run", &["0", "srun"]);
        command.args(options.split(' ')).args(program).env(PART, "init").env("PHALANX_TIMEOUT", "20");
        // The hosts share the machine's cores, on which Open MPI's ranks would otherwise spin.
        command.env("OMPI_MCA_mpi_yield_when_idle", "1");
        Ok(Node::start(command).end()?)
    }
}

fn says(said: &str, what: &str, times: usize) -> Result<(), Failed> {
    if said.matches(what).count() == times {
        return Ok(());
    }
    Err(format!("{what:?} should be there {times} times:\n{said}").into())
}

fn one_host(slurm: &Slurm) -> Result<(), Failed> {
    says(&slurm.srun("-N 1 -n 2 --mpi=none")?.1, "sum 3 on 1 host", 2)
}

fn without_mpi(slurm: &Slurm) -> Result<(), Failed> {
    let said = slurm.srun("-N 2 -n 2 --mpi=none")?.1;
    says(&said, "srun started 2 ranks on several hosts (h[0-1]) without an MPI", 2)?;
    says(&said, "srun --mpi=pmi2 PROGRAM", 2)
}

/// On two hosts, of which the first gets one more of three ranks; or on three with four ranks.
fn with_mpi(slurm: &Slurm, kind: &str, ranks: usize) -> Result<(), Failed> {
    let (hosts, sum) = (ranks - 1, ranks * (ranks + 1) / 2);
    let (code, said) = slurm.srun(&format!("-N {hosts} -n {ranks} --mpi={kind}"))?;
    says(&said, &format!("sum {sum} on "), ranks)?;
    // Also where MPICH hangs in MPI_Finalize: the work is done.
    if code == Some(0) { Ok(()) } else { Err(format!("{code:?}: {said}").into()) }
}

fn killed_rank(slurm: &Slurm) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let script = format!("[ $SLURM_PROCID = 1 ] && kill -9 $$; exec {}", program.display());
    let (code, said) = slurm.step("-N 2 -n 2 --mpi=pmi2 -K", &["sh", "-c", &script])?;
    if code == Some(0) { Err(said.into()) } else { says(&said, "task 1: Killed", 1) }
}

/// One launcher on each host, with two ranks each, as a batch script would start them.
fn launchers(slurm: &Slurm) -> Result<(), Failed> {
    let script = format!(
        "umask 077; echo the secret of this test > /tmp/token; exec {} launch --nnodes $SLURM_NNODES --node-rank $SLURM_NODEID \
         --store h0:29400 --token-file /tmp/token -n 2 -- sh -c 'echo here is $PHALANX_RANK of $PHALANX_WORLD_SIZE'",
        env!("CARGO_BIN_EXE_phalanx")
    );
    let (code, said) = slurm.step("-N 3 -n 3 --mpi=none", &["sh", "-c", &script])?;
    for rank in 0..6 {
        says(&said, &format!("here is {rank} of 6"), 1)?;
    }
    if code == Some(0) { Ok(()) } else { Err(format!("{code:?}: {said}").into()) }
}
