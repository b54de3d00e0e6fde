//! Training of a model on a mesh: data and shard ranks see different sequences, tensor ranks have parts of the matrices, pipeline ranks some of the
//! blocks. Parameters are sharded (ZeRO-3) and gathered for each use.

use crate::math::{Place, Real};
use crate::model::{Fields, Gradients, Kept, Model, Part, Sizes};
use phalanx::{Comm, ReduceOp, Source};
use phalanx_train::Result;
use phalanx_train::checkpoint::{Checkpoint, Saver, State};
use phalanx_train::mesh::{Axis, Mesh};
use phalanx_train::norm::{clip_factor, global_norm_of_groups};
use phalanx_train::optimizer::AdamW;
use phalanx_train::pipeline::{Pipeline, Position, Schedule, Stage, mean_loss};
use phalanx_train::sharding::{Reduction, ShardedGroup};
use std::collections::HashMap;
use std::path::Path;

/// What is trained, on any mesh.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    pub sizes: Sizes,
    /// Sequences of all ranks in a step.
    pub sequences: usize,
    pub micro_batches: usize,
    pub steps: usize,
    pub learning_rate: f64,
    /// The greatest norm of a gradient.
    pub clip: f64,
}

/// The words of a sequence, one more than its tokens: each follows from the one before, by one of three rules.
fn words(sizes: &Sizes, number: usize) -> Vec<u32> {
    let vocabulary = sizes.vocabulary as u64;
    let mut word = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    let step = 3 + number as u64 % 3;
    (0..=sizes.tokens)
        .map(|_| {
            word = (word * 5 + step) % vocabulary;
            word as u32
        })
        .collect()
}

/// One rank's parameters and activations.
pub struct Worker<'a, D: Place, T: Real> {
    task: Task,
    mesh: &'a Mesh,
    model: Model<'a, D>,
    pub parts: Vec<(Part, ShardedGroup<D, T, T>)>,
    /// Sums of the micro-batches, by part.
    gradients: Vec<Vec<T>>,
    /// By micro-batch, what the blocks keep; and the gradient of the head's input.
    kept: HashMap<usize, Vec<Kept<T>>>,
    of_head: HashMap<usize, Vec<T>>,
    losses: Vec<(f64, usize)>,
    step: usize,
    /// Norms of the gradients, of all steps.
    norms: Vec<f64>,
}

