//! Several launchers on one machine.

use super::common::{self, eventually, number_in, runs, signal};
use super::node::Node;
use super::rank::PART;
use libtest_mimic::{Failed, Trial};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    let mut add = |name: &str, run: fn(&Job) -> Result<(), Failed>| {
        trials.push(Trial::test(format!("loopback/{name}"), move || run(&Job::new())));
    };
    add("ranks_are_numbered_over_the_nodes", ranks_are_numbered_over_the_nodes);
    add("nodes_of_one_host_share_memory", nodes_of_one_host_share_memory);
    add("ranks_of_a_large_job_reach_the_store_through_their_launcher", a_large_job);
    add("settings_that_differ_between_ranks_are_named", settings_that_differ);
    add("a_failure_ends_all_nodes", a_failure_ends_all_nodes);
    add("a_failure_lets_all_nodes_go_on_with_the_option", a_failure_lets_all_nodes_go_on);
    add("a_lost_node_lets_the_others_go_on_with_the_option", a_lost_node_lets_the_others_go_on);
    add("a_program_that_cannot_be_started_ends_all_nodes", a_program_that_cannot_be_started);
    add("a_restart_restarts_all_nodes", a_restart_restarts_all_nodes);
    add("a_signal_to_one_launcher_ends_all_nodes", a_signal_to_one_launcher);
    add("a_launcher_that_waits_for_the_others_hears_a_signal", |job| a_waiting_launcher(job, 0));
    add("another_launcher_that_waits_hears_a_signal", |job| a_waiting_launcher(job, 1));
    add("a_killed_launcher_is_a_lost_node", |job| a_killed_launcher(job, 1));
    add("the_killed_launcher_of_the_store_is_a_lost_node", |job| a_killed_launcher(job, 0));
    add("a_stopped_launcher_is_a_lost_node", |job| a_stopped_launcher(job, None));
    add("a_launcher_may_be_stopped_for_less_than_the_heartbeat_timeout", |job| {
        a_stopped_launcher(job, Some("8"))
    });
    add("another_token_is_refused", another_token_is_refused);
    add("two_launchers_of_one_node_are_refused", two_launchers_of_one_node);
    add("a_launcher_of_another_job_is_refused", another_job_is_refused);
    add("whoever_is_waited_for_is_named_meanwhile", waiting_is_said);
    add("options_that_miss_something_are_explained", options_that_miss_something);
    trials
}

/// The files and the port of a job.
pub struct Job {
    pub folder: tempfile::TempDir,
    pub token: PathBuf,
    pub store: String,
}

impl Job {
    fn new() -> Job {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        Job::at(free.local_addr().unwrap().to_string())
    }

    pub fn at(store: String) -> Job {
        let folder = tempfile::tempdir().unwrap();
        let token = token_file(folder.path(), "token", "the secret of this test");
        Job { folder, token, store }
    }

    /// `phalanx launch` of one node, with more options and a program.
    pub fn node(&self, rank: usize, nodes: usize, options: &str, program: &[&str]) -> Command {
        let (store, token) = (&self.store, self.token.display());
        let mut command = common::phalanx(&format!(
            "launch --nnodes {nodes} --node-rank {rank} --store {store} --token-file {token} {options} --"
        ));
        command.args(program).env("PHALANX_TIMEOUT", "30").env("PHALANX_HEARTBEAT_TIMEOUT", "1.4");
        command
    }

    fn shell(&self, rank: usize, options: &str, script: &str) -> Node {
        Node::start(self.node(rank, 2, options, &["sh", "-c", script]))
    }
}

