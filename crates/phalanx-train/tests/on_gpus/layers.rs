//! Layers that are split among ranks, and smaller messages.

use crate::same::{Results, on_both};
use phalanx::{Comm, bf16, f16};
use phalanx_train::Result;
use phalanx_train::attention::Merge;
use phalanx_train::compress::{Format, Quantize, Quantized};
use phalanx_train::device::{Device, Number};
use phalanx_train::expert::{Experts, Rows};
use phalanx_train::tensor::{
    CrossEntropy, Slabs, VocabularyParallel, exchange, gather, own_part, scatter_sum,
};
use std::ops::Range;

on_both! { slabs, cross_entropy, cross_entropy_as_worked_out, experts, quantized, merged }

/// Between -1 and 1.
fn numbers<T: Number>(len: usize, salt: usize) -> Vec<T> {
    (0..len).map(|at| T::from_f64(((at * 29 + salt * 101) as f64 * 0.71).sin())).collect()
}

/// All of a buffer.
fn all<'a, D: Device, T: Number>(device: &D, buffer: &'a D::Buffer<T>) -> D::View<'a, T> {
    device.view(buffer, 0..phalanx::Source::len(buffer))
}

/// This rank's part of so many.
fn part(comm: &Comm, whole: usize) -> Range<usize> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let start = |rank: usize| rank * (whole / ranks) + rank.min(whole % ranks);
    start(rank)..start(rank + 1)
}

/// Gathering, scattering and exchanging, along all dimensions and with uneven parts.
fn slabs<D: Slabs>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    slabs_of::<D, f32>(comm, device, &mut results)?;
    slabs_of::<D, f64>(comm, device, &mut results)?;
    slabs_of::<D, f16>(comm, device, &mut results)?;
    slabs_of::<D, bf16>(comm, device, &mut results)?;
    Ok(results)
}

fn slabs_of<D: Slabs, T: Number>(comm: &Comm, device: &D, results: &mut Results) -> Result<()> {
    for shape in [[4, 3, 5], [1, 7, 300], [8, 8, 4], [5, 2, 1]] {
        let whole = numbers::<T>(shape.iter().product(), 1);
        let uploaded = device.upload(&whole)?;
        for dimension in 0..3 {
            let own = own_part(comm, device, &shape, dimension, &uploaded)?;
            let name = format!("{} of shape {shape:?} along {dimension}", T::DTYPE);
            results.buffer(format!("own part of {name}"), device, &own)?;
            let gathered = gather(comm, device, &shape, dimension, &all::<D, T>(device, &own))?;
            assert_eq!(device.download(&all::<D, T>(device, &gathered))?, whole, "{name}");
            let summed = scatter_sum(comm, device, &shape, dimension, &uploaded)?;
            results.buffer(format!("part of the sum of {name}"), device, &summed)?;
            let to = (dimension + 1) % 3;
            let moved = exchange(comm, device, &shape, [dimension, to], &own)?;
            results.buffer(format!("exchange of {name}"), device, &moved)?;
        }
    }
    Ok(())
}

fn cross_entropy<D: CrossEntropy>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    // Rounded to 24, 53, 11 and 8 bits after exponentials that differ in their last.
    cross_entropy_of::<D, f32>(comm, device, 1e-7, &mut results)?;
    cross_entropy_of::<D, f64>(comm, device, 1e-12, &mut results)?;
    cross_entropy_of::<D, f16>(comm, device, 1e-3, &mut results)?;
    cross_entropy_of::<D, bf16>(comm, device, 1e-2, &mut results)?;
    Ok(results)
}

