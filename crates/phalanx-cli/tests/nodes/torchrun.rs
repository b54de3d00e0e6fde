//! Ranks with torchrun's variables, as it sets them for two nodes with one rank each.

use super::node::Node;
use super::rank::PART;
use libtest_mimic::{Failed, Trial};
use std::net::TcpListener;
use std::process::Command;

pub fn trials() -> Vec<Trial> {
    let trial = |name: &str, run: fn() -> Result<(), Failed>| Trial::test(format!("torchrun/{name}"), run);
    vec![
        trial("nodes_of_one_host_meet_beside_torchruns_store", nodes_of_one_host),
        trial("a_restart_meets_again_on_the_same_port", a_restart),
        trial("without_a_token_nobody_is_trusted", without_a_token),
        trial("a_port_that_is_taken_is_named", a_port_that_is_taken),
    ]
}

/// This test program as a rank of two, on a node of its own.
pub fn rank(rank: usize, master: &str, port: u16) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("PHALANX_")) {
            command.env_remove(name);
        }
    }
    let rank = rank.to_string();
    command.env("RANK", &rank).env("GROUP_RANK", rank).env("LOCAL_RANK", "0");
    command.env("WORLD_SIZE", "2").env("LOCAL_WORLD_SIZE", "1");
    command.env("MASTER_ADDR", master).env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_RUN_ID", "none").env("TORCHELASTIC_RESTART_COUNT", "0");
    command.env("PHALANX_TOKEN", "the secret of this test").env(PART, "init");
    command
}

/// A port for torchrun's own store, and the listener that has it.
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