pub fn token_file(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

fn says(said: &str, what: &str) -> Result<(), Failed> {
    if said.contains(what) { Ok(()) } else { Err(format!("it should say {what:?}:\n{said}").into()) }
}

fn equal<T: PartialEq + std::fmt::Debug>(actual: T, expected: T, said: &str) -> Result<(), Failed> {
    if actual == expected { Ok(()) } else { Err(format!("{actual:?}, not {expected:?}:\n{said}").into()) }
}

fn ranks_are_numbered_over_the_nodes(job: &Job) -> Result<(), Failed> {
    let script = "echo rank $PHALANX_RANK of $PHALANX_WORLD_SIZE, $PHALANX_LOCAL_RANK of \
                  $PHALANX_LOCAL_WORLD_SIZE here, node $PHALANX_NODE_RANK of $PHALANX_NNODES, job $PHALANX_JOB";
    // The second launcher is started first, and waits.
    let second = job.shell(1, "-n 1", script);
    let first = job.shell(0, "-n 2", script);
    let ((code, a), (other, b)) = (first.end()?, second.end()?);
    equal((code, other), (Some(0), Some(0)), &format!("{a}{b}"))?;
    says(&a, "[0] rank 0 of 3, 0 of 2 here, node 0 of 2, job ")?;
    says(&a, "[1] rank 1 of 3, 1 of 2 here, node 0 of 2, job ")?;
    says(&b, "[2] rank 2 of 3, 0 of 1 here, node 1 of 2, job ")?;
    let id = |said: &str| said.trim().rsplit(' ').next().unwrap().to_owned();
    equal(id(&a), id(&b), &a)
}

/// Two launchers on one machine: the ranks' handshake shows that they share a host.
fn nodes_of_one_host_share_memory(job: &Job) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let start = |rank| {
        let mut command = job.node(rank, 2, "-n 2", &[program.to_str().unwrap()]);
        command.env(PART, "init");
        Node::start(command)
    };
    let nodes = [0, 1].map(start);
    for node in nodes {
        let (code, said) = node.end()?;
        equal((code, said.matches("sum 10 on 1 host").count()), (Some(0), 2), &said)?;
    }
    Ok(())
}

/// From a number of ranks on, which is lowered here, each launcher connects its ranks to the store; again after a restart.
fn a_large_job(job: &Job) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let script = format!(
        "echo at $PHALANX_STORE; [ $PHALANX_RESTART_COUNT = 1 ] || exit 3; exec {}",
        program.display()
    );
    let start = |rank| {
        let mut command = job.node(rank, 2, "-n 2 --max-restarts 1", &["sh", "-c", &script]);
        command.env(PART, "init").env("PHALANX_TEST_SHARED_FROM", "4");
        Node::start(command)
    };
    for node in [0, 1].map(start) {
        let (code, said) = node.end()?;
        equal((code, said.matches("sum 10 on 1 host").count()), (Some(0), 2), &said)?;
        let of_the_job = said.matches(&format!("at {}", job.store)).count();
        equal((of_the_job, said.matches("at 127.0.0.1:").count() >= 2), (0, true), &said)?;
        let is_calm = !said.contains("is lost");
        equal(is_calm, true, &said)?;
    }
    Ok(())
}

fn settings_that_differ(job: &Job) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let [first, second] = ["0", "1"].map(|check| {
        let mut command = job.node(check.parse().unwrap(), 2, "-n 1", &[program.to_str().unwrap()]);
        command.env(PART, "init").env("PHALANX_CHECK", check);
        Node::start(command)
    });
    for said in [first.end()?.1, second.end()?.1] {
        says(&said, "rank 1 on ")?;
        says(&said, "was told to compare calls (PHALANX_CHECK=1), and rank 0 on ")?;
    }
    Ok(())
}

fn a_failure_ends_all_nodes(job: &Job) -> Result<(), Failed> {
    let first = job.shell(0, "-n 2", "sleep 1000");
    let second =
        job.shell(1, "-n 2", "[ $PHALANX_RANK = 3 ] || exec sleep 1000; sleep 0.3; echo why >&2; exit 7");
    let started = Instant::now();
    let ((code, a), (other, b)) = (first.end()?, second.end()?);
    equal((code, other), (Some(7), Some(7)), &format!("{a}{b}"))?;
    says(&b, "rank 3 failed first: exit status 7")?;
    says(&a, "node 1 (")?;
    says(&a, "rank 3 failed first: exit status 7")?;
    says(&a, "    why")?;
    if started.elapsed() > Duration::from_secs(10) {
        return Err(format!("it took {:?}", started.elapsed()).into());
    }
    Ok(())
}

