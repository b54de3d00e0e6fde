//! New ranks: those who come, those who do not, those who come too late, and a thousand of them.

use super::common::{DEADLINE, Ground, has, says};
use super::holdings::Baseline;
use super::{Backend, Case, Effort};
use crate::fault::{self, Fault};
use crate::processes::{Ended, Launch, describe, phase};
use crate::scenario::{ErrorContext, Outcome, Scenario};
use crate::{Fields, verdict};
use phalanx::{Comm, Error, ReduceOp};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("grow/part", |args| part(&args[0])),
    Scenario::rank("grow/nobody_comes", |comm, _| nobody_comes(&comm)),
    Scenario::rank("grow/different_numbers", |comm, _| different_numbers(&comm)),
    Scenario::process("grow/soak", soak),
];

/// Ranks at first; the processes after them join.
const MEMBERS: usize = 3;
/// How many are to join.
const JOINERS: usize = 2;

/// How long those wait who are not wanted.
const PATIENCE: Duration = Duration::from_secs(2);

pub fn cases(backend: Backend) -> Vec<Case> {
    if !cfg!(target_os = "linux") {
        return Vec::new();
    }
    let on = move |launch: Launch| -> Result<Vec<Ended>, String> {
        Ground::new(backend)?.launch(launch.deadline(DEADLINE)).run()
    };
    let mut cases = vec![
        Case::new("processes/grow/joiners", move || all_well(on(world(MEMBERS + JOINERS, "come"))?)),
        Case::new("processes/grow/nobody_comes", move || all_well(on(Launch::new("grow/nobody_comes", 3))?)),
        Case::new("processes/grow/different_numbers", move || {
            all_well(on(Launch::new("grow/different_numbers", 3))?)
        }),
        Case::new("processes/grow/one_too_many", move || {
            one_too_many(on(world(MEMBERS + JOINERS + 1, "come"))?)
        }),
        Case::new("processes/grow/of_another_attempt", move || {
            let last = MEMBERS + JOINERS;
            of_another_attempt(on(world(last + 1, "come").env_of(last, "PHALANX_JOB", Some("of before")))?)
        }),
        Case::seeded("processes/grow/joiner_dies", move |random| {
            joiner_dies(on(world(MEMBERS + JOINERS, &format!("die {}", random.below(8000))))?)
        }),
    ];
    cases.push(Case::soak("processes/grow/soak", move |effort| {
        let rounds = match (effort, backend) {
            (Effort::Short, _) => 25,
            (Effort::Full, Backend::Host) => 1000,
            // Making a communicator of a library takes its time.
            (Effort::Full, _) => 60,
        };
        let launch = Launch::new("grow/soak", 3).arg(rounds).deadline(10 * DEADLINE);
        Ground::new(backend)?.launch(launch).reports().map(drop)
    }));
    cases
}

/// The members, and others who join.
fn world(processes: usize, what: &str) -> Launch {
    let launch = Launch::new("grow/part", processes).arg(what);
    let members = MEMBERS.to_string();
    (0..MEMBERS).fold(launch, |launch, rank| {
        let launch = launch.env_of(rank, "PHALANX_WORLD_SIZE", Some(&members));
        launch.env_of(rank, "PHALANX_LOCAL_WORLD_SIZE", Some(&members))
    })
}

fn text(error: Error) -> String {
    error.to_string()
}

fn works(comm: &Comm) -> Result<(), String> {
    let mut ones = vec![1u32; 20_000];
    comm.all_reduce_in_place(&mut ones, ReduceOp::Sum).map_err(text)?;
    let right = ones.iter().all(|one| *one == comm.world_size() as u32);
    if right { Ok(()) } else { Err("a wrong sum".into()) }
}

/// A member, or somebody who joins.
fn part(what: &str) -> Outcome {
    let number: usize = std::env::var("PHALANX_RANK").ok().and_then(|r| r.parse().ok()).ok_or("no rank")?;
    let delay = what.strip_prefix("die ").and_then(|delay| delay.parse().ok()).map(Duration::from_micros);
    if number < MEMBERS {
        return member(delay.is_some());
    }
    if let Some(delay) = delay.filter(|_| number == MEMBERS) {
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            let _ = fault::inject_here(Fault::Kill);
        });
    }
    if delay.is_none() {
        // One after the other: they get their numbers in this order.
        std::thread::sleep(PATIENCE / 6 * (number - MEMBERS) as u32);
    }
    let wanted = number < MEMBERS + JOINERS;
    let builder = Comm::builder().timeout(if wanted { 3 * PATIENCE } else { PATIENCE });
    match builder.join() {
        Ok(comm) if delay.is_some() => go_on_without(comm),
        Ok(comm) if comm.rank() != number => {
            Err(format!("joiner {} is rank {}", number - MEMBERS, comm.rank()))
        }
        Ok(comm) => {
            let fields = Fields::new().with("rank", comm.rank()).with("ranks", comm.world_size());
            works(&comm)?;
            comm.finalize().map_err(text)?;
            Ok(fields.to_string())
        }
        Err(error) => Ok(verdict::fields(&error).to_string()),
    }
}

