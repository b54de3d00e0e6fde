//! `train_digits` of phalanx, with gradients and the optimizer's state sharded (ZeRO-2), and a checkpoint after each epoch. If a rank is lost,
//! the others go on from the last checkpoint, which they read with one rank less.
//!
//! ```text
//! cargo run --release -p phalanx-train --example train_digits_sharded -- --ranks 4             ranks as threads
//! phalanx launch -n 4 --keep-going -- target/release/examples/train_digits_sharded             ranks as processes
//! ```
//!
//! `--folder F` says where the checkpoints are; by default in a temporary folder, which only threads share.

#[path = "../../../phalanx/examples/train_digits/digits.rs"]
mod digits;
#[path = "../../../phalanx/examples/train_digits/network.rs"]
mod network;
#[path = "../../../phalanx/examples/train_digits/random.rs"]
mod random;

use digits::Digits;
use network::{PARAMETERS, accuracy, add_gradient, initial_parameters};
use phalanx::{Comm, ReduceOp};
use phalanx_train::checkpoint::{Checkpoint, Saver, State};
use phalanx_train::device::Host;
use phalanx_train::optimizer::Sgd;
use phalanx_train::sampler::Sampler;
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};
use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const EPOCHS: u64 = 20;
/// Images of all ranks in a step.
const BATCH: usize = 32;
const LEARNING_RATE: f64 = 0.05;
/// The name of all parameters together, in checkpoints.
const NAME: &str = "network";

struct Options {
    ranks: Option<usize>,
    folder: PathBuf,
}

fn options() -> Result<Options> {
    let folder = std::env::temp_dir().join(format!("train_digits_sharded-{}", std::process::id()));
    let mut options = Options { ranks: None, folder };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} takes a value"))?;
        match name.as_str() {
            "--ranks" => options.ranks = Some(value.parse()?),
            "--folder" => options.folder = value.into(),
            _ => return Err(format!("{name}: there are --ranks N and --folder F").into()),
        }
    }
    Ok(options)
}

fn main() -> Result<()> {
    let options = options()?;
    if options.ranks.is_none() {
        let comm = phalanx::init()?;
        if comm.world_size() > 1 {
            return train(comm, &options.folder);
        }
    }
    let ranks = options.ranks.unwrap_or(2);
    phalanx::try_run(ranks, |comm| train(comm, &options.folder)).map(drop)
}

/// One rank's training, over losses of other ranks.
fn train(mut comm: Comm, folder: &Path) -> Result<()> {
    let data = digits::load(None)?;
    loop {
        match epochs(&comm, &data, folder) {
            Err(phalanx_train::Error::Comm(error)) if error.is_fatal() => {
                comm = comm.shrink()?;
                if comm.rank() == 0 {
                    println!("a rank is lost, {} go on", comm.world_size());
                }
            }
            Err(error) => return Err(error.into()),
            Ok(parameters) => {
                comm.finalize()?;
                let accuracy = accuracy(&parameters, &data.held_out);
                if accuracy < 0.95 {
                    return Err(format!("the held-out accuracy is {accuracy}, 0.95 is required").into());
                }
                return Ok(());
            }
        }
    }
}

/// Trains from the last checkpoint to the end; the network.
fn epochs(comm: &Comm, data: &Digits, folder: &Path) -> phalanx_train::Result<Vec<f32>> {
    let mut sgd = Sgd { learning_rate: LEARNING_RATE, momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let layout = FlatLayout::new(&[(NAME, [PARAMETERS])], comm.world_size())?;
    let mut initial = initial_parameters(7);
    initial.resize(layout.len(), 0.0);
    let mut group = ShardedGroup::<_, f32, f32>::new(comm, &Host, layout, &initial, &sgd)?;
    let mut sampler = Sampler::shuffled(data.learnt.len(), 42);
    let mut begin = 0;
    if let Some(checkpoint) = Checkpoint::latest_of_all(comm, folder)? {
        checkpoint.load_group(NAME, &mut group)?;
        let state = checkpoint.value("sampler", comm.rank());
        sampler.restore(state.expect("each checkpoint has it"))?;
        begin = checkpoint.step();
    }
    let mut saver = Saver::new(comm, folder)?.keep(2);
    for epoch in begin..EPOCHS {
        sgd.learning_rate = LEARNING_RATE * (1.0 - epoch as f64 / EPOCHS as f64);
        let loss = one_epoch(comm, data, &sgd, &mut group, &mut sampler)?;
        let mut state = State::new();
        state.group(NAME, &group);
        state.value("sampler", sampler.state());
        saver.save(epoch + 1, state)?;
        let parameters = &group.gather(comm)?[..PARAMETERS];
        if comm.rank() == 0 {
            let percent = 100.0 * accuracy(parameters, &data.held_out);
            let loss = loss / data.learnt.len() as f32;
            println!("epoch {:2}: loss {loss:.4}, held-out accuracy {percent:.2} %", epoch + 1);
        }
    }
    saver.finish()?;
    Ok(group.gather(comm)?[..PARAMETERS].to_vec())
}

/// The sum of all images' losses.
fn one_epoch(
    comm: &Comm,
    data: &Digits,
    sgd: &Sgd,
    group: &mut ShardedGroup<Host, f32, f32>,
    sampler: &mut Sampler,
) -> phalanx_train::Result<f32> {
    // Each rank takes as many images; the last batch of an epoch may be smaller.
    let each = BATCH.div_ceil(comm.world_size());
    let mut gradient = vec![0.0; group.layout().len()];
    let mut sum = [0.0];
    while let Some(batch) = sampler.next_batch(comm.rank(), comm.world_size(), each) {
        let weight = 1.0 / batch.of_all_ranks() as f32;
        gradient.fill(0.0);
        let parameters = group.gather(comm)?;
        for image in batch.samples() {
            let image = &data.learnt[*image];
            sum[0] += add_gradient(parameters, image, weight, &mut gradient[..PARAMETERS]) / weight;
        }
        group.reduce_gradient(comm, &&gradient[..], Reduction::Sum)?;
        group.step(sgd, 1.0)?;
    }
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
    Ok(sum[0])
}
