//! Reductions that send less.

use phalanx::{Comm, bf16};
use phalanx_train::buckets::{GradientBuckets, Parameter, Settings};
use phalanx_train::checkpoint::{Checkpoint, Saver, State};
use phalanx_train::compress::{Format, PowerSgd, PowerSgdHook, Quantized};
use phalanx_train::device::Host;
use std::path::Path;

fn noise(rank: usize, step: usize, element: usize) -> f64 {
    ((element * 29 + step * 101 + rank * 1009) as f64 * 0.71).sin()
}

#[test]
fn a_mean_of_rank_one_comes_through_whole() {
    for (a, b, mean) in [
        ([1.0f64, 2.0, 2.0, 4.0], [3.0, 6.0, 6.0, 12.0], [2.0, 4.0, 4.0, 8.0]),
        ([0.0; 4], [0.0; 4], [0.0; 4]),
    ] {
        phalanx::run(2, |comm| {
            let mut power = PowerSgd::new(&Host, 2, 2, 1, 7).unwrap();
            for _ in 0..3 {
                let mut gradient = [a, b][comm.rank()];
                power.reduce(&comm, &mut &mut gradient[..]).unwrap();
                for (here, expected) in gradient.iter().zip(mean) {
                    assert!((here - expected).abs() < 1e-12, "{here} is not {expected}");
                }
            }
        })
        .unwrap();
    }
}

#[test]
fn what_is_left_out_comes_later() {
    const ROWS: usize = 6;
    const COLUMNS: usize = 5;
    const STEPS: usize = 12;
    for rank in 1..=3 {
        let results = phalanx::run(4, |comm| {
            let mut power = PowerSgd::<_, f32>::new(&Host, ROWS, COLUMNS, rank, 1).unwrap();
            let mut delivered = vec![0.0f64; ROWS * COLUMNS];
            for step in 0..STEPS {
                let mut gradient: Vec<f32> =
                    (0..ROWS * COLUMNS).map(|at| noise(comm.rank(), step, at) as f32).collect();
                power.reduce(&comm, &mut &mut gradient[..]).unwrap();
                delivered.iter_mut().zip(&gradient).for_each(|(sum, number)| *sum += f64::from(*number));
                if step == STEPS / 2 {
                    // Through a checkpoint.
                    let saved = power.state().map(|state| state.clone());
                    power = PowerSgd::new(&Host, ROWS, COLUMNS, rank, 99).unwrap();
                    power.state().into_iter().zip(saved).for_each(|(state, saved)| *state = saved);
                }
            }
            let [error, _] = power.state();
            (delivered, error.clone())
        })
        .unwrap();
        for at in 0..ROWS * COLUMNS {
            let error = results.iter().map(|(_, error)| f64::from(error[at])).sum::<f64>() / 4.0;
            let all = (0..STEPS).flat_map(|step| (0..4).map(move |rank| noise(rank, step, at)));
            let expected = all.sum::<f64>() / 4.0;
            let delivered = results[0].0[at];
            assert!((delivered + error - expected).abs() < 1e-4, "{delivered} + {error} is not {expected}");
            assert!(results.iter().all(|(here, _)| here[at].to_bits() == delivered.to_bits()));
        }
    }
}

#[test]
fn errors_of_quantized_means_are_within_their_bounds() {
    for (ranks, len, block) in [(1, 1, 256), (2, 1000, 64), (3, 257, 16), (5, 4096, 256), (4, 0, 8)] {
        for format in [Format::Int8, Format::Fp8] {
            // Blocks of very unlike size.
            let number =
                |rank: usize, at: usize| noise(rank, 0, at) as f32 * 10f32.powi((at / block % 9) as i32 - 4);
            let results = phalanx::run(ranks, |comm| {
                let mut numbers: Vec<f32> = (0..len).map(|at| number(comm.rank(), at)).collect();
                let quantized = Quantized::new(format, block).unwrap();
                quantized.all_reduce_mean(&comm, &Host, &mut &mut numbers[..]).unwrap();
                numbers
            })
            .unwrap();
            for at in 0..len {
                let start = at / block * block;
                let most = |rank: usize| {
                    (start..(start + block).min(len)).map(|at| number(rank, at).abs()).fold(0.0, f32::max)
                };
                let mean = |f: &dyn Fn(usize) -> f32| (0..ranks).map(f).sum::<f32>() / ranks as f32;
                // Each rank's rounding, and then the mean's, of which the block's greatest is at most the mean of the ranks' greatest.
                let bound = match format {
                    Format::Int8 => {
                        mean(&|rank| most(rank) / 254.0) + mean(&most) * (1.0 + 1.0 / 254.0) / 254.0
                    }
                    Format::Fp8 => {
                        let once = mean(&|rank| number(rank, at).abs() / 16.0 + most(rank) / 458_752.0);
                        once + (mean(&|rank| number(rank, at).abs()) + once) / 16.0
                            + mean(&most) * 1.1 / 458_752.0
                    }
                };
                let (here, exact) = (results[0][at], mean(&|rank| number(rank, at)));
                assert!(
                    (here - exact).abs() <= bound * 1.0001,
                    "{format:?} {at}: {here} is not {exact} within {bound}"
                );
                assert!(results.iter().all(|numbers| numbers[at].to_bits() == here.to_bits()));
            }
        }
    }
}

