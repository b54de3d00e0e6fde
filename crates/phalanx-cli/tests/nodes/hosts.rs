//! Three hosts that `.ci/hosts` makes, and ranks of host memory on them, two on each: over UCX.

use super::common::phalanx;
use super::loopback::token_file;
use super::node::Node;
use super::rank::{END, PART};
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::{suite, ucx};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Hosts, made for the first trial that needs them.
pub struct Hosts {
    state: PathBuf,
}

static HOSTS: OnceLock<Result<Hosts, String>> = OnceLock::new();

/// Ends the hosts, if there are any.
pub fn end() {
    if let Some(Ok(hosts)) = HOSTS.get() {
        let _ = hosts.command("down", &[]).status();
        let _ = std::fs::remove_dir_all(&hosts.state);
    }
}

/// Why there can be no hosts, or one of these programs is missing.
pub fn obstacle(programs: &[&'static str]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("hosts need root".to_owned());
    }
    let folders = std::env::var("PATH").unwrap_or_default();
    let is_there = |program: &str| folders.split(':').any(|folder| Path::new(folder).join(program).exists());
    let missing = programs.iter().find(|program| !is_there(program));
    missing.map(|program| format!("{program} is not installed; .ci/tools does that"))
}

/// A trial that is ignored if there is an obstacle, unless it must run.
pub fn trial(
    name: String,
    obstacle: Option<&String>,
    run: impl FnOnce() -> Result<(), Failed> + Send + 'static,
) -> Trial {
    let trial = Trial::test(name, run);
    match obstacle {
        None => trial,
        Some(_) if std::env::var_os("PHALANX_TEST_NAMESPACES").is_some() => trial,
        Some(why) => trial.with_kind(format!("cannot run: {why}")).with_ignored_flag(true),
    }
}

impl Hosts {
    pub fn get() -> Result<&'static Hosts, Failed> {
        let hosts = HOSTS.get_or_init(|| {
            let hosts = Hosts { state: format!("/run/phalanx-hosts-{}", std::process::id()).into() };
            hosts.perform("up", &["3"]).map(|()| hosts)
        });
        hosts.as_ref().map_err(|error| error.clone().into())
    }

    pub fn command(&self, action: &str, arguments: &[&str]) -> Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.ci/hosts");
        let mut command = Command::new(script);
        super::common::forget_settings(&mut command);
        command.env("HOSTS_DIR", &self.state).arg(action).args(arguments);
        command
    }

    pub fn perform(&self, action: &str, arguments: &[&str]) -> Result<(), String> {
        let done = self.command(action, arguments).output().map_err(|error| error.to_string())?;
        match done.status.success() {
            true => Ok(()),
            false => Err(format!("hosts {action}: {}", String::from_utf8_lossy(&done.stderr))),
        }
    }

    /// A launcher on each host, with two ranks of this test program in a role.
    fn launch(
        &self,
        port: u16,
        part: &str,
        options: &str,
        settings: &[(&str, &str)],
    ) -> Result<[Node; 3], Failed> {
        let program = std::env::current_exe()?;
        self.launch_program(port, &[program.as_os_str()], &format!("-n 2 {options}"), |command| {
            command.env(PART, part).env("PHALANX_HEARTBEAT_TIMEOUT", "3").envs(settings.iter().copied());
        })
    }

    /// A launcher on each host, with a program and its arguments.
    fn launch_program(
        &self,
        port: u16,
        program: &[&OsStr],
        options: &str,
        set: impl Fn(&mut Command),
    ) -> Result<[Node; 3], Failed> {
        // The hosts have folders for temporary files of their own, and share all others.
        let token = token_file(&self.state, &format!("token-{port}"), "the secret of this test");
        Ok([0, 1, 2].map(|host| {
            let launcher = phalanx(&format!(
                "launch --nnodes 3 --node-rank {host} --store h0:{port} --token-file {} {options} --",
                token.display()
            ));
            let mut command = self.command("run", &[&host.to_string()]);
            command.arg(launcher.get_program()).args(launcher.get_args()).args(program);
            command.env("PHALANX_BACKEND", "auto").env("PHALANX_TIMEOUT", "30");
            set(&mut command);
            Node::start(command)
        }))
    }
}

