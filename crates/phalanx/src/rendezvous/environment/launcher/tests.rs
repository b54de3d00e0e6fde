//! Environments as launchers were seen to make them (where there is no such machine: as their sources do).

mod clusters;
mod nested;

use super::*;
use crate::rendezvous::environment::tests::environment;

type Variables = &'static [(&'static str, &'static str)];

const PHALANX: Variables = &[("PHALANX_RANK", "1"), ("PHALANX_WORLD_SIZE", "4"), ("PHALANX_JOB", "abc")];

/// torchrun 2.11, `--standalone --nproc-per-node 2`.
const TORCHRUN: Variables = &[
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

/// Open MPI 4.1.4, `mpirun -np 2`.
const OPEN_MPI_4: Variables = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_UNIVERSE_SIZE", "2"),
    ("PMIX_NAMESPACE", "599982081"),
    ("PMIX_RANK", "1"),
    ("PMIX_SERVER_URI2", "599982080.0;tcp4://127.0.0.1:48411"),
];

/// Open MPI 5.0.11, `mpirun -np 2`.
const OPEN_MPI_5: Variables = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-host-20317@1"),
    ("PMIX_RANK", "1"),
    ("PMIX_SERVER_URI2", "prterun-host-20317@0.0;tcp4://127.0.0.1:56741"),
    ("PRTE_LAUNCHED", "1"),
];

/// MPICH 4.0.2 and 5.0.2, `mpirun -np 2`.
const MPICH: Variables = &[
    ("HYDI_CONTROL_FD", "7"),
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "1"),
    ("PMI_FD", "8"),
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "2"),
];

/// Intel MPI 2021.18, `mpiexec.hydra -np 2`.
const INTEL_MPI: Variables = &[
    ("I_MPI_HYDRA_UUID", "674f0000-5834-9aab-c460-06006e341313"),
    ("MPI_LOCALNRANKS", "2"),
    ("MPI_LOCALRANKID", "1"),
    ("PMI_FD", "11"),
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "2"),
];

/// PMIx without more, as `srun --mpi=pmix` adds it to a step's variables.
const PMIX: Variables = &[
    ("PMIX_RANK", "1"),
    ("PMIX_NAMESPACE", "slurm.pmix.77.0"),
    ("PMIX_SERVER_URI2", "pmix-server;tcp4://10.0.0.1:1"),
];

/// What Slurm's and HPE's plugins set for PALS.
const PALS: Variables = &[
    ("PALS_APID", "77000"),
    ("PALS_RANKID", "5"),
    ("PALS_NODEID", "1"),
    ("PALS_LOCAL_RANKID", "1"),
    ("PMI_RANK", "5"),
    ("PMI_SIZE", "8"),
    ("PMI_LOCAL_RANK", "1"),
    ("PMI_LOCAL_SIZE", "4"),
];

