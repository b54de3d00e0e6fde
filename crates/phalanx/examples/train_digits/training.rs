//! The training loop of one rank.

use crate::Result;
use crate::digits::Digits;
use crate::network::{PARAMETERS, accuracy, add_gradient, initial_parameters};
use crate::random::Random;
use phalanx::{Comm, ReduceOp};
use std::time::Instant;

/// Images per step, of all ranks together.
const BATCH: usize = 32;
/// At first; it falls to zero over the epochs.
const LEARNING_RATE: f32 = 0.05;
const MOMENTUM: f32 = 0.9;

pub struct Outcome {
    /// The share of the held-out images whose class is found.
    pub accuracy: f32,
}

/// Trains and checks that all ranks have the same network at the end, bit for bit.
pub fn train(comm: &Comm, data: &Digits, epochs: usize) -> Result<Outcome> {
    let mut parameters = initial_parameters(7);
    let mut velocity = vec![0.0; PARAMETERS];
    // The gradient and, behind it, the loss. Memory from `alloc` is reduced without being copied first.
    let mut gradient = comm.alloc::<f32>(PARAMETERS + 1)?;
    let mut order: Vec<usize> = (0..data.learnt.len()).collect();
    let mut shuffle = Random(42);
    for epoch in 1..=epochs {
        let started = Instant::now();
        let mut loss = 0.0;
        let learning_rate = LEARNING_RATE * (1.0 - (epoch - 1) as f32 / epochs as f32);
        // The same order on every rank.
        shuffle.shuffle(&mut order);
        for batch in order.chunks(BATCH) {
            gradient.fill(0.0);
            let weight = 1.0 / batch.len() as f32;
            for &image in share(batch, comm.rank(), comm.world_size()) {
                gradient[PARAMETERS] +=
                    add_gradient(&parameters, &data.learnt[image], weight, &mut gradient[..PARAMETERS]);
            }
            comm.all_reduce_in_place(&mut gradient, ReduceOp::Sum)?;
            loss += gradient[PARAMETERS] * batch.len() as f32;
            for ((p, v), g) in parameters.iter_mut().zip(&mut velocity).zip(gradient.iter()) {
                *v = MOMENTUM * *v - learning_rate * g;
                *p += *v;
            }
        }
        if comm.rank() == 0 {
            println!(
                "epoch {epoch:2}: loss {:.4}, held-out accuracy {:.2} %, {:.0} ms, {} ranks",
                loss / data.learnt.len() as f32,
                100.0 * accuracy(&parameters, &data.held_out),
                1e3 * started.elapsed().as_secs_f64(),
                comm.world_size()
            );
        }
    }
    check_all_equal(comm, &parameters)?;
    Ok(Outcome { accuracy: accuracy(&parameters, &data.held_out) })
}

/// A rank's part of a batch; the parts differ by one image at most.
fn share(batch: &[usize], rank: usize, ranks: usize) -> &[usize] {
    &batch[batch.len() * rank / ranks..batch.len() * (rank + 1) / ranks]
}

/// An error unless every rank holds the same bits.
fn check_all_equal(comm: &Comm, parameters: &[f32]) -> Result<()> {
    let own: Vec<u32> = parameters.iter().map(|p| p.to_bits()).collect();
    let mut all = vec![0; own.len() * comm.world_size()];
    comm.all_gather(&own, &mut all)?;
    match all.chunks(own.len()).position(|other| other != own) {
        Some(rank) => Err(format!("rank {} and rank {rank} have different weights", comm.rank()).into()),
        None => {
            if comm.rank() == 0 {
                println!("all {} ranks hold the same {} weights, bit for bit", comm.world_size(), own.len());
            }
            Ok(())
        }
    }
}