pub fn trials() -> Vec<Trial> {
    let obstacle = obstacle(&["ip", "nsenter"]);
    let of_ucx = |name: &str, run: fn(&Hosts) -> Result<(), Failed>| {
        let name = format!("hosts/ucx/{name}");
        match ucx::missing() {
            Some(reason) => suite::ignored(name, &reason),
            None => trial(name, obstacle.as_ref(), move || run(Hosts::get()?)),
        }
    };
    vec![
        of_ucx("ranks_on_three_hosts_share_their_work", all_work),
        of_ucx("a_killed_rank_is_named_by_ranks_and_launchers", killed_rank),
        of_ucx("a_cut_off_host_is_named_by_ranks_and_launchers", cut_off_host),
        of_ucx("the_others_go_on_without_a_cut_off_host", others_go_on),
        of_ucx("a_killed_rank_is_replaced", killed_rank_replaced),
        of_ucx("a_stopped_rank_is_ended_and_replaced", stopped_rank_replaced),
        of_ucx("the_ranks_of_a_host_are_replaced_twice", host_replaced),
        of_ucx("all_ranks_start_anew_where_none_is_left", all_killed),
        of_ucx("an_outage_of_a_second_is_survived", outage),
        of_ucx("a_host_without_the_library_is_told_how_to_get_it", without_library),
        of_ucx("an_interface_that_is_not_there_is_named", wrong_interface),
        of_ucx("doctor_names_a_host_that_sends_slowly", slow_host),
    ]
}

fn all_say(nodes: [Node; 3], what: &[&str]) -> Result<(), Failed> {
    let ended = nodes.into_iter().map(|node| Ok(node.end()?.1)).collect::<Result<Vec<_>, Failed>>()?;
    for said in &ended {
        if let Err(failure) = says(said, what) {
            // The reason may be another node's.
            let failure = failure.message().unwrap_or_default();
            return Err(format!("{failure}\nall nodes:\n{}", ended.join("\n")).into());
        }
    }
    Ok(())
}

fn says(said: &str, what: &[&str]) -> Result<(), Failed> {
    match what.iter().find(|part| !said.contains(**part)) {
        None => Ok(()),
        Some(part) => Err(format!("{part:?} should be there:\n{said}").into()),
    }
}

fn all_work(hosts: &Hosts) -> Result<(), Failed> {
    all_say(hosts.launch(29401, "init", "", &[])?, &["sum 21 on 3 host"])
}

/// Two ranks of each host loop until something is wrong. Answers the process of world rank 3, the second of host 1, by its id there.
fn start_loop(nodes: &[Node; 3]) -> Result<String, Failed> {
    for (node, rank) in nodes.iter().zip([1, 3, 5]) {
        node.wait_for(&format!("[{rank}] looping "))?;
    }
    let said = nodes[1].said();
    let of_rank = said.lines().find_map(|line| line.strip_prefix("[3] looping ")).map(str::to_owned);
    Ok(of_rank.ok_or_else(|| format!("no process of rank 3: {said}"))?)
}

fn killed_rank(hosts: &Hosts) -> Result<(), Failed> {
    let nodes = hosts.launch(29402, "loop", "", &[])?;
    let process = start_loop(&nodes)?;
    hosts.perform("run", &["1", "kill", "-9", &process])?;
    let started = Instant::now();
    let [first, _, third] = nodes;
    for node in [first, third] {
        says(&node.end()?.1, &["rank 3"])?;
    }
    match started.elapsed() < Duration::from_secs(10) {
        true => Ok(()),
        false => Err(format!("it took {:.1?}", started.elapsed()).into()),
    }
}

fn with_cut(hosts: &Hosts, then: impl FnOnce() -> Result<(), Failed>) -> Result<(), Failed> {
    hosts.perform("cut", &["1"])?;
    let outcome = then();
    hosts.perform("join", &["1"])?;
    outcome
}

