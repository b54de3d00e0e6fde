//! A transformer on meshes of GPUs, with the losses of one rank of the host. Products, sums, parameters and messages are on the GPUs, what is
//! between the products on the host.

use crate::math::{Place, Real};
use crate::model::Sizes;
use crate::same;
use crate::train::{Task, curve};
use crate::world::has_cublas;
use libtest_mimic::Trial;
use phalanx::{BackendKind, Comm};
use phalanx_testkit::emulated::is_emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::suite::Condition;
use phalanx_testkit::{Outcome, Scenario};
use phalanx_train::Result;
use phalanx_train::device::{Device, Gpu, Host};
use phalanx_train::mesh::Axis;
use phalanx_train::tensor::Products;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[Scenario::rank("transformer", |comm, _| {
    train::<f64>(&comm, SMALL, 1e-12).map_err(|error| error.to_string())?
})];

/// Of real GPUs alone.
pub const LARGE_SCENARIO: Scenario = Scenario::rank("large_transformer", |comm, _| {
    train::<f32>(&comm, LARGE, 1e-5).map_err(|error| error.to_string())?
});

const SMALL: Task = Task {
    sizes: Sizes { vocabulary: 17, tokens: 6, width: 8, heads: 2, blocks: 2 },
    sequences: 8,
    micro_batches: 2,
    steps: 2,
    learning_rate: 5e-3,
    clip: 0.5,
};

/// Of ten million parameters.
const LARGE: Task = Task {
    sizes: Sizes { vocabulary: 512, tokens: 64, width: 320, heads: 8, blocks: 8 },
    sequences: 16,
    micro_batches: 2,
    steps: 2,
    learning_rate: 1e-3,
    clip: 1.0,
};

impl Place for Gpu {
    fn connected(&self, comm: &Comm) -> Result<Gpu> {
        Gpu::connected(self, comm)
    }

    fn product<T: Real>(
        &self,
        size: [usize; 3],
        transposed: [bool; 2],
        a: &[T],
        b: &[T],
        c: &mut [T],
        adds: bool,
    ) -> Result<()> {
        let (a, b, mut to) = (self.upload(a)?, self.upload(b)?, self.upload(c)?);
        let (a, b) = (a.as_view(), b.as_view());
        Products::product(self, size, transposed, &a, &b, &mut to.as_view_mut(), adds)?;
        c.copy_from_slice(&self.download(&to.as_view())?);
        Ok(())
    }
}

/// Meshes of so many ranks.
fn meshes(ranks: usize) -> Vec<Vec<(Axis, usize)>> {
    let axes = [Axis::Data, Axis::Pipeline, Axis::Shard, Axis::Tensor];
    match ranks {
        1 => vec![vec![]],
        4 => vec![
            vec![(Axis::Data, 2), (Axis::Tensor, 2)],
            vec![(Axis::Pipeline, 2), (Axis::Shard, 2)],
            vec![(Axis::Pipeline, 2), (Axis::Tensor, 2)],
        ],
        _ => axes.map(|axis| vec![(axis, ranks)]).to_vec(),
    }
}

fn train<T: Real>(comm: &Comm, task: Task, tolerance: f64) -> Result<Outcome> {
    let gpu = same::gpu(comm)?;
    let one = Comm::builder()
        .backend(BackendKind::Solo)
        .run(1, |comm| curve::<_, T>(&comm, &Host, task, &[], None))?
        .remove(0)?;
    for mesh in meshes(comm.world_size()) {
        let here = curve::<_, T>(comm, &gpu, task, &mesh, None)?;
        let is_near = |(a, b): (&f64, &f64)| ((a - b) / b).abs() < tolerance;
        if here.len() != task.steps || !here.iter().flatten().zip(one.iter().flatten()).all(is_near) {
            return Ok(Err(format!("{mesh:?}: losses and norms {here:?} are not {one:?}")));
        }
    }
    Ok(Ok(String::new()))
}

/// Two ranks with the large model: `-- large_transformer --ignored`.
pub fn large(gpus: usize) -> Trial {
    let trial = Trial::test("processes/large_transformer/2", || {
        let launch = Launch::new(LARGE_SCENARIO.name, 2).deadline(Duration::from_secs(400)).on_gpus();
        Ok(launch.env("PHALANX_BACKEND", BackendKind::Nccl.name()).reports().map(drop)?)
    });
    let can_run = gpus >= 2 && has_cublas() && !is_emulated();
    trial
        .with_ignored_flag(true)
        .only_if(can_run, "it takes two GPUs that are not emulated, cuBLAS, and minutes")
}