fn cross_entropy_of<D: CrossEntropy, T: Number>(
    comm: &Comm,
    device: &D,
    tolerance: f64,
    results: &mut Results,
) -> Result<()> {
    const ROWS: usize = 6;
    // With 4 ranks and 3 words, one has none.
    for vocabulary in [3, 5, 1000] {
        let targets: Vec<Option<u32>> =
            (0..ROWS).map(|row| (row != 2).then_some((row * 7 % vocabulary) as u32)).collect();
        let own = part(comm, vocabulary);
        let logits = numbers::<T>(ROWS * vocabulary, 3);
        let columns: Vec<T> =
            logits.chunks_exact(vocabulary).flat_map(|row| row[own.clone()].to_vec()).collect();
        let mut mine = device.upload(&columns)?;
        let losses = {
            let logits = all::<D, T>(device, &mine);
            VocabularyParallel::forward(comm, device, vocabulary, &logits, &targets, 0.1)?
        };
        results.near(format!("losses of {vocabulary} words in {}", T::DTYPE), losses.losses(), 1e-12);
        losses.backward(&mut device.view_mut(&mut mine, 0..columns.len()), &[0.5; ROWS])?;
        let gradient = device.download(&device.view(&mine, 0..columns.len()))?;
        results.near(format!("gradients of {vocabulary} words in {}", T::DTYPE), &gradient, tolerance);
    }
    Ok(())
}

/// Logits 0, 1, 2, 3 over all ranks, target 3, smoothing 0.1.
fn cross_entropy_as_worked_out<D: CrossEntropy>(comm: &Comm, device: &D) -> Result<Results> {
    let own = part(comm, 4);
    let mut logits = device.upload(&[0.0f64, 1.0, 2.0, 3.0][own.clone()])?;
    let losses = {
        let logits = all::<D, f64>(device, &logits);
        VocabularyParallel::forward(comm, device, 4, &logits, &[Some(3)], 0.1)?
    };
    assert!((losses.mean() - 0.590190).abs() < 1e-6, "{}", losses.mean());
    losses.backward(&mut device.view_mut(&mut logits, 0..own.len()), &[1.0])?;
    let gradient = device.download(&device.view(&logits, 0..own.len()))?;
    for (here, expected) in gradient.iter().zip(&[0.007059, 0.062144, 0.211883, -0.281086][own]) {
        assert!((here - expected).abs() < 1e-6, "{here} is not {expected}");
    }
    Ok(Results::default())
}

/// Tokens go to experts and back: an idle expert, a rank without tokens, an expert that is 3 times its input.
fn experts<D: Rows>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    experts_of::<D, f32>(comm, device, &mut results)?;
    experts_of::<D, f64>(comm, device, &mut results)?;
    experts_of::<D, bf16>(comm, device, &mut results)?;
    Ok(results)
}

fn experts_of<D: Rows, T: Number>(comm: &Comm, device: &D, results: &mut Results) -> Result<()> {
    const WIDTH: usize = 300;
    const TOP: usize = 2;
    let tokens = if comm.rank() == 1 { 0 } else { 5 + comm.rank() };
    // Expert 3 is never chosen.
    let chosen: Vec<u32> = (0..tokens).flat_map(|token| [token as u32 % 3, 4]).collect();
    let weights = numbers::<f64>(tokens * TOP, 7);
    let routing = Experts::new(comm, 5)?.route(comm, TOP, &chosen, &weights)?;
    for step in 0..3 {
        let name = |what: &str| format!("{what} in {} of step {step}", T::DTYPE);
        let sent = device.upload(&numbers::<T>(tokens * WIDTH, step))?;
        let mut rows = routing.dispatch(comm, device, WIDTH, &all::<D, T>(device, &sent))?;
        results.buffer(name("rows of experts"), device, &rows)?;
        let len = phalanx::Source::len(&rows);
        device.scale(&mut device.view_mut(&mut rows, 0..len), 3.0)?;
        let combined = routing.combine(comm, device, WIDTH, &all::<D, T>(device, &rows))?;
        results.buffer(name("output"), device, &combined.output)?;
        let gradient = device.upload(&numbers::<T>(tokens * WIDTH, step + 10))?;
        let (of_outputs, of_weights) = routing.combine_backward(
            comm,
            device,
            WIDTH,
            &all::<D, T>(device, &gradient),
            &combined.returned,
        )?;
        results.buffer(name("gradients of outputs"), device, &of_outputs)?;
        results.near(name("gradients of weights"), &of_weights, 1e-12);
        let of_tokens = routing.dispatch_backward(comm, device, WIDTH, &all::<D, T>(device, &of_outputs))?;
        results.buffer(name("gradients of tokens"), device, &of_tokens)?;
    }
    Ok(())
}

