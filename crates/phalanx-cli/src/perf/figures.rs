//! From measured times to the figures of a row.

use super::plan::Plan;
use super::report::Measurement;
use super::stats::Stats;

/// Measured times in seconds, the same on every rank.
#[derive(Debug, Clone)]
pub struct Times {
    /// The time of each iteration on its slowest rank.
    pub iterations: Vec<f64>,
    /// The average over a loop without barriers, if it was measured.
    pub loop_average: Option<f64>,
    /// The time of the call that enqueues an operation on a GPU.
    pub enqueue: Option<f64>,
}

/// The figures of one size, in the report's units.
pub fn figures(plan: &Plan, ranks: usize, times: Times, bytes: usize, wrong: Option<u64>) -> Measurement {
    const MICROSECONDS: f64 = 1e6;
    let operation = plan.operation;
    let stats = Stats::new(&times.iterations);
    let time = times.loop_average.unwrap_or(stats.p50);
    let algbw = operation.algorithm_bandwidth(bytes, ranks, time);
    let in_microseconds = |time: &f64| time * MICROSECONDS;
    Measurement {
        time: time * MICROSECONDS,
        algbw,
        busbw: algbw.map(|algbw| algbw * operation.bus_factor(ranks)),
        wrong,
        iterations: times.iterations.len(),
        p50: stats.p50 * MICROSECONDS,
        p95: stats.p95 * MICROSECONDS,
        p99: stats.p99 * MICROSECONDS,
        min: stats.min * MICROSECONDS,
        max: stats.max * MICROSECONDS,
        mean: stats.mean * MICROSECONDS,
        variation: stats.variation,
        loop_average: times.loop_average.as_ref().map(in_microseconds),
        enqueue: times.enqueue.as_ref().map(in_microseconds),
        times: (plan.per_iteration).then(|| times.iterations.iter().map(in_microseconds).collect()),
    }
}
