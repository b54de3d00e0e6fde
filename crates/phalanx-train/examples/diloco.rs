//! DiLoCo: each rank trains by itself for 50 steps, and then all agree. 50 times fewer messages, for nearly the same network.
//!
//! ```text
//! cargo run --release -p phalanx-train --example diloco -- 4
//! ```
//!
//! Prints the loss of DiLoCo and of training in step, with the bytes that each has sent.

use phalanx::{Comm, ReduceOp};
use phalanx_train::Result;
use phalanx_train::device::Host;
use phalanx_train::optimizer::{AdamW, Optimizer, Piece, Sgd};
use phalanx_train::outer::Outer;

const INPUTS: usize = 6;
const HIDDEN: usize = 16;
const LEN: usize = HIDDEN * INPUTS + HIDDEN;
const BATCH: usize = 16;
const INNER: u64 = 50;
const ROUNDS: u64 = 30;

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(4, |ranks| ranks.parse().expect("a number of ranks"));
    let ends = phalanx::try_run(ranks, |comm| {
        let in_step = train(&comm, false)?;
        let diloco = train(&comm, true)?;
        if comm.rank() == 0 {
            println!("in step: loss {:.5}, {} bytes of each rank", in_step.0, in_step.1);
            println!("DiLoCo:  loss {:.5}, {} bytes of each rank", diloco.0, diloco.1);
        }
        Ok::<_, phalanx_train::Error>((in_step, diloco))
    })?;
    for (in_step, diloco) in ends {
        assert!(diloco.0 < 0.02 && in_step.0 < 0.02, "one has not learnt");
        assert_eq!(diloco.1 * INNER, in_step.1);
    }
    Ok(())
}

/// Between -1 and 1.
fn noise(number: u64) -> f64 {
    let x = (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((x ^ (x >> 29)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Trains a network of two layers; its loss on samples that no rank has seen, and the bytes that this rank has given.
fn train(comm: &Comm, is_local: bool) -> Result<(f64, u64)> {
    let mut parameters: Vec<f64> = (0..LEN as u64).map(|at| 0.4 * noise(at)).collect();
    let (mut first, mut second) = (vec![0.0; LEN], vec![0.0; LEN]);
    let adam = AdamW { weight_decay: 0.0, ..AdamW::new(3e-3) };
    let outer = Sgd { learning_rate: 0.7, momentum: 0.9, nesterov: true, weight_decay: 0.0 };
    let mut outer = Outer::new(&Host, &&parameters[..], outer)?;
    let mut bytes = 0;
    for step in 1..=ROUNDS * INNER {
        let mut gradient = vec![0.0; LEN];
        // Each rank has samples of its own.
        let begin = (step * comm.world_size() as u64 + comm.rank() as u64) * BATCH as u64;
        for number in begin..begin + BATCH as u64 {
            add_gradient(&parameters, 1_000_000 + number, &mut gradient);
        }
        if !is_local {
            comm.all_reduce_in_place(&mut gradient, ReduceOp::Avg)?;
            bytes += 8 * LEN as u64;
        }
        let states = &mut [&mut first[..], &mut second[..]];
        let (piece, values) = (Piece::whole(&[LEN]), &mut &mut parameters[..]);
        adam.update(&Host, step, &piece, &&gradient[..], values, states)?;
        if is_local && step % INNER == 0 {
            outer.synchronize(comm, &mut parameters)?;
            bytes += 8 * LEN as u64;
        }
    }
    let loss = (0..1000).map(|number| add_gradient(&parameters, number, &mut vec![0.0; LEN])).sum::<f64>();
    Ok((loss * BATCH as f64 / 1000.0, bytes))
}

/// Adds the gradient of a sample's squared error, over the batch; answers that error.
fn add_gradient(parameters: &[f64], number: u64, gradient: &mut [f64]) -> f64 {
    let x: [f64; INPUTS] = std::array::from_fn(|at| noise(number * INPUTS as u64 + at as u64));
    let wanted = (x[0] + x[1]).sin() - 0.5 * (2.0 * x[2]).sin();
    let (weights, last) = parameters.split_at(HIDDEN * INPUTS);
    let hidden: [f64; HIDDEN] = std::array::from_fn(|unit| {
        weights[unit * INPUTS..][..INPUTS].iter().zip(&x).map(|(w, x)| w * x).sum::<f64>().tanh()
    });
    let error = hidden.iter().zip(last).map(|(h, w)| h * w).sum::<f64>() - wanted;
    let of_output = 2.0 * error / BATCH as f64;
    for unit in 0..HIDDEN {
        gradient[HIDDEN * INPUTS + unit] += of_output * hidden[unit];
        let before_tanh = of_output * last[unit] * (1.0 - hidden[unit] * hidden[unit]);
        for (k, x) in x.iter().enumerate() {
            gradient[unit * INPUTS + k] += before_tanh * x;
        }
    }
    error * error / BATCH as f64
}
