//! Gradient buckets.

use half::{bf16, f16};
use phalanx::{Comm, ReduceOp};
use phalanx_train::Error;
use phalanx_train::buckets::{
    Divisor, Gradient, GradientBuckets, Parameter, Participation, Reduction, Settings, Slot, SlotValues,
    Values,
};
use phalanx_train::device::{Host, Number};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

type Buckets = GradientBuckets<Host>;

fn of_f32(names: &[(&str, usize)]) -> Vec<Parameter> {
    names.iter().map(|(name, len)| Parameter::new::<f32>(*name, *len)).collect()
}

fn read<T: Number>(buckets: &Buckets, name: &str, len: usize) -> Vec<T> {
    let mut to = vec![T::default(); len];
    buckets.read(name, &mut &mut to[..]).unwrap();
    to
}

/// Buckets that hold one parameter each.
const SMALL: Settings = Settings {
    bucket_bytes: 4,
    reduction: Reduction::Mean,
    divisor: Divisor::Participants,
    sums_in_f32: true,
};

#[test]
fn parameters_that_the_last_micro_batch_does_not_use_are_reduced_all_the_same() {
    for settings in [Settings::default(), SMALL] {
        phalanx::run(2, |comm| {
            let parameters = of_f32(&[("a", 1), ("b", 1), ("never", 2)]);
            let mut buckets = Buckets::new(&comm, &Host, &parameters, settings).unwrap();
            for _ in 0..3 {
                buckets.begin(&comm, 1.0).unwrap();
                buckets.accumulate(true).unwrap();
                buckets.add(&comm, "a", &&[[1.0f32], [3.0]][comm.rank()][..]).unwrap();
                buckets.accumulate(false).unwrap();
                buckets.add(&comm, "b", &&[[5.0f32], [7.0]][comm.rank()][..]).unwrap();
                buckets.finish(&comm).unwrap();
                assert_eq!(read::<f32>(&buckets, "a", 1), [2.0]);
                assert_eq!(read::<f32>(&buckets, "b", 1), [6.0]);
                assert_eq!(read::<f32>(&buckets, "never", 2), [0.0; 2]);
            }
        })
        .unwrap();
    }
}

#[test]
fn every_sample_counts_the_same_in_unequal_batches() {
    phalanx::run(2, |comm| {
        let mut buckets = Buckets::new(&comm, &Host, &of_f32(&[("w", 1)]), Settings::default()).unwrap();
        let (samples, gradient) = [(7.0, 1.0f32), (6.0, 14.0)][comm.rank()];
        for _ in 0..2 {
            buckets.begin(&comm, samples).unwrap();
            buckets.add(&comm, "w", &&[gradient][..]).unwrap();
            let all = buckets.finish(&comm).unwrap();
            assert_eq!(all, Participation { ranks: 2, weight: 13.0 });
            assert!((read::<f32>(&buckets, "w", 1)[0] - 7.0).abs() < 1e-6);
        }
    })
    .unwrap();
}

#[test]
fn ranks_that_have_finished_take_part_without_a_batch() {
    for (divisor, expected) in [(Divisor::Participants, 1.0f32), (Divisor::InitialWorld, 0.75)] {
        phalanx::run(4, |comm| {
            let settings = Settings { divisor, ..Settings::default() };
            let mut buckets = Buckets::new(&comm, &Host, &of_f32(&[("w", 1)]), settings).unwrap();
            let mut weight = 10.0f32;
            for step in 0..4 {
                // Rank 3 finishes after two steps, and rank 0, whose order counts, in step 3.
                let has_batch = step < 2 || step == 2 && comm.rank() != 3;
                buckets.begin(&comm, if has_batch { 1.0 } else { 0.0 }).unwrap();
                if has_batch {
                    buckets.add(&comm, "w", &&[1.0f32][..]).unwrap();
                }
                let all = buckets.finish(&comm).unwrap();
                let gradient = read::<f32>(&buckets, "w", 1)[0];
                assert_eq!(all.ranks, [4, 4, 3, 0][step]);
                assert!((gradient - [1.0, 1.0, expected, 0.0][step]).abs() < 2e-7, "{gradient}");
                weight -= gradient;
            }
            let mut all = [0.0f32; 4];
            comm.all_gather(&[weight], &mut all).unwrap();
            assert!(all.iter().all(|other| other.to_bits() == weight.to_bits()));
        })
        .unwrap();
    }
}

