//! This test program as a rank.

use super::common::forget_settings;
use phalanx::UniqueId;
use phalanx::internal::store::{Host, Rendezvous, Server, Settings, Store, Token};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// The variable with the role of a process.
pub const PART: &str = "NODES_TEST_PART";
/// For the role `member`: the store's address, this rank, and the number of ranks.
const MEMBER: &str = "NODES_TEST_MEMBER";
/// For the role `member`: seconds that a member may be silent, if not the default.
pub const SILENCE: &str = "NODES_TEST_SILENCE";
/// For the role `place`: the rank's place, see [`placed_command`].
const PLACE: &str = "NODES_TEST_PLACE";
/// For the role `identified`: rank and file of the id, see [`identified_command`].
const ID: &str = "NODES_TEST_ID";
/// For the role `loop, and rebuild`: the file whose presence ends the loop.
pub const END: &str = "NODES_TEST_END";
/// For the role `checkpoint`: the file.
pub const CHECKPOINT: &str = "NODES_TEST_CHECKPOINT";
/// The timeout of successful tests: longer than any of their waits.
const TIMEOUT: Duration = Duration::from_secs(30);

/// This test program as a rank in a store.
pub fn member_command(address: &str, rank: usize, size: usize) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(PART, "member").env(MEMBER, format!("{address} {rank} {size}")).env(SILENCE, "1.4");
    command
}

/// This test program as a rank without a launcher, with its rank, number of ranks, job, and address and token of a store.
pub fn placed_command(rank: usize, ranks: usize, job: &str, store: Option<(&str, &str)>) -> Command {
    let (address, token) = store.unwrap_or_default();
    unlaunched_command("place", PLACE, &[&rank.to_string(), &ranks.to_string(), job, address, token])
}

/// This test program as a rank that joins others by an id. Rank 0 makes the id and writes it to a file; with an address, it
/// listens there.
pub fn identified_command(rank: usize, ranks: usize, address: &str, file: &Path) -> Command {
    let file = file.to_str().unwrap();
    unlaunched_command("identified", ID, &[&rank.to_string(), &ranks.to_string(), address, file])
}

/// This test program in a role, with the role's variable and without those of launchers.
fn unlaunched_command(part: &str, variable: &str, words: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    forget_settings(&mut command);
    command.env(PART, part).env(variable, words.join("|")).env("PHALANX_BACKEND", "host");
    command
}

/// In a process that a test started: runs its role.
pub fn serve() -> Option<ExitCode> {
    match std::env::var(PART).ok()?.as_str() {
        "init" => init(phalanx::Comm::builder()),
        "place" => place(),
        "identified" => identified(),
        // In the first attempt a rank ends before it joins the others.
        "init, and fail at first" => {
            let is = |name: &str, value: &str| std::env::var(name).as_deref() == Ok(value);
            if is("TORCHELASTIC_RESTART_COUNT", "0") && is("RANK", "1") {
                return Some(ExitCode::FAILURE);
            }
            init(phalanx::Comm::builder());
        }
        "loop" => run_loop(None, false),
        "loop for 6 s" => run_loop(Some(Duration::from_secs(6)), false),
        "loop, and shrink" => run_loop(None, true),
        "loop, and rebuild" => rebuild_loop(),
        "checkpoint" => work_from_checkpoint(),
        "member" => member(),
        part => panic!("there is no part {part}"),
    }
    Some(ExitCode::SUCCESS)
}