/// Host 1 is cut off; the ranks and launchers of the others say this.
fn the_others_say(hosts: &Hosts, nodes: [Node; 3], what: &str) -> Result<(), Failed> {
    start_loop(&nodes)?;
    with_cut(hosts, || {
        let [first, second, third] = nodes;
        for node in [first, third] {
            says(&node.end()?.1, &[what])?;
        }
        second.end()?;
        Ok(())
    })
}

fn cut_off_host(hosts: &Hosts) -> Result<(), Failed> {
    the_others_say(hosts, hosts.launch(29403, "loop", "", &[])?, "node 1")
}

/// Four of six ranks shrink, and their sum is right.
fn others_go_on(hosts: &Hosts) -> Result<(), Failed> {
    let nodes = hosts.launch(29404, "loop, and shrink", "--keep-going", &[])?;
    the_others_say(hosts, nodes, "4 go on with the sum 4")
}

/// Starts ranks that replace lost ones, and ends their loop when the test has had its way with them.
fn rebuilding(
    hosts: &Hosts,
    port: u16,
    options: &str,
    test: impl FnOnce(&[Node; 3]) -> Result<(), Failed>,
) -> Result<[String; 3], Failed> {
    let end = hosts.state.join(format!("end-{port}"));
    let end = end.to_str().ok_or("a path that is text")?;
    let nodes = hosts.launch(port, "loop, and rebuild", options, &[(END, end)])?;
    for rank in 0..6 {
        wait_for_build(&nodes, rank, 1)?;
    }
    test(&nodes)?;
    std::fs::write(end, "")?;
    let [first, second, third] = nodes.map(Node::end);
    let ended = [first?, second?, third?];
    match ended.iter().find(|(code, said)| *code != Some(0) || !said.contains("the loop has ended")) {
        None => Ok(ended.map(|(_, said)| said)),
        Some((code, said)) => Err(format!("{code:?}: {said}").into()),
    }
}

/// The lines of a rank with its communicators.
fn builds(nodes: &[Node; 3], rank: usize) -> Vec<String> {
    let (said, prefix) = (nodes[rank / 2].said(), format!("[{rank}] 6 ranks on 3 hosts, process "));
    said.lines().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
}

