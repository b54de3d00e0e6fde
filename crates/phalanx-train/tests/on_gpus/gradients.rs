//! Gradients, sharded parameters and norms among ranks.

use crate::same::{Results, on_both};
use phalanx::{Comm, bf16, f16};
use phalanx_train::Result;
use phalanx_train::buckets::{GradientBuckets, Parameter, Settings};
use phalanx_train::device::{Device, Number, Overlap};
use phalanx_train::mesh::{Axis, Layout, Mesh, Placement};
use phalanx_train::norm::{ReplicaCheck, Squares, clip, clip_factor, global_norm_of_groups};
use phalanx_train::optimizer::{AdamW, ElementWise, Optimizer, Sgd};
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};

on_both! { buckets, in_their_own_type, unequal_batches, unused_parameters, sharded, replicas_and_clipping }

fn number(at: usize, salt: usize) -> f64 {
    ((at * 31 + salt * 17) as f64 * 0.37).sin()
}

fn upload<D: Device, T: Number>(device: &D, numbers: &[f64]) -> Result<D::Buffer<T>> {
    device.upload(&numbers.iter().map(|x| T::from_f64(*x)).collect::<Vec<T>>())
}

fn read<D: Overlap, T: Number>(
    buckets: &GradientBuckets<D>,
    device: &D,
    name: &str,
    len: usize,
) -> Result<Vec<T>> {
    let mut gradient = device.zeros::<T>(len)?;
    buckets.read(name, &mut device.view_mut(&mut gradient, 0..len))?;
    device.download(&device.view(&gradient, 0..len))
}

/// Several buckets of all types, gradients in orders that the ranks do not share, over steps and micro-batches. Multiples of 1/64: NCCL adds up
/// more than two ranks in an order of its own.
fn buckets<D: Overlap>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    let lens = [700, 3, 1025, 60, 4096, 31];
    let parameters = lens.iter().enumerate().map(|(at, len)| match at % 3 {
        0 => Parameter::new::<f32>(format!("p{at}"), *len),
        1 => Parameter::new::<f64>(format!("p{at}"), *len),
        _ => Parameter::new::<bf16>(format!("p{at}"), *len),
    });
    let parameters = parameters.collect::<Vec<_>>();
    let settings = Settings { bucket_bytes: 4096, ..Settings::default() };
    let mut buckets = GradientBuckets::new(comm, device, &parameters, settings)?;
    for step in 0..4 {
        buckets.begin(comm, 1.0)?;
        for micro in 0..2 {
            buckets.accumulate(micro == 0)?;
            for turn in 0..lens.len() {
                let at = (turn + comm.rank() + step) % lens.len();
                let salt = step * 10 + micro * 5 + comm.rank();
                let numbers: Vec<f64> =
                    (0..lens[at]).map(|i| (number(i, salt) * 64.0).round() / 64.0).collect();
                let name = format!("p{at}");
                match at % 3 {
                    0 => add::<D, f32>(&mut buckets, comm, device, &name, &numbers)?,
                    1 => add::<D, f64>(&mut buckets, comm, device, &name, &numbers)?,
                    _ => add::<D, bf16>(&mut buckets, comm, device, &name, &numbers)?,
                }
            }
        }
        assert_eq!(buckets.finish(comm)?.ranks, comm.world_size());
        for (at, len) in lens.iter().enumerate() {
            let name = format!("p{at}");
            let title = format!("{name} in step {step}");
            match at % 3 {
                0 => results.numbers(title, &read::<D, f32>(&buckets, device, &name, *len)?),
                1 => results.numbers(title, &read::<D, f64>(&buckets, device, &name, *len)?),
                _ => results.numbers(title, &read::<D, bf16>(&buckets, device, &name, *len)?),
            }
        }
    }
    Ok(results)
}

fn add<D: Overlap, T: Number>(
    buckets: &mut GradientBuckets<D>,
    comm: &Comm,
    device: &D,
    name: &str,
    numbers: &[f64],
) -> Result<()> {
    let gradient = upload::<D, T>(device, numbers)?;
    buckets.add(comm, name, &device.view(&gradient, 0..numbers.len()))
}

/// Gradients of 16 bits, summed in these. Whole numbers: the order of the sum does not show.
fn in_their_own_type<D: Overlap>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    let parameters = [Parameter::new::<bf16>("a", 1025), Parameter::new::<f16>("b", 700)];
    let settings = Settings { sums_in_f32: false, bucket_bytes: 1024, ..Settings::default() };
    let mut buckets = GradientBuckets::new(comm, device, &parameters, settings)?;
    for step in 0..3 {
        buckets.begin(comm, 1.0)?;
        for micro in 0..2 {
            buckets.accumulate(micro == 0)?;
            let whole = |len: usize| -> Vec<f64> {
                (0..len).map(|at| (4 * ((at + step + micro + comm.rank()) % 9)) as f64 - 16.0).collect()
            };
            add::<D, bf16>(&mut buckets, comm, device, "a", &whole(1025))?;
            add::<D, f16>(&mut buckets, comm, device, "b", &whole(700))?;
        }
        buckets.finish(comm)?;
        results.numbers(format!("a in step {step}"), &read::<D, bf16>(&buckets, device, "a", 1025)?);
        results.numbers(format!("b in step {step}"), &read::<D, f16>(&buckets, device, "b", 700)?);
    }
    Ok(results)
}

