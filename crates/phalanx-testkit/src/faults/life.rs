//! Lives with a fault in them: ranks that do a random program, and one that goes in some way at a random moment.
//!
//! A [`Plan`] follows from a seed, so that every rank knows it and a run can be done again. The rank that something
//! happens to does it to itself, before a step of the program or at any moment during it; the others must get one
//! verdict that names it, in time, with right data in everything that succeeded before, go on without it, and leave
//! nothing behind.

use super::Case;
use super::common::{self, one_verdict};
use super::holdings::{self, Holdings};
use crate::fault::{self, Fault};
use crate::fields::Fields;
use crate::processes::{Ended, Launch, describe, phase};
use crate::program::{self, Problem};
use crate::random::Random;
use crate::scenario::{Outcome, Scenario};
use crate::verdict;
use phalanx::{Comm, Error, ReduceOp};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("life/rank", |args| process_rank(&Plan::of(args)?)),
    Scenario::process("life/threads", |args| thread_ranks(&Plan::of(args)?)),
];

/// The communicators' deadline.
const TIMEOUT: Duration = Duration::from_secs(1);
/// What the issue allows beyond it.
const GRACE: Duration = Duration::from_secs(1);
/// Who is gone is noticed at once, whatever the deadline; this much is for a machine with much else to do.
const NOTICED: Duration = Duration::from_secs(2);
/// A world that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(40);

/// How a rank goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Kill,
    Stop,
    Exit,
    Panic,
    Leave,
    Abort,
    Late,
}

impl Way {
    const ALL: [(Way, &'static str); 7] = [
        (Way::Kill, "kill"),
        (Way::Stop, "stop"),
        (Way::Exit, "exit"),
        (Way::Panic, "panic"),
        (Way::Leave, "leave"),
        (Way::Abort, "abort"),
        (Way::Late, "late"),
    ];

    fn name(self) -> &'static str {
        Way::ALL[self as usize].1
    }

    /// Whether it happens to a whole process, and so at any moment.
    fn is_of_process(self) -> bool {
        matches!(self, Way::Kill | Way::Stop | Way::Exit)
    }

    /// Whether the rank is there again, too late.
    fn comes_back(self) -> bool {
        matches!(self, Way::Stop | Way::Late)
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (way, name) in Way::ALL {
        if cfg!(target_os = "linux") {
            cases.push(Case::seeded(format!("processes/life/{name}"), move |random| {
                on_processes(&Plan::new(random.next_u64(), way, true))
            }));
        }
        if cfg!(target_os = "linux") && !way.is_of_process() {
            cases.push(Case::seeded(format!("threads/life/{name}"), move |random| {
                on_threads(&Plan::new(random.next_u64(), way, false))
            }));
        }
    }
    cases
}

/// One step of a program.
#[derive(Debug, Clone)]
enum Act {
    Collective(program::Step),
    /// Messages around the ring, to the next and from the one before; so many elements.
    Ring(usize),
    /// The same in a group, with an all_reduce.
    Group(usize),
    /// A collective of the ranks with even and of those with odd numbers, and a barrier of all.
    Split(program::Step),
    /// An all_reduce that goes on meanwhile.
    Request(usize),
    /// An all_reduce on memory in which the ranks write each other's results.
    Push(usize),
    Barrier,
    Finalize,
}

impl Act {
    fn random(random: &mut Random) -> Act {
        let longest = [3, 100, 3000, 40_000][random.below(4)];
        match random.below(9) {
            0..=2 => Act::Collective(program::Step::random(random, longest)),
            3 => Act::Ring(1 + random.below(10 * longest)),
            4 => Act::Group(1 + random.below(10 * longest)),
            5 => Act::Split(program::Step::random(random, longest)),
            6 => Act::Request(1 + random.below(10 * longest)),
            7 => Act::Push(70_000 + random.below(400_000)),
            _ => Act::Barrier,
        }
    }

    /// What verdicts may call it.
    fn names(&self) -> Vec<String> {
        let of = |step: &program::Step| snake_case(&format!("{:?}", step.operation));
        match self {
            Act::Collective(step) => vec![of(step)],
            Act::Ring(_) => vec!["send".into(), "recv".into()],
            Act::Group(_) => vec!["send".into(), "recv".into(), "all_reduce".into()],
            Act::Split(_) => vec!["split".into(), "barrier".into()],
            Act::Request(_) | Act::Push(_) => vec!["all_reduce".into()],
            Act::Barrier => vec!["barrier".into()],
            Act::Finalize => vec!["finalize".into()],
        }
    }