#[test]
fn what_is_not_finite_spoils_its_block_on_every_rank() {
    let results = phalanx::run(2, |comm| {
        let mut numbers = [bf16::ONE; 12];
        numbers[5] = if comm.rank() == 1 { bf16::INFINITY } else { bf16::ONE };
        let quantized = Quantized::new(Format::Int8, 4).unwrap();
        quantized.all_reduce_mean(&comm, &Host, &mut &mut numbers[..]).unwrap();
        numbers.map(|number| number.is_nan())
    })
    .unwrap();
    for nan in results {
        assert_eq!(nan, std::array::from_fn(|at| (4..8).contains(&at)));
    }
}

#[test]
fn ranks_and_blocks_that_cannot_be_are_refused() {
    let error = |rank| PowerSgd::<_, f32>::new(&Host, 4, 3, rank, 0).unwrap_err().to_string();
    assert!(error(4).contains("rank 4 for a matrix of 4 × 3: 1 to 3"));
    assert!(error(0).contains("rank 0"));
    assert!(Quantized::new(Format::Fp8, 0).unwrap_err().to_string().contains("blocks of 0"));
}

const MATRICES: [(&str, usize, usize); 2] = [("a", 6, 5), ("b", 4, 7)];

fn buckets_of(comm: &Comm, bucket_bytes: usize, hook: &PowerSgdHook<Host, f32>) -> GradientBuckets<Host> {
    let mut parameters: Vec<Parameter> =
        MATRICES.iter().map(|(name, rows, columns)| Parameter::new::<f32>(*name, rows * columns)).collect();
    parameters.push(Parameter::new::<f32>("bias", 9));
    let settings = Settings { bucket_bytes, ..Settings::default() };
    let mut buckets = GradientBuckets::new(comm, &Host, &parameters, settings).unwrap();
    buckets.set_hook(Some(Box::new(hook.clone()))).unwrap();
    buckets
}

/// A hook whose state went through files.
fn through_a_checkpoint(
    comm: &Comm,
    folder: &Path,
    hook: &PowerSgdHook<Host, f32>,
) -> PowerSgdHook<Host, f32> {
    let mut saved = Vec::new();
    hook.for_each_state(|name, [error, right]| saved.push((name.to_owned(), error.clone(), right.clone())));
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut saver = Saver::new(comm, folder).unwrap();
    let mut state = State::new();
    for (name, error, right) in &saved {
        // The error is each rank's own; the right factor is that of all.
        let own = rank * error.len()..(rank + 1) * error.len();
        let shape = [ranks, error.len()];
        state.tensor::<_, f32>(
            format!("{name}.error"),
            &shape,
            std::slice::from_ref(&own),
            &Host,
            &error[..],
        );
        let all = 0..right.len();
        state.tensor::<_, f32>(
            format!("{name}.right"),
            &[right.len()],
            std::slice::from_ref(&all),
            &Host,
            &right[..],
        );
    }
    saver.save(1, state).unwrap();
    saver.finish().unwrap();
    let checkpoint = Checkpoint::latest_of_all(comm, folder).unwrap().unwrap();
    let read = PowerSgdHook::new(&Host, &MATRICES, 1, 99).unwrap();
    read.for_each_state(|name, [error, right]| {
        let own = rank * error.len()..(rank + 1) * error.len();
        *error = checkpoint.read(&format!("{name}.error"), std::slice::from_ref(&own)).unwrap();
        let all = 0..right.len();
        *right = checkpoint.read(&format!("{name}.right"), std::slice::from_ref(&all)).unwrap();
    });
    read
}