fn quantized<D: Quantize>(comm: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    quantized_of::<D, f32>(comm, device, &mut results)?;
    quantized_of::<D, f64>(comm, device, &mut results)?;
    quantized_of::<D, f16>(comm, device, &mut results)?;
    quantized_of::<D, bf16>(comm, device, &mut results)?;
    Ok(results)
}

fn quantized_of<D: Quantize, T: Number>(comm: &Comm, device: &D, results: &mut Results) -> Result<()> {
    for (len, block) in [(1, 256), (1000, 64), (257, 16), (4096, 256), (0, 8)] {
        for format in [Format::Int8, Format::Fp8] {
            // Blocks of very unlike size, one of zeros, and one with a number that is not finite.
            let size = |at: usize| match at / block {
                2 => 0.0,
                5 if at % block == 3 => f64::INFINITY,
                other => 10f64.powi((other % 9) as i32 - 6),
            };
            let own = numbers::<f64>(len, comm.rank());
            let own: Vec<T> = own.iter().enumerate().map(|(at, x)| T::from_f64(x * size(at))).collect();
            let mut mean = device.upload(&own)?;
            let quantized = Quantized::new(format, block)?;
            quantized.all_reduce_mean(comm, device, &mut device.view_mut(&mut mean, 0..len))?;
            results.buffer(format!("mean of {len} × {} by {format:?}", T::DTYPE), device, &mean)?;
        }
    }
    Ok(())
}

/// Attention's results over different keys, also over none.
fn merged<D: Merge>(_: &Comm, device: &D) -> Result<Results> {
    let mut results = Results::default();
    merged_of::<D, f32, f32>(device, 1e-6, &mut results)?;
    merged_of::<D, bf16, f32>(device, 1e-6, &mut results)?;
    merged_of::<D, f64, f64>(device, 1e-12, &mut results)?;
    merged_of::<D, f16, bf16>(device, 1e-2, &mut results)?;
    Ok(results)
}

fn merged_of<D: Merge, T: Number, A: Number>(
    device: &D,
    tolerance: f64,
    results: &mut Results,
) -> Result<()> {
    const ROWS: usize = 7;
    const SIZE: usize = 320;
    let (mut output, mut sums) = (device.zeros::<A>(ROWS * SIZE)?, device.zeros::<f64>(ROWS)?);
    device.fill(&mut device.view_mut(&mut sums, 0..ROWS), f64::NEG_INFINITY)?;
    for step in 0..3 {
        let more = device.upload(&numbers::<T>(ROWS * SIZE, step))?;
        let mut of_more: Vec<f64> = numbers(ROWS, step + 5);
        of_more[step] = f64::NEG_INFINITY;
        of_more[6] = f64::NEG_INFINITY;
        of_more[4] += 800.0 * step as f64;
        let of_more = device.upload(&of_more)?;
        let more = (&device.view(&more, 0..ROWS * SIZE), &device.view(&of_more, 0..ROWS));
        let mut to = device.view_mut(&mut output, 0..ROWS * SIZE);
        device.merge(SIZE, more, &mut to, &mut device.view_mut(&mut sums, 0..ROWS))?;
    }
    let output = device.download(&device.view(&output, 0..ROWS * SIZE))?;
    results.near(format!("merged {} in {}", T::DTYPE, A::DTYPE), &output, tolerance);
    results.near("their sums", &device.download(&device.view(&sums, 0..ROWS))?, 1e-12);
    Ok(())
}
