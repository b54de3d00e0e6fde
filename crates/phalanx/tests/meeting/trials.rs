//! The trials.

use super::process::{Process, Variables};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::suite::Condition;
use rustix::thread::UnshareFlags;
use std::time::{Duration, Instant};

type Outcome = Result<(), Failed>;

pub fn all() -> Vec<Trial> {
    let root = rustix::process::geteuid().is_root();
    let needs_root = "namespaces and other users need root";
    let for_root = |name: &str, trial: fn() -> Outcome| Trial::test(name, trial).only_if(root, needs_root);
    let setuid = root.then(SetuidCopy::make).filter(SetuidCopy::counts);
    let is_setuid = setuid.is_some();
    let needs_setuid = "needs root, and a temporary folder whose setuid bits count";
    let setuid_trial =
        Trial::test("a_setuid_program_writes_no_flight_record_where_its_caller_says", move || {
            setuid.as_ref().map_or_else(|| Err(needs_setuid.into()), setuid_rank)
        });
    vec![
        setuid_trial.only_if(is_setuid, needs_setuid),
        Trial::test("ranks_of_an_inner_launcher_form_its_world", inner_launchers),
        Trial::test("a_store_is_used_though_nobody_says_how_many_ranks_are_here", the_store_is_used),
        Trial::test("addresses_that_can_never_work_fail_at_once", hopeless_addresses),
        Trial::test("a_name_without_an_address_fails_at_the_deadline", unknown_name),
        for_root("a_network_without_a_route_fails_at_once", no_route),
        for_root("a_store_shows_ranks_of_two_containers_that_they_are", two_containers),
        for_root("ranks_in_pid_namespaces_of_their_own_meet", pid_namespaces),
        for_root("a_token_file_of_another_user_is_refused", token_of_another),
        for_root("a_name_that_another_user_has_taken_is_told", taken_name),
    ]
}

fn check(is_right: bool, said: &str) -> Outcome {
    if is_right { Ok(()) } else { Err(said.to_owned().into()) }
}

/// Variables of rank `rank` of 2, as `phalanx launch` sets them for a job.
fn launched<'a>(rank: &'a str, job: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("PHALANX_RANK", rank),
        ("PHALANX_WORLD_SIZE", "2"),
        ("PHALANX_LOCAL_RANK", rank),
        ("PHALANX_LOCAL_WORLD_SIZE", "2"),
        ("PHALANX_JOB", job),
    ]
}

fn sums_of_two(ranks: [Process; 2]) -> Outcome {
    let said = ranks.map(|rank| rank.end().0);
    check(said == ["rank 0 of 2: 3", "rank 1 of 2: 3"], &format!("{said:?}"))
}

/// `phalanx launch -n 1 -- mpirun -n 2 PROGRAM`.
fn inner_launchers() -> Outcome {
    let job = format!("outer {}", std::process::id());
    let outer = [("PHALANX_RANK", "0"), ("PHALANX_WORLD_SIZE", "1"), ("PHALANX_JOB", &*job)];
    let namespace = format!("inner-{}", std::process::id());
    let rank = |rank| {
        let inner = [
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_RANK", rank),
            ("PMIX_NAMESPACE", &*namespace),
        ];
        Process::nested(&outer, &inner)
    };
    sums_of_two([rank("0"), rank("1")])
}

/// What Kubernetes or a script by hand sets.
fn by_hand<'a>(rank: &'a str, address: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("RANK", rank),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
        ("TORCHELASTIC_RUN_ID", address),
        ("PHALANX_STORE", address),
        ("PHALANX_TOKEN", "the token of these trials"),
    ]
}

fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").to_string()
}

fn the_store_is_used() -> Outcome {
    let address = free_address();
    let alone = [&by_hand("1", &address)[..], &[("PHALANX_TIMEOUT", "0.3")]].concat();
    let (said, _) = Process::rank(&alone).end();
    check(said.contains(&address), &said)?;
    sums_of_two(["0", "1"].map(|rank| Process::rank(&by_hand(rank, &address))))
}

fn two_containers() -> Outcome {
    let address = free_address();
    let here = Process::rank(&by_hand("0", &address));
    let there = Process::rank_in(UnshareFlags::NEWIPC, &by_hand("1", &address));
    for (said, succeeded) in [here, there].map(Process::end) {
        check(!succeeded && said.contains("2 hosts or containers"), &said)?;
    }
    Ok(())
}

/// Fails well before the deadline of 20 s, and says these.
fn fails_at_once(rank: impl FnOnce() -> Process, says: &[&str]) -> Outcome {
    let started = Instant::now();
    let (said, succeeded) = rank().end();
    let at_once = started.elapsed() < Duration::from_secs(4);
    let says_all = says.iter().all(|part| said.contains(part));
    check(
        !succeeded && at_once && says_all,
        &format!("after {:.1?}: {said}; not {says:?}", started.elapsed()),
    )
}

