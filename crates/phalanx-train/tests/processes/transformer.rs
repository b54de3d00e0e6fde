//! A transformer on 8 processes, with the losses of one rank.

use crate::model::Sizes;
use crate::train::{Task, curve};
use libtest_mimic::Trial;
use phalanx::Comm;
use phalanx_testkit::processes::{Launch, describe};
use phalanx_testkit::{Outcome, Scenario};
use phalanx_train::device::Host;
use phalanx_train::mesh::Axis;

pub const SCENARIOS: &[Scenario] = &[Scenario::rank("transformer/mesh", |comm, args| train(&comm, args))];

const MESHES: [&[(Axis, usize)]; 2] = [
    &[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Tensor, 2)],
    &[(Axis::Pipeline, 2), (Axis::Shard, 2), (Axis::Tensor, 2)],
];

const TASK: Task = Task {
    sizes: Sizes { vocabulary: 17, tokens: 6, width: 8, heads: 2, blocks: 2 },
    sequences: 8,
    micro_batches: 2,
    steps: 5,
    learning_rate: 5e-3,
    clip: 0.5,
};

fn train(comm: &Comm, args: &[String]) -> Outcome {
    let mesh = MESHES[args[0].parse::<usize>().map_err(|error| error.to_string())?];
    let text = |error: phalanx_train::Error| error.to_string();
    let here = curve::<_, f64>(comm, &Host, TASK, mesh, None).map_err(text)?;
    let one = phalanx::run(1, |comm| curve::<_, f64>(&comm, &Host, TASK, &[], None).map_err(text));
    let one = one.map_err(|error| error.to_string())?.remove(0)?;
    let is_near = |(a, b): (&f64, &f64)| ((a - b) / b).abs() < 1e-12;
    if here.len() == TASK.steps && here.iter().flatten().zip(one.iter().flatten()).all(is_near) {
        return Ok("right".into());
    }
    Err(format!("losses and norms {here:?} are not {one:?}"))
}

pub fn trials() -> Vec<Trial> {
    let trial = |number: usize| {
        Trial::test(format!("transformer/mesh_{number}_has_the_losses_of_one_rank"), move || {
            let ended = Launch::new("transformer/mesh", 8).arg(number).run()?;
            if ended.iter().all(|rank| rank.outcome.as_ref().is_ok_and(|said| said == "right")) {
                Ok(())
            } else {
                Err(describe(&ended).into())
            }
        })
    };
    (0..MESHES.len()).map(trial).collect()
}
