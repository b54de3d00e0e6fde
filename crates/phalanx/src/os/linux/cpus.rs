//! Which cores a thread may use, on hosts with any number of them.

use std::io;

/// Cores as a bit set, for as many as Linux has on any processor.
pub(crate) type CpuSet = [u64; 128];

const WORD: usize = u64::BITS as usize;

/// The cores this thread may use.
pub(crate) fn usable_cpus() -> CpuSet {
    let mut set = [0; size_of::<CpuSet>() / size_of::<u64>()];
    for (word, cpus) in set.iter_mut().zip(affinity(affinity_of_this_thread)) {
        *word = cpus;
    }
    set
}

/// The numbers of the cores that this thread may use; empty if they are not known.
pub fn usable_cores() -> Vec<usize> {
    let set = affinity(affinity_of_this_thread);
    let is_in = |core: &usize| set[core / WORD] & 1 << (core % WORD) != 0;
    (0..set.len() * WORD).filter(is_in).collect()
}

/// Lets this thread run on these cores only, and what it starts.
pub fn run_on(cores: &[usize]) -> io::Result<()> {
    let mut set = vec![0u64; cores.iter().max().map_or(0, |last| last / WORD + 1)];
    for core in cores {
        set[core / WORD] |= 1 << (core % WORD);
    }
    // SAFETY: the kernel reads as many bytes as the set has.
    let status = unsafe { libc::sched_setaffinity(0, size_of_val(&set[..]), set.as_ptr().cast()) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Asks for a bit set that the kernel finds too small ("invalid argument") if it can have more cores. libc's own has 1,024.
fn affinity(ask: impl Fn(&mut [u64]) -> io::Result<()>) -> Vec<u64> {
    const MOST: usize = 1 << 20;
    let mut set = vec![0; size_of::<CpuSet>() / size_of::<u64>()];
    loop {
        match ask(&mut set) {
            Ok(()) => return set,
            Err(e) if e.kind() == io::ErrorKind::InvalidInput && set.len() * WORD < MOST => {
                set = vec![0; 2 * set.len()];
            }
            Err(_) => return Vec::new(),
        }
    }
}

fn affinity_of_this_thread(set: &mut [u64]) -> io::Result<()> {
    // SAFETY: the kernel writes as many bytes as the set has at most; the rest is zero.
    let status = unsafe { libc::sched_getaffinity(0, size_of_val(set), set.as_mut_ptr().cast()) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_may_have_any_number_of_cores() {
        for cores in [8, 1024, 1025, 8192, 20_000] {
            // As the kernel: a set without room for all cores is refused.
            let kernel = |set: &mut [u64]| {
                if set.len() * WORD < cores {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                set[(cores - 1) / WORD] |= 1 << ((cores - 1) % WORD);
                Ok(())
            };
            let set = affinity(kernel);
            assert_eq!(set.iter().map(|word| word.count_ones()).sum::<u32>(), 1, "{cores}");
        }
        assert!(affinity(|_| Err(io::ErrorKind::PermissionDenied.into())).is_empty());
    }

    #[test]
    fn a_thread_runs_where_it_is_told() {
        let own = usable_cores();
        assert_eq!(usable_cpus().iter().map(|word| word.count_ones() as usize).sum::<usize>(), own.len());
        let core = *own.last().expect("a core");
        let moved = std::thread::spawn(move || run_on(&[core]).map(|()| usable_cores()));
        assert_eq!(moved.join().unwrap().unwrap(), [core]);
        assert!(run_on(&[1 << 19]).is_err(), "no host has so many");
    }
}
