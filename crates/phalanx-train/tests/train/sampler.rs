//! Which rank takes which sample.

use phalanx_train::sampler::{Batch, Sampler};

/// Batches of all ranks in the next step, if it is not the end of the epoch; all samplers are then in the same state.
fn step(samplers: &mut [Sampler], batch: usize) -> Option<Vec<Batch>> {
    let ranks = samplers.len();
    let batches: Vec<Option<Batch>> = samplers
        .iter_mut()
        .enumerate()
        .map(|(rank, sampler)| sampler.next_batch(rank, ranks, batch))
        .collect();
    assert!(samplers.iter().all(|sampler| sampler.state() == samplers[0].state()));
    assert!(batches.iter().all(|batch| batch.is_some() == batches[0].is_some()), "all ends are together");
    batches.into_iter().collect()
}

fn samples(batches: &[Batch]) -> Vec<usize> {
    batches.iter().flat_map(Batch::samples).copied().collect()
}

#[test]
fn ten_samples_on_2_ranks_for_3_steps_then_on_3_ranks() {
    let mut two = vec![Sampler::in_order(10); 2];
    let taken: Vec<usize> = (0..3).flat_map(|_| samples(&step(&mut two, 1).unwrap())).collect();
    assert_eq!(taken, [0, 1, 2, 3, 4, 5]);
    let mut three = vec![Sampler::in_order(10); 3];
    three.iter_mut().for_each(|sampler| sampler.restore(&two[0].state()).unwrap());
    assert_eq!(samples(&step(&mut three, 1).unwrap()), [6, 7, 8]);
    let last = step(&mut three, 1).unwrap();
    assert_eq!(samples(&last), [9]);
    // Every rank can take part; padding weighs 0.
    let weights: Vec<Vec<f64>> = last.iter().map(|batch| batch.weights().collect()).collect();
    assert_eq!(weights, [[1.0], [0.0], [0.0]]);
    assert!(last.iter().all(|batch| batch.padded().len() == 1 && batch.of_all_ranks() == 1));
    assert_eq!(step(&mut three, 1), None);
    assert_eq!((three[0].epoch(), three[0].left()), (1, 10));
}

/// An epoch's samples in the order of steps and ranks, with ranks that come and go.
fn epoch(new: impl Fn() -> Sampler, epoch: u64, ranks: &[usize], batch: usize) -> Vec<usize> {
    let mut state = new().state();
    state["epoch"] = epoch.into();
    let mut all = Vec::new();
    for ranks in ranks.iter().cycle() {
        let mut samplers = vec![new(); *ranks];
        samplers.iter_mut().for_each(|sampler| sampler.restore(&state).unwrap());
        let Some(batches) = step(&mut samplers, batch) else { break };
        all.extend(samples(&batches));
        state = samplers[0].state();
    }
    all
}

#[test]
fn shuffled_samples_are_the_same_in_every_layout_and_each_comes_once() {
    for samples in [1, 2, 7, 64, 1000] {
        let new = || Sampler::shuffled(samples, 42);
        let first = epoch(new, 0, &[1], 1);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..samples), "{samples} samples, each once");
        for ranks in [&[1][..], &[2], &[3, 5], &[8, 1, 4]] {
            assert_eq!(epoch(new, 0, ranks, 3), first, "{samples} samples, ranks {ranks:?}");
        }
    }
    let orders = [
        epoch(|| Sampler::shuffled(1000, 42), 0, &[2], 4),
        epoch(|| Sampler::shuffled(1000, 42), 1, &[2], 4),
        epoch(|| Sampler::shuffled(1000, 43), 0, &[2], 4),
        (0..1000).collect(),
    ];
    for (at, one) in orders.iter().enumerate() {
        for other in &orders[..at] {
            let same = one.iter().zip(other).filter(|(one, other)| one == other).count();
            assert!(same < 20, "{same} of 1000 samples at the same place");
        }
    }
}

#[test]
fn shuffled_samples_come_at_every_place_equally_often() {
    // 4000 seeds, 8 places: 500 times each, with a deviation of 21.
    let mut counts = [0; 8];
    for seed in 0..4000 {
        let first = epoch(|| Sampler::shuffled(8, seed), 0, &[1], 8);
        counts[first.iter().position(|sample| *sample == 3).unwrap()] += 1;
    }
    assert!(counts.iter().all(|count| (400..600).contains(count)), "{counts:?}");
}

#[test]
fn samples_of_similar_length_come_together() {
    let lengths: Vec<u32> = (0..1000).map(|sample| sample * 7919 % 1000).collect();
    let of_batches = |new: &dyn Fn() -> Sampler| {
        let order = epoch(new, 2, &[4, 3], 4);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
        let spread = |batch: &[usize]| {
            let lengths = batch.iter().map(|sample| lengths[*sample]);
            lengths.clone().max().unwrap() - lengths.min().unwrap()
        };
        order.chunks(16).map(spread).sum::<u32>()
    };
    let by_length = of_batches(&|| Sampler::by_length(lengths.clone(), 200, 5).unwrap());
    let shuffled = of_batches(&|| Sampler::shuffled(1000, 5));
    assert!(by_length * 5 < shuffled, "{by_length} beside {shuffled}");
}

#[test]
fn the_state_of_another_data_set_or_seed_is_refused() {
    for state in
        [Sampler::shuffled(10, 2).state(), Sampler::shuffled(11, 1).state(), Sampler::in_order(10).state()]
    {
        let error = Sampler::shuffled(10, 1).restore(&state).unwrap_err().to_string();
        assert!(error.contains("this sampler has 10, Some(1)"), "{error}");
    }
    let error = Sampler::in_order(10).restore(&"what".into()).unwrap_err().to_string();
    assert!(error.contains("is not a sampler's state"), "{error}");
}
