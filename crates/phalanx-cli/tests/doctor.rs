//! `phalanx doctor` from outside: what it lists, and that it tells a machine that works from one
//! that does not.
#![cfg(target_os = "linux")]

mod common;

use common::{phalanx, say};
use std::process::Command;

#[test]
fn everything_works_here() {
    let said = say(phalanx("doctor"));
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    for text in [
        concat!("phalanx ", env!("CARGO_PKG_VERSION")),
        "usable cores",
        "ulimit -n",
        "memfd_create",
        "a world of one rank",
        "are not looked for",
        "all_reduce, 2 threads       OK",
        "all_reduce, 2 processes     OK",
    ] {
        assert!(said.stdout.contains(text), "{text} is missing in\n{}", said.stdout);
    }
}

#[test]
fn more_ranks_can_be_asked_for() {
    let said = say(phalanx("doctor -n 4"));
    assert_eq!(said.code, Some(0), "{}", said.stdout);
    assert!(said.stdout.contains("all_reduce, 4 processes"), "{}", said.stdout);
}

#[test]
fn a_launchers_variables_are_shown_but_not_its_secret() {
    let mut command = phalanx("doctor");
    command.envs([("PHALANX_RANK", "1"), ("PHALANX_WORLD_SIZE", "4"), ("PHALANX_JOB", "0123secret")]);
    let said = say(command);
    assert_eq!(said.code, Some(0), "{}", said.stdout);
    assert!(said.stdout.contains("rank 1 of 4, as phalanx launch says"), "{}", said.stdout);
    assert!(said.stdout.contains("phalanx launch, by PHALANX_RANK"), "{}", said.stdout);
    assert!(!said.stdout.contains("0123secret"));

    let mut command = phalanx("doctor");
    command.envs([("PHALANX_RANK", "one"), ("PHALANX_WORLD_SIZE", "4")]);
    assert!(say(command).stdout.contains("an error: PHALANX_RANK=\"one\" is not valid"));
}

#[test]
fn the_launcher_of_an_mpi_job_is_named_with_the_reason() {
    let mut command = phalanx("doctor");
    command.envs([("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "3")]);
    command.env("PMIX_NAMESPACE", "1234");
    let said = say(command);
    for text in [
        "Open MPI, by OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; it comes before PMIx",
        "rank 3 of 4, as Open MPI says, on the backend mpi",
    ] {
        assert!(said.stdout.contains(text), "{text} is missing in\n{}", said.stdout);
    }
}

#[test]
fn the_mpi_library_is_named_or_what_was_tried() {
    let mut command = phalanx("doctor");
    command.env("PHALANX_MPI_LIB", "/nonexistent/libmpi.so.99");
    let said = say(command);
    assert!(said.stdout.contains("tried /nonexistent/libmpi.so.99, from PHALANX_MPI_LIB"), "{}", said.stdout);
}

#[test]
fn what_does_not_work_is_named() {
    // Too few open files for a process rank's pipes.
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -n 8; exec {} doctor", env!("CARGO_BIN_EXE_phalanx"))]);
    let said = say(command);
    assert_eq!(said.code, Some(1), "{}", said.stdout);
    assert!(said.stdout.contains("FAILED"), "{}", said.stdout);
    assert!(said.stdout.contains("Too many open files"), "{}", said.stdout);
    assert!(said.stdout.contains("1 test failed"), "{}", said.stdout);
}
