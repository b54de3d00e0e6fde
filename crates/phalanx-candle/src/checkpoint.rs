//! [`Checkpoints`]: the variables of all ranks, saved by some number of ranks and read by another.

use crate::adam_w::AdamW;
use crate::error::{failed, failed_training, usage};
use crate::ranks::Ranks;
use crate::weights::{Place, Weights};
use candle_core::{DType, Result, Tensor, Var};
use phalanx::{bf16, f16};
use phalanx_train::checkpoint::{Checkpoint, Saver, State};
use phalanx_train::device::{Host, Number};
use std::ops::Range;
use std::path::PathBuf;

/// Checkpoints of one training, in a folder that all ranks see: phalanx-train's format, of which safetensors files are a part.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::VarMap;
/// use phalanx_candle::{AdamW, AdamWSettings, Checkpoints, Init, Ranks, Weights};
/// # let folder = std::env::temp_dir().join(format!("phalanx-candle-checkpoint-{}", std::process::id()));
///
/// let train = |ranks: &Ranks| -> candle_core::Result<Vec<f32>> {
///     let weights = Weights::variables(ranks, &VarMap::new(), 1, DType::F32);
///     let part = weights.split(5, "x", 0, &Init::Normal { mean: 0.0, deviation: 1.0 })?;
///     let mut optimizer = AdamW::new(&weights, AdamWSettings::default())?;
///     let mut checkpoints = Checkpoints::new(ranks, &folder)?;
///     // Goes on where the last one is, if there is one.
///     let begin = checkpoints.load(&weights, Some(&mut optimizer))?.unwrap_or(0);
///     for step in begin..begin + 3 {
///         optimizer.step(&part.sqr()?.sum_all()?.backward()?)?;
///         checkpoints.save(step + 1, &weights, Some(&optimizer))?;
///     }
///     checkpoints.finish()?;
///     ranks.all_gather_parts(&part, 0, 5)?.to_vec1()
/// };
/// // Three steps on two ranks, and three on one.
/// let two = Ranks::try_run(2, |ranks| train(&ranks))?;
/// let one = Ranks::try_run(1, |ranks| train(&ranks))?;
/// # std::fs::remove_dir_all(&folder)?;
/// # let _ = (two, one);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct Checkpoints {
    ranks: Ranks,
    saver: Saver,
    folder: PathBuf,
}

impl Checkpoints {
    /// In a folder, which is made by the first [`save`](Checkpoints::save). Of all ranks together, also where they split layers or batches
    /// among smaller groups. Collective.
    pub fn new(ranks: &Ranks, folder: impl Into<PathBuf>) -> Result<Checkpoints> {
        let folder = folder.into();
        let saver = ranks.comm().with(|comm| Ok(Saver::new(comm, folder.clone()))).map_err(failed)?;
        Ok(Checkpoints { ranks: ranks.clone(), saver: saver.map_err(failed_training)?, folder })
    }

    /// Keeps so many checkpoints, and removes older ones.
    #[must_use]
    pub fn keep(self, count: usize) -> Checkpoints {
        Checkpoints { saver: self.saver.keep(count), ..self }
    }

    /// Saves the variables, and the optimiser's state: a copy now, and the files in the background. Collective.
    ///
    /// # Errors
    /// Those of the save before, too.
    pub fn save(&mut self, step: u64, weights: &Weights, optimizer: Option<&AdamW>) -> Result<()> {
        let mut copies = Vec::new();
        for (name, variable, place) in weights.placed() {
            if let Some(parameter) = of(optimizer, &name) {
                for (moment, variable) in MOMENTS.iter().zip(&parameter.moments) {
                    copies.push(Copied::new(format!("{moment}.{name}"), variable, &place)?);
                }
            }
            copies.push(Copied::new(name, &variable, &place)?);
        }
        let mut state = State::new();
        for copied in &copies {
            copied.add(&mut state);
        }
        if let Some(optimizer) = optimizer {
            state.value(STEPS, optimizer.steps());
        }
        self.saver.save(step, state).map_err(failed_training)
    }

    /// Waits until the last save is complete. Collective.
    pub fn finish(&mut self) -> Result<()> {
        self.saver.finish().map_err(failed_training)
    }

