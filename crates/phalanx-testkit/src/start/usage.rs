//! What processes use: the most memory that they have together, sampled, and processor time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(100);

/// Bytes of resident memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Peak {
    /// Of the first process.
    pub first: u64,
    /// Of all of them at one time.
    pub all: u64,
}

/// A thread that looks at processes.
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Peak>,
}

impl Watch {
    /// Begins to look at processes, by their ids.
    pub fn of(processes: Vec<u32>) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut peak = Peak::default();
            loop {
                let is_last = stopped.load(Ordering::Relaxed);
                let now: Vec<u64> = processes.iter().map(|process| resident(*process)).collect();
                peak.first = peak.first.max(now.first().copied().unwrap_or(0));
                peak.all = peak.all.max(now.iter().sum());
                if is_last {
                    return peak;
                }
                std::thread::sleep(INTERVAL);
            }
        });
        Watch { stop, thread }
    }

    /// Looks once more, and returns the most that was seen.
    pub fn end(self) -> Peak {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("it only reads files")
    }
}

/// Resident memory of a process, in bytes; 0 where the system does not say.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Processor time that a process has had; 0 where the system does not say.
pub fn cpu_time(process: u32) -> Duration {
    /// Linux counts it in units of 10 ms for programs, whatever its own clock is.
    const TICK: Duration = Duration::from_millis(10);
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name in parentheses may contain spaces. User and system time are fields 14 and 15 of the whole.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let ticks = fields.skip(11).take(2).filter_map(|field| field.parse::<u32>().ok()).sum();
    TICK * ticks
}
