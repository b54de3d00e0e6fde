//! Going on after a failure, and again, and a thousand times.

use super::common::{DEADLINE, has, have_one_name};
use super::holdings::{Baseline, Holdings};
use super::{Case, Effort};
use crate::fault::{self, Fault};
use crate::fields::Fields;
use crate::processes::{Launch, describe, phase};
use crate::random::Random;
use crate::scenario::{ErrorContext, Outcome, Scenario};
use crate::{threads, verdict};
use phalanx::{Comm, Error, ReduceOp};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("shrink/healthy", |comm, _| healthy(&comm)),
    Scenario::rank("shrink/one_by_one", |comm, _| one_by_one(comm)),
    Scenario::rank("shrink/one_does_not_come", |comm, _| one_does_not_come(&comm)),
    Scenario::rank("shrink/one_is_slow", |comm, _| one_is_slow(&comm)),
    Scenario::rank("shrink/a_late_rank_comes_back", |comm, _| comes_back(&comm, Back::Late)),
    Scenario::rank("shrink/a_stopped_rank_comes_back", |comm, _| comes_back(&comm, Back::Stopped)),
    Scenario::rank("shrink/one_is_stopped", |comm, _| one_is_stopped(&comm)),
    Scenario::rank("shrink/lost_meanwhile", lost_meanwhile),
    Scenario::rank("shrink/lost_amid_agreements", lost_amid_agreements),
    Scenario::process("shrink/soak", |args| {
        let before = Holdings::now()?;
        let comm = phalanx::init().map_err(|error| error.to_string())?;
        let report = soak(comm, args)?;
        before.compare()?;
        Ok(report)
    }),
    Scenario::process("shrink/soak_of_threads", |args| {
        let before = Holdings::now()?;
        let outcomes = phalanx::run(RANKS, |comm| soak(comm, args)).map_err(|error| error.to_string())?;
        // A rank that fails leaves, and the others only say that it is gone.
        if outcomes.iter().any(Result::is_err) {
            return Err(format!("{outcomes:#?}"));
        }
        before.compare()?;
        Ok(String::new())
    }),
];

const RANKS: usize = 4;

/// How many of the scenarios, from the first, are done by threads, too.
const OF_THREADS: usize = 5;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for scenario in &SCENARIOS[..OF_THREADS] {
        let name = scenario.name;
        cases.push(Case::new(format!("threads/{name}"), || {
            let outcomes = threads::run_scenario(scenario, RANKS, &[], DEADLINE)?;
            if outcomes.iter().all(Result::is_ok) { Ok(()) } else { Err(format!("{outcomes:#?}")) }
        }));
        if cfg!(target_os = "linux") {
            cases.push(Case::new(format!("processes/{name}"), move || {
                Launch::new(name, RANKS).deadline(DEADLINE).reports().map(drop)
            }));
        }
    }
    if cfg!(target_os = "linux") {
        for (name, phase) in
            [("shrink/one_is_stopped", "shrunk"), ("shrink/a_stopped_rank_comes_back", "failed")]
        {
            cases.push(Case::new(format!("processes/{name}"), move || stop_one(name, phase)));
        }
        cases.push(Case::seeded("processes/shrink/lost_meanwhile", lose_two));
        cases.push(Case::seeded("processes/shrink/lost_amid_agreements", lose_amid_agreements));
        // Enough that what each round leaves behind is more than what may be left.
        let rounds = |effort| if effort == Effort::Full { 1000 } else { 120 };
        let launch = move |launch: Launch, effort| {
            launch.arg(rounds(effort)).deadline(4 * DEADLINE).reports().map(drop)
        };
        cases.push(Case::soak("processes/shrink/soak", move |effort| {
            launch(Launch::new("shrink/soak", RANKS), effort)
        }));
        cases.push(Case::soak("threads/shrink/soak", move |effort| {
            launch(Launch::alone("shrink/soak_of_threads"), effort)
        }));
    }
    cases
}

fn text(error: Error) -> String {
    error.to_string()
}

fn works(comm: &Comm, len: usize) -> phalanx::Result<()> {
    have_one_name(comm)?;
    let mut ones = vec![1u32; len];
    comm.all_reduce_in_place(&mut ones, ReduceOp::Sum)?;
    assert!(ones.iter().all(|one| *one == comm.world_size() as u32), "a wrong sum");
    Ok(())
}