#[test]
fn errors_stay_with_their_parameters_over_rebuilt_buckets_and_checkpoints() {
    const STEPS: usize = 12;
    let folder = tempfile::tempdir().unwrap();
    let results = phalanx::run(3, |comm| {
        let mut hook = PowerSgdHook::new(&Host, &MATRICES, 1, 1).unwrap();
        // One parameter in a bucket at first, and in another order from the second step on.
        let mut buckets = buckets_of(&comm, 1, &hook);
        let mut delivered = [vec![0.0f64; 30], vec![0.0; 28]];
        for step in 0..STEPS {
            if step == 4 {
                hook = through_a_checkpoint(&comm, folder.path(), &hook);
                // All in one bucket.
                buckets = buckets_of(&comm, 1 << 20, &hook);
            }
            buckets.begin(&comm, 1.0).unwrap();
            for (number, (name, rows, columns)) in MATRICES.iter().enumerate().rev() {
                let gradient: Vec<f32> = (0..rows * columns)
                    .map(|at| noise(comm.rank(), step, at + 100 * number) as f32)
                    .collect();
                buckets.add(&comm, name, &&gradient[..]).unwrap();
            }
            buckets.add(&comm, "bias", &&[comm.rank() as f32; 9][..]).unwrap();
            buckets.finish(&comm).unwrap();
            for ((name, ..), sum) in MATRICES.iter().zip(&mut delivered) {
                let mut gradient = vec![0.0f32; sum.len()];
                buckets.read(name, &mut &mut gradient[..]).unwrap();
                sum.iter_mut().zip(&gradient).for_each(|(sum, number)| *sum += f64::from(*number));
            }
            // What is no matrix comes whole.
            let mut bias = [0.0f32; 9];
            buckets.read("bias", &mut &mut bias[..]).unwrap();
            assert_eq!(bias, [1.0; 9]);
        }
        let mut errors = Vec::new();
        hook.for_each_state(|_, [error, _]| errors.push(error.clone()));
        (delivered, errors)
    })
    .unwrap();
    for number in 0..MATRICES.len() {
        for at in 0..results[0].0[number].len() {
            let all =
                (0..STEPS).flat_map(|step| (0..3).map(move |rank| noise(rank, step, at + 100 * number)));
            let expected = all.sum::<f64>() / 3.0;
            // A rank's error is of its share of the mean: they add up.
            let error = results.iter().map(|(_, errors)| f64::from(errors[number][at])).sum::<f64>();
            let delivered = results[0].0[number][at];
            assert!((delivered + error - expected).abs() < 1e-4, "{delivered} + {error} is not {expected}");
            assert!(error.abs() > 1e-4 || at > 0, "nothing was left out: {error}");
            assert!(results.iter().all(|(here, _)| here[number][at].to_bits() == delivered.to_bits()));
        }
    }
}

#[test]
fn a_bucket_travels_in_8_bits_if_its_hook_says_so() {
    phalanx::run(4, |comm| {
        let parameters = [Parameter::new::<f32>("a", 1000), Parameter::new::<f64>("b", 50)];
        let mut buckets = GradientBuckets::new(&comm, &Host, &parameters, Settings::default()).unwrap();
        buckets.set_hook(Some(Box::new(Quantized::new(Format::Int8, 64).unwrap()))).unwrap();
        for _ in 0..3 {
            // Batches of 1 to 4 samples: sample by sample the same weight.
            buckets.begin(&comm, comm.rank() as f64 + 1.0).unwrap();
            let a: Vec<f32> = (0..1000).map(|at| noise(comm.rank(), 0, at) as f32).collect();
            buckets.add(&comm, "a", &&a[..]).unwrap();
            buckets.add(&comm, "b", &&[comm.rank() as f64; 50][..]).unwrap();
            buckets.finish(&comm).unwrap();
        }
        let (mut a, mut b) = ([0.0f32; 1000], [0.0f64; 50]);
        buckets.read("a", &mut &mut a[..]).unwrap();
        buckets.read("b", &mut &mut b[..]).unwrap();
        for (at, number) in a.iter().enumerate() {
            let exact: f64 = (0..4).map(|rank| noise(rank, 0, at) * (rank as f64 + 1.0) / 10.0).sum();
            // Each rank's share, and the sum: 1/254 of the block's greatest, which is at most 1.
            assert!((f64::from(*number) - exact).abs() < 2.0 / 254.0 * 1.01, "{number} is not {exact}");
        }
        // 0.1 × 0 + 0.2 × 1 + 0.3 × 2 + 0.4 × 3, of which each block is the greatest number.
        assert!(b.iter().all(|number| (number - 2.0).abs() < 1e-5), "{b:?}");
    })
    .unwrap();
}

#[test]
fn matrices_that_cannot_be_are_refused_by_name() {
    let error = |matrices: &[(&str, usize, usize)]| {
        PowerSgdHook::<_, f32>::new(&Host, matrices, 3, 0).err().unwrap().to_string()
    };
    assert!(error(&[("thin", 2, 9)]).contains("\"thin\": rank 3 for a matrix of 2 × 9"));
    assert!(error(&[("w", 4, 4), ("w", 4, 4)]).contains("two matrices are named \"w\""));
}