    /// Reads the newest complete checkpoint into the variables and the optimiser, and answers its step; `None` if there is none. Each rank
    /// reads its own parts, whatever parts the ranks had that saved it. Collective.
    ///
    /// # Errors
    /// If a variable is missing in it, or has another shape or type; if a file is not as it was written.
    pub fn load(&mut self, weights: &Weights, optimizer: Option<&mut AdamW>) -> Result<Option<u64>> {
        let found = self.ranks.comm().with(|comm| Ok(Checkpoint::latest_of_all(comm, &self.folder)));
        let Some(checkpoint) = found.map_err(failed)?.map_err(failed_training)? else { return Ok(None) };
        for (name, variable, place) in weights.placed() {
            if let Some(parameter) = of(optimizer.as_deref(), &name) {
                for (moment, variable) in MOMENTS.iter().zip(&parameter.moments) {
                    read(&checkpoint, &format!("{moment}.{name}"), variable, &place)?;
                }
            }
            read(&checkpoint, &name, &variable, &place)?;
        }
        if let Some(optimizer) = optimizer {
            let steps = checkpoint.value(STEPS, 0).and_then(|steps| steps.as_u64());
            optimizer.set_steps(steps.ok_or_else(|| {
                usage(format!(
                    "{}: it has no state of an optimiser; load it without",
                    checkpoint.folder().display()
                ))
            })?);
        }
        Ok(Some(checkpoint.step()))
    }
}

/// Names of the optimiser's tensors begin with these, and then have the parameter's.
const MOMENTS: [&str; 2] = ["adam_w.mean", "adam_w.squares"];
const STEPS: &str = "adam_w.steps";

fn of<'a>(optimizer: Option<&'a AdamW>, name: &str) -> Option<&'a crate::adam_w::Parameter> {
    optimizer?.parameters().iter().find(|parameter| parameter.name == name)
}

/// This rank's part of a parameter, in host memory.
struct Copied {
    name: String,
    shape: Vec<usize>,
    ranges: Vec<Range<usize>>,
    numbers: Numbers,
}

enum Numbers {
    F32(Vec<f32>),
    F64(Vec<f64>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Copied {
    fn new(name: String, variable: &Var, place: &Place) -> Result<Copied> {
        let flat = variable.flatten_all()?;
        let numbers = match flat.dtype() {
            DType::F32 => Numbers::F32(flat.to_vec1()?),
            DType::F64 => Numbers::F64(flat.to_vec1()?),
            DType::F16 => Numbers::F16(flat.to_vec1()?),
            DType::BF16 => Numbers::Bf16(flat.to_vec1()?),
            other => {
                return Err(usage(format!(
                    "{name}: a checkpoint has parameters of f32, f64, f16 and bf16, and not of {}",
                    other.as_str()
                )));
            }
        };
        Ok(Copied { name, shape: place.shape.clone(), ranges: place.ranges(), numbers })
    }

    fn add<'a>(&'a self, state: &mut State<'a>) {
        let Copied { name, shape, ranges, numbers } = self;
        match numbers {
            Numbers::F32(numbers) => state.tensor::<_, f32>(name, shape, ranges, &Host, &numbers[..]),
            Numbers::F64(numbers) => state.tensor::<_, f64>(name, shape, ranges, &Host, &numbers[..]),
            Numbers::F16(numbers) => state.tensor::<_, f16>(name, shape, ranges, &Host, &numbers[..]),
            Numbers::Bf16(numbers) => state.tensor::<_, bf16>(name, shape, ranges, &Host, &numbers[..]),
        }
    }
}

/// Reads this rank's part of a parameter.
fn read(checkpoint: &Checkpoint, name: &str, variable: &Var, place: &Place) -> Result<()> {
    let saved = checkpoint.tensors().find(|(other, _)| *other == name).map(|(_, shape)| shape.to_vec());
    if saved.as_ref() != Some(&place.shape) {
        let found = saved.map_or("there is none".into(), |shape| format!("it has the shape {shape:?} there"));
        return Err(usage(format!(
            "{}: {name} of shape {:?} is wanted; {found}",
            checkpoint.folder().display(),
            place.shape
        )));
    }
    let tensor = match variable.dtype() {
        DType::F32 => numbers::<f32>(checkpoint, name, variable, place),
        DType::F64 => numbers::<f64>(checkpoint, name, variable, place),
        DType::F16 => numbers::<f16>(checkpoint, name, variable, place),
        _ => numbers::<bf16>(checkpoint, name, variable, place),
    }?;
    variable.set(&tensor)
}

fn numbers<T: Number + candle_core::WithDType>(
    checkpoint: &Checkpoint,
    name: &str,
    variable: &Var,
    place: &Place,
) -> Result<Tensor> {
    let numbers = checkpoint.read::<T>(name, &place.ranges()).map_err(failed_training)?;
    Tensor::from_vec(numbers, variable.shape(), variable.device())
}
