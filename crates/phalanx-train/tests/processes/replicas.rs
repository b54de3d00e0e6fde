//! A replica group loses a rank, and comes back with a new process and the others' state.

use libtest_mimic::Trial;
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::fault::{self, Fault};
use phalanx_testkit::processes::{Launch, describe};
use phalanx_testkit::{Outcome, Scenario};
use phalanx_train::device::Host;
use phalanx_train::replicas::{ReplicaGroups, average};

pub const SCENARIOS: &[Scenario] = &[Scenario::process("replicas/back", |args| {
    let number: usize = std::env::var("PHALANX_RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
    let comm = if number < RANKS { phalanx::init() } else { phalanx::join() };
    train(comm.map_err(|error| error.to_string())?, number, args[0].parse() == Ok(number))
        .map_err(|error| error.to_string())
})];

/// Two groups of two ranks.
const RANKS: usize = 4;
const STEPS: u64 = 20;

/// A rank's part of the model, which grows by the step's number in each step.
fn part(place: usize, steps: u64) -> Vec<u8> {
    let sum = steps * (steps + 1) / 2;
    [1000 * (place as u64 + 1) + sum].map(u64::to_le_bytes).concat()
}

fn train(mut comm: Comm, number: usize, is_victim: bool) -> phalanx_train::Result<String> {
    let is_new = number >= RANKS;
    let mut group = (!is_new).then_some(number as u32 / 2);
    let (mut steps, mut state) = (0, if is_new { Vec::new() } else { part(number % 2, 0) });
    loop {
        let (own, groups) = ReplicaGroups::refill(&comm, group, 2, 2)?;
        group = Some(own);
        steps = groups.catch_up(steps, &mut state)?;
        match steps_of(&comm, &groups, &mut steps, &mut state, is_victim) {
            Err(phalanx_train::Error::Comm(error)) if error.is_fatal() => comm = comm.rebuild()?,
            Err(error) => return Err(error),
            Ok(()) => break,
        }
    }
    let (_, groups) = ReplicaGroups::refill(&comm, group, 2, 2)?;
    Ok(if state == part(groups.within.rank(), STEPS) { "right" } else { "wrong" }.into())
}

fn steps_of(
    comm: &Comm,
    groups: &ReplicaGroups,
    steps: &mut u64,
    state: &mut [u8],
    is_victim: bool,
) -> phalanx_train::Result<()> {
    while *steps < STEPS {
        let mut gradient = [(*steps + 1) as f64];
        groups.within.barrier()?;
        if is_victim && *steps == 7 {
            let _ = fault::inject_here(Fault::Kill);
        }
        average(&groups.across, &Host, &mut &mut gradient[..], true)?;
        // All make the step, or none.
        let mut all_did = [1u8];
        comm.all_reduce_in_place(&mut all_did, ReduceOp::Min)?;
        let number = u64::from_le_bytes(state[..8].try_into().expect("a number"));
        state[..8].copy_from_slice(&(number + gradient[0] as u64).to_le_bytes());
        *steps += 1;
    }
    Ok(comm.barrier()?)
}

pub fn trials() -> Vec<Trial> {
    let trial = |victim: usize| {
        Trial::test(format!("replicas/rank_{victim}_is_killed_and_its_group_comes_back"), move || {
            let members = RANKS.to_string();
            let launch = (0..RANKS).fold(Launch::new("replicas/back", RANKS + 1), |launch, rank| {
                let launch = launch.env_of(rank, "PHALANX_WORLD_SIZE", Some(&members));
                launch.env_of(rank, "PHALANX_LOCAL_WORLD_SIZE", Some(&members))
            });
            let ended = launch.arg(victim).run()?;
            let right = |rank: usize, outcome: &Outcome| match outcome {
                Ok(said) => said == "right" && rank != victim,
                Err(_) => rank == victim,
            };
            if ended.iter().all(|rank| right(rank.rank, &rank.outcome)) {
                Ok(())
            } else {
                Err(describe(&ended).into())
            }
        })
    };
    [0, 3].map(trial).into()
}
