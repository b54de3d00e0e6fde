//! Command-line values that several subcommands take: counts, numbers of ranks, and durations.

use std::time::Duration;

/// The library's limit for ranks that meet in the memory of one host.
pub const MAX_RANKS: usize = 512;
/// A limit for counts: `perf` keeps the times of all iterations, and products of counts must not overflow.
const MAX_COUNT: usize = 100_000_000;
/// The longest duration in seconds, 136 years: every clock can hold it.
const MAX_SECONDS: f64 = u32::MAX as f64;

/// Reads a number of ranks: at least 1.
pub fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("0 ranks cannot do anything: give at least 1".to_owned()),
        Ok(ranks) if ranks > MAX_RANKS => {
            Err(format!("{ranks} ranks are too many: at most {MAX_RANKS} can meet in one machine's memory"))
        }
        Ok(ranks) => Ok(ranks),
        Err(_) => Err(format!("{text:?} is no number of ranks: expected 1, 2, 3, …")),
    }
}

/// Reads a count that may be 0.
pub fn count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count <= MAX_COUNT);
    count.ok_or_else(|| format!("{text:?} is no count: expected a whole number, at most {MAX_COUNT}"))
}

/// Reads a duration in seconds, which may have a fraction.
pub fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .filter(|seconds| *seconds <= MAX_SECONDS)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| {
            format!(
                "{text:?} is no duration: expected seconds above 0, like 30 or 0.5, at most {MAX_SECONDS}"
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_least_one_rank_is_needed() {
        assert_eq!(ranks("3"), Ok(3));
        assert!(ranks("0").unwrap_err().contains("at least 1"));
        assert!(ranks("-1").is_err());
        assert!(ranks("two").is_err());
        assert!(ranks("9999999999999999").unwrap_err().contains("at most 512"));
        assert_eq!((ranks("512"), ranks("513").is_err()), (Ok(512), true));
    }

    #[test]
    fn durations_are_positive_seconds() {
        assert_eq!(seconds("2"), Ok(Duration::from_secs(2)));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "inf", "NaN", "1e300", "1.8e19", "soon"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
