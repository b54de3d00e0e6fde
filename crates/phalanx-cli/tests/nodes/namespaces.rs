//! Nodes in two networks, and the cut of the wire between them.

use super::loopback::Job;
use super::network::{Network, SECOND, obstacle};
use super::node::Node;
use super::rank::{self, PART};
use super::torchrun;
use libtest_mimic::{Failed, Trial};
use phalanx_testkit::ucx;
use std::time::{Duration, Instant};

/// Time until all know of a loss: 2 s, and 1 s more for a busy machine.
const LIMIT: Duration = Duration::from_secs(3);

pub fn trials() -> Vec<Trial> {
    let obstacle = obstacle();
    let mut trials = Vec::new();
    let mut add = |name: &str, run: fn(&Network) -> Result<(), Failed>| {
        let trial = Trial::test(format!("namespaces/{name}"), move || run(&Network::new()?));
        // Without the right to make namespaces they are ignored, or fail if it is required.
        trials.push(match &obstacle {
            None => trial,
            Some(_) if std::env::var_os("PHALANX_TEST_NAMESPACES").is_some() => trial,
            Some(why) => trial.with_kind(format!("cannot run: {why}")).with_ignored_flag(true),
        });
    };
    add("ranks_of_all_nodes_start_and_end", ranks_start_and_end);
    add("encrypted_launchers_and_ranks_meet", encrypted);
    add("launchers_that_differ_in_encryption_say_so", half_encrypted);
    add("a_name_that_comes_late_is_looked_up_again", late_name);
    add("pods_of_the_kubernetes_example_meet", pods);
    add("a_store_is_reached_by_each_address_of_its_name", two_addresses);
    add("an_error_lists_each_address_that_was_tried", each_address_is_listed);
    add("shared_memory_between_hosts_is_refused", shared_memory_is_refused);
    add("torchrun_on_two_hosts_meets", torchrun_on_two_hosts);
    add("ranks_with_an_id_on_two_hosts_meet", by_an_id);
    add("ranks_cut_off_both_ways_are_named", |network| ranks_cut_off(network, Network::cut));
    add("ranks_that_cannot_be_heard_are_named", |network| ranks_cut_off(network, |n| n.cut_from(1)));
    add("ranks_that_hear_nothing_are_named", |network| ranks_cut_off(network, |n| n.cut_from(0)));
    add("an_outage_of_the_network_may_last_for_seconds", short_outage);
    add("a_node_cut_off_both_ways_ends_the_job", |network| node_cut_off(network, Network::cut));
    add("a_node_that_cannot_be_heard_ends_the_job", |network| node_cut_off(network, |n| n.cut_from(1)));
    add("a_node_that_hears_nothing_ends_the_job", |network| node_cut_off(network, |n| n.cut_from(0)));
    trials
}

fn launch(network: &Network, job: &Job, options: &str, program: &[&str]) -> [Node; 2] {
    [0, 1]
        .map(|node| Node::start(network.inside(node, job.node(node, 2, options, program).env(PART, "init"))))
}

fn job(network: &Network) -> Job {
    Job::at(format!("{}:29400", network.address(0)))
}

fn ranks_start_and_end(network: &Network) -> Result<(), Failed> {
    let job = job(network);
    let nodes =
        launch(network, &job, "-n 2", &["sh", "-c", "echo here is $PHALANX_RANK of $PHALANX_WORLD_SIZE"]);
    all_are_here(nodes)
}

/// Two ranks of each node say which of four they are.
fn all_are_here(nodes: [Node; 2]) -> Result<(), Failed> {
    for (node, ranks) in nodes.into_iter().zip([[0, 1], [2, 3]]) {
        let (code, said) = node.end()?;
        let all = ranks.iter().all(|rank| said.contains(&format!("[{rank}] here is {rank} of 4")));
        if code != Some(0) || !all {
            return Err(format!("{code:?}: {said}").into());
        }
    }
    Ok(())
}

/// A job whose store has a name.
fn named_job() -> Job {
    Job::at("phalanx-head:29400".to_owned())
}

fn both_succeed(nodes: [Node; 2]) -> Result<(), Failed> {
    for node in nodes {
        let (code, said) = node.end()?;
        if code != Some(0) {
            return Err(format!("{code:?}: {said}").into());
        }
    }
    Ok(())
}

/// The name comes when both launchers have looked it up in vain for longer than a resolver takes.
fn late_name(network: &Network) -> Result<(), Failed> {
    for end in [0, 1] {
        network.set_hosts(end, "127.0.0.1 localhost\n")?;
    }
    let job = named_job();
    let nodes = launch(network, &job, "-n 1", &["true"]);
    std::thread::sleep(Duration::from_millis(1500));
    for end in [0, 1] {
        network.set_hosts(end, &format!("{} phalanx-head\n", network.address(0)))?;
    }
    both_succeed(nodes)
}

