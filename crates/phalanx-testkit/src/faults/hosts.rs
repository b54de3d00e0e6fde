//! Ranks of host memory on three hosts with a network, over UCX: a rank or a host is killed, a host is cut off for good or for a moment, or
//! sends slowly. Nothing hangs; who is gone is named with its host, the same for all that remain, and these go on.

use super::Case;
use crate::fault::Fault;
use crate::networked::{HOSTS, NetworkedHosts, obstacle};
use crate::processes::{Launch, World, describe, phase};
use crate::random::Random;
use crate::scenario::{Outcome, Scenario};
use crate::ucx;
use phalanx::{Comm, Error, PeerEvent, ReduceOp};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("hosts/rank", |comm, args| work(&comm, args)),
    Scenario::rank("hosts/agreeing", |comm, args| agree(&comm, args)),
    Scenario::process("hosts/rejoining", rejoin),
];

/// How long a rank may be silent.
const SILENCE: Duration = Duration::from_secs(3);
/// From the fault to the verdict: the silence, a second, and what a machine with much else to do takes.
const NAMED: Duration = Duration::from_secs(9);
/// A world that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// Set for processes that join the others.
const NEWCOMER: &str = "TESTKIT_NEWCOMER";
/// How long ranks work that nothing ends.
const WORK: Duration = Duration::from_secs(3);

/// What happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    KillRank,
    KillHost,
    KillAmidAgreements,
    CutAmidAgreements,
    Cut,
    Outage,
    Slow,
    /// Two ranks are killed, the second perhaps while the first is replaced.
    Rejoin,
}

impl Way {
    const ALL: [(Way, &'static str); 8] = [
        (Way::KillRank, "kill_rank"),
        (Way::KillHost, "kill_host"),
        (Way::KillAmidAgreements, "kill_amid_agreements"),
        (Way::CutAmidAgreements, "cut_amid_agreements"),
        (Way::Cut, "cut"),
        (Way::Outage, "outage"),
        (Way::Slow, "slow"),
        (Way::Rejoin, "rejoin"),
    ];

    /// Whether the ranks go on as if nothing had been.
    fn is_survived(self) -> bool {
        matches!(self, Way::Outage | Way::Slow)
    }

    /// Whether the ranks agree on flags meanwhile, in place of sums.
    fn is_amid_agreements(self) -> bool {
        matches!(self, Way::KillAmidAgreements | Way::CutAmidAgreements)
    }
}

/// A case of a seed.
#[derive(Debug)]
struct Plan {
    way: Way,
    /// Ranks of each host.
    sizes: [usize; HOSTS],
    elements: usize,
    host: usize,
    /// The rank that is killed: the first or the last of the host.
    rank: usize,
    /// Into the work.
    delay: Duration,
    /// A third of the silence at most: TCP may wait as long again after it.
    outage: Duration,
    /// The second rank that is killed, and how long after the first.
    second: (usize, Duration),
    /// The hosts on which new ranks come.
    newcomers: [usize; 2],
}

pub fn cases() -> Vec<Case> {
    let why_not = || ucx::missing().or_else(obstacle);
    let case = |(way, name): (Way, &str)| {
        let run = move |random: &mut Random| Plan::new(random, way).run();
        Case::seeded(format!("hosts/{name}"), run).ignored(why_not())
    };
    Way::ALL.map(case).into()
}

impl Plan {
    fn new(random: &mut Random, way: Way) -> Plan {
        let sizes = [0; HOSTS].map(|_| 1 + random.below(2));
        let host = random.below(HOSTS);
        let first: usize = sizes[..host].iter().sum();
        let rank = first + random.below(sizes[host]);
        let ranks: usize = sizes.iter().sum();
        let other = (rank + 1 + random.below(ranks - 1)) % ranks;
        Plan {
            way,
            sizes,
            elements: [1, 1000, 100_000][random.below(3)],
            host,
            rank,
            delay: Duration::from_millis(random.below(300) as u64),
            outage: Duration::from_millis(200 + random.below(800) as u64),
            second: (
                other,
                Duration::from_millis([0, random.below(40), random.below(400)][random.below(3)] as u64),
            ),
            newcomers: [random.below(HOSTS), random.below(HOSTS)],
        }
    }

