//! A transformer that trains on meshes of 8 ranks with the loss curve of one rank. The one of 10 million parameters takes about
//! two minutes:
//!
//! ```text
//! cargo test -p phalanx-train --test transformer -- --ignored --nocapture
//! ```

mod math;
mod model;
mod train;

use math::Real;
use model::{Part, Sizes};
use phalanx_train::device::Host;
use phalanx_train::mesh::{Axis, Mesh, MeshShape};
use phalanx_train::report::Traffic;
use std::path::Path;
use train::{Task, Worker, curve};

const SMALL: Task = Task {
    sizes: Sizes { vocabulary: 23, tokens: 8, width: 16, heads: 4, blocks: 4 },
    sequences: 16,
    micro_batches: 2,
    steps: 12,
    learning_rate: 5e-3,
    clip: 0.5,
};

const LARGE: Task = Task {
    sizes: Sizes { vocabulary: 512, tokens: 64, width: 320, heads: 8, blocks: 8 },
    sequences: 16,
    micro_batches: 2,
    steps: 4,
    learning_rate: 1e-3,
    clip: 1.0,
};

/// Meshes of 8 ranks, with each pair and each three of the four axes.
const MESHES: [&[(Axis, usize)]; 7] = [
    &[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Tensor, 2)],
    &[(Axis::Data, 2), (Axis::Pipeline, 2), (Axis::Shard, 2)],
    &[(Axis::Data, 2), (Axis::Pipeline, 2), (Axis::Tensor, 2)],
    &[(Axis::Pipeline, 2), (Axis::Shard, 2), (Axis::Tensor, 2)],
    &[(Axis::Pipeline, 4), (Axis::Tensor, 2)],
    &[(Axis::Shard, 8)],
    &[(Axis::Data, 2), (Axis::Tensor, 4)],
];

/// A mesh's losses and norms, which all ranks have alike.
fn run<T: Real>(task: Task, mesh: &[(Axis, usize)], folder: Option<&Path>) -> Vec<[f64; 2]> {
    let ranks = mesh.iter().map(|(_, size)| size).product();
    let curves =
        phalanx::run(ranks, |comm| curve::<_, T>(&comm, &Host, task, mesh, folder).unwrap()).unwrap();
    assert!(curves.iter().all(|curve| *curve == curves[0]), "{mesh:?}: ranks have different losses or norms");
    curves[0].clone()
}

fn check(mesh: &[(Axis, usize)], curve: &[[f64; 2]], expected: &[[f64; 2]], tolerance: f64) {
    assert_eq!(curve.len(), expected.len());
    for (step, (here, expected)) in curve.iter().zip(expected).enumerate() {
        for (here, expected) in here.iter().zip(expected) {
            let difference = (here - expected).abs() / expected;
            let said = format!("{mesh:?}, step {step}: {here} is not {expected} ({difference:.1e})");
            assert!(difference < tolerance, "{said}");
        }
    }
}

/// Trains on one rank and on meshes; the losses of one rank.
fn curves<T: Real>(task: Task, meshes: &[&[(Axis, usize)]], tolerance: f64) -> Vec<f64> {
    let one = run::<T>(task, &[], None);
    assert!(one.iter().any(|[_, norm]| *norm > task.clip), "nothing was clipped: {one:?}");
    meshes.iter().for_each(|mesh| check(mesh, &run::<T>(task, mesh, None), &one, tolerance));
    one.into_iter().map(|[loss, _]| loss).collect()
}

#[test]
fn losses_on_any_mesh_are_those_of_one_rank() {
    let curve = curves::<f64>(SMALL, &MESHES, 1e-12);
    assert!(curve[SMALL.steps - 1] < 0.9 * curve[0], "it does not learn: {curve:?}");
    curves::<f32>(SMALL, &MESHES[..4], 1e-5);
}

#[test]
fn a_checkpoint_of_one_mesh_goes_on_on_any_other() {
    let (short, long) = (Task { steps: 3, ..SMALL }, Task { steps: 3 * MESHES.len(), ..SMALL });
    let one = run::<f64>(long, &[], None);
    let folder = tempfile::tempdir().unwrap();
    // Three steps on each mesh, one after the other.
    for (mesh, expected) in MESHES.iter().zip(one.chunks_exact(3)) {
        check(mesh, &run::<f64>(short, mesh, Some(folder.path())), expected, 1e-10);
    }
}

