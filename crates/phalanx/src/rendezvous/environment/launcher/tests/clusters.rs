//! All that Slurm and Cray PALS set, as their documentation and headers list it (srun's and salloc's manual
//! pages of Slurm 23.11; `pals.h` of HPE's PALS): what a rank is told must not depend on variables that are
//! there for something else.

use super::{check, recognised};
use crate::rendezvous::environment::Environment;

type Variables = &'static [(&'static str, &'static str)];

/// What every process of a job has: of `salloc -N 2 -n 8` and `sbatch -N 2 -n 8`.
const JOB: Variables = &[
    ("SLURM_CLUSTER_NAME", "alpha"),
    ("SLURM_CONF", "/etc/slurm/slurm.conf"),
    ("SLURM_JOBID", "4711"),
    ("SLURM_JOB_ACCOUNT", "physics"),
    ("SLURM_JOB_CPUS_PER_NODE", "4(x2)"),
    ("SLURM_JOB_END_TIME", "1763726400"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_JOB_NAME", "interactive"),
    ("SLURM_JOB_NODELIST", "nid[000012-000013]"),
    ("SLURM_JOB_NUM_NODES", "2"),
    ("SLURM_JOB_PARTITION", "batch"),
    ("SLURM_JOB_QOS", "normal"),
    ("SLURM_JOB_START_TIME", "1763722800"),
    ("SLURM_JOB_UID", "1000"),
    ("SLURM_JOB_USER", "ada"),
    ("SLURM_MEM_PER_CPU", "2000"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NODELIST", "nid[000012-000013]"),
    ("SLURM_NPROCS", "8"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_SUBMIT_DIR", "/home/ada"),
    ("SLURM_SUBMIT_HOST", "login1"),
    ("SLURM_TASKS_PER_NODE", "4(x2)"),
];

/// What a batch script has besides: it runs once, on the first node.
const BATCH_SCRIPT: Variables = &[
    ("ENVIRONMENT", "BATCH"),
    ("SLURMD_NODENAME", "nid000012"),
    ("SLURM_CPUS_ON_NODE", "4"),
    ("SLURM_GTIDS", "0"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_PRIO_PROCESS", "0"),
    ("SLURM_PROCID", "0"),
    ("SLURM_TASK_PID", "20115"),
    ("SLURM_TOPOLOGY_ADDR", "nid000012"),
    ("SLURM_TOPOLOGY_ADDR_PATTERN", "node"),
];

/// What a task of a step has besides: the sixth of `srun -n 8`, in such a job.
const STEP: Variables = &[
    ("SLURMD_NODENAME", "nid000013"),
    ("SLURM_CPUS_ON_NODE", "4"),
    ("SLURM_CPU_BIND", "quiet,mask_cpu:0x1,0x2,0x4,0x8"),
    ("SLURM_DISTRIBUTION", "cyclic"),
    ("SLURM_GTIDS", "4,5,6,7"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.12"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_MPI_TYPE", "none"),
    ("SLURM_NODEID", "1"),
    ("SLURM_PRIO_PROCESS", "0"),
    ("SLURM_PROCID", "5"),
    ("SLURM_SRUN_COMM_HOST", "10.0.0.12"),
    ("SLURM_SRUN_COMM_PORT", "35677"),
    ("SLURM_STEPID", "3"),
    ("SLURM_STEP_ID", "3"),
    ("SLURM_STEP_LAUNCHER_PORT", "35677"),
    ("SLURM_STEP_NODELIST", "nid[000012-000013]"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
    ("SLURM_TASK_PID", "20344"),
    ("SLURM_TOPOLOGY_ADDR", "nid000013"),
    ("SLURM_TOPOLOGY_ADDR_PATTERN", "node"),
    ("SLURM_UMASK", "0022"),
];

/// The shell of `salloc` where Slurm makes it a step of its own on the first node (`use_interactive_step`).
const INTERACTIVE_STEP: Variables = &[
    ("SLURMD_NODENAME", "nid000012"),
    ("SLURM_GTIDS", "0"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
    ("SLURM_PROCID", "0"),
    ("SLURM_PTY_PORT", "40123"),
    ("SLURM_SRUN_COMM_HOST", "10.0.0.1"),
    ("SLURM_STEPID", "4294967290"),
    ("SLURM_STEP_ID", "4294967290"),
    ("SLURM_STEP_NODELIST", "nid000012"),
    ("SLURM_STEP_NUM_NODES", "1"),
    ("SLURM_STEP_NUM_TASKS", "1"),
    ("SLURM_STEP_TASKS_PER_NODE", "1"),
    ("SLURM_TASK_PID", "19001"),
];

/// What `srun --mpi=pmi2` adds.
const PMI2: Variables = &[
    ("PMI_FD", "12"),
    ("PMI_JOBID", "4711.3"),
    ("PMI_RANK", "5"),
    ("PMI_SIZE", "8"),
    ("SLURM_MPI_TYPE", "pmi2"),
];

/// What `srun --mpi=cray_shasta`, and `mpiexec` of PALS, give a rank: `PALS_…`, and `PMI_…` for Cray's PMI.
const PALS: Variables = &[
    ("PALS_APID", "b5a5c2c8-1f6b-4e8e-9c59-7a8e5c0a1a11"),
    ("PALS_APINFO", "/var/run/palsd/b5a5c2c8-1f6b-4e8e-9c59-7a8e5c0a1a11/apinfo"),
    ("PALS_DEPTH", "1"),
    ("PALS_LOCAL_RANKID", "1"),
    ("PALS_LOCAL_SIZE", "4"),
    ("PALS_NODEID", "1"),
    ("PALS_RANKID", "5"),
    ("PALS_SPOOL_DIR", "/var/run/palsd/b5a5c2c8-1f6b-4e8e-9c59-7a8e5c0a1a11"),
    ("PALS_STARTUP_BARRIER", "1"),
    ("PMI_CONTROL_PORT", "26010"),
    ("PMI_JOBID", "4711"),
    ("PMI_LOCAL_RANK", "1"),
    ("PMI_LOCAL_SIZE", "4"),
    ("PMI_RANK", "5"),
    ("PMI_SHARED_SECRET", "1234567890"),
    ("PMI_SIZE", "8"),
    ("PMI_UNIVERSE_SIZE", "8"),
];

fn all(parts: &[Variables]) -> Vec<(&'static str, &'static str)> {
    parts.concat()
}

fn job(variables: &[(&str, &str)]) -> String {
    recognised(variables).place(&Environment::of(variables)).unwrap().job
}

#[test]
fn a_task_of_a_step_is_a_rank() {
    let step = all(&[JOB, STEP]);
    check(&step, "Slurm", 5, Some(8), [Some(1), Some(4)], false);
    let place = recognised(&step).place(&Environment::of(&step)).unwrap();
    assert_eq!((place.job.as_str(), place.one_host), ("Slurm 4711 3", false));
    // The next step of the job is another world.
    let mut next = step.clone();
    next.iter_mut().filter(|(name, _)| *name == "SLURM_STEP_ID").for_each(|(_, id)| *id = "4");
    assert_ne!(job(&next), job(&step));
}

#[test]
fn who_asked_for_an_allocation_is_no_rank() {
    for variables in [all(&[JOB]), all(&[JOB, BATCH_SCRIPT])] {
        assert_eq!(Environment::of(&variables).launcher().unwrap(), None);
    }
    // A step of one task, whatever the allocation is for.
    check(&all(&[JOB, INTERACTIVE_STEP]), "Slurm", 0, Some(1), [Some(0), Some(1)], false);
}

#[test]
fn steps_inside_of_scripts_and_shells_are_steps() {
    // `srun` sets what it sets again, behind what the script had.
    for outer in [BATCH_SCRIPT, INTERACTIVE_STEP] {
        let variables = all(&[JOB, outer, STEP]);
        check(&variables, "Slurm", 5, Some(8), [Some(1), Some(4)], false);
        assert_eq!(job(&variables), "Slurm 4711 3");
    }
}

#[test]
fn steps_that_start_mpi_are_mpis() {
    let name = "MPICH or another launcher with PMI";
    check(&all(&[JOB, STEP, PMI2]), name, 5, Some(8), [Some(1), Some(4)], true);
}

#[test]
fn ranks_of_pals() {
    for variables in [all(&[PALS]), all(&[JOB, STEP, PALS])] {
        check(&variables, "Cray PALS", 5, Some(8), [Some(1), Some(4)], true);
        assert_eq!(job(&variables), "Cray PALS b5a5c2c8-1f6b-4e8e-9c59-7a8e5c0a1a11");
    }
    let ignored = recognised(&all(&[JOB, STEP, PALS])).ignored;
    assert_eq!(ignored, ["MPICH or another launcher with PMI", "Slurm"]);
}