    fn ranks(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// Ranks that the fault takes away.
    fn victims(&self) -> Vec<usize> {
        let first: usize = self.sizes[..self.host].iter().sum();
        match self.way {
            Way::KillRank | Way::KillAmidAgreements => vec![self.rank],
            Way::Rejoin => vec![self.rank, self.second.0],
            Way::KillHost | Way::Cut | Way::CutAmidAgreements => {
                (first..first + self.sizes[self.host]).collect()
            }
            Way::Outage | Way::Slow => Vec::new(),
        }
    }

    fn run(&self) -> Result<(), String> {
        let hosts = NetworkedHosts::get()?;
        let victims: Vec<String> = self.victims().iter().map(ToString::to_string).collect();
        let scenario = match self.way {
            Way::Rejoin => "hosts/rejoining",
            way if way.is_amid_agreements() => "hosts/agreeing",
            _ => "hosts/rank",
        };
        let launch = Launch::new(scenario, self.ranks()).on_network(hosts, self.sizes.to_vec());
        let launch = match self.way {
            Way::Rejoin => {
                let launch = launch.with_newcomers(self.newcomers.to_vec());
                [0, 1].into_iter().fold(launch, |launch, newcomer| {
                    launch.env_of(self.ranks() + newcomer, NEWCOMER, Some("1"))
                })
            }
            _ => launch,
        };
        let launch = launch.env("PHALANX_BACKEND", "ucx").deadline(PATIENCE).env("PHALANX_CORES", "1");
        let launch = launch.env("PHALANX_HEARTBEAT_TIMEOUT", &SILENCE.as_secs().to_string());
        let mut world = launch.arg(self.elements).arg(victims.join(",")).arg(self.host).start()?;
        let outcome = self.happen(hosts, &mut world);
        let healed = self.heal(hosts);
        let ended = world.finish();
        let problem = outcome.and(healed).and_then(|()| {
            let is_left = |rank: usize| !self.victims().contains(&rank);
            let left: Vec<_> = ended.iter().filter(|rank| is_left(rank.rank)).collect();
            let reports: Vec<&String> = left.iter().filter_map(|rank| rank.outcome.as_ref().ok()).collect();
            match reports.len() == left.len() && reports.iter().all(|report| *report == reports[0]) {
                true => Ok(()),
                false => Err("the ranks that are left do not report the same".to_owned()),
            }
        });
        problem.map_err(|problem| format!("{problem}: {self:?}{}", describe(&ended)))
    }

    fn happen(&self, hosts: &NetworkedHosts, world: &mut World) -> Result<(), String> {
        (0..self.ranks()).try_for_each(|rank| world.await_phase(rank, "together"))?;
        std::thread::sleep(self.delay);
        let host = self.host.to_string();
        match self.way {
            Way::KillRank | Way::KillAmidAgreements => world.inject(self.rank, Fault::Kill)?,
            Way::Rejoin => {
                world.inject(self.rank, Fault::Kill)?;
                std::thread::sleep(self.second.1);
                world.inject(self.second.0, Fault::Kill)?;
            }
            Way::KillHost => {
                hosts.perform("cut", &[&host])?;
                // It ends those with which the script came there, too.
                hosts
                    .command("run", &[&host, "kill", "-9", "-1"])
                    .output()
                    .map_err(|error| error.to_string())?;
            }
            Way::Cut | Way::CutAmidAgreements => hosts.perform("cut", &[&host])?,
            Way::Outage => {
                hosts.perform("cut", &[&host])?;
                std::thread::sleep(self.outage);
            }
            Way::Slow => hosts.perform("slow", &[&host, "100mbit"])?,
        }
        if self.way.is_survived() {
            return Ok(());
        }
        let since = Instant::now();
        let victims = self.victims();
        (0..self.ranks())
            .filter(|rank| !victims.contains(rank))
            .try_for_each(|rank| world.await_phase(rank, "named"))?;
        match since.elapsed() < NAMED {
            true => Ok(()),
            false => Err(format!("named after {:.1?}", since.elapsed())),
        }
    }

    /// Makes the network whole again. Ranks that go on over a slow link are waited for afterwards.
    fn heal(&self, hosts: &NetworkedHosts) -> Result<(), String> {
        let host = self.host.to_string();
        match self.way {
            Way::KillRank | Way::KillAmidAgreements | Way::Rejoin => Ok(()),
            Way::KillHost | Way::Cut | Way::CutAmidAgreements | Way::Outage => {
                hosts.perform("join", &[&host])
            }
            Way::Slow => {
                std::thread::sleep(WORK);
                hosts.perform("slow", &[&host, "none"])
            }
        }
    }
}

/// A rank: works until somebody is gone, or for some seconds; answers what it was told, and the sum of those that go on.
fn work(comm: &Comm, args: &[String]) -> Outcome {
    let [elements, victims, host] = args else { return Err("three arguments are needed".into()) };
    let victims: Vec<usize> = victims.split(',').filter_map(|rank| rank.parse().ok()).collect();
    let text = |error: Error| error.to_string();
    let mut data = vec![1u32; elements.parse().map_err(|_| "no number")?];
    let since = Instant::now();
    let mut is_first = true;
    let error = loop {
        data.fill(1);
        let mut is_over = [u32::from(since.elapsed() > WORK && victims.is_empty())];
        let step = comm.all_reduce_in_place(&mut data, ReduceOp::Sum);
        if let Err(error) = step.and_then(|()| comm.all_reduce_in_place(&mut is_over, ReduceOp::Max)) {
            break error;
        }
        if data.iter().any(|sum| *sum as usize != comm.world_size()) {
            return Err(format!("a wrong sum: {:?}", data.iter().max()));
        }
        if std::mem::take(&mut is_first) {
            phase("together");
        }
        if is_over == [1] {
            return comm.barrier().map(|()| "the end".to_owned()).map_err(text);
        }
    };
    phase("named");
    if victims.contains(&comm.rank()) {
        return Ok("cut off".into());
    }
    let Error::Peer(peer) = &error else { return Err(error.to_string()) };
    let topology = comm.host_topology();
    let named = topology.name_of(topology.host_of(peer.rank));
    let is_right = victims.contains(&peer.rank) && named == format!("h{host}");
    if !is_right || !matches!(peer.event, PeerEvent::Died | PeerEvent::Unreachable) {
        return Err(format!("rank {} on {named} is named: {error}", peer.rank));
    }
    let mut sum = [1u32];
    let survivors = comm.shrink().map_err(text)?;
    survivors.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
    if sum[0] as usize != comm.world_size() - victims.len() {
        return Err(format!("{} ranks go on", sum[0]));
    }
    survivors.finalize().map_err(text)?;
    Ok(format!("{:?} {}", peer.rank, peer.event))
}

/// A rank: agrees on flags until the victims are lost, and some times more; answers what it has agreed on.
fn agree(comm: &Comm, args: &[String]) -> Outcome {
    let victims: Vec<usize> = args[1].split(',').filter_map(|rank| rank.parse().ok()).collect();
    let text = |error: Error| error.to_string();
    let is_victim = victims.contains(&comm.rank());
    // In the third rounds all say yes; in the first ones no survivor does, and in the second ones no victim.
    let flag = |round: usize| round % 3 != usize::from(is_victim);
    let mut answers = String::new();
    // Second rounds without a victim.
    let mut without = 0;
    while without < 3 {
        let round = answers.len();
        let answer = match comm.agree(flag(round)) {
            Ok(answer) => answer,
            // It is cut off, and the others have gone on.
            Err(_) if is_victim => break,
            Err(error) => return Err(format!("agreement {round}: {error}")),
        };
        if answer != flag(round) && (answer || round % 3 == 2) {
            return Err(format!("agreement {round}: {answer}"));
        }
        answers.push(if answer { '1' } else { '0' });
        if round == 0 {
            phase("together");
        }
        without += usize::from(answer && round % 3 == 1);
    }
    phase("named");
    if is_victim {
        return Ok("cut off".into());
    }
    let survivors = comm.shrink().map_err(text)?;
    if survivors.world_size() != comm.world_size() - victims.len() {
        return Err(format!("{} ranks go on", survivors.world_size()));
    }
    survivors.finalize().map_err(text)?;
    Ok(answers)
}

/// A rank that works until both victims are replaced, or one that replaces a victim; answers how many ranks there are in the end.
fn rejoin(args: &[String]) -> Outcome {
    let victims: Vec<usize> = args[1].split(',').filter_map(|rank| rank.parse().ok()).collect();
    let text = |error: Error| error.to_string();
    let is_new = std::env::var_os(NEWCOMER).is_some();
    let since = Instant::now();
    let mut comm = loop {
        match if is_new { phalanx::join() } else { phalanx::init() } {
            // Another rank was lost in the meeting, and the others meet again.
            Err(Error::Bootstrap(_)) if is_new && since.elapsed() < PATIENCE / 2 => {}
            joined => break joined.map_err(text)?,
        }
    };
    let ranks: usize =
        std::env::var("PHALANX_WORLD_SIZE").ok().and_then(|size| size.parse().ok()).ok_or("no size")?;
    let is_victim = !is_new && victims.contains(&comm.rank());
    let mut is_first = true;
    // Rounds in which no victim was there.
    let mut without = 0;
    while without < 20 {
        let mut data = vec![1u32; args[0].parse().map_err(|_| "no number")?];
        let mut left = [u32::from(is_victim)];
        let both = comm.all_reduce_in_place(&mut data, ReduceOp::Sum);
        match both.and_then(|()| comm.all_reduce_in_place(&mut left, ReduceOp::Sum)) {
            Ok(()) if data.iter().any(|sum| *sum as usize != ranks) => {
                return Err(format!("a wrong sum: {:?}", data.iter().max()));
            }
            Ok(()) => without += u32::from(left == [0]),
            Err(error) if error.is_fatal() => {
                comm = comm.rebuild().map_err(|error| format!("rebuild: {error}"))?;
            }
            Err(error) => return Err(error.to_string()),
        }
        if std::mem::take(&mut is_first) && !is_new {
            phase("together");
        }
    }
    phase("named");
    let topology = comm.host_topology();
    let report = format!("{} ranks, {topology}", comm.world_size());
    comm.finalize().map_err(text)?;
    Ok(report)
}