/// Nobody is missing: it is the same world again, and the old one works on.
fn healthy(comm: &Comm) -> Outcome {
    let again = comm.shrink().map_err(text)?;
    if (again.rank(), again.world_size()) != (comm.rank(), comm.world_size()) {
        return Err(format!("{again:?} of {comm:?}"));
    }
    let third = again.shrink().map_err(text)?;
    for comm in [comm, &again, &third] {
        works(comm, 10_000).map_err(text)?;
    }
    let fourth = comm.shrink().map_err(text)?;
    works(&fourth, 10).map_err(text)?;
    Ok(String::new())
}

/// The last rank leaves, the others go on, until one is alone.
fn one_by_one(mut comm: Comm) -> Outcome {
    let mut buffer = comm.alloc::<u32>(100_000).map_err(text)?;
    loop {
        let ranks = comm.world_size();
        buffer.fill(1);
        comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum).map_err(text)?;
        if buffer.iter().any(|sum| *sum != ranks as u32) {
            return Err(format!("a wrong sum of {ranks} ranks"));
        }
        if comm.rank() == ranks - 1 {
            return Ok(String::new());
        }
        match comm.barrier() {
            Err(Error::Peer(error)) if error.rank == ranks - 1 => {}
            other => return Err(format!("after rank {} has left: {other:?}", ranks - 1)),
        }
        let next = comm.shrink().map_err(text)?;
        if (next.rank(), next.world_size()) != (comm.rank(), ranks - 1) {
            return Err(format!("{next:?} of {comm:?}"));
        }
        comm = next;
    }
}

/// A rank that does something else while the others shrink is left behind, and told so.
fn one_does_not_come(comm: &Comm) -> Outcome {
    const TIMEOUT: Duration = Duration::from_millis(400);
    comm.set_timeout(TIMEOUT);
    works(comm, 10).map_err(text)?;
    if comm.rank() == 1 {
        std::thread::sleep(3 * TIMEOUT);
        let fields = verdict::expected(comm.barrier(), "barrier of the one that did not come")?;
        has(&fields, "kind", "timeout")?;
        has(&fields, "missing", 1)?;
        let fields = verdict::expected(comm.shrink().map(drop), "shrink of the one that did not come")?;
        has(&fields, "kind", "left behind")?;
        return Ok(String::new());
    }
    let since = Instant::now();
    let rest = comm.shrink().map_err(text)?;
    if since.elapsed() > TIMEOUT + Duration::from_secs(1) {
        return Err(format!("shrink took {:?}", since.elapsed()));
    }
    if rest.world_size() != comm.world_size() - 1 {
        return Err(format!("{rest:?}"));
    }
    works(&rest, 1000).map_err(text)?;
    Ok(String::new())
}

/// A rank that is late, but within the deadline, is waited for.
fn one_is_slow(comm: &Comm) -> Outcome {
    const TIMEOUT: Duration = Duration::from_secs(4);
    comm.set_timeout(TIMEOUT);
    works(comm, 10).map_err(text)?;
    if comm.rank() == 1 {
        std::thread::sleep(TIMEOUT / 4);
    }
    let all = comm.shrink().map_err(text)?;
    if all.world_size() != comm.world_size() {
        return Err(format!("{all:?} of {comm:?}"));
    }
    works(&all, 1000).map_err(text)?;
    Ok(String::new())
}

/// Why a rank was not there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Back {
    Late,
    Stopped,
}

/// A rank that the failure names is back before the others shrink. It is left out all the same: the others' state is ahead of its own.
fn comes_back(comm: &Comm, way: Back) -> Outcome {
    const TIMEOUT: Duration = Duration::from_millis(400);
    works(comm, 10).map_err(text)?;
    comm.set_timeout(if way == Back::Late { TIMEOUT } else { DEADLINE / 2 });
    if comm.rank() == 1 {
        match way {
            Back::Late => std::thread::sleep(2 * TIMEOUT),
            Back::Stopped => fault::inject_here(Fault::Stop).map_err(|error| error.to_string())?,
        }
    }
    let fields = verdict::expected(comm.barrier(), "barrier without one")?;
    match way {
        Back::Late => has(&fields, "missing", 1)?,
        Back::Stopped => has(&fields, "rank", 1).and_then(|()| has(&fields, "event", "Stopped"))?,
    }
    if comm.rank() == 1 {
        let fields = verdict::expected(comm.shrink().map(drop), "shrink of the one that came back")?;
        has(&fields, "kind", "left behind")?;
        return Ok(String::new());
    }
    phase("failed");
    std::thread::sleep(3 * TIMEOUT);
    let since = Instant::now();
    let rest = comm.within(DEADLINE / 2).shrink().map_err(text)?;
    if rest.world_size() != comm.world_size() - 1 || since.elapsed() > Duration::from_secs(2) {
        return Err(format!("after {:?}: {rest:?}", since.elapsed()));
    }
    works(&rest, 1000).map_err(text)?;
    Ok(String::new())
}

