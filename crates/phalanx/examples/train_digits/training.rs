//! The training loop of one rank, which can be left and entered again.

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

/// How far the training is: the same on every rank between two steps.
pub struct Training {
    /// Complete epochs, and steps of the next one.
    epoch: u64,
    step: u64,
    parameters: Vec<f32>,
    velocity: Vec<f32>,
}

impl Training {
    pub fn new() -> Training {
        Training { epoch: 0, step: 0, parameters: initial_parameters(7), velocity: vec![0.0; PARAMETERS] }
    }

    /// The share of the held-out images whose class is found.
    pub fn accuracy(&self, data: &Digits) -> f32 {
        accuracy(&self.parameters, &data.held_out)
    }

    /// Takes rank 0's state: that of a survivor, after a failure. Survivors may be one step apart.
    fn synchronise(&mut self, comm: &Comm) -> phalanx::Result<()> {
        let mut progress = [self.epoch, self.step];
        comm.broadcast_in_place(&mut progress, 0)?;
        [self.epoch, self.step] = progress;
        comm.broadcast_in_place(&mut self.parameters, 0)?;
        comm.broadcast_in_place(&mut self.velocity, 0)
    }

    /// Trains to the end, from where rank 0 is. Afterwards all ranks have the same network, bit for bit, however often they began
    /// again.
    pub fn run(&mut self, comm: &Comm, data: &Digits, epochs: usize) -> phalanx::Result<()> {
        self.synchronise(comm)?;
        // The gradient and, behind it, the loss. Memory from `alloc` is reduced without being copied first.
        let mut gradient = comm.alloc::<f32>(PARAMETERS + 1)?;
        while self.epoch < epochs as u64 {
            let started = Instant::now();
            let mut loss = 0.0;
            let learning_rate = LEARNING_RATE * (1.0 - self.epoch as f32 / epochs as f32);
            let order = order(data.learnt.len(), self.epoch);
            for batch in order.chunks(BATCH).skip(self.step as usize) {
                gradient.fill(0.0);
                let weight = 1.0 / batch.len() as f32;
                for &image in share(batch, comm.rank(), comm.world_size()) {
                    gradient[PARAMETERS] += add_gradient(
                        &self.parameters,
                        &data.learnt[image],
                        weight,
                        &mut gradient[..PARAMETERS],
                    );
                }
                comm.all_reduce_in_place(&mut gradient, ReduceOp::Sum)?;
                loss += gradient[PARAMETERS] * batch.len() as f32;
                for ((p, v), g) in self.parameters.iter_mut().zip(&mut self.velocity).zip(gradient.iter()) {
                    *v = MOMENTUM * *v - learning_rate * g;
                    *p += *v;
                }
                self.step += 1;
            }
            (self.epoch, self.step) = (self.epoch + 1, 0);
            if comm.rank() == 0 {
                println!(
                    "epoch {:2}: loss {:.4}, held-out accuracy {:.2} %, {:.0} ms, {} ranks",
                    self.epoch,
                    loss / data.learnt.len() as f32,
                    100.0 * self.accuracy(data),
                    1e3 * started.elapsed().as_secs_f64(),
                    comm.world_size()
                );
            }
        }
        Ok(())
    }

    /// An error unless every rank holds the same bits.
    pub fn check_all_equal(&self, comm: &Comm) -> Result<()> {
        let own: Vec<u32> = self.parameters.iter().map(|p| p.to_bits()).collect();
        let mut all = vec![0; own.len() * comm.world_size()];
        comm.all_gather(&own, &mut all)?;
        match all.chunks(own.len()).position(|other| other != own) {
            Some(rank) => Err(format!("rank {} and rank {rank} have different weights", comm.rank()).into()),
            None => {
                if comm.rank() == 0 {
                    println!(
                        "all {} ranks hold the same {} weights, bit for bit",
                        comm.world_size(),
                        own.len()
                    );
                }
                Ok(())
            }
        }
    }
}

/// The images in the order of an epoch, the same on every rank.
fn order(images: usize, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..images).collect();
    let mut shuffle = Random(42);
    (0..=epoch).for_each(|_| shuffle.shuffle(&mut order));
    order
}

/// A rank's part of a batch; the parts differ by one image at most.
fn share(batch: &[usize], rank: usize, ranks: usize) -> &[usize] {
    &batch[batch.len() * rank / ranks..batch.len() * (rank + 1) / ranks]
}