/// The command of `phalanx-cli/examples/kubernetes/job.yaml` in two pods: with the variables that Kubernetes sets, and with names that come when the
/// pods run already.
fn pods(network: &Network) -> Result<(), Failed> {
    let manifest = include_str!("../../examples/kubernetes/job.yaml");
    let command = manifest.lines().find_map(|line| line.trim().strip_prefix("command: "));
    let command: Vec<String> = serde_json::from_str(command.ok_or("a command in one line")?)?;
    for end in [0, 1] {
        network.set_hosts(end, "127.0.0.1 localhost\n")?;
    }
    let start = |pod: usize| {
        let words = command.iter().map(|word| match word.as_str() {
            "$(NODE_RANK)" => pod.to_string(),
            "3" => "2".to_owned(),
            word => word.to_owned(),
        });
        let words: Vec<String> = words.take_while(|word| word != "/app/train").collect();
        let (program, options) = words.split_first().ok_or("a program")?;
        if program != "phalanx" {
            return Err(Failed::from(format!("{program} is started")));
        }
        let mut launcher = super::common::phalanx("");
        launcher.args(options).args(["sh", "-c", "echo here is $PHALANX_RANK of $PHALANX_WORLD_SIZE"]);
        launcher.env("PHALANX_TOKEN", "0123456789abcdef0123456789abcdef").env("PHALANX_TIMEOUT", "30");
        Ok(Node::start(network.inside(pod, &launcher)))
    };
    let pods = [start(0)?, start(1)?];
    std::thread::sleep(Duration::from_millis(700));
    for end in [0, 1] {
        network.set_hosts(end, &format!("{} train-0.train\n", network.address(0)))?;
    }
    all_are_here(pods)
}

/// The store's own host knows it by another address first.
fn two_addresses(network: &Network) -> Result<(), Failed> {
    network.set_hosts(0, &format!("{} phalanx-head\n{} phalanx-head\n", SECOND[0], network.address(0)))?;
    network.set_hosts(1, &format!("{} phalanx-head\n", network.address(0)))?;
    let job = named_job();
    both_succeed(launch(network, &job, "-n 1", &["true"]))
}

fn each_address_is_listed(network: &Network) -> Result<(), Failed> {
    network.set_hosts(1, &format!("{} phalanx-head\n{} phalanx-head\n", SECOND[0], network.address(0)))?;
    let job = named_job();
    let mut command = job.node(1, 2, "-n 1", &["true"]);
    command.env("PHALANX_TIMEOUT", "0.5");
    let (_, said) = Node::start(network.inside(1, &command)).end()?;
    let addresses = [format!("[{}]:29400", SECOND[0]), format!("{}:29400", network.address(0))];
    match addresses.iter().all(|address| said.contains(address)) {
        true => Ok(()),
        false => Err(said.into()),
    }
}

fn with_encryption(network: &Network, wanted: [&str; 2]) -> Result<[String; 2], Failed> {
    let (job, program) = (job(network), std::env::current_exe()?);
    let start = |node: usize| {
        let mut launcher = job.node(node, 2, "-n 1", &[program.to_str().expect("a path of text")]);
        launcher.env(PART, "init").env("PHALANX_STORE_TLS", wanted[node]).env("PHALANX_TIMEOUT", "5");
        Node::start(network.inside(node, &launcher))
    };
    let [first, second] = [0, 1].map(start);
    Ok([first.end()?.1, second.end()?.1])
}

/// They get as far as without encryption.
fn encrypted(network: &Network) -> Result<(), Failed> {
    have_met(with_encryption(network, ["1", "1"])?)
}

fn half_encrypted(network: &Network) -> Result<(), Failed> {
    let [_, said] = with_encryption(network, ["1", "0"])?;
    if said.contains("encrypts, and this node does not") { Ok(()) } else { Err(said.into()) }
}

/// The ranks have one kernel: their namespaces tell them apart.
fn shared_memory_is_refused(network: &Network) -> Result<(), Failed> {
    let job = job(network);
    let program = std::env::current_exe()?;
    for node in launch(network, &job, "-n 1", &[program.to_str().unwrap()]) {
        let (_, said) = node.end()?;
        for part in ["2 ranks without GPUs on 2 hosts or containers", "MPI's work", "mpirun -n 2 --host"] {
            if !said.contains(part) {
                return Err(format!("it should say {part:?}:\n{said}").into());
            }
        }
    }
    Ok(())
}

