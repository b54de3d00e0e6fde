//! Statistics of the iterations' times. A percentile is the time of an iteration, never a value between two.

/// Statistics of a list of times, in the list's unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stats {
    pub min: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
    pub mean: f64,
    /// Standard deviation divided by the mean.
    pub variation: f64,
}

impl Stats {
    /// The statistics of at least one time.
    pub fn new(times: &[f64]) -> Stats {
        let mut sorted = times.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let count = sorted.len() as f64;
        let mean = sorted.iter().sum::<f64>() / count;
        let variance = sorted.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / count;
        Stats {
            min: sorted[0],
            p50: percentile(&sorted, 50),
            p95: percentile(&sorted, 95),
            p99: percentile(&sorted, 99),
            max: sorted[sorted.len() - 1],
            mean,
            variation: if mean > 0.0 { variance.sqrt() / mean } else { 0.0 },
        }
    }
}

/// The time that `percent` of the iterations are below.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent / 100).min(sorted.len() - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_iterations_that_happened() {
        let times: Vec<f64> = (0..100).rev().map(f64::from).collect();
        let stats = Stats::new(&times);
        assert_eq!((stats.min, stats.p50, stats.p95, stats.p99, stats.max), (0.0, 50.0, 95.0, 99.0, 99.0));
        assert_eq!(stats.mean, 49.5);
    }

    #[test]
    fn one_iteration_is_every_percentile() {
        let stats = Stats::new(&[3.0]);
        assert_eq!((stats.min, stats.p50, stats.p99, stats.max), (3.0, 3.0, 3.0, 3.0));
        assert_eq!((stats.mean, stats.variation), (3.0, 0.0));
    }

    #[test]
    fn variation_is_relative() {
        let stats = Stats::new(&[1.0, 3.0]);
        assert_eq!((stats.mean, stats.variation), (2.0, 0.5));
    }
}
