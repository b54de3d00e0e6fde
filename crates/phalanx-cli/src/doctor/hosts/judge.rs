//! Which hosts and links are slow: those that differ from the median by more than the others do.
//!
//! A host is judged by its best link in each direction: if even that is slow, the host is, and not its partners. The links
//! between hosts that are not slow are then judged by themselves.

use super::measure::Link;

/// A value is slow that is worse than the median by so many median absolute deviations (of which 1.4826 are one standard deviation), and by
/// this share of the median: where all are nearly equal, small differences do not count. Few hosts with much noise deviate by more than the
/// median; so a bandwidth of less than a third is slow in any case.
const DEVIATIONS: f64 = 5.0 * 1.4826;
const SHARE: f64 = 0.3;
const MOST_SHARE: f64 = 2.0 / 3.0;
/// A latency has to be longer by this share, and by so many seconds: on a busy host the median itself moves.
const LATENCY_SHARE: f64 = 3.0;
const LATENCY_LEAST: f64 = 50e-6;
/// Clocks that differ by more make a timeline hard to read.
const CLOCK: f64 = 10e-3;

#[derive(Debug, Default, PartialEq)]
pub struct Verdict {
    pub slow_hosts: Vec<SlowHost>,
    pub slow_links: Vec<SlowLink>,
    /// Hosts whose clock is away from host 0's, by so many seconds.
    pub clocks: Vec<(usize, f64)>,
}

/// A host whose best link is slow, and what that is for the others.
#[derive(Debug, PartialEq)]
pub struct SlowHost {
    pub host: usize,
    pub what: What,
    pub value: f64,
    pub median: f64,
}

#[derive(Debug, PartialEq)]
pub struct SlowLink {
    pub from: usize,
    pub to: usize,
    pub what: What,
    pub value: f64,
    pub median: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    Sending,
    Receiving,
    Latency,
}

impl Verdict {
    /// Whether nothing is slow. Clocks may differ.
    pub fn is_healthy(&self) -> bool {
        self.slow_hosts.is_empty() && self.slow_links.is_empty()
    }
}

/// What is measured from one host to another.
struct Sample {
    from: usize,
    to: usize,
    value: f64,
}

pub fn judge(links: &[Link], hosts: usize) -> Verdict {
    let bandwidths = both_ways(links, |link| link.bandwidth);
    let latencies = both_ways(links, |link| (link.latency, link.latency));
    let mut verdict = Verdict::default();
    let senders = best(&bandwidths, hosts, |sample| sample.from, f64::max);
    let receivers = best(&bandwidths, hosts, |sample| sample.to, f64::max);
    let nearest = best(&latencies, hosts, |sample| sample.from, f64::min);
    for (what, values) in [(What::Sending, senders), (What::Receiving, receivers), (What::Latency, nearest)] {
        let (median, limit) = limit(&values, what);
        let slow = values.iter().enumerate().filter(|(_, value)| is_beyond(**value, limit, what));
        verdict.slow_hosts.extend(slow.map(|(host, value)| SlowHost { host, what, value: *value, median }));
    }
    for (what, samples) in [(What::Sending, &bandwidths), (What::Latency, &latencies)] {
        let values: Vec<f64> = samples.iter().map(|sample| sample.value).collect();
        let (median, limit) = limit(&values, what);
        let is_explained = |sample: &Sample| {
            verdict.slow_hosts.iter().any(|slow| slow.host == sample.from || slow.host == sample.to)
        };
        // A latency belongs to both directions.
        let counts = |sample: &&Sample| what != What::Latency || sample.from < sample.to;
        let slow = samples.iter().filter(counts).filter(|sample| is_beyond(sample.value, limit, what));
        let slow: Vec<SlowLink> = slow
            .filter(|sample| !is_explained(sample))
            .map(|sample| SlowLink { from: sample.from, to: sample.to, what, value: sample.value, median })
            .collect();
        verdict.slow_links.extend(slow);
    }
    let of_first = links.iter().filter(|link| link.hosts.0 == 0);
    let away = of_first.filter(|link| link.clock_ahead.abs() > CLOCK.max(link.latency));
    verdict.clocks = away.map(|link| (link.hosts.1, link.clock_ahead)).collect();
    verdict
}