fn member(one_dies: bool) -> Outcome {
    let comm = phalanx::init().map_err(text)?;
    works(&comm)?;
    // It may die before it has come, and then nobody else does.
    let grown = comm.within(2 * PATIENCE).grow(JOINERS);
    match grown {
        Ok(grown) if one_dies => go_on_without(grown),
        Ok(grown) => {
            if (grown.rank(), grown.world_size()) != (comm.rank(), MEMBERS + JOINERS) {
                return Err(format!("{grown:?} of {comm:?}"));
            }
            works(&grown)?;
            // Both are there.
            works(&comm)?;
            grown.finalize().map_err(text)?;
            comm.finalize().map_err(text)?;
            Ok(Fields::new().with("kind", "grown").to_string())
        }
        Err(error) if one_dies => {
            works(&comm)?;
            Ok(verdict::fields(&error).to_string())
        }
        Err(error) => Err(error.to_string()),
    }
}

/// The rank that joined dies, or has died: the others go on.
fn go_on_without(comm: Comm) -> Outcome {
    let ranks = comm.world_size();
    let since = Instant::now();
    while since.elapsed() < DEADLINE / 2 {
        if works(&comm).is_err() {
            let rest = comm.shrink().map_err(text)?;
            works(&rest)?;
            let fields = Fields::new().with("kind", "shrunk").with("lost", ranks - rest.world_size());
            rest.finalize().map_err(text)?;
            return Ok(fields.to_string());
        }
    }
    Err("nobody died".into())
}

fn all_well(ended: Vec<Ended>) -> Result<(), String> {
    if ended.iter().all(|rank| rank.outcome.is_ok()) { Ok(()) } else { Err(describe(&ended)) }
}

/// The report of the last, who is not wanted; the others must be well.
fn unwanted(ended: Vec<Ended>) -> Result<Fields, String> {
    let reports: Option<Vec<Fields>> =
        ended.iter().map(|rank| Fields::parse(rank.outcome.as_ref().ok()?)).collect();
    let reports = reports.ok_or_else(|| describe(&ended))?;
    if reports[MEMBERS..MEMBERS + JOINERS].iter().any(|fields| fields.get("rank").is_none()) {
        return Err(describe(&ended));
    }
    Ok(reports[MEMBERS + JOINERS].clone())
}

/// Who comes when all have come is told.
fn one_too_many(ended: Vec<Ended>) -> Result<(), String> {
    let fields = unwanted(ended)?;
    has(&fields, "kind", "bootstrap")?;
    says(&fields, "text", "joiners")
}

/// A process of another attempt of the job does not meet this one's ranks.
fn of_another_attempt(ended: Vec<Ended>) -> Result<(), String> {
    let fields = unwanted(ended)?;
    has(&fields, "kind", "bootstrap")?;
    says(&fields, "text", "no communicator of this job has asked for joiners")
}

/// Before it has come the meeting fails, and its members work on; afterwards it is a rank that died.
fn joiner_dies(ended: Vec<Ended>) -> Result<(), String> {
    let told = |rank: &Ended| -> Result<(), String> {
        let fields = Fields::parse(rank.outcome.as_ref()?).ok_or("not a report")?;
        if fields.get("kind") == Some("shrunk") {
            has(&fields, "lost", 1)
        } else {
            has(&fields, "kind", "bootstrap")
        }
    };
    let others = ended.iter().filter(|rank| rank.rank != MEMBERS);
    others.clone().try_for_each(told).map_err(|problem| format!("{problem}:{}", describe(&ended)))
}

/// The error names who is missing, in time, and the communicator works on.
fn nobody_comes(comm: &Comm) -> Outcome {
    works(comm)?;
    let since = Instant::now();
    let limit = Duration::from_millis(600);
    let fields = verdict::expected(comm.within(limit).grow(2), "growing without joiners")?;
    has(&fields, "kind", "bootstrap")?;
    has(&fields, "missing", "3,4")?;
    if since.elapsed() > limit + Duration::from_secs(1) {
        return Err(format!("it took {:?}", since.elapsed()));
    }
    works(comm)?;
    Ok(String::new())
}

fn different_numbers(comm: &Comm) -> Outcome {
    works(comm)?;
    let fields = verdict::expected(comm.grow(1 + comm.rank() / 2), "growing by different numbers")?;
    has(&fields, "kind", "mismatch")?;
    has(&fields, "ours", "grow(by 1)")?;
    has(&fields, "theirs", "grow(by 2)")?;
    Ok(String::new())
}

/// Again and again the first rank leaves, the others rebuild, and it joins them as the last; nothing grows.
fn soak(args: &[String]) -> Outcome {
    const WARM: usize = 12;
    let rounds: usize = args[0].parse().map_err(|_| "no number of rounds")?;
    let mut comm = phalanx::init().map_err(text)?;
    let ranks = comm.world_size();
    let mut start = None;
    for round in 0..rounds {
        works(&comm).context(|| format!("round {round}"))?;
        comm = if comm.rank() == 0 {
            drop(comm);
            phalanx::join().context(|| format!("round {round}: join"))?
        } else {
            let within = DEADLINE.min(comm.timeout() / 2);
            let rebuilt = comm.within(within).rebuild().context(|| format!("round {round}: rebuild"))?;
            if rebuilt.timeout() != comm.timeout() {
                return Err(format!("round {round}: the new timeout is {:?}", rebuilt.timeout()));
            }
            rebuilt
        };
        if comm.world_size() != ranks {
            return Err(format!("round {round}: {comm:?}"));
        }
        // At the same place of the cycle, so that what was of use here is of use there.
        if round >= WARM && start.is_none() && comm.rank() == 0 {
            start = Some(Baseline::now()?);
        }
    }
    comm.barrier().map_err(text)?;
    if let Some(start) = start {
        start.compare().context(|| format!("after {rounds} rounds"))?;
    }
    phase("soaked");
    comm.finalize().map_err(text)?;
    Ok(String::new())
}