/// `srun -N 2 -n 4`.
const SLURM_STEP: Variables = &[
    ("SLURM_JOB_ID", "77"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_PROCID", "3"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "node[1-2]"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
];

fn recognised(variables: &[(&str, &str)]) -> Launcher {
    environment(variables).launcher().unwrap().expect("a launcher")
}

#[track_caller]
fn check(
    variables: &[(&str, &str)],
    name: &str,
    rank: usize,
    size: Option<usize>,
    local: [Option<usize>; 2],
    mpi: bool,
) {
    let launcher = recognised(variables);
    assert_eq!((launcher.name, launcher.rank, launcher.world_size), (name, rank, size));
    assert_eq!([launcher.local_rank, launcher.local_world_size], local);
    assert_eq!(launcher.starts_mpi(), mpi);
}

#[test]
fn nothing_set_is_no_launcher() {
    for variables in [
        &[][..],
        // Empty is not set.
        &[("RANK", ""), ("WORLD_SIZE", ""), ("PHALANX_RANK", ""), ("PHALANX_WORLD_SIZE", "")],
        &[("PHALANX_LAUNCHED_BY", "none"), ("RANK", "3")],
        &[("PHALANX_LAUNCHED_BY", "none"), ("RANK", "3"), ("WORLD_SIZE", "4")],
        // An interactive allocation, and a batch script in it.
        &[("SLURM_JOB_ID", "77"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_NODELIST", "node1")],
        &[("SLURM_JOB_ID", "77"), ("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")],
        &[("PMI_FD", "8")],
    ] {
        assert_eq!(environment(variables).launcher().unwrap(), None, "{variables:?}");
    }
}

#[test]
fn phalanx_launch() {
    check(PHALANX, "phalanx launch", 1, Some(4), [None, None], false);
}

#[test]
fn torchrun() {
    check(TORCHRUN, "torchrun", 1, Some(2), [Some(1), Some(2)], false);
}

#[test]
fn open_mpi() {
    check(OPEN_MPI_4, "Open MPI", 1, Some(2), [Some(1), Some(2)], true);
    check(OPEN_MPI_5, "Open MPI", 1, Some(2), [Some(1), Some(2)], true);
}

#[test]
fn mpich_and_intel_mpi() {
    check(MPICH, "MPICH or another launcher with PMI", 1, Some(2), [Some(1), Some(2)], true);
    check(INTEL_MPI, "Intel MPI", 1, Some(2), [Some(1), Some(2)], true);
}

#[test]
fn pmix_has_no_size() {
    check(PMIX, "PMIx", 1, None, [None, None], true);
    let error = recognised(PMIX).place(&environment(PMIX)).unwrap_err().to_string();
    assert!(error.contains("how many ranks"), "{error}");
}

#[test]
fn cray_pals() {
    check(PALS, "Cray PALS", 5, Some(8), [Some(1), Some(4)], true);
    // Without PMI's variables it does not say how many there are.
    check(&[("PALS_RANKID", "5"), ("PALS_LOCAL_RANKID", "1")], "Cray PALS", 5, None, [Some(1), None], true);
}

#[test]
fn slurm_steps() {
    check(SLURM_STEP, "Slurm", 3, Some(4), [Some(1), Some(2)], false);
    assert!(!recognised(SLURM_STEP).place(&environment(SLURM_STEP)).unwrap().one_host);
    // One host.
    let one: Vec<_> =
        SLURM_STEP.iter().copied().filter(|(name, _)| *name != "SLURM_STEP_TASKS_PER_NODE").collect();
    let one: Vec<_> = one.into_iter().chain([("SLURM_STEP_TASKS_PER_NODE", "4")]).collect();
    let place = recognised(&one).place(&environment(&one)).unwrap();
    assert_eq!((place.rank, place.world_size, place.job.as_str()), (3, 4, "Slurm 77 0"));
    assert!(place.one_host);
}

#[test]
fn slurm_says_how_many_ranks_each_host_has() {
    let of_host = |list, host| {
        let kept = SLURM_STEP.iter().copied().filter(|(name, _)| *name != SLURM_STEP_TASKS);
        let own: Vec<_> = kept.chain([(SLURM_STEP_TASKS, list), ("SLURM_NODEID", host)]).collect();
        environment(&own).launcher().map(|launcher| launcher.expect("a step").local_world_size)
    };
    for (list, host, ranks) in
        [("3,1", "0", 3), ("3,1", "1", 1), ("1(x2),2", "1", 1), ("1(x2),2", "2", 2), ("2(x2)", "7", 2)]
    {
        assert_eq!(of_host(list, host).unwrap(), Some(ranks), "{list} on host {host}");
    }
    for list in ["two", "2(x", "2(3)", "2,", "2(x)"] {
        let error = of_host(list, "0").unwrap_err().to_string();
        assert!(error.contains(SLURM_STEP_TASKS) && error.contains("3,2"), "{list:?}: {error}");
    }
    assert!(of_host("2(x2)", "here").unwrap_err().to_string().contains("SLURM_NODEID"));
}

#[test]
fn half_a_set_of_variables_names_what_is_missing() {
    /// Variables; the one that is missing, and the one because of which it is.
    type Case = (Variables, [&'static str; 2]);
    let cases: [Case; 16] = [
        (&[("RANK", "3")], ["WORLD_SIZE", "RANK"]),
        (&[("RANK", "3"), ("WORLD_SIZE", "")], ["WORLD_SIZE", "RANK"]),
        (&[("WORLD_SIZE", "4")], ["RANK", "WORLD_SIZE"]),
        (&[("LOCAL_RANK", "1")], ["RANK", "LOCAL_RANK"]),
        (&[("PHALANX_RANK", "0")], ["PHALANX_WORLD_SIZE", "PHALANX_RANK"]),
        (&[("PHALANX_WORLD_SIZE", "2"), ("PHALANX_RANK", "")], ["PHALANX_RANK", "PHALANX_WORLD_SIZE"]),
        (&[("PHALANX_LOCAL_RANK", "0")], ["PHALANX_RANK", "PHALANX_LOCAL_RANK"]),
        (&[("OMPI_COMM_WORLD_RANK", "0")], ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"]),
        (&[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")], ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"]),
        (&[("PALS_LOCAL_RANKID", "0")], ["PALS_RANKID", "PALS_LOCAL_RANKID"]),
        (&[("PMI_RANK", "0")], ["PMI_SIZE", "PMI_RANK"]),
        (&[("PMI_SIZE", "2"), ("PMI_RANK", "")], ["PMI_RANK", "PMI_SIZE"]),
        (&[("PMIX_RANK", "0")], ["PMIX_NAMESPACE", "PMIX_RANK"]),
        (&[("PMIX_NAMESPACE", "a")], ["PMIX_RANK", "PMIX_NAMESPACE"]),
        (&[("SLURM_STEP_NODELIST", "node1")], ["SLURM_PROCID", "SLURM_STEP_NODELIST"]),
        // Those of `phalanx launch` also beside another launcher's.
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("PHALANX_WORLD_SIZE", "2")],
            ["PHALANX_RANK", "PHALANX_WORLD_SIZE"],
        ),
    ];
    for (variables, [missing, because]) in cases {
        let error = environment(variables).launcher().unwrap_err().to_string();
        let says =
            [&format!("{missing}=\"\""), &format!("since {because} is set"), "PHALANX_LAUNCHED_BY=none"];
        assert!(says.iter().all(|part| error.contains(&**part)), "{variables:?}: {error}");
    }
}

#[test]
fn what_is_left_of_a_launcher_does_not_hide_another() {
    let left = [TORCHRUN, &[("PHALANX_LOCAL_RANK", "0"), ("OMPI_COMM_WORLD_RANK", "3"), ("PMIX_RANK", "3")]];
    assert_eq!(recognised(&left.concat()).name, "torchrun");
}

#[test]
fn a_store_is_for_ranks_that_may_be_elsewhere() {
    let by_hand = [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")];
    let one_host = |more: &[(&str, &str)]| {
        let variables = [&by_hand[..], more].concat();
        recognised(&variables).place(&environment(&variables)).unwrap().one_host
    };
    let store = ("PHALANX_STORE", "alpha:29400");
    assert!(one_host(&[]) && one_host(&[("PHALANX_STORE", "")]));
    assert!(!one_host(&[store]) && !one_host(&[store, ("LOCAL_WORLD_SIZE", "1")]));
    assert!(one_host(&[store, ("LOCAL_WORLD_SIZE", "4")]));
    assert!(recognised(&[("RANK", "0"), ("WORLD_SIZE", "1"), store]).is_one_host());
    // The store tells the job, too.
    let least = [("RANK", "1"), ("WORLD_SIZE", "4"), store, ("PHALANX_TOKEN", "0123456789abcdef")];
    let place = recognised(&least).place(&environment(&least)).unwrap();
    assert!(place.job.contains("MASTER_ADDR at port 29400") && place.meeting != place.job, "{place:?}");
    // A place that the program sets has the store of the program.
    assert!(environment(&[store]).placed(0, 2, "mine").launcher().unwrap().unwrap().is_one_host());
}

#[test]
fn what_the_program_says_comes_first() {
    let placed = environment(TORCHRUN).placed(2, 3, "mine");
    let launcher = placed.launcher().unwrap().unwrap();
    assert_eq!((launcher.name, launcher.rank, launcher.world_size), ("the program itself", 2, Some(3)));
    let place = launcher.place(&placed).unwrap();
    assert_eq!((&*place.job, place.one_host), ("the program itself mine", true));
    let nameless = environment(&[]).placed(0, 2, "");
    let error = nameless.launcher().unwrap().unwrap().place(&nameless).unwrap_err().to_string();
    assert!(error.contains("Builder::place(job)"), "{error}");
    let stored = placed.with_store("alpha:5", "0123456789abcdef");
    let place = stored.launcher().unwrap().unwrap().place(&stored).unwrap();
    assert!(!place.one_host);
    let rendezvous = stored.rendezvous(&place).unwrap().unwrap();
    assert_eq!((&*rendezvous.address, rendezvous.host), ("alpha:5", crate::rendezvous::store::Host::Rank(0)));
}

#[test]
fn jobs_are_told_apart() {
    let job = |variables: &[(&str, &str)]| recognised(variables).place(&environment(variables)).unwrap().job;
    let mut restarted = TORCHRUN.to_vec();
    restarted[8].1 = "1";
    assert_ne!(job(TORCHRUN), job(&restarted));
    let mut another = OPEN_MPI_4.to_vec();
    another[5].1 = "599982082";
    assert_ne!(job(OPEN_MPI_4), job(&another));
    // MPICH's variables say nothing: the launcher's process would, and there is none here.
    let error = recognised(MPICH).place(&environment(MPICH)).unwrap_err().to_string();
    assert!(error.contains("tell its jobs apart"), "{error}");
}

#[test]
fn malformed_variables_are_named() {
    let cases: [(&[(&str, &str)], &str); 8] = [
        (&[("PHALANX_RANK", "abc"), ("PHALANX_WORLD_SIZE", "2")], "PHALANX_RANK=\"abc\""),
        (&[("PHALANX_RANK", "-1"), ("PHALANX_WORLD_SIZE", "2")], "PHALANX_RANK=\"-1\""),
        (&[("PHALANX_RANK", "2"), ("PHALANX_WORLD_SIZE", "2"), ("PHALANX_JOB", "x")], "PHALANX_RANK=\"2\""),
        (&[("PHALANX_RANK", "0"), ("PHALANX_WORLD_SIZE", "2")], "PHALANX_JOB"),
        (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")], "MASTER_PORT"),
        (&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "0")], "OMPI_COMM_WORLD_SIZE=\"0\""),
        (&[("PMI_RANK", "x"), ("PMI_SIZE", "2")], "PMI_RANK=\"x\""),
        (&[("RANK", "0"), ("WORLD_SIZE", "100000")], "WORLD_SIZE=\"100000\""),
    ];
    for (variables, expected) in cases {
        let environment = environment(variables);
        let place = environment.launcher().and_then(|launcher| launcher.unwrap().place(&environment));
        let error = place.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
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
        recognised(&variables).place(&environment(&variables))
    };
    assert!(torchrun("4").unwrap().one_host);
    assert!(!torchrun("2").unwrap().one_host);
    assert!(torchrun("5").unwrap_err().to_string().contains("LOCAL_WORLD_SIZE=\"5\""));
}

#[test]
fn ranks_of_mpi_that_may_be_elsewhere_meet_over_it() {
    let meets = |variables: &[(&str, &str)]| recognised(variables).meets_over_mpi(&environment(variables));
    let elsewhere = |all: Variables, local: &'static str| {
        all.iter().copied().filter(|(name, _)| *name != local).chain([(local, "1")]).collect::<Vec<_>>()
    };
    for (variables, local) in [(OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE"), (INTEL_MPI, "MPI_LOCALNRANKS")] {
        assert!(!meets(variables), "{variables:?}");
        let mut variables: Vec<(&str, &str)> = elsewhere(variables, local);
        assert!(meets(&variables), "{variables:?}");
        variables.push(("PHALANX_STORE", "alpha:29400"));
        assert!(!meets(&variables), "{variables:?}");
    }
    // Only MPI knows.
    assert!(meets(PMIX));
    let launcher = recognised(PMIX).with_world_size(4);
    assert_eq!(launcher.place(&environment(PMIX)).unwrap().world_size, 4);
    // Not MPI's.
    assert!(!meets(SLURM_STEP) && !meets(TORCHRUN));
}