#[test]
fn small_gradients_of_16_bits_are_not_lost_beside_large_ones() {
    phalanx::run(2, |comm| {
        let parameters = [Parameter::new::<bf16>("w", 3)];
        let mut buckets = Buckets::new(&comm, &Host, &parameters, Settings::default()).unwrap();
        buckets.begin(&comm, 1.0).unwrap();
        buckets.accumulate(true).unwrap();
        buckets.add(&comm, "w", &&[bf16::from_f32(256.0); 3][..]).unwrap();
        for micro_batch in 0..256 {
            buckets.accumulate(micro_batch < 255).unwrap();
            buckets.add(&comm, "w", &&[bf16::ONE; 3][..]).unwrap();
        }
        buckets.finish(&comm).unwrap();
        assert_eq!(read::<bf16>(&buckets, "w", 3), [bf16::from_f32(512.0); 3]);
        assert!(matches!(buckets.gradient("w").unwrap(), Gradient::F32(values) if values == [512.0; 3]));
    })
    .unwrap();
}

#[test]
fn gradients_of_16_bits_can_be_summed_in_their_own_type() {
    phalanx::run(2, |comm| {
        let parameters = [
            Parameter::new::<bf16>("a", 3),
            Parameter::new::<bf16>("b", 1),
            Parameter::new::<f16>("c", 2),
            Parameter::new::<f32>("d", 1),
        ];
        // Four numbers of two bytes fill a bucket.
        let settings = Settings { sums_in_f32: false, bucket_bytes: 8, ..Settings::default() };
        let mut buckets = Buckets::new(&comm, &Host, &parameters, settings).unwrap();
        assert_eq!(buckets.buckets(), [&["a", "b"][..], &["c"], &["d"]]);
        let own = [1.0, 3.0][comm.rank()];
        // The ranks agree on an order, then they send while gradients are added, then with unequal weights.
        for (weight, mean) in [(1.0, 2.0), (1.0, 2.0), ([3.0, 1.0][comm.rank()], 1.5)] {
            buckets.begin(&comm, weight).unwrap();
            buckets.accumulate(true).unwrap();
            buckets.add(&comm, "a", &&[bf16::from_f32(256.0); 3][..]).unwrap();
            buckets.accumulate(false).unwrap();
            buckets.add(&comm, "a", &&[bf16::ONE; 3][..]).unwrap();
            let Slot { values: SlotValues::Bf16(values), has_value: false } = buckets.slot("b").unwrap()
            else {
                panic!("bf16")
            };
            values.copy_from_slice(&[bf16::from_f32(own)]);
            buckets.ready(&comm, "b").unwrap();
            buckets.add(&comm, "c", &&[f16::from_f32(own); 2][..]).unwrap();
            buckets.add(&comm, "d", &&[own][..]).unwrap();
            buckets.finish(&comm).unwrap();
            // 257 is rounded to even.
            assert!(
                matches!(buckets.gradient("a").unwrap(), Gradient::Bf16(a) if a == [bf16::from_f32(256.0); 3])
            );
            assert!(
                matches!(buckets.gradient("b").unwrap(), Gradient::Bf16(b) if b == [bf16::from_f32(mean)])
            );
            assert!(
                matches!(buckets.gradient("c").unwrap(), Gradient::F16(c) if c == [f16::from_f32(mean); 2])
            );
            assert!(matches!(buckets.gradient("d").unwrap(), Gradient::F32(d) if d == [mean]));
        }
    })
    .unwrap();
}