    fn perform(&self, comm: &Comm, plan: &Plan) -> Result<(), Problem> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let sum = (ranks * (ranks + 1) / 2) as u64;
        let all = |values: &[u64], right: u64| match values.iter().position(|value| *value != right) {
            None => Ok(()),
            Some(i) => Err(Problem::Wrong(format!("element {i} is {} and not {right}: {self:?}", values[i]))),
        };
        match self {
            Act::Collective(step) => step.perform(comm),
            Act::Ring(len) => {
                let mut received = vec![0; *len];
                comm.send_recv(&vec![rank as u64; *len], next, &mut received, previous)?;
                all(&received, previous as u64)
            }
            Act::Group(len) => {
                let (sent, mut received) = (vec![rank as u64; *len], vec![0; *len]);
                let mut total = [rank as u64 + 1; 3];
                comm.group(|group| {
                    group.recv(&mut received, previous)?;
                    group.send(&sent, next)?;
                    group.all_reduce_in_place(&mut total, ReduceOp::Sum)
                })?;
                all(&received, previous as u64)?;
                all(&total, sum)
            }
            Act::Split(step) => {
                let part = comm.split(Some(rank as u32 % 2), 0)?;
                let part = part.ok_or_else(|| Problem::Wrong("no part".into()))?;
                let outcome = step.perform(&part);
                drop(part);
                match outcome {
                    Ok(()) => Ok(comm.barrier()?),
                    Err(Problem::Error(error)) => {
                        plan.expect_in_part(&error, rank)?;
                        comm.barrier()?;
                        Err(Problem::Wrong(format!("a part failed ({error}) and the whole did not")))
                    }
                    Err(wrong) => Err(wrong),
                }
            }
            Act::Request(len) => {
                let total = comm.start_all_reduce(vec![rank as u64 + 1; *len], ReduceOp::Sum)?.wait()?;
                all(&total, sum)
            }
            Act::Push(len) => {
                let mut total = comm.alloc::<u64>(*len)?;
                total.fill(rank as u64 + 1);
                comm.all_reduce_in_place(&mut total, ReduceOp::Sum)?;
                all(&total, sum)
            }
            Act::Barrier => Ok(comm.barrier()?),
            Act::Finalize => unreachable!("the end of a life is not one of its steps"),
        }
    }
}

fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}

/// What happens, and to whom.
#[derive(Debug, Clone)]
struct Plan {
    seed: u64,
    way: Way,
    ranks: usize,
    acts: Vec<Act>,
    victim: usize,
    /// At which act; `None` while the ranks meet.
    at: Option<usize>,
    /// So long after the act has begun; `None` before it.
    delay: Option<Duration>,
}

impl Plan {
    fn new(seed: u64, way: Way, processes: bool) -> Plan {
        let mut random = Random::new(seed);
        let ranks = 2 + random.below(4);
        let mut acts: Vec<Act> = (0..2 + random.below(5)).map(|_| Act::random(&mut random)).collect();
        acts.push(Act::Finalize);
        let victim = random.below(ranks);
        let meeting = processes && matches!(way, Way::Kill | Way::Exit | Way::Stop | Way::Late);
        let at = random.below(acts.len() + usize::from(meeting));
        let delay = Duration::from_micros(random.below([30, 300, 3000][random.clone().below(3)]) as u64);
        let inside = way.is_of_process() && random.below(3) > 0;
        let at = (at < acts.len()).then_some(at);
        Plan { seed, way, ranks, acts, victim, at, delay: inside.then_some(delay) }
    }

    /// From a scenario's arguments.
    fn of(args: &[String]) -> Result<Plan, String> {
        let [seed, way, processes] = args else { return Err("three arguments are needed".into()) };
        let seed = seed.parse().map_err(|_| "no seed")?;
        let way = Way::ALL.into_iter().find(|(_, name)| name == way).ok_or("no such way")?.0;
        Ok(Plan::new(seed, way, processes == "true"))
    }

    fn launch(&self, launch: Launch, processes: bool) -> Launch {
        launch.arg(self.seed).arg(self.way.name()).arg(processes).deadline(PATIENCE)
    }

    fn is_last(&self) -> bool {
        self.at == Some(self.acts.len() - 1)
    }