/// A rank by `phalanx::init()`: prints the sum of all ranks' numbers, or the error.
fn init(builder: phalanx::Builder) {
    let sum = || {
        let is_limited = std::env::var_os("PHALANX_TIMEOUT").is_some();
        let comm = if is_limited { builder } else { builder.timeout(TIMEOUT) }.init()?;
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

/// A rank that works with the others until one of them has worked for so long, or until something is wrong.
fn run_loop(limit: Option<Duration>, shrinks: bool) {
    let comm = phalanx::Comm::builder().timeout(TIMEOUT).init().unwrap();
    let (started, mut first) = (Instant::now(), true);
    let mut data = vec![1f32; 50_000];
    let error = loop {
        let mut is_over = [u32::from(limit.is_some_and(|limit| started.elapsed() > limit))];
        let both = comm.all_reduce_in_place(&mut data, phalanx::ReduceOp::Max);
        if let Err(error) = both.and_then(|()| comm.all_reduce_in_place(&mut is_over, phalanx::ReduceOp::Max))
        {
            break error;
        }
        if std::mem::take(&mut first) {
            println!("looping {}", std::process::id());
        }
        if is_over == [1] {
            comm.finalize().unwrap();
            return println!("the loop has ended");
        }
    };
    println!("error: {error}");
    if !shrinks {
        std::process::exit(1);
    }
    let mut sum = [1u32];
    let shrunk = comm.shrink().and_then(|shrunk| {
        shrunk.all_reduce_in_place(&mut sum, phalanx::ReduceOp::Sum)?;
        Ok(shrunk)
    });
    match shrunk {
        Ok(shrunk) => println!("{} go on with the sum {}", shrunk.world_size(), sum[0]),
        Err(error) => println!("shrink: {error}"),
    }
}

/// A rank that works with the others until there is the file of [`END`]. Lost ranks are replaced.
fn rebuild_loop() {
    let end = std::env::var(END).unwrap();
    let mut comm = phalanx::Comm::builder().timeout(TIMEOUT).init().unwrap();
    loop {
        say(&format!(
            "{} ranks on {} hosts, process {}",
            comm.world_size(),
            comm.host_topology().num_hosts(),
            std::process::id()
        ));
        let error = loop {
            let mut sums = vec![1u32; 50_000];
            // The last says whether a rank has seen the file.
            sums[49_999] = u32::from(comm.rank() == 0 && Path::new(&end).exists());
            if let Err(error) = comm.all_reduce_in_place(&mut sums, phalanx::ReduceOp::Sum) {
                break error;
            }
            assert!(sums[..49_999].iter().all(|sum| *sum as usize == comm.world_size()));
            if sums[49_999] == 1 {
                comm.finalize().unwrap();
                return say("the loop has ended");
            }
        };
        say(&format!("error: {error}"));
        comm = match comm.rebuild() {
            Ok(comm) => comm,
            Err(error) => {
                say(&format!("rebuild: {error}"));
                std::process::exit(1);
            }
        };
    }
}

/// A rank that works twenty steps, from the checkpoint on if there is one. In the job's first attempt rank 1 is killed after the tenth.
fn work_from_checkpoint() {
    let file = std::env::var(CHECKPOINT).unwrap();
    let comm = phalanx::Comm::builder().timeout(TIMEOUT).init().unwrap();
    let is_first = std::env::var_os("SLURM_RESTART_COUNT").is_none();
    let mut from = [std::fs::read_to_string(&file).map_or(0, |text| text.parse::<u32>().unwrap())];
    comm.broadcast_in_place(&mut from, 0).unwrap();
    let mut sum = [0u32];
    for step in from[0]..20 {
        sum = [comm.rank() as u32 + 1];
        comm.all_reduce_in_place(&mut sum, phalanx::ReduceOp::Sum).unwrap();
        if comm.rank() == 0 {
            std::fs::write(format!("{file}.part"), (step + 1).to_string()).unwrap();
            std::fs::rename(format!("{file}.part"), &file).unwrap();
        }
        comm.barrier().unwrap();
        if is_first && step + 1 == 10 && comm.rank() == 1 {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        }
    }
    comm.finalize().unwrap();
    say(&format!("worked from step {} to 20, sum {}", from[0], sum[0]));
}

/// A rank by `Builder::place`.
fn place() {
    let place = std::env::var(PLACE).unwrap();
    let words: Vec<&str> = place.split('|').collect();
    let [rank, ranks] = [0, 1].map(|i| words[i].parse().unwrap());
    let builder = phalanx::Comm::builder().place(rank, ranks, words[2]);
    init(if words[3].is_empty() { builder } else { builder.store(words[3], words[4]) });
}

/// A rank by an id in a file.
fn identified() {
    let known = std::env::var(ID).unwrap();
    let words: Vec<&str> = known.split('|').collect();
    let [rank, ranks] = [0, 1].map(|i| words[i].parse().unwrap());
    let (address, file) = (words[2], Path::new(words[3]));
    if rank == 0 {
        let id = if address.is_empty() { UniqueId::new() } else { UniqueId::listen(address) }.unwrap();
        // The file is complete as soon as it has its name.
        std::fs::write(file.with_extension("part"), id.to_bytes()).unwrap();
        std::fs::rename(file.with_extension("part"), file).unwrap();
    }
    let started = Instant::now();
    while !file.exists() && started.elapsed() < TIMEOUT {
        std::thread::sleep(Duration::from_millis(10));
    }
    let bytes = std::fs::read(file).unwrap().try_into().unwrap();
    init(phalanx::Comm::builder().unique_id(&UniqueId::from_bytes(&bytes).unwrap(), rank, ranks));
}

/// A rank in a store, which rank 0 hosts: prints when all have joined, and which ranks it loses.
fn member() {
    let member = std::env::var(MEMBER).unwrap();
    let mut words = member.split(' ');
    let address = words.next().unwrap().to_owned();
    let mut number = || words.next().unwrap().parse::<usize>().unwrap();
    let (rank, size) = (number(), number());
    let token = Token::new("the token of this test").unwrap();
    let seconds = std::env::var(SILENCE).ok();
    let silence =
        seconds.map_or(Settings::default().silence, |s| Duration::from_secs_f64(s.parse().unwrap()));
    let settings = Settings { silence, ..Settings::default() };
    let server = (rank == 0).then(|| Server::start(&address, token.clone(), settings).unwrap());
    let rendezvous =
        Rendezvous { address, token, job: String::new(), epoch: 0, host: Host::Rank(0), encrypted: false };
    let store = Store::connect(&rendezvous, rank, size, TIMEOUT).unwrap();
    let store = match server {
        Some(server) => store.hosting(server),
        None => store,
    };
    store.exchange("all", b"", TIMEOUT).unwrap();
    say("ready");
    let lost = store.wait_for_loss(0, TIMEOUT);
    for lost in lost {
        say(&format!("lost {}: {}", lost.rank, lost.why));
    }
    // The others must not lose this rank before the test ends it.
    let started = Instant::now();
    while started.elapsed() < TIMEOUT {
        std::thread::sleep(TIMEOUT);
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap();
}