#[test]
fn gradients_that_become_ready_in_other_orders_meet() {
    for settings in [Settings::default(), SMALL] {
        phalanx::run(2, |comm| {
            let parameters = of_f32(&[("b", 5), ("a", 3)]);
            let mut buckets = Buckets::new(&comm, &Host, &parameters, settings).unwrap();
            let rank = comm.rank();
            let (a, b) = ([[1.0f32; 3], [3.0; 3]][rank], [[10.0f32; 5], [30.0; 5]][rank]);
            let mut random = 17 + rank as u64;
            for step in 0..100 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let a_first = if step == 0 { rank == 0 } else { random >> 63 == 0 };
                buckets.begin(&comm, 1.0).unwrap();
                if a_first {
                    buckets.add(&comm, "a", &&a[..]).unwrap();
                }
                buckets.add(&comm, "b", &&b[..]).unwrap();
                if !a_first {
                    buckets.add(&comm, "a", &&a[..]).unwrap();
                }
                buckets.finish(&comm).unwrap();
                assert_eq!(read::<f32>(&buckets, "a", 3), [2.0; 3]);
                assert_eq!(read::<f32>(&buckets, "b", 5), [20.0; 5]);
            }
            assert_eq!(buckets.buckets().concat(), ["a", "b"]);
        })
        .unwrap();
    }
}

#[test]
fn the_mean_is_the_default_and_the_sum_is_said() {
    assert_eq!(Settings::default().reduction, Reduction::Mean);
    for (reduction, expected) in [(Reduction::Mean, 3.0), (Reduction::Sum, 6.0)] {
        phalanx::run(2, |comm| {
            let settings = Settings { reduction, ..Settings::default() };
            let mut buckets = Buckets::new(&comm, &Host, &of_f32(&[("w", 2)]), settings).unwrap();
            buckets.begin(&comm, 1.0).unwrap();
            buckets.add(&comm, "w", &&[3.0f32; 2][..]).unwrap();
            buckets.finish(&comm).unwrap();
            assert_eq!(read::<f32>(&buckets, "w", 2), [expected; 2]);
        })
        .unwrap();
    }
}

/// Gradient of an element: the same on every mesh.
fn gradient(parameter: usize, sample: usize, index: usize) -> f64 {
    ((parameter * 31 + sample * 17 + index * 7) % 23) as f64 / 7.0 - 1.5
}

#[test]
fn the_mean_over_all_samples_is_that_of_one_rank() {
    const SAMPLES: usize = 24;
    let lens = [5, 300, 1, 64, 0, 129];
    let name = |number: usize| format!("p{number}");
    for ranks in [1, 2, 3, 5, 8] {
        phalanx::run(ranks, |comm| {
            let parameters: Vec<Parameter> = (0..lens.len())
                .map(|number| match number % 2 {
                    0 => Parameter::new::<f64>(name(number), lens[number]),
                    _ => Parameter::new::<f32>(name(number), lens[number]),
                })
                .collect();
            let settings = Settings { bucket_bytes: 1000, ..Settings::default() };
            let mut buckets = Buckets::new(&comm, &Host, &parameters, settings).unwrap();
            let own: Vec<usize> = (0..SAMPLES).filter(|sample| sample % ranks == comm.rank()).collect();
            for _ in 0..3 {
                buckets.begin(&comm, own.len() as f64).unwrap();
                for (number, len) in lens.iter().enumerate().rev() {
                    // The mean over the rank's samples.
                    let mean = |index| {
                        own.iter().map(|sample| gradient(number, *sample, index)).sum::<f64>()
                            / own.len() as f64
                    };
                    let values: Vec<f64> = (0..*len).map(mean).collect();
                    if number % 2 == 0 {
                        buckets.add(&comm, &name(number), &&values[..]).unwrap();
                    } else {
                        let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
                        buckets.add(&comm, &name(number), &&values[..]).unwrap();
                    }
                }
                buckets.finish(&comm).unwrap();
                for (number, len) in lens.iter().enumerate() {
                    let (actual, bound) = match number % 2 {
                        0 => (read::<f64>(&buckets, &name(number), *len), 1e-12),
                        _ => (read::<f64>(&buckets, &name(number), *len), 1e-5),
                    };
                    for (index, actual) in actual.into_iter().enumerate() {
                        let all = (0..SAMPLES).map(|sample| gradient(number, sample, index)).sum::<f64>();
                        assert!((actual - all / SAMPLES as f64).abs() < bound);
                    }
                }
            }
        })
        .unwrap();
    }
}