#[test]
fn a_dry_run_makes_the_step_of_any_rank_and_lists_its_gathers() {
    let task = Task { steps: 1, ..SMALL };
    for (mesh, rank) in MESHES.iter().flat_map(|mesh| [(*mesh, 0), (*mesh, 5)]) {
        let (layouts, traffic) = Traffic::of_rank(rank, 8, |comm| {
            curve::<_, f64>(&comm, &Host, task, mesh, None)?;
            let mesh = Mesh::new(&comm, mesh)?;
            let worker = Worker::<_, f64>::new(task, &mesh, &Host)?;
            Ok(worker.parts.iter().map(|(part, group)| (*part, group.layout().len())).collect::<Vec<_>>())
        })
        .unwrap();
        // A block's parameters are gathered in the forward and in the backward of each micro-batch, the others' in the forward.
        let times = |part: &Part| if matches!(part, Part::Block(_)) { 2 } else { 1 };
        let expected: usize = layouts.iter().map(|(part, len)| times(part) * len * 8).sum();
        let shape = MeshShape::new(mesh).unwrap();
        let shard = |rank: usize| shape.coordinate(Axis::Shard, rank);
        // Norms of all ranks and lengths of agreements are a few numbers.
        let gathers =
            traffic.lines.iter().filter(|line| line.operation == "all_gather" && line.recv_bytes > 256);
        let listed: u64 = gathers
            .map(|line| {
                let coordinates: Vec<usize> = line.members.iter().map(|member| shard(*member)).collect();
                assert_eq!(coordinates, (0..shape.size(Axis::Shard)).collect::<Vec<_>>(), "{line:?}");
                line.times as u64 * line.recv_bytes
            })
            .sum();
        assert_eq!(listed, (task.micro_batches * expected) as u64, "{mesh:?}, rank {rank}:\n{traffic}");
    }
}

#[test]
#[ignore = "takes about two minutes: see the head of this file"]
fn losses_of_ten_million_parameters_on_any_mesh_are_those_of_one_rank() {
    let len = |part: Part| {
        part.parameters(&LARGE.sizes).into_iter().map(|(_, shape)| shape.iter().product::<usize>())
    };
    let parameters: usize = Part::all(&LARGE.sizes).into_iter().flat_map(len).sum();
    assert!((10_000_000..11_000_000).contains(&parameters), "{parameters}");
    let curve = curves::<f32>(LARGE, &MESHES[..4], 1e-5);
    println!("{parameters} parameters, losses of one rank {curve:?}");
    assert!(curve[LARGE.steps - 1] < curve[0], "it does not learn: {curve:?}");
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    phalanx::run(1, |comm| {
        let mesh = Mesh::new(&comm, &[]).unwrap();
        let pipeline = SMALL.pipeline(&mesh).unwrap();
        let mut worker = Worker::<_, f64>::new(SMALL, &mesh, &Host).unwrap();
        worker.gradients_of_step(&pipeline).unwrap();
        let gradients: Vec<Vec<f64>> =
            worker.parts.iter().map(|(_, group)| group.gradient().to_vec()).collect();
        for (number, gradient) in gradients.iter().enumerate() {
            let names: Vec<_> = worker.parts[number]
                .1
                .layout()
                .parameters()
                .map(|(name, _, range)| (name.to_owned(), range))
                .collect();
            for (name, range) in names {
                // Somewhere in each parameter.
                let at = range.start + range.len() * 3 / 7;
                let mut loss_with = |change: f64| {
                    let (_, group) = &mut worker.parts[number];
                    group.restore(0).next().unwrap()[at] += change;
                    worker.gradients_of_step(&pipeline).unwrap()
                };
                let step = 1e-5;
                let (above, below) = (loss_with(step), loss_with(-2.0 * step));
                loss_with(step);
                let slope = (above - below) / (2.0 * step);
                let difference = (slope - gradient[at]).abs();
                assert!(difference < 1e-7, "{name}[{at}]: {} is not the slope {slope}", gradient[at]);
            }
        }
    })
    .unwrap();
}
