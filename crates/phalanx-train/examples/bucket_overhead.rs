//! What gradient buckets cost beside a bare all_reduce of the same bytes, on the host: `cargo run --release --example bucket_overhead -- 2`.
//!
//! Prints the medians over steps of rank 0, in milliseconds: a bare all_reduce of all gradients in one buffer, one of each bucket, the same
//! as requests, a step of buckets with `add`, one with gradients that are in their slots, and the same without its `begin`. Percentages are
//! medians of the steps' ratios to the first. Nothing else is computed, so no communication is hidden.

use phalanx::{Comm, ReduceOp};
use phalanx_train::buckets::{GradientBuckets, Parameter, Settings};
use phalanx_train::device::Host;
use std::time::Instant;

const PARAMETERS: usize = 64;
const LEN: usize = 256 << 10;
const STEPS: usize = 51;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ranks = std::env::args().nth(1).map_or(Ok(2), |ranks| ranks.parse())?;
    let lines = phalanx::try_run(ranks, measure)?;
    println!("{}", lines[0]);
    Ok(())
}

fn measure(comm: Comm) -> phalanx_train::Result<String> {
    let names: Vec<String> = (0..PARAMETERS).map(|number| format!("p{number:02}")).collect();
    let parameters: Vec<Parameter> = names.iter().map(|name| Parameter::new::<f32>(name, LEN)).collect();
    let mut buckets = GradientBuckets::new(&comm, &Host, &parameters, Settings::default())?;
    let gradient = vec![1.0f32; LEN];
    let mut whole = vec![1.0f32; PARAMETERS * LEN];
    let per_bucket = (Settings::default().bucket_bytes / 4 / LEN).max(1) * LEN;
    let mut parts: Vec<Vec<f32>> = whole.chunks(per_bucket).map(<[f32]>::to_vec).collect();
    let mut times: [Vec<f64>; 6] = Default::default();
    let write = |buckets: &mut GradientBuckets<Host>| {
        for name in names.iter().rev() {
            // A backward pass would write it here.
            buckets.slot(name)?;
            buckets.ready(&comm, name)?;
        }
        buckets.finish(&comm).map(drop)
    };
    for step in 0..STEPS + 2 {
        let mut timed = |kind: usize, work: &mut dyn FnMut() -> phalanx_train::Result<()>| {
            comm.barrier()?;
            let start = Instant::now();
            work()?;
            // The first steps connect, and agree on the order.
            if step >= 2 {
                times[kind].push(start.elapsed().as_secs_f64() * 1e3);
            }
            phalanx_train::Result::Ok(())
        };
        timed(0, &mut || Ok(comm.all_reduce_in_place(&mut whole, ReduceOp::Avg)?))?;
        timed(1, &mut || {
            whole
                .chunks_mut(per_bucket)
                .try_for_each(|part| Ok(comm.all_reduce_in_place(part, ReduceOp::Avg)?))
        })?;
        timed(4, &mut || {
            let started = parts.drain(..).map(|part| comm.start_all_reduce(part, ReduceOp::Avg));
            let started: Vec<_> = started.collect::<phalanx::Result<_>>()?;
            for request in started {
                parts.push(request.wait()?);
            }
            Ok(())
        })?;
        timed(2, &mut || {
            buckets.begin(&comm, 1.0)?;
            for name in names.iter().rev() {
                buckets.add(&comm, name, &&gradient[..])?;
            }
            buckets.finish(&comm).map(drop)
        })?;
        timed(3, &mut || {
            buckets.begin(&comm, 1.0)?;
            write(&mut buckets)
        })?;
        // A step begins before the forward pass, during which the weights travel.
        buckets.begin(&comm, 1.0)?;
        timed(5, &mut || write(&mut buckets))?;
    }
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let more = |kind: usize| {
        let ratios = times[kind].iter().zip(&times[0]).map(|(time, whole)| time / whole);
        (median(ratios.collect()) - 1.0) * 100.0
    };
    let percent = [2, 3, 5].map(more);
    let [whole, parts, bucketed, written, started, begun] = times.map(median);
    let mib = (PARAMETERS * LEN * 4) >> 20;
    Ok(format!(
        "{mib} MiB among {} ranks: all_reduce {whole:.2} ms, in parts {parts:.2} ms, started {started:.2} ms, buckets {bucketed:.2} ms ({:+.1} %), written in place {written:.2} ms ({:+.1} %), and begun before {begun:.2} ms ({:+.1} %)",
        comm.world_size(),
        percent[0],
        percent[1],
        percent[2]
    ))
}
