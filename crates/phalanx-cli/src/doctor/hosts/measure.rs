//! Measures a pair of hosts. Both call [`measure`]; the one with the lower number answers what was measured.

use phalanx::{Comm, Result};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Messages there and back for the latency, after those that make the connection.
const WARM_UP: usize = 20;
const ROUND_TRIPS: usize = 200;
/// Bytes of a message for the bandwidth, and about how long a direction is measured.
const LONG: usize = 1 << 20;
const LONG_TIME: Duration = Duration::from_millis(150);
const MOST_MESSAGES: u64 = 4096;

/// What was measured between two hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The hosts, by number; the first is the lower one.
    pub hosts: (usize, usize),
    /// Half of a round trip of 8 bytes, in seconds: the median.
    pub latency: f64,
    /// Bytes per second from the first to the second host, and back.
    pub bandwidth: (f64, f64),
    /// How far the second host's clock is ahead of the first one's, in seconds, within half of the shortest round trip.
    pub clock_ahead: f64,
}

pub fn measure(comm: &Comm, peer: usize) -> Result<Option<Link>> {
    let is_first = comm.rank() < peer;
    let (latency, clock_ahead) = round_trips(comm, peer, is_first)?;
    let there = stream(comm, peer, is_first)?;
    let back = stream(comm, peer, !is_first)?;
    let link = Link { hosts: (comm.rank(), peer), latency, bandwidth: (there, back), clock_ahead };
    Ok(is_first.then_some(link))
}

fn clock() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64)
}

/// The latency, and how far the peer's clock is ahead, as the first one sees it.
fn round_trips(comm: &Comm, peer: usize, is_first: bool) -> Result<(f64, f64)> {
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    let mut shortest = (Duration::MAX, 0);
    let mut there = [0i64];
    for trip in 0..WARM_UP + ROUND_TRIPS {
        if !is_first {
            comm.recv(&mut there, peer)?;
            comm.send(&[clock()], peer)?;
            continue;
        }
        let (sent, began) = (clock(), Instant::now());
        comm.send(&[sent], peer)?;
        comm.recv(&mut there, peer)?;
        let took = began.elapsed();
        if trip >= WARM_UP {
            times.push(took);
            // The peer read its clock in the middle, if both ways took as long.
            let ahead = there[0] - (sent + took.as_nanos() as i64 / 2);
            shortest = shortest.min((took, ahead));
        }
    }
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    Ok((median.as_secs_f64() / 2.0, shortest.1 as f64 * 1e-9))
}

/// Bytes per second from one to the other, as the sender sees it.
fn stream(comm: &Comm, peer: usize, is_sender: bool) -> Result<f64> {
    let mut data = vec![0u8; LONG];
    let trial = pass(comm, peer, is_sender, 2, &mut data)?;
    // The sender decides how many.
    let mut count = [(LONG_TIME.as_secs_f64() / (trial.as_secs_f64() / 2.0)) as u64];
    count[0] = count[0].clamp(2, MOST_MESSAGES);
    if is_sender {
        comm.send(&count, peer)?;
    } else {
        comm.recv(&mut count, peer)?;
    }
    let took = pass(comm, peer, is_sender, count[0], &mut data)?;
    Ok(count[0] as f64 * LONG as f64 / took.as_secs_f64())
}

/// Sends so many messages; an answer says that all have come.
fn pass(comm: &Comm, peer: usize, is_sender: bool, count: u64, data: &mut [u8]) -> Result<Duration> {
    let mut answer = [0u8];
    let began = Instant::now();
    for _ in 0..count {
        if is_sender {
            comm.send(data, peer)?;
        } else {
            comm.recv(data, peer)?;
        }
    }
    if is_sender {
        comm.recv(&mut answer, peer)?;
    } else {
        comm.send(&answer, peer)?;
    }
    Ok(began.elapsed())
}
