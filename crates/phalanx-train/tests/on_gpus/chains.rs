//! Messages between neighbours: pipelines and rings.

use crate::same::{self, Results};
use phalanx::{BackendKind, Comm, bf16};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use phalanx_train::attention::{Block, Kernel, Mask, Merge, Ring};
use phalanx_train::device::{Device, Gpu, Host, Number};
use phalanx_train::pipeline::{Messages, Pipeline, Position, Schedule, Stage};
use phalanx_train::{Error, Result};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("pipelines", |comm, _| pipelines(&comm)),
    Scenario::rank("rings", |comm, _| rings(&comm)),
];

fn connected(comm: &Comm) -> Result<Gpu> {
    same::gpu(comm)?.connected(comm)
}

/// What this rank gets among as many ranks of host memory, whose messages have tags.
fn on_host(comm: &Comm, part: fn(&Comm, &Host) -> Result<Results>) -> Result<Results> {
    let world =
        Comm::builder().backend(BackendKind::Host).run(comm.world_size(), |comm| part(&comm, &Host))?;
    world.into_iter().nth(comm.rank()).expect("as many ranks")
}

fn pipelines(comm: &Comm) -> Outcome {
    let gpu = connected(comm).map_err(|error| error.to_string())?;
    same::compare(on_host(comm, schedules::<Host>), schedules::<Gpu>(comm, &gpu))
}

fn rings(comm: &Comm) -> Outcome {
    let gpu = connected(comm).map_err(|error| error.to_string())?;
    // Without connections it is an error, and the message says what to do.
    if comm.world_size() > 1 {
        let unconnected = same::gpu(comm).and_then(|gpu| ring::<Gpu, f32>(comm, &gpu, 7, true).map(drop));
        assert!(unconnected.unwrap_err().to_string().contains("Gpu::connected"));
    }
    same::compare(on_host(comm, rings_of::<Host>), rings_of::<Gpu>(comm, &gpu))
}

/// Multiplies by the stage's weight, and keeps what went in.
struct Layers<'d, D: Device> {
    device: &'d D,
    inputs: Vec<Vec<Option<D::Buffer<f32>>>>,
    /// Σ of gradient · input, for each chunk.
    gradients: Vec<D::Buffer<f32>>,
    /// Gradients of weights that a schedule does later.
    later: Vec<Vec<Option<D::Buffer<f32>>>>,
}

const WIDTH: usize = 1500;

fn weight(stage: usize) -> f64 {
    [0.5, -1.5, 2.0, 0.75][stage % 4]
}

impl<D: Device> Layers<'_, D> {
    fn scaled(&self, from: &D::Buffer<f32>, factor: f64) -> Result<D::Buffer<f32>> {
        let mut to = self.device.zeros::<f32>(WIDTH)?;
        let from = self.device.view(from, 0..WIDTH);
        self.device.add(factor, &from, &mut self.device.view_mut(&mut to, 0..WIDTH))?;
        Ok(to)
    }

    /// Of the input, that it counts how often and with what it came.
    fn add_gradient(&mut self, at: Position, gradient: &D::Buffer<f32>) -> Result<()> {
        let input = self.inputs[at.chunk][at.micro].take().expect("a forward before");
        let mut sum = self.device.view_mut(&mut self.gradients[at.chunk], 0..WIDTH);
        self.device.add(0.25, &self.device.view(gradient, 0..WIDTH), &mut sum)?;
        self.device.add(1.0, &self.device.view(&input, 0..WIDTH), &mut sum)
    }
}

impl<D: Device> Stage<D, f32> for Layers<'_, D> {
    fn forward(&mut self, at: Position, input: Option<D::Buffer<f32>>) -> Result<Option<D::Buffer<f32>>> {
        let input = match input {
            Some(input) => input,
            None => self.device.upload(&vec![at.micro as f32 + 1.0; WIDTH])?,
        };
        let output = self.scaled(&input, weight(at.stage))?;
        self.inputs[at.chunk][at.micro] = Some(input);
        Ok((!at.is_last).then_some(output))
    }

    fn backward(&mut self, at: Position, gradient: Option<D::Buffer<f32>>) -> Result<Option<D::Buffer<f32>>> {
        let gradient = match gradient {
            Some(gradient) => gradient,
            None => self.device.upload(&vec![at.micro as f32 - 1.0; WIDTH])?,
        };
        let back = self.scaled(&gradient, weight(at.stage))?;
        if at.splits_backward {
            self.later[at.chunk][at.micro] = Some(gradient);
        } else {
            self.add_gradient(at, &gradient)?;
        }
        Ok((!at.is_first).then_some(back))
    }

    fn backward_weights(&mut self, at: Position) -> Result<()> {
        let gradient = self.later[at.chunk][at.micro].take().expect("a backward before");
        self.add_gradient(at, &gradient)
    }
}

/// Each kind of schedule, with more micro-batches than messages that could wait unreceived.
fn schedules<D: Messages>(comm: &Comm, device: &D) -> Result<Results> {
    const MICRO: usize = 8;
    let ranks = comm.world_size();
    let mut results = Results::default();
    let schedules = [
        ("gpipe", Schedule::gpipe(ranks, MICRO)?),
        ("1F1B", Schedule::one_forward_one_backward(ranks, MICRO)?),
        ("interleaved", Schedule::interleaved(ranks, 2, MICRO)?),
        ("zero bubble", Schedule::zero_bubble(ranks, MICRO)?),
    ];
    for (name, schedule) in schedules {
        let chunks = schedule.stages() / ranks;
        let none = || (0..chunks).map(|_| (0..MICRO).map(|_| None).collect()).collect();
        let gradients = (0..chunks).map(|_| device.zeros(WIDTH)).collect::<Result<_>>()?;
        let mut layers = Layers { device, inputs: none(), later: none(), gradients };
        for _ in 0..2 {
            Pipeline::new(comm, schedule.clone())?.run(comm, device, &mut layers, |_, _| WIDTH)?;
        }
        for gradient in &layers.gradients {
            results.buffer(name, device, gradient)?;
        }
    }
    Ok(results)
}

