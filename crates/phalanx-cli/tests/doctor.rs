//! Tests of `phalanx doctor` as a program: its lists, and that it notices what does not work.
#![cfg(target_os = "linux")]

mod common;

use common::{Said, phalanx, say, without_gpus};
use std::process::Command;

/// The lines of the summary: a word, what it is about, and what is known of it.
fn summary(said: &Said) -> Vec<&str> {
    said.stdout.lines().filter(|line| line.starts_with("  ")).collect()
}

#[test]
fn a_summary_says_what_works_what_is_missing_and_whether_that_matters() {
    let said = say(without_gpus(without_mpi(phalanx("doctor"))));
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    assert!(said.stdout.lines().count() <= 20, "{}", said.stdout);
    assert!(said.stdout.lines().all(|line| line.chars().count() <= 120), "{}", said.stdout);
    for text in [
        "  OK       all_reduce, 2 threads",
        "  OK       all_reduce, 2 processes",
        "  missing  NVIDIA GPUs",
        "the CUDA driver was not found; matters only on a machine with such GPUs",
        "  missing  MPI",
        "matters only to programs that mpirun, mpiexec or srun starts",
        "Works: ranks on this host. Missing: MPI, UCX, NVIDIA GPUs, AMD GPUs",
        "  missing  UCX",
        "phalanx doctor -v",
    ] {
        assert!(said.stdout.contains(text), "{text} is missing in\n{}", said.stdout);
    }
    assert!(!said.stdout.contains("Everything works"), "{}", said.stdout);
    assert_eq!(summary(&said).iter().filter(|line| line.starts_with("  FAILED")).count(), 0);
}

#[test]
fn an_object_has_all_that_the_text_has() {
    let said = say(without_gpus(without_mpi(phalanx("doctor --json"))));
    assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""));
    let object: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
    assert_eq!((&object["failed"], &object["version"]), (&0.into(), &env!("CARGO_PKG_VERSION").into()));
    assert!(object["verdict"].as_str().unwrap().starts_with("Works: ranks on this host"), "{object}");
    let status = |name: &str| {
        let findings = object["findings"].as_array().unwrap();
        findings.iter().find(|finding| finding["name"] == name).map(|finding| finding["status"].clone())
    };
    assert_eq!(status("all_reduce, 2 processes"), Some("ok".into()));
    assert_eq!(status("NVIDIA GPUs"), Some("missing".into()));
    let text = say(without_gpus(without_mpi(phalanx("doctor -v")))).stdout;
    for section in object["sections"].as_array().unwrap() {
        let heading = section["heading"].as_str().unwrap();
        assert!(text.contains(heading) && !section["lines"].as_array().unwrap().is_empty(), "{section}");
    }
}

/// A filter of system calls, as containers have them, refuses these with EPERM.
#[test]
fn what_a_filter_of_system_calls_refuses_is_found_by_trying_it() {
    for (call, status, text) in [
        (libc::SYS_process_vm_readv, "  slow     reads between processes", "all_to_all"),
        (libc::SYS_memfd_create, "  FAILED   memory that processes share", "memfd_create"),
        (libc::SYS_membarrier, "  slow     small messages", "membarrier"),
    ] {
        let mut command = without_gpus(phalanx("doctor"));
        refuse(&mut command, call);
        let said = say(command);
        let line = summary(&said).into_iter().find(|line| line.starts_with(status));
        let line = line.unwrap_or_else(|| panic!("{status} is missing in\n{}", said.stdout));
        assert!(line.contains(text), "{line}");
        assert_eq!(said.code, Some(i32::from(status.contains("FAILED"))), "{}", said.stdout);
    }
}

/// Makes the kernel refuse a system call to the command and all its children.
fn refuse(command: &mut Command, call: libc::c_long) {
    use std::os::unix::process::CommandExt;
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let filter = [
        // The number of the call is the first word.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: call as u32,
        },
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: both calls read their arguments only, which are alive.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: prctl may be called between fork and exec.
    unsafe { command.pre_exec(install) };
}

fn without_mpi(mut command: Command) -> Command {
    command.env("PHALANX_MPI_LIB", "/nowhere/libmpi.so").env("PHALANX_UCX_LIB", "/nowhere/libucp.so");
    command
}

#[test]
fn the_details_have_everything_that_was_looked_at() {
    let said = say(phalanx("doctor -v"));
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    for text in [
        concat!("phalanx ", env!("CARGO_PKG_VERSION")),
        "usable cores",
        "ulimit -n",
        "memfd_create",
        "a world of one rank",
        "CUDA driver",
        "NCCL",
        "RCCL",
        "HIP",
        "NVSHMEM",
        "NVRTC",
        "nvJitLink",
        "device library",
        "  OK       all_reduce, 2 threads",
        "  OK       all_reduce, 2 processes",
    ] {
        assert!(said.stdout.contains(text), "{text} is missing in\n{}", said.stdout);
    }
}

#[test]
fn without_a_driver_it_says_what_was_tried() {
    let said = say(without_gpus(phalanx("doctor -v")));
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    for text in [
        "not found; PHALANX_CUDA_LIB can name its file",
        "/nowhere/libcuda.so.1 (from PHALANX_CUDA_LIB): ",
        "not found; PHALANX_NCCL_LIB can name its file",
        "/nowhere/libnccl.so.2 (from PHALANX_NCCL_LIB): ",
        "not available: the CUDA driver was not found",
    ] {
        assert!(said.stdout.contains(text), "{text} is missing in\n{}", said.stdout);
    }
    assert!(!said.stdout.contains("with GPUs"), "{}", said.stdout);
}