fn hopeless_addresses() -> Outcome {
    for (rank, address, says) in [
        ("0", "127.0.0.1:0", "port"),
        ("1", "127.0.0.1:0", "port"),
        ("1", "127.0.0.1", "host:port"),
        ("1", "127.0.0.1:port", "host:port"),
        ("0", "224.0.0.1:29400", "multicast"),
        ("1", "224.0.0.1:29400", "multicast"),
        ("1", "[ff02::1]:29400", "multicast"),
        ("1", "255.255.255.255:29400", "broadcast"),
        ("0", "192.0.2.1:29400", "none of this host's"),
    ] {
        let variables = by_hand(rank, address);
        fails_at_once(|| Process::rank(&variables), &["PHALANX_STORE", address, says])?;
    }
    Ok(())
}

/// A name server may get to know a host late: the name is looked up until the deadline.
fn unknown_name() -> Outcome {
    let address = "no-such-name.invalid:29400";
    for rank in ["0", "1"] {
        let variables = [&by_hand(rank, address)[..], &[("PHALANX_TIMEOUT", "1")]].concat();
        fails_at_once(|| Process::rank(&variables), &["PHALANX_STORE", address, "no address"])?;
    }
    Ok(())
}

fn no_route() -> Outcome {
    for address in ["10.1.2.3:29400", "[2001:db8::1]:29400"] {
        let variables = by_hand("1", address);
        fails_at_once(|| Process::rank_in(UnshareFlags::NEWNET, &variables), &["PHALANX_STORE", address])?;
    }
    Ok(())
}

fn token_of_another() -> Outcome {
    let path = std::env::temp_dir().join(format!("phalanx-another-{}", std::process::id()));
    std::fs::write(&path, "the token of these trials")?;
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    std::os::unix::fs::chown(&path, Some(65534), None)?;
    let mut variables = by_hand("0", "127.0.0.1:1");
    variables.pop();
    variables.push(("PHALANX_TOKEN_FILE", path.to_str().expect("text")));
    let outcome = fails_at_once(|| Process::rank(&variables), &["65534"]);
    std::fs::remove_file(&path)?;
    outcome
}

/// A copy of this program that is setuid, removed when it is dropped.
struct SetuidCopy(std::path::PathBuf);

impl SetuidCopy {
    fn make() -> SetuidCopy {
        let path = std::env::temp_dir().join(format!("phalanx-meeting-{}", std::process::id()));
        let copied = std::fs::copy(std::env::current_exe().expect("a path of its own"), &path);
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
        copied.and_then(|_| std::fs::set_permissions(&path, mode)).expect("a setuid copy");
        SetuidCopy(path)
    }

    fn counts(&self) -> bool {
        Process::setuid(&self.0, 65534, "secure", &[]).end().0 == "true"
    }
}

impl Drop for SetuidCopy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn setuid_rank(program: &SetuidCopy) -> Outcome {
    // A folder that cannot be made is an error at the start, unless it is left out.
    let variables = [("PHALANX_TRACE_DIR", "/dev/null/folder"), ("PHALANX_BACKEND", "solo")];
    let (said, _) = Process::rank(&variables).end();
    check(said.contains("PHALANX_TRACE_DIR"), &said)?;
    let (said, _) = Process::setuid(&program.0, 65534, "rank", &variables).end();
    check(said == "rank 0 of 1: 1", &said)
}

fn pid_namespaces() -> Outcome {
    let start = |alone: [bool; 2]| {
        let job = format!("namespaces {alone:?} of {}", std::process::id());
        let ranks = [("0", alone[0]), ("1", alone[1])].map(|(rank, alone)| {
            let variables = launched(rank, &job);
            if alone { Process::rank_in(UnshareFlags::NEWPID, &variables) } else { Process::rank(&variables) }
        });
        sums_of_two(ranks)
    };
    start([false, true])?;
    start([true, false])?;
    start([true, true])
}

/// In a network namespace of its own, so that the only rank that meets there is this trial's.
fn taken_name() -> Outcome {
    let trial = || {
        // SAFETY: this thread only starts processes and reads a file, and ends.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(|error| error.to_string())?;
        take_the_name()
    };
    std::thread::spawn(trial).join().expect("no panic")
}

fn take_the_name() -> Outcome {
    let job = format!("taken {}", std::process::id());
    let variables: Variables<'_> = &launched("0", &job);
    let first = Process::rank(variables);
    let started = Instant::now();
    let name = loop {
        if let Some(name) = meeting_name() {
            break name;
        }
        check(started.elapsed() < super::process::PATIENCE, "rank 0 does not listen")?;
        std::thread::sleep(Duration::from_millis(5));
    };
    drop(first);
    let _squatter = Process::squatter(65534, &name);
    fails_at_once(|| Process::rank(variables), &["65534", "taken"])
}

/// The name of the abstract socket at which ranks of phalanx meet now, in this thread's network namespace.
fn meeting_name() -> Option<String> {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/unix").ok()?;
    let names = sockets.lines().filter_map(|line| Some(line.split_once('@')?.1));
    names.into_iter().find(|name| name.starts_with("phalanx-")).map(str::to_owned)
}
