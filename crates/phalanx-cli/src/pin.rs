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

/// Ascending numbers in the kernel's form: `0-3,8`.
pub fn list(numbers: &[usize]) -> String {
    let ranges = numbers.chunk_by(|one, next| one + 1 == *next);
    let texts = ranges.map(|range| match range {
        [one] => one.to_string(),
        _ => format!("{}-{}", range[0], range[range.len() - 1]),
    });
    texts.collect::<Vec<_>>().join(",")
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_ranges() {
        assert_eq!(list(&[0]), "0");
        assert_eq!(list(&[0, 1, 2, 3, 8]), "0-3,8");
        assert_eq!(list(&[1, 3, 4]), "1,3-4");
        assert_eq!(list(&[]), "");
    }

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