/// The library is a pipe: opening it never returns, as with a broken driver.
#[test]
fn a_library_that_hangs_does_not_hang_the_doctor() {
    use rustix::fs::{FileType, Mode};
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("libnccl.so.2");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let mut command = without_gpus(phalanx("doctor -v -T 2"));
    command.env("PHALANX_NCCL_LIB", &pipe);
    let said = say(command);
    assert_eq!(said.code, Some(1), "{}{}", said.stdout, said.stderr);
    for text in [
        "/nowhere/libcuda.so.1 (from PHALANX_CUDA_LIB): ",
        "  FAILED   GPUs and their libraries",
        "no answer after 2 s: the driver or a library hangs",
        "not available: the questions about GPUs were not answered",
        "  OK       all_reduce, 2 processes",
        "1 FAILED.",
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
    let mut command = phalanx("doctor -v");
    command.envs([("PHALANX_RANK", "1"), ("PHALANX_WORLD_SIZE", "4"), ("PHALANX_JOB", "0123secret")]);
    let said = say(command);
    assert_eq!(said.code, Some(0), "{}", said.stdout);
    assert!(said.stdout.contains("rank 1 of 4, as phalanx launch says"), "{}", said.stdout);
    assert!(said.stdout.contains("phalanx launch, by PHALANX_RANK"), "{}", said.stdout);
    assert!(!said.stdout.contains("0123secret"));

    let mut command = phalanx("doctor -v");
    command.envs([("PHALANX_RANK", "one"), ("PHALANX_WORLD_SIZE", "4")]);
    let said = say(command);
    assert!(
        said.stdout.contains("FAILED   phalanx::init()                    PHALANX_RANK=\"one\" is not valid"),
        "{}",
        said.stdout
    );
    assert_eq!(said.code, Some(1), "{}", said.stdout);
}

#[test]
fn settings_that_init_would_refuse_are_a_failure() {
    for (name, value) in [
        ("PHALANX_BACKEND", "carrier-pigeon"),
        ("PHALANX_TIMEOUT", "soon"),
        ("PHALANX_STOPPED_TIMEOUT", "-1"),
        ("PHALANX_CORES", "0"),
        ("PHALANX_CHECK", "perhaps"),
        ("PHALANX_HEARTBEAT_TIMEOUT", "never"),
        ("PHALANX_STORE_TLS", "2"),
        ("PHALANX_TRACE_SIGNAL", "KILL"),
        ("PHALANX_TRACE_DIR", "/proc/self/status/traces"),
    ] {
        let mut command = without_gpus(phalanx("doctor"));
        command.env(name, value);
        let said = say(command);
        let text =
            format!("  FAILED   phalanx::init()                    {name}={value:?} is not valid: expected");
        assert!(said.stdout.contains(&text), "{text} is missing in\n{}", said.stdout);
        assert_eq!(said.code, Some(1), "{}", said.stdout);
    }
}

#[test]
fn ranks_that_would_not_find_each_other_are_an_error() {
    let job = ("PHALANX_JOB", "job");
    let of_two_hosts = [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")];
    let store = [("MASTER_ADDR", "alpha"), ("MASTER_PORT", "29500")];
    let cases = [
        (vec![("PHALANX_RANK", "1"), ("PHALANX_WORLD_SIZE", "4")], "PHALANX_JOB=\"\" is not valid"),
        (vec![("PHALANX_RANK", "1"), ("PHALANX_WORLD_SIZE", "600"), job], "1 to 512 ranks"),
        ([&of_two_hosts[..], &store].concat(), "neither PHALANX_TOKEN nor PHALANX_TOKEN_FILE is set"),
    ];
    for (variables, text) in cases {
        let mut command = without_gpus(phalanx("doctor"));
        command.envs(variables);
        let said = say(command);
        assert!(said.stdout.contains(text), "{text} is missing in\n{}", said.stdout);
    }
}

#[test]
fn the_launcher_of_an_mpi_job_is_named_with_the_reason() {
    let mut command = without_gpus(phalanx("doctor -v"));
    command.envs([("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "3")]);
    command.env("PMIX_NAMESPACE", "1234");
    let said = say(command);
    for text in [
        "Open MPI, by OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; it comes before PMIx",
        "rank 3 of 4, as Open MPI says, on the backend mpi: an MPI launcher started the ranks, and not each has a GPU",
    ] {
        assert!(said.stdout.contains(text), "{text} is missing in\n{}", said.stdout);
    }
}

#[test]
fn the_mpi_library_is_named_or_what_was_tried() {
    let mut command = phalanx("doctor -v");
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
    assert!(said.stdout.contains("1 FAILED."), "{}", said.stdout);
}

/// As under a launcher that ignores SIGCHLD, or has blocked every signal.
#[cfg(target_os = "linux")]
#[test]
fn inherited_signals_do_not_change_what_is_found() {
    for option in ["--ignore-signal=CHLD", "--block-signal"] {
        let inner = phalanx("doctor");
        let mut command = std::process::Command::new("env");
        command
            .arg(option)
            .arg(inner.get_program())
            .args(inner.get_args())
            .stdin(std::process::Stdio::null());
        inner.get_envs().for_each(|(name, value)| {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        });
        let said = say(command);
        assert_eq!(said.code, Some(0), "{option}: {}{}", said.stdout, said.stderr);
        for trial in ["OK       all_reduce, 2 threads", "OK       all_reduce, 2 processes"] {
            assert!(said.stdout.contains(trial), "{option}: {}", said.stdout);
        }
    }
}