fn a_failure_lets_all_nodes_go_on(job: &Job) -> Result<(), Failed> {
    let failed = job.folder.path().join("failed").display().to_string();
    let first = job.shell(
        0,
        "-n 1 --keep-going",
        &format!("while [ ! -e {failed} ]; do sleep 0.01; done; echo done"),
    );
    let second = job.shell(1, "-n 1 --keep-going", &format!("echo > {failed}; exit 7"));
    let ((code, a), (other, b)) = (first.end()?, second.end()?);
    // The other node's rank has survived the failure.
    equal((code, other), (Some(0), Some(0)), &format!("{a}{b}"))?;
    says(&a, "[0] done")?;
    says(&b, "rank 1 failed: exit status 7")
}

fn a_lost_node_lets_the_others_go_on(job: &Job) -> Result<(), Failed> {
    let at = |name: &str| job.folder.path().join(name).display().to_string();
    let script = format!(
        "echo $$ > {0}; while [ ! -e {1} ]; do sleep 0.01; done; echo done",
        at("$PHALANX_RANK"),
        at("go")
    );
    let first = job.shell(0, "-n 1 --keep-going", &script);
    let mut second = job.shell(1, "-n 1 --keep-going", &script);
    eventually("both run", || {
        (0..2).all(|rank| number_in(&job.folder.path().join(rank.to_string())).is_some())
    });
    second.kill();
    first.wait_for("going on without node 1")?;
    std::fs::write(at("go"), "")?;
    let (code, said) = first.end()?;
    equal(code, Some(0), &said)?;
    says(&said, "[0] done")
}

fn a_program_that_cannot_be_started(job: &Job) -> Result<(), Failed> {
    let first = job.shell(0, "-n 1", "sleep 1000");
    let second = Node::start(job.node(1, 2, "-n 1", &["no-such-program-anywhere"]));
    let ((code, a), (other, b)) = (first.end()?, second.end()?);
    equal((code, other), (Some(127), Some(127)), &format!("{a}{b}"))?;
    says(&a, "cannot start no-such-program-anywhere")?;
    says(&b, "cannot start no-such-program-anywhere")
}

fn a_restart_restarts_all_nodes(job: &Job) -> Result<(), Failed> {
    let script = "echo attempt $PHALANX_RESTART_COUNT; [ $PHALANX_RANK.$PHALANX_RESTART_COUNT = 1.0 ] && exit 5; \
                  [ $PHALANX_RESTART_COUNT = 1 ] || exec sleep 1000";
    let nodes = [0, 1].map(|node| job.shell(node, "-n 1 --max-restarts 2", script));
    for node in nodes {
        let (code, said) = node.end()?;
        equal(code, Some(0), &said)?;
        says(&said, "rank 1 failed first: exit status 5")?;
        says(&said, "restart 1 of at most 2")?;
        says(&said, "attempt 1")?;
        equal(said.contains("attempt 2"), false, &said)?;
    }
    // Ranks join the store of their own epoch.
    let program = std::env::current_exe()?;
    let script = format!("[ $PHALANX_RESTART_COUNT = 1 ] || exit 5; exec {}", program.display());
    let job = Job::new();
    let nodes = [0, 1].map(|rank| {
        let mut command = job.node(rank, 2, "-n 1 --max-restarts 1", &["sh", "-c", &script]);
        command.env(PART, "init");
        Node::start(command)
    });
    for node in nodes {
        let (code, said) = node.end()?;
        equal(code, Some(0), &said)?;
        says(&said, "sum 3 on 1 host")?;
    }
    Ok(())
}

fn a_signal_to_one_launcher(job: &Job) -> Result<(), Failed> {
    let nodes = [0, 1].map(|node| job.shell(node, "-n 1", "echo started; exec sleep 1000"));
    for node in &nodes {
        node.wait_for("started")?;
    }
    signal(nodes[1].pid(), Signal::TERM);
    let [first, second] = nodes;
    let ((code, a), (other, b)) = (first.end()?, second.end()?);
    equal((code, other), (Some(128 + 15), Some(128 + 15)), &format!("{a}{b}"))?;
    says(&a, "node 1 (")?;
    says(&a, "its launcher got SIGTERM")
}

