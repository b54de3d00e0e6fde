//! A mixture of experts: each rank has some experts, and tokens travel to the ones that their router chose.
//!
//! ```text
//! cargo run --release -p phalanx-train --example moe -- 4
//! ```
//!
//! The tokens are of eight kinds, and each kind is to be multiplied by a matrix of its own. One matrix could not learn that; eight experts and
//! a router can. Prints the loss, and how evenly the tokens are spread over the experts.

use phalanx::{Comm, ReduceOp};
use phalanx_train::Result;
use phalanx_train::device::Host;
use phalanx_train::expert::{Experts, Routing};
use phalanx_train::optimizer::{AdamW, Optimizer, Piece};

const WIDTH: usize = 4;
const EXPERTS: usize = 8;
/// Of each rank in a step.
const TOKENS: usize = 64;
const STEPS: u64 = 600;

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(4, |ranks| ranks.parse().expect("a number of ranks"));
    phalanx::try_run(ranks, train).map(drop)
}

/// Numbers with their gradient and the optimizer's moments.
struct Parameter {
    values: Vec<f64>,
    gradient: Vec<f64>,
    moments: [Vec<f64>; 2],
    shape: [usize; 2],
}

impl Parameter {
    fn new(shape: [usize; 2], seed: usize) -> Parameter {
        let len = shape[0] * shape[1];
        let values = (0..len).map(|at| 0.5 * noise(seed * 1000 + at)).collect();
        Parameter { values, gradient: vec![0.0; len], moments: [vec![0.0; len], vec![0.0; len]], shape }
    }

    fn update(&mut self, adam: &AdamW, step: u64) -> Result<()> {
        let [first, second] = &mut self.moments;
        let states = &mut [&mut first[..], &mut second[..]];
        let (piece, values) = (Piece::whole(&self.shape), &mut &mut self.values[..]);
        adam.update(&Host, step, &piece, &&self.gradient[..], values, states)?;
        self.gradient.fill(0.0);
        Ok(())
    }
}