#[test]
fn gradients_written_to_their_slots_are_reduced_like_those_added() {
    phalanx::run(2, |comm| {
        let mut buckets = Buckets::new(&comm, &Host, &of_f32(&[("w", 2)]), Settings::default()).unwrap();
        for _ in 0..2 {
            buckets.begin(&comm, 1.0).unwrap();
            for micro_batch in 0..3 {
                buckets.accumulate(micro_batch < 2).unwrap();
                let Slot { values: SlotValues::F32(values), has_value } = buckets.slot("w").unwrap() else {
                    panic!("f32")
                };
                assert_eq!(has_value, micro_batch > 0);
                for value in values {
                    *value = if has_value { *value } else { 0.0 } + [1.0, 3.0][comm.rank()];
                }
                buckets.ready(&comm, "w").unwrap();
            }
            assert!(buckets.ready(&comm, "w").is_err() && buckets.slot("w").is_err());
            buckets.finish(&comm).unwrap();
            assert_eq!(read::<f32>(&buckets, "w", 2), [6.0; 2]);
        }
    })
    .unwrap();
}

#[test]
fn a_bucket_is_sent_before_the_gradients_of_later_ones_are_there() {
    phalanx::run(2, |comm| {
        let mut buckets =
            Buckets::new(&comm, &Host, &of_f32(&[("a", 1), ("b", 1), ("c", 1)]), SMALL).unwrap();
        let sent = Arc::new(AtomicUsize::new(0));
        let counter = sent.clone();
        let count = move |_: usize, _: &[(&str, Range<usize>)], _: &Comm, _: &mut Values<Host>| {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        buckets.set_hook(Some(Box::new(count))).unwrap();
        // In the first step the order is not known; then it is b, c, a.
        for sent_after in [[0, 0, 0], [1, 2, 3]] {
            sent.store(0, Ordering::Relaxed);
            buckets.begin(&comm, 1.0).unwrap();
            for (name, sent_then) in ["b", "c", "a"].into_iter().zip(sent_after) {
                buckets.add(&comm, name, &&[1.0f32][..]).unwrap();
                assert_eq!(sent.load(Ordering::Relaxed), sent_then);
            }
            buckets.finish(&comm).unwrap();
            assert_eq!(sent.load(Ordering::Relaxed), 3);
        }
        // A later one waits for those before it.
        sent.store(0, Ordering::Relaxed);
        buckets.begin(&comm, 1.0).unwrap();
        buckets.add(&comm, "c", &&[1.0f32][..]).unwrap();
        assert_eq!(sent.load(Ordering::Relaxed), 0);
        buckets.add(&comm, "b", &&[1.0f32][..]).unwrap();
        assert_eq!(sent.load(Ordering::Relaxed), 2);
        buckets.finish(&comm).unwrap();
    })
    .unwrap();
}

#[test]
fn a_hook_takes_the_place_of_the_sum() {
    phalanx::run(2, |comm| {
        let parameters = of_f32(&[("a", 2), ("b", 1)]);
        let mut buckets = Buckets::new(&comm, &Host, &parameters, Settings::default()).unwrap();
        let hook =
            |bucket: usize, members: &[(&str, Range<usize>)], comm: &Comm, values: &mut Values<Host>| {
                assert_eq!((bucket, members), (0, &[("a", 0..2), ("b", 2..3)][..]));
                let Values::F32(values) = values else { panic!("f32") };
                comm.all_reduce_in_place(values, ReduceOp::Sum)?;
                values.iter_mut().for_each(|x| *x *= 10.0);
                Ok(())
            };
        buckets.set_hook(Some(Box::new(hook))).unwrap();
        buckets.begin(&comm, 1.0).unwrap();
        buckets.add(&comm, "a", &&[1.0f32, 2.0][..]).unwrap();
        assert!(buckets.set_hook(None).is_err());
        buckets.add(&comm, "b", &&[3.0f32][..]).unwrap();
        buckets.finish(&comm).unwrap();
        assert_eq!(read::<f32>(&buckets, "a", 2), [10.0, 20.0]);
        assert_eq!(read::<f32>(&buckets, "b", 1), [30.0]);
    })
    .unwrap();
}

#[test]
fn mistakes_of_one_rank_are_refused_and_the_step_goes_on() {
    phalanx::run(2, |comm| {
        let parameters = of_f32(&[("a", 2), ("b", 1)]);
        let mut buckets = Buckets::new(&comm, &Host, &parameters, SMALL).unwrap();
        let usage = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Usage(_))), "{result:?}");
        for _ in 0..2 {
            if comm.rank() == 0 {
                usage(buckets.add(&comm, "a", &&[1.0f32; 2][..]));
                usage(buckets.begin(&comm, -1.0));
                usage(buckets.finish(&comm).map(drop));
            }
            buckets.begin(&comm, 1.0).unwrap();
            if comm.rank() == 0 {
                usage(buckets.begin(&comm, 1.0));
                usage(buckets.add(&comm, "a", &&[1.0f32; 3][..]));
                usage(buckets.add(&comm, "a", &&[1.0f64; 2][..]));
                usage(buckets.add(&comm, "c", &&[1.0f32; 2][..]));
            }
            buckets.add(&comm, "a", &&[1.0f32; 2][..]).unwrap();
            if comm.rank() == 0 {
                usage(buckets.add(&comm, "a", &&[1.0f32; 2][..]));
                usage(buckets.accumulate(true));
                usage(buckets.read::<f32>("a", &mut &mut [0.0; 2][..]));
            }
            buckets.finish(&comm).unwrap();
            assert_eq!(read::<f32>(&buckets, "a", 2), [1.0; 2]);
        }
    })
    .unwrap();
}

