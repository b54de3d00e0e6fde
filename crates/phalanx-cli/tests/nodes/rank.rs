//! What this test program does when it is started as a rank.

use super::common::forget_settings;
use phalanx::UniqueId;
use phalanx::store::{Host, Rendezvous, Server, Settings, Store, Token};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Names the part that a process plays.
pub const PART: &str = "NODES_TEST_PART";
/// For the part `member`: the store's address, this rank, and the number of ranks.
const MEMBER: &str = "NODES_TEST_MEMBER";
/// For the part `place`: what the program knows of itself, see [`placed_command`].
const PLACE: &str = "NODES_TEST_PLACE";
/// For the part `identified`: what a program has that carries an id, see [`identified_command`].
const ID: &str = "NODES_TEST_ID";
/// Longer than anything here takes when it works.
const PATIENCE: Duration = Duration::from_secs(30);

/// This test program as a rank in a store.
pub fn member_command(address: &str, rank: usize, size: usize) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(PART, "member").env(MEMBER, format!("{address} {rank} {size}"));
    command
}

/// This test program as a rank that nothing but the program itself knows of: rank, number of ranks, job, and where its store is.
pub fn placed_command(rank: usize, ranks: usize, job: &str, store: Option<(&str, &str)>) -> Command {
    let (address, token) = store.unwrap_or_default();
    unlaunched_command("place", PLACE, &[&rank.to_string(), &ranks.to_string(), job, address, token])
}

/// This test program as a rank that meets others by an id, which rank 0 makes and leaves in a file; with an address, it listens there.
pub fn identified_command(rank: usize, ranks: usize, address: &str, file: &Path) -> Command {
    let file = file.to_str().unwrap();
    unlaunched_command("identified", ID, &[&rank.to_string(), &ranks.to_string(), address, file])
}

/// This test program in a part of which a variable of its own says more, and none of a launcher's.
fn unlaunched_command(part: &str, variable: &str, words: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    forget_settings(&mut command);
    command.env(PART, part).env(variable, words.join("|")).env("PHALANX_BACKEND", "host");
    command
}

/// In a process that a test started: plays its part.
pub fn serve() -> Option<ExitCode> {
    match std::env::var(PART).ok()?.as_str() {
        "init" => init(phalanx::Comm::builder()),
        "place" => place(),
        "identified" => identified(),
        // One rank goes before the others meet it, in the first attempt.
        "init, and fail at first" => {
            let is = |name: &str, value: &str| std::env::var(name).as_deref() == Ok(value);
            if is("TORCHELASTIC_RESTART_COUNT", "0") && is("RANK", "1") {
                return Some(ExitCode::FAILURE);
            }
            init(phalanx::Comm::builder());
        }
        "member" => member(),
        part => panic!("there is no part {part}"),
    }
    Some(ExitCode::SUCCESS)
}

/// Environment and `phalanx::init()`: what it answers.
fn init(builder: phalanx::Builder) {
    let sum = || {
        let is_limited = std::env::var_os("PHALANX_TIMEOUT").is_some();
        let comm = if is_limited { builder } else { builder.timeout(PATIENCE) }.init()?;
        let mut sum = [comm.rank() as u64 + 1];
        comm.all_reduce_in_place(&mut sum, phalanx::ReduceOp::Sum)?;
        let hosts = comm.host_topology().num_hosts();
        comm.finalize()?;
        Ok::<_, phalanx::Error>(format!("sum {} on {hosts} host", sum[0]))
    };
    match sum() {
        Ok(text) => println!("{text}"),
        Err(error) => println!("error: {error}"),
    }
}

/// A rank by what the program says.
fn place() {
    let place = std::env::var(PLACE).unwrap();
    let words: Vec<&str> = place.split('|').collect();
    let [rank, ranks] = [0, 1].map(|i| words[i].parse().unwrap());
    let builder = phalanx::Comm::builder().place(rank, ranks, words[2]);
    init(if words[3].is_empty() { builder } else { builder.store(words[3], words[4]) });
}

/// A rank by an id that came in a file.
fn identified() {
    let known = std::env::var(ID).unwrap();
    let words: Vec<&str> = known.split('|').collect();
    let [rank, ranks] = [0, 1].map(|i| words[i].parse().unwrap());
    let (address, file) = (words[2], Path::new(words[3]));
    if rank == 0 {
        let id = if address.is_empty() { UniqueId::new() } else { UniqueId::listen(address) }.unwrap();
        // Whoever sees the file sees all of it.
        std::fs::write(file.with_extension("part"), id.to_bytes()).unwrap();
        std::fs::rename(file.with_extension("part"), file).unwrap();
    }
    let started = Instant::now();
    while !file.exists() && started.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    let bytes = std::fs::read(file).unwrap().try_into().unwrap();
    init(phalanx::Comm::builder().unique_id(&UniqueId::from_bytes(&bytes).unwrap(), rank, ranks));
}

/// A rank in a store, which rank 0 hosts: says when all are there, and whom it loses.
fn member() {
    let member = std::env::var(MEMBER).unwrap();
    let mut words = member.split(' ');
    let address = words.next().unwrap().to_owned();
    let mut number = || words.next().unwrap().parse::<usize>().unwrap();
    let (rank, size) = (number(), number());
    let token = Token::new("the token of this test").unwrap();
    let server = (rank == 0).then(|| Server::start(&address, token.clone(), Settings::default()).unwrap());
    let rendezvous = Rendezvous { address, token, epoch: 0, host: Host::Rank(0), encrypted: false };
    let store = Store::connect(&rendezvous, rank, size, PATIENCE).unwrap();
    let store = match server {
        Some(server) => store.hosting(server),
        None => store,
    };
    store.exchange("all", b"", PATIENCE).unwrap();
    say("ready");
    let lost = store.wait_for_loss(0, PATIENCE);
    for lost in lost {
        say(&format!("lost {}: {}", lost.rank, lost.why));
    }
    // Until it is ended, so that its own end is no news to the others.
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        std::thread::sleep(PATIENCE);
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap();
}