/// The launcher's own ranks have ended, the other node's have not.
fn a_waiting_launcher(job: &Job, waiting: usize) -> Result<(), Failed> {
    let script = |node| if node == waiting { "echo started" } else { "echo started; exec sleep 1000" };
    let nodes = [0, 1].map(|node| job.shell(node, "-n 1", script(node)));
    for node in &nodes {
        node.wait_for("started")?;
    }
    let waits = nodes[waiting].pid();
    eventually("its rank has ended", || common::ranks_of(waits as u32).is_empty());
    signal(waits, Signal::TERM);
    let [first, second] = nodes;
    let ((code, a), (other, b)) = (first.end()?, second.end()?);
    let said = format!("{a}{b}");
    equal((code, other), (Some(128 + 15), Some(128 + 15)), &said)?;
    says(&said, &format!("node {waiting} ("))?;
    says(&said, "its launcher got SIGTERM")
}

/// The other launchers name the lost node and end, and no process of that node is left.
fn a_killed_launcher(job: &Job, victim: usize) -> Result<(), Failed> {
    let pid = |node: usize| job.folder.path().join(node.to_string());
    let mut nodes = [0, 1].map(|node| {
        let script = format!("echo $$ > {}; exec sleep 1000", pid(node).display());
        job.shell(node, "-n 1", &script)
    });
    let read = |node: usize| number_in(&pid(node));
    eventually("the ranks have started", || (0..2).all(|node| read(node).is_some()));
    let ranks = [0, 1].map(|node| read(node).unwrap());
    nodes[victim].kill();
    let started = Instant::now();
    let [first, second] = nodes;
    let (code, said) = if victim == 0 { second.end()? } else { first.end()? };
    equal(code, Some(1), &said)?;
    says(&said, &format!("node {victim} (lost)"))?;
    if started.elapsed() > Duration::from_secs(3) {
        return Err(format!("it took {:?}", started.elapsed()).into());
    }
    for rank in ranks {
        eventually("the rank has ended", || !runs(rank));
    }
    Ok(())
}

/// The launcher of node 1 is stopped: for good, or for less than it may be silent.
fn a_stopped_launcher(job: &Job, may_be_silent: Option<&str>) -> Result<(), Failed> {
    let go = job.folder.path().join("go");
    let script = format!("echo started; while [ ! -e {} ]; do sleep 0.01; done", go.display());
    let [first, second] = [0, 1].map(|node| {
        let mut command = job.node(node, 2, "-n 1", &["sh", "-c", &script]);
        command.envs(may_be_silent.map(|seconds| ("PHALANX_HEARTBEAT_TIMEOUT", seconds)));
        Node::start(command)
    });
    for node in [&first, &second] {
        node.wait_for("started")?;
    }
    signal(second.pid(), Signal::STOP);
    if may_be_silent.is_some() {
        // Longer than the default.
        std::thread::sleep(Duration::from_millis(2500));
        signal(second.pid(), Signal::CONT);
        std::fs::write(go, "")?;
        let ((code, a), (other, b)) = (first.end()?, second.end()?);
        return equal((code, other), (Some(0), Some(0)), &format!("{a}{b}"));
    }
    let started = Instant::now();
    let (code, said) = first.end()?;
    let took = started.elapsed();
    signal(second.pid(), Signal::CONT);
    equal(code, Some(1), &said)?;
    says(&said, "node 1 (lost)")?;
    if took > Duration::from_secs(3) {
        return Err(format!("it took {took:?}").into());
    }
    let (code, said) = second.end()?;
    equal(code == Some(0), false, &said)
}