/// Waits until a rank has had so many communicators; answers its process.
fn wait_for_build(nodes: &[Node; 3], rank: usize, count: usize) -> Result<String, Failed> {
    let started = Instant::now();
    loop {
        let mut builds = builds(nodes, rank);
        if builds.len() >= count {
            return Ok(builds.swap_remove(builds.len() - 1));
        }
        if started.elapsed() > super::common::TIMEOUT {
            let said = nodes.each_ref().map(Node::said).join("\n--\n");
            return Err(format!("rank {rank} is not in communicator {count}:\n{said}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn killed_rank_replaced(hosts: &Hosts) -> Result<(), Failed> {
    let said = rebuilding(hosts, 29411, "--restarts 1", |nodes| {
        hosts.perform("run", &["1", "kill", "-9", &wait_for_build(nodes, 3, 1)?])?;
        (0..6).try_for_each(|rank| wait_for_build(nodes, rank, 2).map(drop))
    })?;
    says(&said[1], &["rank 3 failed: killed by SIGKILL", "starting it anew (restart 1 of at most 1)"])?;
    says(&said[0], &["rank 3"])
}

/// The others of its host say that they have gone on without it.
fn stopped_rank_replaced(hosts: &Hosts) -> Result<(), Failed> {
    let said = rebuilding(hosts, 29414, "--restarts 1", |nodes| {
        hosts.perform("run", &["1", "kill", "-STOP", &wait_for_build(nodes, 3, 1)?])?;
        (0..6).try_for_each(|rank| wait_for_build(nodes, rank, 2).map(drop))
    })?;
    says(&said[1], &["rank 3 failed: killed by SIGKILL", "starting it anew (restart 1 of at most 1)"])
}

fn host_replaced(hosts: &Hosts) -> Result<(), Failed> {
    let said = rebuilding(hosts, 29412, "--restarts 4", |nodes| {
        for _ in 0..2 {
            let counts: Vec<usize> = (0..6).map(|rank| builds(nodes, rank).len()).collect();
            let processes = [2, 3].map(|rank| wait_for_build(nodes, rank, counts[rank]));
            let [first, second] = processes;
            hosts.perform("run", &["1", "kill", "-9", &first?, &second?])?;
            // The new ranks have said so only once, and may have been there before the others.
            for (rank, count) in counts.into_iter().enumerate() {
                wait_for_build(nodes, rank, count + 1)?;
            }
        }
        Ok(())
    })?;
    says(&said[1], &["rank 2 failed", "rank 3 failed", "(restart 4 of at most 4)"])
}

/// The last ranks that could take in new ones are killed with all others.
fn all_killed(hosts: &Hosts) -> Result<(), Failed> {
    let said = rebuilding(hosts, 29413, "--restarts 12", |nodes| {
        let processes: Result<Vec<String>, Failed> =
            (0..6).map(|rank| wait_for_build(nodes, rank, 1)).collect();
        let processes = processes?;
        let script =
            |host: usize| ["kill", "-9", &processes[2 * host], &processes[2 * host + 1]].map(str::to_owned);
        let kills = [0, 1, 2].map(|host| {
            let words = script(host);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            hosts.command("run", &[&[["0", "1", "2"][host]], &words[..]].concat()).spawn()
        });
        for kill in kills {
            kill?.wait()?;
        }
        (0..6).try_for_each(|rank| wait_for_build(nodes, rank, 2).map(drop))
    })?;
    match said.iter().any(|said| said.contains("no rank can take in a new one: starting all anew")) {
        true => Ok(()),
        false => Err(said.join("\n--\n").into()),
    }
}

fn outage(hosts: &Hosts) -> Result<(), Failed> {
    // The default: what TCP sends again after the outage may come two seconds later.
    let nodes = hosts.launch(29405, "loop for 6 s", "", &[("PHALANX_HEARTBEAT_TIMEOUT", "10")])?;
    start_loop(&nodes)?;
    with_cut(hosts, || {
        std::thread::sleep(Duration::from_secs(1));
        Ok(())
    })?;
    all_say(nodes, &["the loop has ended"])
}

fn without_library(hosts: &Hosts) -> Result<(), Failed> {
    let nodes = hosts.launch(29406, "init", "", &[("PHALANX_UCX_LIB", "/nowhere/libucp.so.0")])?;
    let ways =
        ["apt install libucx0", "pip install libucx-cu12", "conda install", "HPC-X", "PHALANX_UCX_LIB="];
    all_say(nodes, &[&ways[..], &["6 ranks on 3 host(s)"]].concat())
}

fn wrong_interface(hosts: &Hosts) -> Result<(), Failed> {
    let nodes = hosts.launch(29407, "init", "", &[("PHALANX_INTERFACE", "carrier-pigeon0")])?;
    all_say(nodes, &["PHALANX_INTERFACE", "carrier-pigeon0", "10.77.0."])
}

/// Host 1 may send a tenth of what it could; the doctor says so, and only then.
fn slow_host(hosts: &Hosts) -> Result<(), Failed> {
    let picture = hosts.state.join("map.svg");
    let doctor = |port| -> Result<(Option<i32>, String), Failed> {
        let program = phalanx("");
        let arguments = ["doctor", "--hosts", "--picture"].map(OsStr::new);
        let words = [&[program.get_program()], &arguments[..], &[picture.as_os_str()]].concat();
        let [first, second, third] = hosts.launch_program(port, &words, "-n 1 --no-prefix", |_| ())?;
        let ended = first.end()?;
        second.end()?;
        third.end()?;
        Ok(ended)
    };
    hosts.perform("slow", &["1", "200mbit"])?;
    let slow = doctor(29408);
    hosts.perform("slow", &["1", "none"])?;
    let (code, said) = slow?;
    says(&said, &["3 hosts, 3 links measured over the backend ucx", "SLOW host 1 (h1) sends slowly: "])?;
    if code != Some(1) || said.matches("sends slowly").count() != 1 {
        return Err(format!("{code:?}: one host is slow:\n{said}").into());
    }
    let drawn = std::fs::read_to_string(&picture)?;
    says(&drawn, &["<svg", "h1"])
}