#[test]
fn ranks_with_other_parameters_are_told_at_the_start() {
    phalanx::run(3, |comm| {
        let len = if comm.rank() == 2 { 4 } else { 3 };
        let made = Buckets::new(&comm, &Host, &of_f32(&[("w", len)]), Settings::default());
        let Err(Error::Mismatch(text)) = made.map(drop) else { panic!("not seen") };
        assert!(text.contains("rank 2"), "{text}");
    })
    .unwrap();
}

#[test]
fn a_rank_that_panics_in_its_backward_is_an_error_for_the_others() {
    let backward = |comm: Comm| {
        let mut buckets = Buckets::new(&comm, &Host, &of_f32(&[("a", 2), ("b", 2)]), SMALL).unwrap();
        let mut finished = Ok(Participation { ranks: 0, weight: 0.0 });
        for step in 0..2 {
            buckets.begin(&comm, 1.0).unwrap();
            buckets.add(&comm, "a", &&[1.0f32; 2][..]).unwrap();
            assert!(step == 0 || comm.rank() == 0, "the user's closure panics");
            finished = buckets.add(&comm, "b", &&[1.0f32; 2][..]).and_then(|()| buckets.finish(&comm));
        }
        finished
    };
    let outcomes =
        phalanx::run(2, |comm| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| backward(comm))));
    let [survivor, panicked] = &outcomes.unwrap()[..] else { panic!("two ranks") };
    assert!(matches!(survivor, Ok(Err(Error::Comm(error))) if error.is_fatal()), "{survivor:?}");
    assert!(panicked.is_err());
}