/// 7 samples of gradient 1 on rank 0, 6 of 14 on rank 1, and ranks without a batch: 7.
fn unequal_batches<D: Overlap>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    let mut buckets =
        GradientBuckets::new(comm, device, &[Parameter::new::<f32>("w", 5)], Settings::default())?;
    let (weight, gradient) = *[(7.0, 1.0), (6.0, 14.0)].get(comm.rank()).unwrap_or(&(0.0, 0.0));
    for _ in 0..3 {
        buckets.begin(comm, weight)?;
        if weight > 0.0 {
            add::<D, f32>(&mut buckets, comm, device, "w", &[gradient; 5])?;
        }
        buckets.finish(comm)?;
        let mean = read::<D, f32>(&buckets, device, "w", 5)?;
        let expected = if comm.world_size() == 1 { 1.0 } else { 7.0 };
        assert!(mean.iter().all(|mean| (mean - expected).abs() < 1e-5), "{mean:?}");
        results.numbers("mean", &mean);
    }
    Ok(results)
}

/// A is used in micro-batch 1 of 2 alone (gradients 1|3), B in the last (5|7), C never.
fn unused_parameters<D: Overlap>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    let parameters = ["a", "b", "c"].map(|name| Parameter::new::<bf16>(name, 9));
    let mut buckets = GradientBuckets::new(comm, device, &parameters, Settings::default())?;
    let own = |first: f64| first + 2.0 * (comm.rank() % 2) as f64;
    let mean = |first: f32| first + if comm.world_size() == 1 { 0.0 } else { 1.0 };
    for _ in 0..3 {
        buckets.begin(comm, 1.0)?;
        buckets.accumulate(true)?;
        add::<D, bf16>(&mut buckets, comm, device, "a", &[own(1.0); 9])?;
        buckets.accumulate(false)?;
        add::<D, bf16>(&mut buckets, comm, device, "b", &[own(5.0); 9])?;
        buckets.finish(comm)?;
        for (name, expected) in [("a", mean(1.0)), ("b", mean(5.0)), ("c", 0.0)] {
            let gradient = read::<D, f32>(&buckets, device, name, 9)?;
            assert_eq!(gradient, [expected; 9], "{name}");
            results.numbers(name, &gradient);
        }
    }
    Ok(results)
}

/// ZeRO-1 to 3, with AdamW and SGD, clipped by the global norm.
fn sharded<D: Overlap + ElementWise + Squares>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    let sgd = Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01 };
    steps::<D, f32, f32>(comm, device, &AdamW::new(0.01), &mut results)?;
    steps::<D, bf16, f32>(comm, device, &AdamW::new(0.01), &mut results)?;
    steps::<D, f64, f64>(comm, device, &sgd, &mut results)?;
    Ok(results)
}

fn steps<D: Overlap + ElementWise + Squares, T: Number, M: Number>(
    comm: &Comm,
    device: &D,
    optimizer: &impl Optimizer<D>,
    results: &mut Results,
) -> Result<()> {
    let shapes: [(&str, &[usize]); 3] = [("a", &[50, 7]), ("b", &[3, 3]), ("c", &[1, 64])];
    let layout = FlatLayout::new(&shapes, comm.world_size())?;
    let flat = |salt: usize| {
        let mut numbers = vec![0.0; layout.len()];
        for (_, _, range) in layout.parameters() {
            // Small whole numbers: the norm has the same bits in every order of the sum.
            range.for_each(|at| numbers[at] = ((at * 7 + salt) % 9) as f64 - 4.0);
        }
        numbers
    };
    let initial: Vec<M> = flat(0).into_iter().map(M::from_f64).collect();
    let mesh = Mesh::new(comm, &[(Axis::Shard, comm.world_size())])?;
    let mut group = ShardedGroup::<D, T, M>::new(comm, device, layout.clone(), &initial, optimizer)?;
    for step in 1..4 {
        group.prefetch(comm)?;
        group.gather(comm)?;
        group.release();
        group.gather(comm)?;
        for micro in 0..2 {
            let gradient = upload::<D, T>(device, &flat(step * 100 + micro * 10 + comm.rank()))?;
            let gradient = device.view(&gradient, 0..layout.len());
            group.reduce_gradient(comm, &gradient, Reduction::Mean)?;
        }
        let norm = global_norm_of_groups(&mesh, device, &[&group])?;
        results.numbers(format!("norm in step {step}"), &[norm]);
        group.step(optimizer, clip_factor(norm, 3.0)?)?;
        results.buffer(
            format!("parameters in {} after step {step}", T::DTYPE),
            device,
            group.gather(comm)?,
        )?;
    }
    Ok(())
}

/// Norm, clipping and checksums of parameters that are split or replicated.
fn replicas_and_clipping<D: Squares>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    let ranks = comm.world_size();
    let mesh = Mesh::new(comm, &[(Axis::Tensor, ranks)])?;
    let split = Layout::replicated(&[ranks]).with(Axis::Tensor, Placement::Split(0));
    let replicated = Layout::replicated(&[1]);
    let mut own = upload::<D, f32>(device, &[3.0])?;
    let mut all = upload::<D, f32>(device, &[12.0])?;
    let norm = {
        let parts =
            &mut [(&split, device.view_mut(&mut own, 0..1)), (&replicated, device.view_mut(&mut all, 0..1))];
        clip(&mesh, device, parts, 1.0)?
    };
    assert_eq!(norm, (9.0 * ranks as f64 + 144.0).sqrt());
    results.buffer("split", device, &own)?;
    results.buffer("replicated", device, &all)?;
    let check = ReplicaCheck::every(1);
    check.check(1, &mesh, device, &[("w", &replicated, device.view(&all, 0..1))])?;
    if ranks > 2 {
        let mut other = upload::<D, f32>(device, &[if comm.rank() == 2 { 1.0 } else { 2.0 }])?;
        let other = device.view_mut(&mut other, 0..1);
        let told = check.check(1, &mesh, device, &[("w", &replicated, D::reborrow(&other))]).unwrap_err();
        assert!(told.to_string().contains("\"w\", ranks [2]"), "{told}");
    }
    Ok(results)
}