/// A rank that is stopped while the others shrink, and that no failure names, is left behind before the deadline.
fn one_is_stopped(comm: &Comm) -> Outcome {
    works(comm, 10).map_err(text)?;
    if comm.rank() == 1 {
        fault::inject_here(Fault::Stop).map_err(|error| error.to_string())?;
        let fields = verdict::expected(comm.shrink().map(drop), "shrink of the one that was stopped")?;
        has(&fields, "kind", "left behind")?;
        return Ok(String::new());
    }
    let since = Instant::now();
    let rest = comm.shrink().map_err(text)?;
    let took = since.elapsed();
    if rest.world_size() != comm.world_size() - 1 || took > Duration::from_secs(3) {
        return Err(format!("after {took:?}: {rest:?}"));
    }
    works(&rest, 1000).map_err(text)?;
    phase("shrunk");
    Ok(String::new())
}

/// Rank 1, which is stopped, goes on when the others are in this phase.
fn stop_one(scenario: &str, phase: &str) -> Result<(), String> {
    let mut world = Launch::new(scenario, RANKS).deadline(DEADLINE).start()?;
    (0..RANKS).filter(|rank| *rank != 1).try_for_each(|rank| world.await_phase(rank, phase))?;
    world.inject(1, Fault::Continue)?;
    let ended = world.finish();
    if ended.iter().all(|rank| rank.outcome.is_ok()) { Ok(()) } else { Err(describe(&ended)) }
}

/// The first victim dies and the rest shrinks; the second dies meanwhile. Arguments: after how many
/// microseconds.
fn lost_meanwhile(comm: Comm, args: &[String]) -> Outcome {
    let ranks = comm.world_size();
    comm.set_timeout(Duration::from_secs(2));
    works(&comm, 1000).map_err(text)?;
    let delay = Duration::from_micros(args[0].parse().map_err(|_| "no delay")?);
    match comm.rank() {
        1 => {
            let _ = fault::inject_here(Fault::Kill);
        }
        2 => {
            std::thread::spawn(move || {
                std::thread::sleep(delay);
                let _ = fault::inject_here(Fault::Kill);
            });
        }
        _ => {}
    }
    let verdict = loop {
        if let Err(error) = works(&comm, 1000) {
            break verdict::fields(&error);
        }
    };
    let mut rest = comm.shrink().map_err(text)?;
    drop(comm);
    // The second goes while it shrinks, before or behind.
    let since = Instant::now();
    loop {
        if since.elapsed() > DEADLINE / 2 {
            return Err(format!("the second is not gone: {rest:?}"));
        }
        // All go on until all say that it is enough, so that nobody leaves early.
        let enough = rest.world_size() == ranks - 2 && since.elapsed() > delay + Duration::from_millis(100);
        let mut enough = [u8::from(enough)];
        match works(&rest, 3000).and_then(|()| rest.all_reduce_in_place(&mut enough, ReduceOp::Min)) {
            Ok(()) if enough == [1] => break,
            Ok(()) => {}
            Err(_) => rest = rest.shrink().context(|| "shrink again".into())?,
        }
    }
    Ok(verdict.with("rest", rest.world_size()).to_string())
}

fn lose_two(random: &mut Random) -> Result<(), String> {
    let delay = random.below([500, 20_000, 120_000][random.clone().below(3)]);
    let ended = Launch::new("shrink/lost_meanwhile", 5).arg(delay).deadline(DEADLINE).run()?;
    for rank in ended.iter().filter(|rank| ![1, 2].contains(&rank.rank)) {
        let told = || -> Result<(), String> {
            let fields = Fields::parse(rank.outcome.as_ref()?).ok_or("not a report")?;
            has(&fields, "rest", 3)?;
            has(&fields, "event", "Died")
        };
        told().map_err(|problem| format!("{problem}, delay {delay} µs:{}", describe(&ended)))?;
    }
    Ok(())
}

