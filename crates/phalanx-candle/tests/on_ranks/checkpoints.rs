//! Checkpoints: saved by all ranks, read by each alone, and the other way round.

use crate::{Case, assert_close};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarMap;
use phalanx_candle::{
    AdamW, AdamWSettings, Checkpoints, ColumnParallelLinear, Init, Ranks, RowParallelLinear, Weights,
};
use std::path::PathBuf;

pub const CASES: &[Case] =
    &[("checkpoints/other_numbers_of_ranks", other_numbers_of_ranks), ("checkpoints/refused", refused)];

/// A folder that all ranks have: rank 0 makes it and says its number.
fn common_folder(ranks: &Ranks) -> Result<PathBuf> {
    let mut number = [std::process::id() as u64, rand_of_address()];
    ranks.comm().broadcast_in_place(&mut number, 0).expect("a broadcast");
    Ok(std::env::temp_dir().join(format!("phalanx-candle-{}-{:x}", number[0], number[1])))
}

/// Some number that two trials of one process do not share.
fn rand_of_address() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

fn alone(ranks: &Ranks) -> Result<Ranks> {
    Ok(ranks.split(Some(ranks.rank() as u32), 0)?.expect("it has a colour"))
}

/// A model of every kind of part, after `steps` steps.
struct Model {
    weights: Weights,
    variables: VarMap,
    optimizer: AdamW,
}

impl Model {
    fn new(ranks: &Ranks, seed: u64, steps: usize) -> Result<Model> {
        let variables = VarMap::new();
        let weights = Weights::variables(ranks, &variables, seed, DType::F32);
        ColumnParallelLinear::fused(4, &[5, 9], true, &weights.pp("fused"))?;
        RowParallelLinear::new(7, 3, true, &weights.pp("down"))?;
        weights.get((), "scalar", &Init::Constant(seed as f64))?;
        let mut optimizer = AdamW::new(&weights, AdamWSettings::default())?;
        for _ in 0..steps {
            let mut loss = Tensor::zeros((), DType::F32, ranks.device())?;
            for variable in variables.all_vars() {
                loss = (loss + variable.sqr()?.sum_all()?)?;
            }
            optimizer.step(&loss.backward()?)?;
        }
        Ok(Model { weights, variables, optimizer })
    }

    /// The whole model is the parts of all ranks, one after the other: here, as one rank sees it.
    fn value(&self, name: &str) -> Tensor {
        self.variables.data().lock().expect("not poisoned")[name].as_tensor().clone()
    }
}

/// What all ranks save, each reads alone, whole: the same bits as a model that one rank trained. And all read together what one saved.
fn other_numbers_of_ranks(ranks: &Ranks) -> Result<()> {
    let folder = common_folder(ranks)?;
    let trained = Model::new(ranks, 1, 3)?;
    let mut checkpoints = Checkpoints::new(ranks, &folder)?.keep(2);
    checkpoints.save(3, &trained.weights, Some(&trained.optimizer))?;
    checkpoints.finish()?;

    let one = alone(ranks)?;
    let expected = Model::new(&one, 1, 3)?;
    let mut whole = Model::new(&one, 2, 0)?;
    let mut read = Checkpoints::new(&one, &folder)?;
    assert_eq!(read.load(&whole.weights, Some(&mut whole.optimizer))?, Some(3));
    assert_eq!(whole.optimizer.steps(), 3);
    for name in ["fused.weight", "fused.bias", "down.weight", "down.bias", "scalar"] {
        assert_close(&whole.value(name), &expected.value(name), 0.0);
    }
    ranks.barrier()?;

    // Saved by one, in a folder of its own; read by all.
    let folder_of_one = folder.with_extension("one");
    if ranks.rank() == 0 {
        let mut saved = Checkpoints::new(&one, &folder_of_one)?;
        saved.save(7, &whole.weights, Some(&whole.optimizer))?;
        saved.finish()?;
    }
    ranks.barrier()?;
    let mut parts = Model::new(ranks, 5, 0)?;
    let mut checkpoints = Checkpoints::new(ranks, &folder_of_one)?;
    assert_eq!(checkpoints.load(&parts.weights, Some(&mut parts.optimizer))?, Some(7));
    for name in ["fused.weight", "fused.bias", "down.weight", "down.bias", "scalar"] {
        assert_close(&parts.value(name), &trained.value(name), 0.0);
    }
    ranks.barrier()?;
    if ranks.rank() == 0 {
        std::fs::remove_dir_all(&folder)?;
        std::fs::remove_dir_all(&folder_of_one)?;
    }
    Ok(())
}

/// Another model, and a folder with nothing in it.
fn refused(ranks: &Ranks) -> Result<()> {
    let folder = common_folder(ranks)?;
    let model = Model::new(ranks, 1, 0)?;
    let mut checkpoints = Checkpoints::new(ranks, &folder)?;
    assert_eq!(checkpoints.load(&model.weights, None)?, None);
    checkpoints.save(1, &model.weights, None)?;
    checkpoints.finish()?;
    let variables = VarMap::new();
    let weights = Weights::variables(ranks, &variables, 1, DType::F32);
    weights.get((2, 2), "scalar", &Init::Constant(0.0))?;
    let error = checkpoints.load(&weights, None).unwrap_err().to_string();
    assert!(error.contains("scalar of shape [2, 2]") && error.contains("[]"), "{error}");
    let mut model = model;
    let error = checkpoints.load(&model.weights, Some(&mut model.optimizer)).unwrap_err().to_string();
    assert!(error.contains("adam_w.mean"), "{error}");
    let integers = Weights::variables(ranks, &VarMap::new(), 1, DType::U32);
    integers.get(3, "ids", &Init::Constant(1.0))?;
    let error = checkpoints.save(2, &integers, None).unwrap_err().to_string();
    assert!(error.contains("ids") && error.contains("u32"), "{error}");
    ranks.barrier()?;
    if ranks.rank() == 0 {
        std::fs::remove_dir_all(&folder)?;
    }
    Ok(())
}