/// Attention with the same weight for all keys that a query sees, on the host.
struct Uniform<'d, D> {
    device: &'d D,
    size: usize,
}

impl<D: Device> Uniform<'_, D> {
    /// How many queries and keys there are, and how many of them a query sees.
    fn seen(&self, block: &Block<D::View<'_, impl Number>>) -> (usize, usize, impl Fn(usize) -> usize) {
        let [queries, keys] =
            [&block.queries, &block.keys].map(|view| phalanx::Source::len(view) / self.size);
        let is_causal = block.mask == Mask::Causal;
        (queries, keys, move |query: usize| if is_causal { query + 1 } else { keys })
    }
}

impl<D: Device, T: Number> Kernel<D, T> for Uniform<'_, D> {
    fn forward(&mut self, block: Block<D::View<'_, T>>) -> Result<(D::Buffer<T>, D::Buffer<f64>)> {
        let (queries, _, seen) = self.seen(&block);
        let values = self.device.download(&block.values)?;
        let mean = |at: usize| {
            let (count, column) = (seen(at / self.size), at % self.size);
            T::from_f64(
                (0..count).map(|key| values[key * self.size + column].to_f64()).sum::<f64>() / count as f64,
            )
        };
        let sums: Vec<f64> = (0..queries).map(|query| (seen(query) as f64).ln()).collect();
        let output: Vec<T> = (0..queries * self.size).map(mean).collect();
        Ok((self.device.upload(&output)?, self.device.upload(&sums)?))
    }

    fn backward(
        &mut self,
        block: Block<D::View<'_, T>>,
        _output: D::View<'_, T>,
        sums: D::View<'_, f64>,
        gradient: D::View<'_, T>,
    ) -> Result<[D::Buffer<T>; 3]> {
        let (queries, keys, seen) = self.seen(&block);
        let (sums, gradient) = (self.device.download(&sums)?, self.device.download(&gradient)?);
        let mut of_values = vec![0.0; keys * self.size];
        for query in 0..queries {
            for at in 0..seen(query) * self.size {
                of_values[at] += gradient[query * self.size + at % self.size].to_f64() * (-sums[query]).exp();
            }
        }
        let of_values: Vec<T> = of_values.into_iter().map(T::from_f64).collect();
        let zeros = |count: usize| self.device.zeros::<T>(count * self.size);
        Ok([zeros(queries)?, zeros(keys)?, self.device.upload(&of_values)?])
    }
}

fn rings_of<D: Messages + Merge>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    for (tokens, is_causal) in [(7, true), (8, false), (64, true)] {
        for (name, numbers) in
            ["output", "gradient"].into_iter().zip(ring::<D, f32>(comm, device, tokens, is_causal)?)
        {
            results.near(format!("{name} of {tokens} tokens"), &numbers, 1e-6);
        }
        for numbers in ring::<D, bf16>(comm, device, tokens, is_causal)? {
            results.near(format!("{tokens} tokens in bf16"), &numbers, 1e-2);
        }
    }
    Ok(results)
}

/// Queries and keys of 0, value j is j: output i is i / 2, if the mask is causal.
fn ring<D: Messages + Merge, T: Number>(
    comm: &Comm,
    device: &D,
    tokens: usize,
    is_causal: bool,
) -> Result<[Vec<T>; 2]> {
    const SIZE: usize = 4;
    let ring = Ring::new(comm, tokens, 1, SIZE, is_causal)?;
    let own: Vec<usize> = ring.tokens(comm.rank()).into_iter().flatten().collect();
    let of_tokens = |number: &dyn Fn(usize) -> f64| -> Vec<T> {
        own.iter().flat_map(|token| [T::from_f64(number(*token)); SIZE]).collect()
    };
    let (zeros, values) =
        (device.upload(&of_tokens(&|_| 0.0))?, device.upload(&of_tokens(&|token| token as f64))?);
    let mut kernel = Uniform { device, size: SIZE };
    let inputs = [&zeros, &zeros, &values];
    let attention = ring.forward::<D, T, f32>(comm, device, &mut kernel, inputs)?;
    let len = own.len() * SIZE;
    let output = device.download(&device.view(&attention.output, 0..len))?;
    for (token, row) in own.iter().zip(output.chunks_exact(SIZE)) {
        let expected = if is_causal { *token } else { tokens - 1 } as f64 / 2.0;
        let is_near = |x: &T| (x.to_f64() - expected).abs() <= expected / 100.0;
        if !row.iter().all(is_near) {
            return Err(Error::Usage(format!("token {token}: {row:?} is not {expected}")));
        }
    }
    let gradient = device.upload(&of_tokens(&|token| 1.0 + token as f64))?;
    let [_, _, of_values] =
        ring.backward::<D, T, f32>(comm, device, &mut kernel, inputs, &attention, &gradient)?;
    Ok([output, device.download(&device.view(&of_values, 0..len))?])
}