    /// In a part of the world, the verdict must name the victim, too, by its number there.
    fn expect_in_part(&self, error: &Error, rank: usize) -> Result<(), Problem> {
        let there = self.victim / 2;
        let right = self.victim % 2 == rank % 2
            && match error {
                Error::Peer(error) => error.rank == there,
                Error::Timeout(error) => error.missing.iter().all(|missing| missing.rank == there),
                _ => false,
            };
        if right { Ok(()) } else { Err(Problem::Wrong(format!("in a part: {error}"))) }
    }

    /// The verdict on the victim's going, as far as it can be known.
    fn expect(&self, verdict: &Fields) -> Result<(), String> {
        let victim = self.victim.to_string();
        let (kind, event) = match self.way {
            Way::Kill | Way::Exit => ("peer", Some("Died")),
            Way::Panic => ("peer", Some("Panicked")),
            Way::Leave => ("peer", Some("Left")),
            Way::Abort => ("aborted", None),
            Way::Stop | Way::Late => ("timeout", None),
        };
        common::has(verdict, "kind", kind)?;
        common::has(verdict, "fatal", true)?;
        if let Some(event) = event {
            common::has(verdict, "event", event)?;
        }
        common::has(verdict, if kind == "timeout" { "missing" } else { "rank" }, victim)
    }
}

// --- in a rank ------------------------------------------------------------------------------------------

/// What a whole process may do to itself.
fn strike(way: Way) {
    let outcome = match way {
        Way::Kill => fault::inject_here(Fault::Kill),
        Way::Stop => fault::inject_here(Fault::Stop),
        Way::Exit => std::process::exit(17),
        _ => Ok(()),
    };
    outcome.expect("a process can send itself a signal");
}

/// Something happens now, or in a while by a thread; `None` if it has happened.
fn light(plan: &Plan) -> Option<JoinHandle<()>> {
    let way = plan.way;
    match plan.delay {
        None => {
            strike(way);
            None
        }
        Some(delay) => Some(std::thread::spawn(move || {
            let since = Instant::now();
            // Sleeping is too coarse for the shortest.
            while since.elapsed() < delay {
                std::hint::spin_loop();
            }
            strike(way);
        })),
    }
}

fn process_rank(plan: &Plan) -> Outcome {
    let before = Holdings::now()?;
    let victim = std::env::var("PHALANX_RANK").is_ok_and(|rank| rank == plan.victim.to_string());
    let mut bomb = None;
    if victim && plan.at.is_none() {
        if plan.way == Way::Late {
            std::thread::sleep(TIMEOUT * 5 / 2);
        }
        bomb = light(plan);
    }
    let since = Instant::now();
    let joined = phalanx::init();
    // Somebody who is struck while the ranks meet does nothing more before that.
    let _ = bomb.map(JoinHandle::join);
    let fields = match joined {
        Ok(comm) => live(comm, plan)?,
        Err(error) => {
            let took = since.elapsed().as_millis();
            verdict::fields(&error).with("outcome", "alone").with("took_ms", took)
        }
    };
    phase("through");
    before.compare()?;
    Ok(fields.to_string())
}

