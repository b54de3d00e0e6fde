//! Rounds of the bare calls and of phalanx's in turns, and what they say of the difference.

use std::time::Duration;

/// Per operation, as one rank saw a round.
#[derive(Clone, Copy)]
pub struct Sample {
    /// CPU time of the call.
    pub enqueue: Duration,
    /// Until it was complete.
    pub total: Duration,
}

/// Medians, the bare calls' first, in microseconds.
pub struct Comparison {
    pub enqueue: [f64; 2],
    /// How much longer an enqueue took: the median of the rounds' differences, which a machine that slows down for a while
    /// does not change.
    pub more: f64,
    pub total: [f64; 2],
    /// The median of the rounds' ratios.
    pub ratio: f64,
}

impl Comparison {
    /// The rounds in the order in which they were made.
    pub fn of(bare: &[Sample], ours: &[Sample]) -> Comparison {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let of_each = |of: fn(&Sample) -> Duration| {
            [bare, ours].map(|samples| median(samples.iter().map(|sample| micros(of(sample)))))
        };
        let pairs = || bare.iter().zip(ours);
        Comparison {
            enqueue: of_each(|sample| sample.enqueue),
            more: median(pairs().map(|(bare, ours)| micros(ours.enqueue) - micros(bare.enqueue))),
            total: of_each(|sample| sample.total),
            ratio: median(pairs().map(|(bare, ours)| ours.total.as_secs_f64() / bare.total.as_secs_f64())),
        }
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
