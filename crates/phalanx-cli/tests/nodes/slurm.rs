//! Steps of a real Slurm on three hosts that `.ci/hosts` makes.

use super::hosts::{Hosts, obstacle, trial};
use super::node::Node;
use super::rank::{CHECKPOINT, PART};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::{suite, ucx};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What the trials need; in CI they fail without it.
const NEEDED: [&str; 6] = ["slurmctld", "slurmd", "munged", "mpirun.mpich", "mpirun.openmpi", "nsenter"];

pub fn trials() -> Vec<Trial> {
    let obstacle = obstacle(&NEEDED);
    let trial = |name: &str, run: fn(&Slurm) -> Result<(), Failed>| {
        trial(format!("slurm/{name}"), obstacle.as_ref(), move || run(&Slurm::get()?))
    };
    // These go over UCX.
    let of_ucx = |name: &str, run: fn(&Slurm) -> Result<(), Failed>| match ucx::missing() {
        Some(reason) => suite::ignored(format!("slurm/{name}"), &reason),
        None => trial(name, run),
    };
    vec![
        trial("a_step_on_one_host_shares_memory", one_host),
        trial("a_step_without_mpi_is_told_what_to_do", without_mpi),
        trial("a_step_with_pmi2_uses_mpi", |slurm| with_mpi(slurm, "pmi2", 3)),
        trial("a_step_with_pmix_uses_mpi", |slurm| with_mpi(slurm, "pmix", 3)),
        trial("unlike_numbers_of_ranks", |slurm| with_mpi(slurm, "pmi2", 4)),
        trial("a_killed_rank_ends_the_step", killed_rank),
        trial("launchers_in_a_step_meet", launchers),
        of_ucx("a_step_without_a_token_makes_one", without_token),
        of_ucx("a_step_with_a_store_needs_no_mpi", with_store),
        of_ucx("scancel_leaves_nothing_behind", cancelled),
        of_ucx("the_time_limit_leaves_nothing_behind", time_limit),
        of_ucx("a_failed_job_goes_on_from_its_checkpoint", requeued),
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

    /// The same in a role, with a store at which the ranks meet.
    fn srun_with_store(&self, options: &str, part: &str, port: u16) -> Result<Node, Failed> {
        let mut command = self.0.command("run", &["0", "srun"]);
        command.args(options.split(' ')).arg(std::env::current_exe()?).env(PART, part);
        command.env("PHALANX_STORE", format!("h0:{port}")).env("PHALANX_TOKEN", "the secret of this test");
        Ok(Node::start(command))
    }

    /// What one of Slurm's commands says.
    fn ask(&self, words: &[&str]) -> Result<String, Failed> {
        let done = self.0.command("run", &[&["0"], words].concat()).output()?;
        match done.status.success() {
            true => Ok(String::from_utf8_lossy(&done.stdout).into_owned()),
            false => Err(format!("{words:?}: {}", String::from_utf8_lossy(&done.stderr)).into()),
        }
    }

    /// Waits until no job is left, nor any process of this test program on the hosts.
    fn wait_until_empty(&self) -> Result<(), Failed> {
        let program = std::env::current_exe()?;
        let program = program.to_str().ok_or("a path that is text")?;
        let left = || -> Result<String, Failed> {
            let mut left = self.ask(&["squeue", "-h"])?;
            for host in ["0", "1", "2"] {
                let found = self.0.command("run", &[host, "pgrep", "-af", program]).output()?;
                left.push_str(&String::from_utf8_lossy(&found.stdout));
            }
            Ok(left)
        };
        wait_until("nothing is left", Duration::from_secs(20), || Ok(left()?.is_empty())).map_err(|error| {
            format!("{}: {}", error.message().unwrap_or(""), left().unwrap_or_default()).into()
        })
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

/// Where MUNGE's programs are not found.
fn without_mpi(slurm: &Slurm) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let script = format!("PATH=/nowhere exec {}", program.display());
    let said = slurm.step("-N 2 -n 2 --mpi=none", &["/bin/sh", "-c", &script])?.1;
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

fn wait_until(
    what: &str,
    limit: Duration,
    mut is_so: impl FnMut() -> Result<bool, Failed>,
) -> Result<(), Failed> {
    let started = Instant::now();
    while !is_so()? {
        if started.elapsed() > limit {
            return Err(format!("{what}: not within {limit:?}").into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// `srun` alone: rank 0 makes a token, which MUNGE hands to the others; also at a store that the user names.
fn without_token(slurm: &Slurm) -> Result<(), Failed> {
    let (code, said) = slurm.srun("-N 3 -n 6 --mpi=none")?;
    says(&said, "sum 21 on 3 host", 6)?;
    let script = format!("PHALANX_STORE=h1:29426 exec {}", std::env::current_exe()?.display());
    let (_, named) = slurm.step("-N 2 -n 3 -w h1,h2 --mpi=none", &["/bin/sh", "-c", &script])?;
    says(&named, "sum 6 on 2 host", 3)?;
    if code == Some(0) { Ok(()) } else { Err(format!("{code:?}: {said}").into()) }
}

/// Unlike numbers of ranks: three on the first two hosts.
fn with_store(slurm: &Slurm) -> Result<(), Failed> {
    let (code, said) = slurm.srun_with_store("-N 2 -n 3 --mpi=none", "init", 29421)?.end()?;
    says(&said, "sum 6 on 2 host", 3)?;
    let (_, six) = slurm.srun_with_store("-N 3 -n 6 --mpi=none", "init", 29422)?.end()?;
    says(&six, "sum 21 on 3 host", 6)?;
    if code == Some(0) { Ok(()) } else { Err(format!("{code:?}: {said}").into()) }
}

fn cancelled(slurm: &Slurm) -> Result<(), Failed> {
    let step = slurm.srun_with_store("-N 3 -n 6 --mpi=none", "loop", 29423)?;
    step.wait_for("looping")?;
    let job = slurm.ask(&["squeue", "-h", "-o", "%i"])?;
    slurm.ask(&["scancel", job.trim()])?;
    let (code, said) = step.end()?;
    if code == Some(0) || !said.contains("CANCELLED") {
        return Err(format!("{code:?}: {said}").into());
    }
    slurm.wait_until_empty()
}

/// Slurm counts in minutes, and looks every half.
fn time_limit(slurm: &Slurm) -> Result<(), Failed> {
    let step = slurm.srun_with_store("-N 3 -n 6 --mpi=none --time=1", "loop", 29424)?;
    step.wait_for("looping")?;
    let is_over = || Ok(step.said().contains("DUE TO TIME LIMIT"));
    wait_until("the time limit", Duration::from_secs(180), is_over)?;
    if step.end()?.0 == Some(0) {
        return Err("the step should have failed".into());
    }
    slurm.wait_until_empty()
}

/// By the example: a rank is killed in the middle; the job is queued again and goes on from the step that was saved.
fn requeued(slurm: &Slurm) -> Result<(), Failed> {
    let folder = PathBuf::from(slurm.ask(&["printenv", "HOSTS_DIR"])?.trim());
    let (checkpoint, output) = (folder.join("checkpoint"), folder.join("requeued.out"));
    let mut command: Command = slurm.0.command("run", &["0", "sbatch", "-o"]);
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/slurm/job.sbatch");
    command.arg(&output).arg(example).arg(std::env::current_exe()?);
    command.env(PART, "checkpoint").env(CHECKPOINT, &checkpoint).env("STORE_PORT", "29425");
    let (code, said) = Node::start(command).end()?;
    if code != Some(0) {
        return Err(format!("{code:?}: {said}").into());
    }
    let written = || std::fs::read_to_string(&output).unwrap_or_default();
    wait_until("the end of the job", Duration::from_secs(90), || {
        Ok(written().matches("worked from").count() == 4)
    })
    .map_err(|error| format!("{}: {}", error.message().unwrap_or(""), written()))?;
    says(&written(), "worked from step 10 to 20, sum 10", 4)?;
    slurm.wait_until_empty()
}