/// Ranks that are killed in the middle of agreements, each after so many microseconds (arguments: from rank 1 on). The others answer what
/// they agreed on, which is what their own flags allow.
fn lost_amid_agreements(comm: Comm, args: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    comm.set_timeout(DEADLINE / 4);
    works(&comm, 10).map_err(text)?;
    let delays = args.iter().map(|delay| delay.parse().map(Duration::from_micros));
    let delays: Vec<Duration> = delays.collect::<Result<_, _>>().map_err(|_| "no delay")?;
    let is_victim = (1..=delays.len()).contains(&rank);
    if is_victim {
        let delay = delays[rank - 1];
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            let _ = fault::inject_here(Fault::Kill);
        });
    }
    let last = *delays.iter().max().ok_or("no victims")? + Duration::from_millis(50);
    let (since, mut answers) = (Instant::now(), String::new());
    // In the third rounds all say yes; in the first ones no survivor does, and in the second ones no victim.
    let flag = |round: usize| round % 3 != usize::from(is_victim);
    loop {
        let round = answers.len();
        let answer = comm.agree(flag(round)).context(|| format!("agreement {round}"))?;
        if answer != flag(round) && (answer || round % 3 == 2) {
            return Err(format!("agreement {round}: {answer}"));
        }
        answers.push(if answer { '1' } else { '0' });
        // That it is enough is agreed on, too, when the victims are gone.
        if comm.agree(!is_victim && since.elapsed() > last).context(|| format!("the end after {round}"))? {
            break;
        }
    }
    let rest = comm.shrink().map_err(text)?;
    if rest.world_size() != ranks - delays.len() {
        return Err(format!("{rest:?} of {comm:?}"));
    }
    works(&rest, 1000).map_err(text)?;
    Ok(answers)
}

fn lose_amid_agreements(random: &mut Random) -> Result<(), String> {
    let ranks = 3 + random.below(4);
    let victims = 1 + random.below(ranks - 2);
    let launch = Launch::new("shrink/lost_amid_agreements", ranks).deadline(DEADLINE);
    // At about the same moment, or one after the other.
    let longest = [300, 3000, 60_000][random.below(3)];
    let launch = (0..victims).fold(launch, |launch, _| launch.arg(random.below(longest)));
    let ended = launch.run()?;
    let left = ended.iter().filter(|rank| !(1..=victims).contains(&rank.rank));
    let answers: Vec<&String> = left.filter_map(|rank| rank.outcome.as_ref().ok()).collect();
    let is_right = answers.len() == ranks - victims && answers.iter().all(|other| *other == answers[0]);
    // Second and third rounds of survivors alone.
    match is_right && answers[0].contains("11") {
        true => Ok(()),
        false => Err(format!("{victims} victims, up to {longest} µs:{}", describe(&ended))),
    }
}

/// Again and again a new communicator takes the old one's place, healthy or failed; nothing grows.
fn soak(comm: Comm, args: &[String]) -> Outcome {
    const WARM: usize = 20;
    let rounds: usize = args[0].parse().map_err(|_| "no number of rounds")?;
    let mut comm = comm;
    let mut start = None;
    for round in 0..rounds {
        if round == WARM {
            comm.barrier().map_err(text)?;
            start = Some(Baseline::now()?);
            comm.barrier().map_err(text)?;
        }
        if round % 2 == 1 {
            // A failure that everybody survives.
            let len = 100 + usize::from(comm.rank() == round % comm.world_size());
            match comm.all_reduce_in_place(&mut vec![1u8; len], ReduceOp::Sum) {
                Err(Error::Mismatch(_)) => {}
                other => return Err(format!("round {round}: {other:?}")),
            }
        }
        let next = comm.shrink().context(|| format!("round {round}"))?;
        if next.world_size() != comm.world_size() {
            return Err(format!("round {round}: {next:?} of {comm:?}"));
        }
        let mut shared = next.alloc::<u32>(70_000).map_err(text)?;
        shared.fill(1);
        next.all_reduce_in_place(&mut shared, ReduceOp::Sum).context(|| format!("round {round}"))?;
        works(&next, [3, 2000, 30_000][round % 3]).context(|| format!("round {round}"))?;
        comm = next;
    }
    comm.barrier().map_err(text)?;
    if let Some(start) = start {
        start.compare().context(|| format!("after {rounds} rounds"))?;
    }
    comm.barrier().map_err(text)?;
    phase("soaked");
    comm.finalize().map_err(text)?;
    Ok(String::new())
}