fn thread_ranks(plan: &Plan) -> Outcome {
    let before = Holdings::now()?;
    let reports = Mutex::new(vec![None; plan.ranks]);
    let world = catch_unwind(AssertUnwindSafe(|| {
        Comm::builder().timeout(TIMEOUT).run(plan.ranks, |comm| {
            let rank = comm.rank();
            let outcome = live(comm, plan);
            reports.lock().expect("nobody panics with it")[rank] = Some(outcome);
        })
    }));
    match world {
        Err(_) if plan.way == Way::Panic => {}
        Err(_) => return Err("a panic".into()),
        Ok(world) => drop(world.map_err(|error| error.to_string())?),
    }
    before.compare()?;
    let reports = reports.into_inner().map_err(|_| "a panic with the reports in hand")?;
    let lines = reports.into_iter().map(|report| match report {
        Some(outcome) => outcome.map(|fields| fields.to_string()),
        None => Ok(String::new()),
    });
    Ok(lines.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// A rank's life until its end or its failure.
fn live(comm: Comm, plan: &Plan) -> Result<Fields, String> {
    let is_victim = comm.rank() == plan.victim;
    comm.set_timeout(TIMEOUT);
    for (i, act) in plan.acts.iter().enumerate() {
        let mut bomb = None;
        if is_victim && plan.at == Some(i) {
            match plan.way {
                Way::Panic => panic!("this rank was told to panic"),
                Way::Leave => return Ok(Fields::new().with("outcome", "gone")),
                Way::Abort => {
                    comm.abort();
                    return Ok(Fields::new().with("outcome", "gone"));
                }
                Way::Late => std::thread::sleep(TIMEOUT * 5 / 2),
                Way::Kill | Way::Stop | Way::Exit => bomb = light(plan),
            }
        }
        let since = Instant::now();
        if let Act::Finalize = act {
            let outcome = comm.finalize();
            let took = since.elapsed();
            let _ = bomb.map(JoinHandle::join);
            return Ok(match outcome {
                Ok(()) => Fields::new().with("outcome", "done"),
                Err(error) => failed(&error, took, i),
            });
        }
        let outcome = act.perform(&comm, plan);
        let took = since.elapsed();
        let _ = bomb.map(JoinHandle::join);
        match outcome {
            Ok(()) => {}
            Err(Problem::Wrong(wrong)) => return Err(format!("step {i}: {wrong}")),
            Err(Problem::Error(error)) => {
                let fields = failed(&error, took, i);
                let shrunk = comm.shrink();
                common::report(comm, &error, took)?;
                return Ok(fields.with("shrunk", go_on(shrunk)?));
            }
        }
    }
    unreachable!("the last act is the end")
}

fn failed(error: &Error, took: Duration, step: usize) -> Fields {
    verdict::fields(error).with("outcome", "failed").with("took_ms", took.as_millis()).with("step", step)
}

/// How many ranks go on together; they try it.
fn go_on(shrunk: phalanx::Result<Comm>) -> Result<String, String> {
    let comm = match shrunk {
        Err(Error::LeftBehind { .. }) => return Ok("left behind".into()),
        Err(error) => return Err(format!("shrink: {error}")),
        Ok(comm) => comm,
    };
    let text = |error: Error| format!("after shrink: {error}");
    let ranks = comm.world_size();
    for len in [1, 5000, 100_000] {
        let mut ones = vec![1u32; len];
        comm.all_reduce_in_place(&mut ones, ReduceOp::Sum).map_err(text)?;
        if ones.iter().any(|one| *one != ranks as u32) {
            return Err("after shrink: a wrong sum".into());
        }
    }
    comm.finalize().map_err(text)?;
    Ok(ranks.to_string())
}

// --- what must come of it -------------------------------------------------------------------------------

fn on_processes(plan: &Plan) -> Result<(), String> {
    let before = holdings::names()?;
    let timeout = TIMEOUT.as_secs_f64().to_string();
    let launch = plan.launch(Launch::new("life/rank", plan.ranks), true).env("PHALANX_TIMEOUT", &timeout);
    let mut world = launch.start()?;
    if plan.way == Way::Stop {
        for rank in (0..plan.ranks).filter(|rank| *rank != plan.victim) {
            world.await_phase(rank, "through").map_err(|problem| format!("{problem}\n{plan:?}"))?;
        }
        // The others may be at their end before it happens.
        world.await_stop(plan.victim)?;
        world.inject(plan.victim, Fault::Continue)?;
    }
    let ended = world.finish();
    judge(plan, &reports(plan, &ended)?)
        .and_then(|()| nothing_left(&before))
        .map_err(|problem| format!("{problem}\n{}\n{plan:?}", describe(&ended)))
}

fn on_threads(plan: &Plan) -> Result<(), String> {
    let reports = plan.launch(Launch::alone("life/threads"), false).reports();
    let reports = reports.map_err(|problem| format!("{problem}\n{plan:?}"))?;
    let lines: Vec<String> = reports[0].split('\n').map(str::to_owned).collect();
    judge(plan, &lines).map_err(|problem| format!("{problem}\n{lines:#?}\n{plan:?}"))
}

/// Every rank's report, in rank order; that of a victim which could give none is empty.
fn reports(plan: &Plan, ended: &[Ended]) -> Result<Vec<String>, String> {
    let report = |rank: &Ended| match &rank.outcome {
        Ok(report) => Ok(report.clone()),
        Err(_) if rank.rank == plan.victim && !plan.way.comes_back() => Ok(String::new()),
        Err(_) => Err(format!("rank {} has no report:{}\n{plan:?}", rank.rank, describe(ended))),
    };
    ended.iter().map(report).collect()
}

fn nothing_left(before: &[String]) -> Result<(), String> {
    let new: Vec<_> = holdings::names()?.into_iter().filter(|name| !before.contains(name)).collect();
    if new.is_empty() { Ok(()) } else { Err(format!("names are left: {new:?}")) }
}

fn judge(plan: &Plan, reports: &[String]) -> Result<(), String> {
    let parsed: Option<Vec<Fields>> = reports.iter().map(|report| Fields::parse(report)).collect();
    let parsed = parsed.ok_or("not a report")?;
    let survivors = || parsed.iter().enumerate().filter(|(rank, _)| *rank != plan.victim);
    let outcome = |fields: &Fields| fields.get("outcome").unwrap_or_default().to_owned();
    if plan.at.is_none() && survivors().any(|(_, fields)| outcome(fields) == "alone") {
        return survivors().try_for_each(|(_, fields)| judge_meeting(plan, fields));
    }
    for (rank, fields) in survivors() {
        match outcome(fields).as_str() {
            "failed" => judge_failure(plan, fields).map_err(|problem| format!("rank {rank}: {problem}"))?,
            "done" if plan.is_last() => {}
            // Who came through the meeting in time was not late.
            "done" if plan.at.is_none() && plan.delay.is_some() && plan.way == Way::Stop => {}
            other => return Err(format!("rank {rank} is {other:?}: {fields}")),
        }
    }
    let failures: Vec<String> = survivors()
        .filter(|(_, fields)| outcome(fields) == "failed")
        .map(|(_, fields)| fields.clone().without(&["step", "shrunk", "outcome"]).to_string())
        .collect();
    if failures.is_empty() {
        return Ok(());
    }
    let verdict = one_verdict(&failures, failures.len())?;
    judge_operation(plan, &verdict, survivors().filter_map(|(_, fields)| fields.number("step")).max())?;
    judge_going_on(plan, &parsed)
}

/// The ranks did not meet: each survivor is told why, and who did not come.
fn judge_meeting(plan: &Plan, fields: &Fields) -> Result<(), String> {
    if fields.get("kind") != Some("bootstrap") {
        return judge_failure(plan, fields);
    }
    let victim = plan.victim.to_string();
    let text = fields.get("text").unwrap_or_default();
    if fields.get("missing") != Some(&victim) && !text.contains(&format!("rank {victim}")) {
        return Err(format!("rank {victim} is not named: {fields}"));
    }
    in_time(fields, TIMEOUT + GRACE)
}

fn judge_failure(plan: &Plan, fields: &Fields) -> Result<(), String> {
    plan.expect(fields)?;
    // An abort ends whatever the others are in, also if they are behind.
    let early = fields.number("step").is_none_or(|step| step < plan.at.unwrap_or(0) as u64);
    if early && plan.way != Way::Abort {
        return Err(format!("it failed before anything had happened: {fields}"));
    }
    in_time(fields, if plan.way.comes_back() { TIMEOUT + GRACE } else { NOTICED })
}

fn in_time(fields: &Fields, limit: Duration) -> Result<(), String> {
    match fields.number("took_ms") {
        Some(took) if u128::from(took) <= limit.as_millis() => Ok(()),
        _ => Err(format!("not within {limit:?}: {fields}")),
    }
}

/// The operation that the verdict names is one that was under way.
fn judge_operation(plan: &Plan, verdict: &Fields, last: Option<u64>) -> Result<(), String> {
    let Some(operation) = verdict.get("operation") else { return Ok(()) };
    let acts = &plan.acts[plan.at.unwrap_or(0)..=last.unwrap_or(0) as usize];
    let name = operation.split('(').next().unwrap_or_default();
    if acts.iter().any(|act| act.names().iter().any(|other| other == name)) {
        Ok(())
    } else {
        Err(format!("{operation} was not under way: {verdict}"))
    }
}

/// Those who failed together go on together.
fn judge_going_on(plan: &Plan, reports: &[Fields]) -> Result<(), String> {
    // In the last step some may have been done already, and gone.
    if reports.iter().any(|fields| fields.get("step").is_some() && fields.get("shrunk").is_none()) {
        return Ok(());
    }
    for (rank, fields) in reports.iter().enumerate().filter(|(_, fields)| fields.get("shrunk").is_some()) {
        let right = if rank == plan.victim { "left behind".into() } else { (plan.ranks - 1).to_string() };
        common::has(fields, "shrunk", right).map_err(|problem| format!("rank {rank}: {problem}"))?;
    }
    Ok(())
}
