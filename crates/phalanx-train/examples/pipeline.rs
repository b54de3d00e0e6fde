//! A pipeline of four ranks: each has two layers of a network that learns a function of another one.
//!
//! ```text
//! cargo run --release -p phalanx-train --example pipeline -- 4
//! ```
//!
//! Prints the schedule as a table, with its bubble, and the loss as it falls.

use phalanx::Comm;
use phalanx_train::Result;
use phalanx_train::device::Host;
use phalanx_train::mesh::{Init, Layout, MeshShape};
use phalanx_train::optimizer::{AdamW, Optimizer, Piece};
use phalanx_train::pipeline::{Costs, Pipeline, Position, Schedule, Stage, mean_loss};
use std::collections::HashMap;

const WIDTH: usize = 8;
const MICRO_BATCHES: usize = 8;
/// Samples of a micro-batch.
const SAMPLES: usize = 4;
const STEPS: u64 = 400;

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(4, |ranks| ranks.parse().expect("a number of ranks"));
    phalanx::try_run(ranks, train).map(drop)
}

fn train(comm: Comm) -> Result<()> {
    // Two chunks for each rank: rank r has the stages r and r + ranks.
    let micros = MICRO_BATCHES.next_multiple_of(comm.world_size());
    let schedule = Schedule::interleaved(comm.world_size(), 2, micros)?;
    if comm.rank() == 0 {
        print!("{}", schedule.timeline(Costs::default()).to_table());
    }
    let pipeline = Pipeline::new(&comm, schedule)?;
    let mut layers = Layers::new(&pipeline, comm.rank())?;
    let adam = AdamW { weight_decay: 0.0, ..AdamW::new(3e-3) };
    for step in 1..=STEPS {
        layers.losses.clear();
        pipeline.run(&comm, &Host, &mut layers, |_, _| SAMPLES * WIDTH)?;
        layers.update(&adam, step)?;
        let loss = mean_loss(&comm, &layers.losses)?;
        if comm.rank() == 0 && (step == 1 || step % 100 == 0) {
            println!("step {step:3}: loss {loss:.5}");
        }
        if step == STEPS {
            assert!(loss < 0.02, "it has not learnt: the loss is {loss}");
        }
    }
    Ok(())
}

/// The layers of this rank: y = x + tanh(W x).
struct Layers {
    micros: usize,
    /// For each chunk: weights, their gradient, and the optimizer's two moments.
    chunks: Vec<[Vec<f64>; 4]>,
    /// Inputs and tanh(W x), from the forward to the backward.
    kept: HashMap<(usize, usize), (Vec<f64>, Vec<f64>)>,
    /// Gradients of the last stage's outputs.
    of_outputs: HashMap<usize, Vec<f64>>,
    losses: Vec<(f64, usize)>,
}

impl Layers {
    fn new(pipeline: &Pipeline, rank: usize) -> Result<Layers> {
        let schedule = pipeline.schedule();
        let layout = Layout::replicated(&[WIDTH, WIDTH]);
        let block = layout.block(&MeshShape::new(&[])?, 0)?;
        let zeros = || vec![0.0; WIDTH * WIDTH];
        let chunk = |chunk| {
            let name = format!("layers.{}.weight", schedule.stage(rank, chunk));
            let weights = Init::Normal { mean: 0.0, deviation: 0.3 }.fill(7, &name, &layout, &block);
            [weights, zeros(), zeros(), zeros()]
        };
        Ok(Layers {
            micros: schedule.micro_batches(),
            chunks: (0..schedule.chunks()).map(chunk).collect(),
            kept: HashMap::new(),
            of_outputs: HashMap::new(),
            losses: Vec::new(),
        })
    }

    /// Makes a step of the mean gradient of all samples.
    fn update(&mut self, adam: &AdamW, step: u64) -> Result<()> {
        for [weights, gradient, first, second] in &mut self.chunks {
            let states = &mut [&mut first[..], &mut second[..]];
            let piece = Piece::whole(&[WIDTH, WIDTH]);
            adam.update(&Host, step, &piece, &&gradient[..], &mut &mut weights[..], states)?;
            gradient.fill(0.0);
        }
        Ok(())
    }
}

/// A sample: input and wanted output.
fn sample(number: usize) -> ([f64; WIDTH], [f64; WIDTH]) {
    let x = std::array::from_fn(|at| ((number * 17 + at * 5) as f64 * 0.7).sin());
    let y = std::array::from_fn(|at| 0.8 * x[(at + 1) % WIDTH] - 0.5 * (2.0 * x[at]).sin());
    (x, y)
}

impl Stage<Host, f64> for Layers {
    fn forward(&mut self, at: Position, input: Option<Vec<f64>>) -> Result<Option<Vec<f64>>> {
        let samples = || (at.micro * SAMPLES..(at.micro + 1) * SAMPLES).map(sample);
        let input = input.unwrap_or_else(|| samples().flat_map(|(x, _)| x).collect());
        let weights = &self.chunks[at.chunk][0];
        let product = |x: &[f64], row: usize| -> f64 {
            weights[row * WIDTH..][..WIDTH].iter().zip(x).map(|(w, x)| w * x).sum()
        };
        let rows = input.chunks_exact(WIDTH);
        let inner: Vec<f64> = rows.flat_map(|x| (0..WIDTH).map(move |row| product(x, row).tanh())).collect();
        let output: Vec<f64> = input.iter().zip(&inner).map(|(x, inner)| x + inner).collect();
        self.kept.insert((at.micro, at.chunk), (input, inner));
        if !at.is_last {
            return Ok(Some(output));
        }
        let wanted = samples().flat_map(|(_, y)| y);
        let errors: Vec<f64> = output.iter().zip(wanted).map(|(here, wanted)| here - wanted).collect();
        let loss = errors.iter().map(|error| error * error).sum::<f64>() / errors.len() as f64;
        self.losses.push((loss, SAMPLES));
        // The loss of a step is the mean over all micro-batches.
        let factor = 2.0 / (errors.len() * self.micros) as f64;
        self.of_outputs.insert(at.micro, errors.iter().map(|error| factor * error).collect());
        Ok(None)
    }

    fn backward(&mut self, at: Position, gradient: Option<Vec<f64>>) -> Result<Option<Vec<f64>>> {
        let gradient =
            gradient.or_else(|| self.of_outputs.remove(&at.micro)).expect("the last stage kept it");
        let (input, inner) = self.kept.remove(&(at.micro, at.chunk)).expect("the forward kept it");
        let [weights, of_weights, ..] = &mut self.chunks[at.chunk];
        let mut of_input = gradient.clone();
        for (row, (gradient, inner)) in gradient.iter().zip(&inner).enumerate() {
            let (sample, output) = (row / WIDTH, row % WIDTH);
            let before_tanh = gradient * (1.0 - inner * inner);
            for column in 0..WIDTH {
                of_weights[output * WIDTH + column] += before_tanh * input[sample * WIDTH + column];
                of_input[sample * WIDTH + column] += before_tanh * weights[output * WIDTH + column];
            }
        }
        Ok((!at.is_first).then_some(of_input))
    }
}
