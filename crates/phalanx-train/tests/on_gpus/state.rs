//! What goes on over steps: checkpoints, outer optimizers, ranks that leave out a step.

use crate::same::{Results, on_both};
use phalanx::{Comm, bf16};
use phalanx_train::Result;
use phalanx_train::checkpoint::{Checkpoint, Saver, State};
use phalanx_train::device::{Device, Overlap};
use phalanx_train::optimizer::{AdamW, ElementWise, Sgd};
use phalanx_train::outer::Outer;
use phalanx_train::replicas::average;
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};
use std::time::{Duration, SystemTime};

on_both! { checkpoints, outer, averages }

/// Steps of a sharded group go on from a checkpoint as without one.
fn checkpoints<D: Overlap + ElementWise>(comm: &Comm, device: &D) -> Result<Results> {
    let (mut results, adamw) = (Results::default(), AdamW::new(0.01));
    let layout = FlatLayout::new(&[("a", [30, 7]), ("b", [5, 3])], comm.world_size())?;
    let len = layout.len();
    let mut initial: Vec<f32> = (0..len).map(|at| (at as f32 * 0.37).sin()).collect();
    let end = layout.parameters().map(|(_, _, range)| range.end).max().unwrap_or(0);
    initial[end..].fill(0.0);
    let group = || ShardedGroup::<D, bf16, f32>::new(comm, device, layout.clone(), &initial, &adamw);
    let step = |group: &mut ShardedGroup<D, bf16, f32>| -> Result<()> {
        let own = |at: usize| bf16::from_f32(((at + 31 * comm.rank()) as f32 * 0.71).sin());
        let gradient = (0..len).map(|at| if at < end { own(at) } else { bf16::ZERO }).collect::<Vec<_>>();
        let gradient = device.upload(&gradient)?;
        group.reduce_gradient(comm, &device.view(&gradient, 0..len), Reduction::Mean)?;
        group.step(&adamw, 1.0)
    };
    let mut saved = group()?;
    step(&mut saved)?;
    // A name that no other run has.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let number = comm.broadcast_value(now.as_nanos() as u64 ^ u64::from(std::process::id()) << 40, 0)?;
    let folder = std::env::temp_dir().join(format!("phalanx-train-{number}"));
    let mut saver = Saver::new(comm, &folder)?;
    let mut state = State::new();
    state.group("all", &saved);
    saver.save(1, state)?;
    saver.finish()?;
    let mut loaded = group()?;
    Checkpoint::latest_of_all(comm, &folder)?.expect("it was saved").load_group("all", &mut loaded)?;
    for group in [&mut saved, &mut loaded] {
        step(group)?;
        results.buffer("parameters", device, group.gather(comm)?)?;
    }
    let [of_saved, of_loaded] = [&mut saved, &mut loaded].map(|group| group.gather(comm));
    let all = |buffer| device.download(&device.view(buffer, 0..len));
    assert_eq!(all(of_saved?)?, all(of_loaded?)?);
    comm.barrier()?;
    if comm.rank() == 0 {
        std::fs::remove_dir_all(&folder).expect("the folder of the checkpoints");
    }
    Ok(results)
}

/// Two ranks begin at 1, come to 0.8 and 0.6, and then both to 0.5: with rate 0.7 and Nesterov's 0.9, to 0.601 and 0.29657.
fn outer<D: ElementWise>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    let sgd = Sgd { learning_rate: 0.7, momentum: 0.9, nesterov: true, weight_decay: 0.0 };
    let mut parameters = device.upload(&[1.0f64; 9])?;
    let mut outer = Outer::new(device, &device.view(&parameters, 0..9), sgd)?;
    for (ends, expected) in [([0.8, 0.6], 0.601), ([0.5, 0.5], 0.29657)] {
        parameters = device.upload(&[ends[comm.rank() % 2]; 9])?;
        outer.synchronize(comm, &mut parameters)?;
        let here = device.download(&device.view(&parameters, 0..9))?;
        if comm.world_size() > 1 {
            assert!(here.iter().all(|x| (x - expected).abs() < 1e-12), "{here:?} is not {expected}");
        }
        results.numbers("parameters", &here);
    }
    Ok(results)
}

/// Rank 1 takes no part, and what it has is not a number.
fn averages<D: Device>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    let takes_part = comm.rank() != 1;
    let own = if takes_part { comm.rank() as f32 } else { f32::NAN };
    let mut gradient = device.upload(&[own; 5])?;
    let others = average(comm, device, &mut device.view_mut(&mut gradient, 0..5), takes_part)?;
    assert_eq!(others, comm.world_size() - usize::from(comm.world_size() > 1));
    let mean = (0..comm.world_size()).filter(|rank| *rank != 1).sum::<usize>() as f32 / others as f32;
    let here = device.download(&device.view(&gradient, 0..5))?;
    assert!(here.iter().all(|x| (x - mean).abs() < 1e-6), "{here:?} is not {mean}");
    results.numbers("mean", &here);
    Ok(results)
}
