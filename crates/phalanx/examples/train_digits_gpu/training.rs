//! The training loop of one rank.

use crate::Result;
use crate::digits::Digits;
use crate::network::{Images, Network, PARAMETERS};
use crate::random::Random;
use phalanx::{Comm, ReduceOp};
use std::ops::Range;
use std::time::Instant;

/// Images per step, of all ranks together.
const BATCH: usize = 32;
/// At first; it falls to zero over the epochs.
const LEARNING_RATE: f32 = 0.05;
const MOMENTUM: f32 = 0.9;

/// Trains, and checks that all ranks have the same network at the end, bit for bit. Answers with the share of the held-out
/// images whose class is found.
pub fn train(comm: &Comm, data: &Digits, epochs: usize) -> Result<f32> {
    let stream = comm.cuda_stream()?;
    let (learnt, held_out) = (Images::new(stream, &data.learnt)?, Images::new(stream, &data.held_out)?);
    let mut network = Network::new(stream, held_out.len.max(BATCH))?;
    let mut order: Vec<i32> = (0..learnt.len as i32).collect();
    let mut shuffle = Random(42);
    for epoch in 1..=epochs {
        let started = Instant::now();
        let learning_rate = LEARNING_RATE * (1.0 - (epoch - 1) as f32 / epochs as f32);
        // The same order on every rank.
        shuffle.shuffle(&mut order);
        let order = stream.clone_htod(&order)?;
        for first in (0..learnt.len).step_by(BATCH) {
            let batch = first..(first + BATCH).min(learnt.len);
            let images = batch.len() as f32;
            let share = share(batch, comm.rank(), comm.world_size());
            network.compute_gradient(&learnt, &order, share, 1.0 / images)?;
            comm.all_reduce_in_place(&mut network.gradient, ReduceOp::Sum)?;
            network.step(learning_rate, MOMENTUM, images)?;
        }
        // The first look at the GPU in this epoch: with the deadline.
        comm.sync()?;
        let (loss, accuracy) = (network.take_loss()?, network.accuracy(&held_out)?);
        if comm.rank() == 0 {
            println!(
                "epoch {epoch:2}: loss {:.4}, held-out accuracy {:.2} %, {:.0} ms, {} ranks",
                loss / learnt.len as f32,
                100.0 * accuracy,
                1e3 * started.elapsed().as_secs_f64(),
                comm.world_size()
            );
        }
    }
    check_all_equal(comm, &network)?;
    network.accuracy(&held_out)
}

/// A rank's part of a batch; the parts differ by one image at most.
fn share(batch: Range<usize>, rank: usize, ranks: usize) -> Range<usize> {
    batch.start + batch.len() * rank / ranks..batch.start + batch.len() * (rank + 1) / ranks
}

/// An error unless every rank holds the same bits.
fn check_all_equal(comm: &Comm, network: &Network) -> Result<()> {
    let stream = comm.cuda_stream()?;
    let mut all = stream.alloc_zeros::<f32>(PARAMETERS * comm.world_size())?;
    comm.all_gather(&network.parameters, &mut all)?;
    comm.sync()?;
    let all: Vec<u32> = stream.clone_dtoh(&all)?.into_iter().map(f32::to_bits).collect();
    let own = comm.rank() * PARAMETERS..(comm.rank() + 1) * PARAMETERS;
    match all.chunks(PARAMETERS).position(|other| *other != all[own.clone()]) {
        Some(rank) => Err(format!("rank {} and rank {rank} have different weights", comm.rank()).into()),
        None => {
            if comm.rank() == 0 {
                println!("all {} ranks hold the same {PARAMETERS} weights, bit for bit", comm.world_size());
            }
            Ok(())
        }
    }
}