fn another_token_is_refused(job: &Job) -> Result<(), Failed> {
    let first = job.shell(0, "-n 1", "true");
    let other = Job {
        folder: tempfile::tempdir()?,
        token: token_file(job.folder.path(), "other", "a secret of another job"),
        store: job.store.clone(),
    };
    let (code, said) = other.shell(1, "-n 1", "true").end()?;
    equal(code, Some(1), &said)?;
    says(&said, "another token")?;
    // The host of the store knows at once.
    first.wait_for("the store has turned away 127.0.0.1:")?;
    first.wait_for("another token")?;
    // The job goes on.
    let (code, said) = job.shell(1, "-n 1", "true").end()?;
    equal(code, Some(0), &said)?;
    equal(first.end()?.0, Some(0), &said)
}

/// The same port, the same token, another job.
fn another_job_is_refused(job: &Job) -> Result<(), Failed> {
    let first = job.shell(0, "-n 1 --job a", "true");
    let (code, said) = job.shell(1, "-n 1 --job b", "true").end()?;
    equal(code, Some(1), &said)?;
    says(&said, "node 1 belongs to the job \"b\", and this is the store of \"a\"")?;
    first.wait_for("node 1 belongs to the job \"b\"")?;
    // The job goes on.
    let (code, said) = job.shell(1, "-n 1 --job a", "true").end()?;
    equal((code, first.end()?.0), (Some(0), Some(0)), &said)
}

fn waiting_is_said(job: &Job) -> Result<(), Failed> {
    let started = Instant::now();
    // Node 0 waits for node 1, a rank for the other of its host, and a node for its store.
    let waits_for_node = job.shell(0, "-n 1", "true");
    let program = std::env::current_exe()?;
    let script = format!("[ $PHALANX_RANK = 1 ] && exec sleep 1000; exec {}", program.display());
    let mut alone = common::phalanx("launch -n 2 --");
    let waits_for_rank = Node::start({
        alone.args(["sh", "-c", &script]).env(PART, "init");
        alone
    });
    let other = Job::new();
    let waits_for_store = other.shell(1, "-n 1", "true");
    waits_for_node.wait_for("waiting for node 1")?;
    waits_for_rank.wait_for("waiting for rank 1")?;
    waits_for_store.wait_for("waiting for the store at 127.0.0.1:")?;
    let took = started.elapsed();
    if took < Duration::from_secs(8) { Ok(()) } else { Err(format!("it took {took:?}").into()) }
}

fn two_launchers_of_one_node(job: &Job) -> Result<(), Failed> {
    let nodes = [0, 1, 1].map(|node| Node::start(job.node(node, 3, "-n 1", &["true"])));
    let mut all = String::new();
    for node in nodes {
        let (code, said) = node.end()?;
        equal(code, Some(1), &said)?;
        all += &said;
    }
    // The store's host also says whom it turned away.
    equal(all.matches("two processes claim to be node 1").count(), 4, &all)
}

fn options_that_miss_something(job: &Job) -> Result<(), Failed> {
    let token = job.token.display();
    let open = token_file(job.folder.path(), "open", "a secret that all can read");
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o644))?;
    for (options, expected) in [
        ("--nnodes 2".to_owned(), "--node-rank"),
        ("--nnodes 2 --node-rank 1".to_owned(), "--store"),
        (
            "--nnodes 2 --node-rank 1 --store 127.0.0.1:1".to_owned(),
            "give --token-file, or set PHALANX_TOKEN",
        ),
        (format!("--nnodes 2 --node-rank 2 --store 127.0.0.1:1 --token-file {token}"), "count from 0"),
        ("--nnodes 2 --node-rank 0 --store 127.0.0.1:1 --token-file /nowhere".to_owned(), "/nowhere"),
        (format!("--nnodes 2 --node-rank 0 --store 127.0.0.1:0 --token-file {}", open.display()), "mode 644"),
        (format!("--nnodes 2 --node-rank 0 --store 192.0.2.1:1 --token-file {token}"), "none of this host's"),
    ] {
        let said = common::say(common::phalanx(&format!("launch {options} -n 1 -- true")));
        equal(said.code == Some(0), false, &said.stderr)?;
        says(&said.stderr, expected)?;
    }
    Ok(())
}