/// What is measured there and back.
fn both_ways(links: &[Link], value: impl Fn(&Link) -> (f64, f64)) -> Vec<Sample> {
    let of_link = |link: &Link| {
        let ((a, b), (there, back)) = (link.hosts, value(link));
        [Sample { from: a, to: b, value: there }, Sample { from: b, to: a, value: back }]
    };
    links.iter().flat_map(of_link).collect()
}

/// Each host's best value; hosts that were not measured have none.
fn best(
    samples: &[Sample],
    hosts: usize,
    of: impl Fn(&Sample) -> usize,
    better: impl Fn(f64, f64) -> f64,
) -> Vec<f64> {
    let of_host = |host| samples.iter().filter(|s| of(s) == host).map(|s| s.value).reduce(&better);
    (0..hosts).filter_map(of_host).collect()
}

/// The median, and the last value that is not slow.
fn limit(values: &[f64], what: What) -> (f64, f64) {
    let middle = median(values);
    let distances: Vec<f64> = values.iter().map(|value| (value - middle).abs()).collect();
    let deviation = DEVIATIONS * median(&distances);
    let limit = match what {
        What::Latency => middle + deviation.max(LATENCY_SHARE * middle).max(LATENCY_LEAST),
        What::Sending | What::Receiving => middle - deviation.clamp(SHARE * middle, MOST_SHARE * middle),
    };
    (middle, limit)
}

fn is_beyond(value: f64, limit: f64, what: What) -> bool {
    if what == What::Latency { value > limit } else { value < limit }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pairs of so many hosts, with 10 GB/s and 5 µs; `change` may make a link another one.
    fn network(hosts: usize, change: impl Fn(&mut Link)) -> Vec<Link> {
        let pairs = (0..hosts).flat_map(|a| (a + 1..hosts).map(move |b| (a, b)));
        pairs
            .map(|(a, b)| {
                // Some noise, as on real hosts.
                let noise = 1.0 + 0.02 * ((a * 7 + b * 3) % 5) as f64;
                let mut link = Link {
                    hosts: (a, b),
                    latency: 5e-6 * noise,
                    bandwidth: (10e9 * noise, 10e9 / noise),
                    clock_ahead: 0.0,
                };
                change(&mut link);
                link
            })
            .collect()
    }

    #[test]
    fn equal_hosts_are_healthy() {
        for hosts in 2..10 {
            assert_eq!(judge(&network(hosts, |_| ()), hosts), Verdict::default(), "{hosts} hosts");
        }
    }

    #[test]
    fn a_host_that_sends_slowly_is_named_and_its_partners_are_not() {
        for hosts in 3..10 {
            let slow = network(hosts, |link| match link.hosts {
                (2, _) => link.bandwidth.0 /= 5.0,
                (_, 2) => link.bandwidth.1 /= 5.0,
                _ => {}
            });
            let verdict = judge(&slow, hosts);
            let named: Vec<_> = verdict.slow_hosts.iter().map(|slow| (slow.host, slow.what)).collect();
            assert_eq!(named, [(2, What::Sending)], "{hosts} hosts");
            assert!(verdict.slow_links.is_empty(), "{:?}", verdict.slow_links);
        }
    }

    #[test]
    fn a_link_is_named_by_itself() {
        let slow = network(6, |link| {
            if link.hosts == (1, 4) {
                link.bandwidth.1 /= 3.0;
            }
            if link.hosts == (0, 3) {
                (link.latency, link.clock_ahead) = (180e-6, -0.5);
            }
        });
        let verdict = judge(&slow, 6);
        assert!(verdict.slow_hosts.is_empty() && !verdict.is_healthy());
        let named: Vec<_> = verdict.slow_links.iter().map(|link| (link.from, link.to, link.what)).collect();
        assert_eq!(named, [(4, 1, What::Sending), (0, 3, What::Latency)]);
        assert_eq!(verdict.clocks, [(3, -0.5)]);
    }
}