impl<'a, D: Place, T: Real> Worker<'a, D, T> {
    pub fn new(task: Task, mesh: &'a Mesh, device: &D) -> Result<Worker<'a, D, T>> {
        let device = device.connected(mesh.comm(Axis::Pipeline))?;
        let (stages, stage) = (mesh.size(Axis::Pipeline), mesh.coordinate(Axis::Pipeline));
        let blocks = task.sizes.blocks;
        let is_here = |part: &Part| match part {
            Part::Embedding => stage == 0,
            Part::Block(number) => number * stages / blocks == stage,
            Part::Head => stage + 1 == stages,
        };
        let shard = mesh.comm(Axis::Shard);
        let group = |part: Part| {
            let layout = part.layout(&task.sizes, mesh.shape(), mesh.rank())?;
            let initial = part.initial::<T>(&task.sizes, mesh.shape(), mesh.rank(), &layout)?;
            Ok((part, ShardedGroup::new(shard, &device, layout, &initial, &task.optimizer())?))
        };
        let parts =
            Part::all(&task.sizes).into_iter().filter(is_here).map(group).collect::<Result<Vec<_>>>()?;
        let gradients = parts.iter().map(|(_, group)| vec![T::default(); group.layout().len()]).collect();
        Ok(Worker {
            task,
            mesh,
            model: Model { sizes: task.sizes, tensor: mesh.comm(Axis::Tensor), device },
            parts,
            gradients,
            kept: HashMap::new(),
            of_head: HashMap::new(),
            losses: Vec::new(),
            step: 0,
            norms: Vec::new(),
        })
    }

    /// Sequences of a micro-batch on this rank.
    fn each(&self) -> usize {
        self.task.sequences / self.replicas() / self.task.micro_batches
    }

    /// Ranks that see different sequences.
    fn replicas(&self) -> usize {
        self.mesh.size(Axis::Data) * self.mesh.size(Axis::Shard)
    }

    /// Inputs and targets of a micro-batch.
    fn batch(&self, micro: usize) -> [Vec<u32>; 2] {
        let shard = self.mesh.size(Axis::Shard);
        let replica = self.mesh.coordinate(Axis::Data) * shard + self.mesh.coordinate(Axis::Shard);
        let first = self.step * self.task.sequences + (micro * self.replicas() + replica) * self.each();
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for number in first..first + self.each() {
            let words = words(&self.task.sizes, number);
            inputs.extend(&words[..self.task.sizes.tokens]);
            targets.extend(&words[1..]);
        }
        [inputs, targets]
    }

    /// All micro-batches forwards and backwards; the mean loss of all sequences. The gradients are reduced.
    pub fn gradients_of_step(&mut self, pipeline: &Pipeline) -> Result<f64> {
        self.losses.clear();
        self.gradients.iter_mut().for_each(|gradient| gradient.fill(T::default()));
        let mesh = self.mesh;
        let len = self.each() * self.task.sizes.tokens * self.task.sizes.width;
        let (device, data) = (self.model.device.clone(), mesh.comm(Axis::Data));
        pipeline.run(mesh.comm(Axis::Pipeline), &device, self, |_, _| len)?;
        for ((_, group), gradient) in self.parts.iter_mut().zip(&self.gradients) {
            let shard = mesh.comm(Axis::Shard);
            let gradient = device.upload(gradient)?;
            let gradient = device.view(&gradient, 0..group.layout().len());
            group.reduce_gradient_among(shard, Some(data), &gradient, Reduction::Mean)?;
        }
        let mut loss = [mean_loss(mesh.comm(Axis::Pipeline), &self.losses)?];
        for axis in [Axis::Data, Axis::Shard] {
            mesh.comm(axis).all_reduce_in_place(&mut loss, ReduceOp::Avg)?;
        }
        Ok(loss[0])
    }

    /// One step; its loss.
    pub fn step(&mut self, pipeline: &Pipeline) -> Result<f64> {
        let loss = self.gradients_of_step(pipeline)?;
        let groups: Vec<_> = self.parts.iter().map(|(_, group)| group).collect();
        let norm = global_norm_of_groups(self.mesh, &self.model.device, &groups)?;
        let factor = clip_factor(norm, self.task.clip)?;
        for (_, group) in &mut self.parts {
            group.step(&self.task.optimizer(), factor)?;
        }
        self.step += 1;
        self.norms.push(norm);
        Ok(loss)
    }
}

impl Task {
    fn optimizer(&self) -> AdamW {
        AdamW::new(self.learning_rate)
    }

