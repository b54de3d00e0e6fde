//! Ranks with torchrun's variables for two nodes with one rank each, and the real torchrun, if `PHALANX_TEST_TORCHRUN`
//! names it. CI has one.

use super::common::forget_settings;
use super::node::Node;
use super::rank::PART;
use libtest_mimic::{Failed, Trial};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn trials() -> Vec<Trial> {
    let trial = |name: &str, run: fn() -> Result<(), Failed>| Trial::test(format!("torchrun/{name}"), run);
    let real = |name: &str, run: fn(&Path) -> Result<(), Failed>| {
        let name = format!("torchrun/real/{name}");
        match real_torchrun() {
            Some(path) => Trial::test(name, move || run(&path)),
            None if std::env::var_os("CI").is_some() && cfg!(target_arch = "x86_64") => {
                Trial::test(name, || Err("PHALANX_TEST_TORCHRUN names no torchrun; .ci/run does that".into()))
            }
            None => {
                let ignored = Trial::test(name, || Ok(())).with_ignored_flag(true);
                ignored.with_kind("PHALANX_TEST_TORCHRUN names no torchrun")
            }
        }
    };
    vec![
        real("ranks_of_one_agent", one_agent),
        real("two_agents_and_their_store", two_agents),
        real("a_rank_that_fails_is_restarted", restarted_agent),
        trial("nodes_of_one_host_meet_beside_torchruns_store", nodes_of_one_host),
        trial("a_restart_meets_again_on_the_same_port", a_restart),
        trial("without_a_token_nobody_is_trusted", without_a_token),
        trial("a_port_that_is_taken_is_named", a_port_that_is_taken),
    ]
}

/// This test program as one of two ranks, on its own node.
pub fn rank(rank: usize, master: &str, port: u16) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    forget_settings(&mut command);
    let rank = rank.to_string();
    command.env("RANK", &rank).env("GROUP_RANK", rank).env("LOCAL_RANK", "0");
    command.env("WORLD_SIZE", "2").env("LOCAL_WORLD_SIZE", "1");
    command.env("MASTER_ADDR", master).env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_RUN_ID", "none").env("TORCHELASTIC_RESTART_COUNT", "0");
    command.env("PHALANX_TOKEN", "the secret of this test").env(PART, "init");
    command
}

fn real_torchrun() -> Option<PathBuf> {
    std::env::var_os("PHALANX_TEST_TORCHRUN").map(PathBuf::from)
}

/// torchrun with these options, and this test program as its ranks. Old releases need this spelling, new ones accept it.
fn agent(torchrun: &Path, options: &str) -> Command {
    let mut command = Command::new(torchrun);
    forget_settings(&mut command);
    command.args(options.split(' ')).arg("--no_python").arg(std::env::current_exe().unwrap());
    command.env("PHALANX_TOKEN", "the secret of this test").env(PART, "init");
    command.env("PHALANX_BACKEND", "host");
    command
}

/// Expects the line `what` this many times.
fn all_say(said: &str, what: &str, times: usize) -> Result<(), Failed> {
    if said.matches(what).count() == times {
        return Ok(());
    }
    Err(format!("{what:?} should be there {times} times:\n{said}").into())
}

fn one_agent(torchrun: &Path) -> Result<(), Failed> {
    let (status, said) = Node::start(agent(torchrun, "--standalone --nnodes=1 --nproc_per_node=3")).end()?;
    assert_eq!(status, Some(0), "{said}");
    all_say(&said, "sum 6 on 1 host", 3)
}

/// As on two hosts: the ranks join our store, beside torchrun's own at the master's port.
fn two_agents(torchrun: &Path) -> Result<(), Failed> {
    let (listener, port) = torchruns_store();
    drop(listener);
    let start = |node: usize| {
        let options = format!(
            "--nnodes=2 --node_rank={node} --nproc_per_node=1 --master_addr=127.0.0.1 --master_port={port}"
        );
        Node::start(agent(torchrun, &options))
    };
    for node in [0, 1].map(start) {
        let (status, said) = node.end()?;
        assert_eq!(status, Some(0), "{said}");
        all_say(&said, "sum 3 on 1 host", 1)?;
    }
    Ok(())
}

fn restarted_agent(torchrun: &Path) -> Result<(), Failed> {
    let mut agent = agent(torchrun, "--standalone --nnodes=1 --nproc_per_node=2 --max_restarts=1");
    agent.env(PART, "init, and fail at first");
    let (status, said) = Node::start(agent).end()?;
    assert_eq!(status, Some(0), "{said}");
    all_say(&said, "sum 3 on 1 host", 2)
}

/// A listener in the place of torchrun's store, and its port.
fn torchruns_store() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn ours(port: u16) -> u16 {
    port.checked_add(1000).unwrap_or(port - 1000)
}

fn both(start: impl Fn(usize) -> Command) -> Result<[String; 2], Failed> {
    let [first, second] = [0, 1].map(|rank| Node::start(start(rank)));
    Ok([first.end()?.1, second.end()?.1])
}

fn says(said: &str, what: &str) -> Result<(), Failed> {
    if said.contains(what) { Ok(()) } else { Err(format!("it should say {what:?}:\n{said}").into()) }
}

fn nodes_of_one_host() -> Result<(), Failed> {
    let (_torchruns, port) = torchruns_store();
    let said = both(|number| rank(number, "127.0.0.1", port))?;
    said.iter().try_for_each(|said| says(said, "sum 3 on 1 host"))
}

fn a_restart() -> Result<(), Failed> {
    let (_torchruns, port) = torchruns_store();
    for restart in ["0", "1", "2"] {
        let said = both(|number| {
            let mut rank = rank(number, "127.0.0.1", port);
            rank.env("TORCHELASTIC_RESTART_COUNT", restart);
            rank
        })?;
        said.iter().try_for_each(|said| says(said, "sum 3 on 1 host"))?;
    }
    Ok(())
}

fn without_a_token() -> Result<(), Failed> {
    let (_torchruns, port) = torchruns_store();
    let said = both(|number| {
        let mut rank = rank(number, "127.0.0.1", port);
        rank.env_remove("PHALANX_TOKEN");
        rank
    })?;
    said.iter().try_for_each(|said| says(said, "PHALANX_TOKEN_FILE"))
}

fn a_port_that_is_taken() -> Result<(), Failed> {
    let (_torchruns, port) = torchruns_store();
    let _other = TcpListener::bind(("127.0.0.1", ours(port)))?;
    let mut first = rank(0, "127.0.0.1", port);
    first.env("PHALANX_TIMEOUT", "2");
    let (_, said) = Node::start(first).end()?;
    says(&said, &format!("127.0.0.1:{} is taken by another program", ours(port)))
}
