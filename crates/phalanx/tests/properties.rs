//! Random programs of collectives, on random numbers of thread ranks, compared with the plain reference.
//!
//! The programs are the same in every run: the generator starts from a fixed seed.

use phalanx::{Comm, DType};
use phalanx_testkit::accesses::{self, Access, Kind};
use phalanx_testkit::halo::Spread;
use phalanx_testkit::program::{self, Form, Operation, Step};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestCaseError, TestRng, TestRunner};

/// The most ranks of a property: as many as keep it quick.
const RANKS: usize = 6;

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![3 => 0..8usize, 3 => 8..600usize, 1 => 600..20_000usize]
}

fn step() -> impl Strategy<Value = Step> {
    let what = (0..Operation::ALL.len(), 0..DType::ALL.len(), 0..6usize, 0..RANKS, 0..Form::ALL.len());
    (what, vec(length(), program::RANKS * program::RANKS), any::<u8>(), any::<u64>()).prop_map(
        |((operation, dtype, combine, root, form), lengths, shared, seed)| Step {
            operation: Operation::ALL[operation],
            dtype: DType::ALL[dtype],
            combine,
            root,
            form: Form::ALL[form],
            lengths,
            shared,
            seed,
        },
    )
}

/// Runs a property on the same cases in every run.
fn check<S: Strategy>(cases: u32, strategy: &S, property: impl Fn(S::Value) -> Result<(), String>)
where
    S::Value: std::fmt::Debug,
{
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let outcome = TestRunner::new_with_rng(config, rng)
        .run(strategy, |value| property(value).map_err(TestCaseError::fail));
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// All ranks' results, or every rank's problem: the one that failed first is not the lowest.
fn on_all_ranks(ranks: usize, f: impl Fn(&Comm) -> Result<(), String> + Sync) -> Result<(), String> {
    let outcomes = phalanx::run(ranks, |comm| f(&comm)).map_err(|error| error.to_string())?;
    if outcomes.iter().all(Result::is_ok) { Ok(()) } else { Err(format!("{ranks} ranks: {outcomes:#?}")) }
}

#[test]
fn programs_deliver_what_the_reference_says() {
    check(200, &(1..=RANKS, vec(step(), 1..8)), |(ranks, steps)| {
        on_all_ranks(ranks, |comm| {
            steps.iter().enumerate().try_for_each(|(i, step)| {
                step.perform(comm).map_err(|problem| format!("step {i} on rank {}: {problem}", comm.rank()))
            })
        })
    });
}

#[test]
fn accesses_to_symmetric_memory_do_what_the_model_does() {
    let kind = (0..Kind::ALL.len()).prop_map(|kind| Kind::ALL[kind]);
    let place = (0..RANKS, 0..RANKS, 0..60usize, 1..20usize, 1..5usize);
    let access = (place, kind, any::<u64>()).prop_map(|((by, target, at, len, stride), kind, value)| {
        Access { by, target, kind, at, len, stride, value }
    });
    let epochs = vec(vec(access, 0..12), 1..6);
    check(200, &(1..=RANKS, 1..60usize, epochs), |(ranks, len, epochs)| {
        on_all_ranks(ranks, |comm| accesses::perform(comm, len, &epochs))
    });
}

#[test]
fn splits_bring_the_right_ranks_together() {
    let place = (proptest::option::weighted(0.85, 0..3u32), -2..2i64);
    let splits = vec(vec(place, RANKS), 1..4);
    check(150, &(1..=RANKS, splits, step()), |(ranks, splits, step)| {
        on_all_ranks(ranks, |comm| {
            let mut nested: Option<Comm> = None;
            let mut members: Vec<usize> = (0..ranks).collect();
            for places in &splits {
                let from = nested.as_ref().unwrap_or(comm);
                let own = places[members[from.rank()]];
                let part = from.split(own.0, own.1).map_err(|error| error.to_string())?;
                // By key, then by the order in the communicator that is split: a stable sort does just that.
                let mut expected: Vec<usize> =
                    members.iter().copied().filter(|m| places[*m].0 == own.0).collect();
                expected.sort_by_key(|member| places[*member].1);
                match part {
                    None if own.0.is_none() => return Ok(()),
                    None => return Err("a rank with a colour got no communicator".into()),
                    Some(_) if own.0.is_none() => {
                        return Err("a rank without a colour got one".into());
                    }
                    Some(part) => {
                        members = expected;
                        if members.get(part.rank()) != Some(&comm.rank())
                            || part.world_size() != members.len()
                        {
                            return Err(format!("rank {} is {part:?}, members {members:?}", comm.rank()));
                        }
                        step.perform(&part).map_err(|problem| problem.to_string())?;
                        nested = Some(part);
                    }
                }
            }
            Ok(())
        })
    });
}

#[test]
fn halos_have_what_the_whole_array_has_there() {
    let dimensions = vec((1..4usize, any::<bool>(), 0..3usize), 1..4);
    check(150, &(dimensions, vec(0..4usize, 1..8)), |(dimensions, extra)| {
        let spread = Spread { dimensions, extra };
        if spread.ranks() > 8 {
            return Ok(());
        }
        on_all_ranks(spread.ranks(), |comm| {
            let (grid, width) = (spread.grid(), spread.width());
            let place = grid.coordinates(comm.rank());
            let (shape, [array, expected]) = (spread.shape(&place), spread.part(&place));
            let text = |error: phalanx::Error| error.to_string();
            let mut at_once = array.clone();
            comm.exchange_halo(&grid, &mut at_once, &shape, &width).map_err(text)?;
            let halo = comm.start_exchange_halo(&grid, &array, &shape, &width).map_err(text)?;
            let mut in_flight = array;
            halo.finish(&mut in_flight).map_err(text)?;
            for array in [at_once, in_flight] {
                if array != expected {
                    return Err(format!("{spread:?}, {place:?}: {array:?}, expected {expected:?}"));
                }
            }
            Ok(())
        })
    });
}