/// Between -1 and 1.
fn noise(number: usize) -> f64 {
    let x = (number as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((x ^ (x >> 29)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// A token of a kind, and what is to become of it. The kind shows in the signs of the first three numbers.
fn token(number: usize) -> ([f64; WIDTH], [f64; WIDTH]) {
    let kind = number % EXPERTS;
    let x: [f64; WIDTH] = std::array::from_fn(|at| {
        let size = 0.5 + 0.5 * noise(number * 7 + at).abs();
        if at == 3 { noise(number * 7 + at) } else { size * f64::from(((kind >> at & 1) * 2) as i32 - 1) }
    });
    let wanted = |row: usize| (0..WIDTH).map(|k| noise(900_000 + kind * 64 + row * WIDTH + k) * x[k]).sum();
    (x, std::array::from_fn(wanted))
}

fn train(comm: Comm) -> Result<()> {
    let experts = Experts::new(&comm, EXPERTS)?;
    let mut router = Parameter::new([EXPERTS, WIDTH], 1);
    let mut own: Vec<Parameter> =
        experts.local().map(|expert| Parameter::new([WIDTH, WIDTH], 10 + expert)).collect();
    let adam = AdamW { weight_decay: 0.0, ..AdamW::new(1e-2) };
    for step in 1..=STEPS {
        let first = (step as usize * comm.world_size() + comm.rank()) * TOKENS;
        let tokens: Vec<_> = (first..first + TOKENS).map(token).collect();
        let (loss, routing) = one_step(&comm, &experts, &mut router, &mut own, &tokens)?;
        router.update(&adam, step)?;
        own.iter_mut().try_for_each(|expert| expert.update(&adam, step))?;

        let mut mean = [loss];
        comm.all_reduce_in_place(&mut mean, ReduceOp::Avg)?;
        if step == 1 || step % 150 == 0 {
            let statistics = routing.statistics(&comm)?;
            if comm.rank() == 0 {
                println!("step {step:3}: loss {:.5}, tokens of the experts {:?}", mean[0], statistics.tokens);
            }
        }
        if step == STEPS {
            assert!(mean[0] < 0.03, "the experts have not learnt: the loss is {}", mean[0]);
        }
    }
    Ok(())
}

/// Forward and backward of this rank's tokens; the mean loss of them.
fn one_step(
    comm: &Comm,
    experts: &Experts,
    router: &mut Parameter,
    own: &mut [Parameter],
    tokens: &[([f64; WIDTH], [f64; WIDTH])],
) -> Result<(f64, Routing)> {
    let x: Vec<f64> = tokens.iter().flat_map(|(x, _)| *x).collect();
    // Softmax over the experts; the two likeliest are chosen, each with its probability as weight.
    let probabilities: Vec<[f64; EXPERTS]> = tokens.iter().map(|(x, _)| softmax(&router.values, x)).collect();
    let (mut chosen, mut weights) = (Vec::new(), Vec::new());
    for of_token in &probabilities {
        let mut order: [usize; EXPERTS] = std::array::from_fn(|expert| expert);
        order.sort_by(|a, b| of_token[*b].total_cmp(&of_token[*a]));
        chosen.extend(order[..2].iter().map(|expert| *expert as u32));
        weights.extend(order[..2].iter().map(|expert| of_token[*expert]));
    }
    let routing = experts.route(comm, 2, &chosen, &weights)?;
    let rows = routing.dispatch(comm, &Host, WIDTH, &&x[..])?;
    let mut outputs = vec![0.0; rows.len()];
    for (expert, parameter) in experts.local().zip(own.iter()) {
        for row in routing.rows_of(expert) {
            for output in 0..WIDTH {
                outputs[row * WIDTH + output] =
                    (0..WIDTH).map(|k| parameter.values[output * WIDTH + k] * rows[row * WIDTH + k]).sum();
            }
        }
    }
    let combined = routing.combine(comm, &Host, WIDTH, &&outputs[..])?;

    let wanted = tokens.iter().flat_map(|(_, wanted)| *wanted);
    let errors: Vec<f64> = combined.output.iter().zip(wanted).map(|(here, wanted)| here - wanted).collect();
    let loss = errors.iter().map(|error| error * error).sum::<f64>() / errors.len() as f64;
    let gradient: Vec<f64> = errors.iter().map(|error| 2.0 * error / errors.len() as f64).collect();
    let (of_outputs, of_weights) =
        routing.combine_backward(comm, &Host, WIDTH, &&gradient[..], &combined.returned)?;
    for (expert, parameter) in experts.local().zip(own) {
        for row in routing.rows_of(expert) {
            for (at, gradient) in parameter.gradient.iter_mut().enumerate() {
                let (output, k) = (at / WIDTH, at % WIDTH);
                // A mean over all ranks' tokens.
                *gradient +=
                    experts.gradient_factor() * of_outputs[row * WIDTH + output] * rows[row * WIDTH + k];
            }
        }
    }
    for (choice, of_weight) in of_weights.iter().enumerate() {
        let (token, expert) = (choice / 2, chosen[choice] as usize);
        let p = &probabilities[token];
        for other in 0..EXPERTS {
            let of_score = of_weight * p[expert] * (f64::from(u8::from(other == expert)) - p[other]);
            for k in 0..WIDTH {
                router.gradient[other * WIDTH + k] += of_score * x[token * WIDTH + k];
            }
        }
    }
    // The router is the same on every rank.
    comm.all_reduce_in_place(&mut router.gradient, ReduceOp::Avg)?;
    Ok((loss, routing))
}

fn softmax(router: &[f64], x: &[f64; WIDTH]) -> [f64; EXPERTS] {
    let score = |expert: usize| -> f64 { (0..WIDTH).map(|k| router[expert * WIDTH + k] * x[k]).sum() };
    let scores: [f64; EXPERTS] = std::array::from_fn(score);
    let greatest = scores.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - greatest).exp()).sum();
    scores.map(|score| (score - greatest).exp() / sum)
}
