//! Reductions that send less.

use phalanx::bf16;
use phalanx_train::compress::{Format, PowerSgd, Quantized};
use phalanx_train::device::Host;

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