    pub fn pipeline(&self, mesh: &Mesh) -> Result<Pipeline> {
        let schedule = Schedule::one_forward_one_backward(mesh.size(Axis::Pipeline), self.micro_batches)?;
        Pipeline::new(mesh.comm(Axis::Pipeline), schedule)
    }
}

/// The losses and the norms of the gradients of all steps on a mesh, the same on every rank. With a folder, it goes on from the newest checkpoint
/// there, and ends with one.
pub fn curve<D: Place, T: Real>(
    comm: &Comm,
    device: &D,
    task: Task,
    mesh: &[(Axis, usize)],
    folder: Option<&Path>,
) -> Result<Vec<[f64; 2]>> {
    let mesh = Mesh::new(comm, mesh)?;
    let pipeline = task.pipeline(&mesh)?;
    let mut worker = Worker::<D, T>::new(task, &mesh, device)?;
    let checkpoint = folder.map(|folder| Checkpoint::latest_of_all(comm, folder)).transpose()?.flatten();
    if let Some(checkpoint) = checkpoint {
        for (part, group) in &mut worker.parts {
            checkpoint.load_group(&part.name(), group)?;
        }
        worker.step = checkpoint.step() as usize;
    }
    let losses = (0..task.steps).map(|_| worker.step(&pipeline)).collect::<Result<Vec<_>>>()?;
    if let Some(folder) = folder {
        let mut saver = Saver::new(comm, folder)?;
        let mut state = State::new();
        worker.parts.iter().for_each(|(part, group)| state.group(&part.name(), group));
        saver.save(worker.step as u64, state)?;
        saver.finish()?;
    }
    Ok(losses.into_iter().zip(worker.norms).map(|(loss, norm)| [loss, norm]).collect())
}

fn download<D: Place, T: Real>(device: &D, buffer: &D::Buffer<T>) -> Result<Vec<T>> {
    device.download(&device.view(buffer, 0..buffer.len()))
}

/// Activations are on the host between the layers, and on the device between the stages.
impl<D: Place, T: Real> Stage<D, T> for Worker<'_, D, T> {
    fn forward(&mut self, at: Position, input: Option<D::Buffer<T>>) -> Result<Option<D::Buffer<T>>> {
        let device = self.model.device.clone();
        let input = input.map(|input| download(&device, &input)).transpose()?;
        let [words, targets] = self.batch(at.micro);
        let shard = self.mesh.comm(Axis::Shard);
        // Each row counts as much, over all micro-batches of this rank.
        let weight = 1.0 / (self.task.micro_batches * targets.len()) as f64;
        let (mut x, mut kept) = (input.unwrap_or_default(), Vec::new());
        for number in 0..self.parts.len() {
            self.parts[number].1.gather(shard)?;
            if let Some((_, next)) = self.parts.get_mut(number + 1) {
                next.prefetch(shard)?;
            }
            let (part, group) = &mut self.parts[number];
            let numbers = download(&device, group.gather(shard)?)?;
            group.release();
            let fields = Fields::new(group.layout(), &numbers);
            match part {
                Part::Embedding => x = self.model.embed(&fields, &words),
                Part::Block(_) => {
                    let (output, of_block) = self.model.block(&fields, x)?;
                    kept.push(of_block);
                    x = output;
                }
                Part::Head => {
                    let mut gradients = Gradients::new(group.layout(), &mut self.gradients[number]);
                    let (loss, dx) = self.model.head(&fields, &x, &targets, weight, &mut gradients)?;
                    self.losses.push((loss, targets.len()));
                    self.of_head.insert(at.micro, dx);
                }
            }
        }
        self.kept.insert(at.micro, kept);
        (!at.is_last).then(|| device.upload(&x)).transpose()
    }

    fn backward(&mut self, at: Position, gradient: Option<D::Buffer<T>>) -> Result<Option<D::Buffer<T>>> {
        let device = self.model.device.clone();
        let gradient = gradient.map(|gradient| download(&device, &gradient)).transpose()?;
        let mut dx = gradient.or_else(|| self.of_head.remove(&at.micro)).expect("the head's forward kept it");
        let mut kept = self.kept.remove(&at.micro).expect("the forward kept it");
        let [words, _] = self.batch(at.micro);
        let shard = self.mesh.comm(Axis::Shard);
        for ((part, group), gradient) in self.parts.iter_mut().zip(&mut self.gradients).rev() {
            match part {
                Part::Embedding => {
                    let mut gradients = Gradients::new(group.layout(), gradient);
                    self.model.embed_backward(&words, &dx, &mut gradients);
                }
                Part::Block(_) => {
                    let numbers = download(&device, group.gather(shard)?)?;
                    group.release();
                    let mut gradients = Gradients::new(group.layout(), gradient);
                    let fields = Fields::new(group.layout(), &numbers);
                    let of_block = kept.pop().expect("one for each block");
                    dx = self.model.block_backward(&fields, &of_block, dx, &mut gradients)?;
                }
                Part::Head => {}
            }
        }
        (!at.is_first).then(|| device.upload(&dx)).transpose()
    }
}