/// The ranks know that they are on two hosts.
fn have_met(said: [String; 2]) -> Result<(), Failed> {
    for said in said {
        if !said.contains("2 ranks without GPUs on 2 hosts or containers") {
            return Err(said.into());
        }
    }
    Ok(())
}

/// torchrun's variables on two hosts: rank 0 hosts the store, beside torchrun's own.
fn torchrun_on_two_hosts(network: &Network) -> Result<(), Failed> {
    let [first, second] = [0, 1].map(|rank| {
        let command = torchrun::rank(rank, network.address(0), 29500);
        Node::start(network.inside(rank, &command))
    });
    let expected = match ucx::missing() {
        None => "sum 3 on 2 host",
        Some(_) => "2 ranks on 2 host(s)",
    };
    match [first.end()?.1, second.end()?.1].into_iter().find(|said| !said.contains(expected)) {
        None => Ok(()),
        Some(said) => Err(said.into()),
    }
}

/// Ranks by an id, without a launcher.
fn by_an_id(network: &Network) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("id");
    let [first, second] = [0, 1].map(|rank| {
        let command = rank::identified_command(rank, 2, network.address(0), &file);
        Node::start(network.inside(rank, &command))
    });
    have_met([first.end()?.1, second.end()?.1])
}

/// Ranks 0 (with the store) and 1 on one side, rank 2 on the other.
fn ranks_cut_off(network: &Network, cut: fn(&Network) -> Result<(), String>) -> Result<(), Failed> {
    let address = format!("{}:29500", network.address(0));
    let ranks = [0, 1, 2].map(|rank| {
        Node::start(network.inside(usize::from(rank == 2), &rank::member_command(&address, rank, 3)))
    });
    for rank in &ranks {
        rank.wait_for("ready")?;
    }
    // Long enough for heartbeats to go both ways.
    std::thread::sleep(Duration::from_millis(500));
    cut(network)?;
    let started = Instant::now();
    for rank in &ranks[..2] {
        rank.wait_for("lost 2: ")?;
    }
    let near = started.elapsed();
    // It cannot know whether it is cut off itself, or the store's host.
    ranks[2].wait_for("lost ")?;
    let far = started.elapsed();
    let said = ranks.each_ref().map(Node::said);
    if near > LIMIT || far > LIMIT {
        return Err(format!("it took {near:?} and {far:?}: {said:?}").into());
    }
    let verdict = |said: &str| said.lines().find(|line| line.starts_with("lost")).map(str::to_owned);
    let same = verdict(&said[0]) == verdict(&said[1]);
    let far_names = said[2].contains("lost 2: ") || said[2].contains("lost 0: it hosts the store");
    if same && far_names { Ok(()) } else { Err(format!("{said:?}").into()) }
}

/// By default, ranks survive an outage as of a switch that fails over, and still hear of each other.
fn short_outage(network: &Network) -> Result<(), Failed> {
    let address = format!("{}:29500", network.address(0));
    let ranks = [0, 1].map(|rank| {
        let mut command = rank::member_command(&address, rank, 2);
        command.env_remove(rank::SILENCE);
        Node::start(network.inside(rank, &command))
    });
    for rank in &ranks {
        rank.wait_for("ready")?;
    }
    network.cut()?;
    std::thread::sleep(Duration::from_millis(1800));
    network.join()?;
    // The retransmission that comes next.
    std::thread::sleep(Duration::from_millis(1800));
    let [mut first, second] = ranks;
    let said = first.said() + &second.said();
    if said.contains("lost") {
        return Err(said.into());
    }
    // A connection that closes is a verdict as before.
    first.kill();
    match second.wait_for("lost 0: it hosts the store")? {
        took if took < LIMIT => Ok(()),
        took => Err(format!("it took {took:?}").into()),
    }
}

fn node_cut_off(network: &Network, cut: fn(&Network) -> Result<(), String>) -> Result<(), Failed> {
    let job = job(network);
    let nodes = launch(network, &job, "-n 1", &["sh", "-c", "echo started; exec sleep 1000"]);
    for node in &nodes {
        node.wait_for("started")?;
    }
    std::thread::sleep(Duration::from_millis(500));
    cut(network)?;
    let started = Instant::now();
    nodes[0].wait_for("node 1 (lost)")?;
    nodes[1].wait_for("(lost)")?;
    let took = started.elapsed();
    if took > LIMIT {
        return Err(format!("it took {took:?}").into());
    }
    for node in nodes {
        let (code, said) = node.end()?;
        if code != Some(1) {
            return Err(format!("{code:?}: {said}").into());
        }
    }
    Ok(())
}
