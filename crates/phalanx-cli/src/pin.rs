//! Pins a rank's thread to a core. Linux only.

use anyhow::Result;

/// Pins the calling thread to the usable core number `rank`, modulo the number of usable cores.
#[cfg(target_os = "linux")]
pub fn to_core_of(rank: usize) -> Result<()> {
    use anyhow::Context;

    let cores = usable_cores();
    let core = *cores.get(rank % cores.len().max(1)).context("no usable core was found")?;
    phalanx::internal::run_on(&[core]).with_context(|| format!("cannot pin rank {rank} to core {core}"))
}

#[cfg(not(target_os = "linux"))]
pub fn to_core_of(_rank: usize) -> Result<()> {
    anyhow::bail!("--pin works on Linux only")
}

/// The numbers of the cores that the calling thread may run on; empty if unknown.
pub fn usable_cores() -> Vec<usize> {
    phalanx::internal::usable_cores()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_has_one_core() {
        let cores = usable_cores();
        assert!(!cores.is_empty());
        // In a thread of its own: the test harness's threads stay as they are.
        let pinned = std::thread::spawn(|| {
            to_core_of(1).unwrap();
            usable_cores()
        });
        assert_eq!(pinned.join().unwrap(), [cores[1 % cores.len()]]);
    }
}
