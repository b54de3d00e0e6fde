//! `--bind-to`: the cores that each rank of this machine may use, by Linux's description of it under `/sys`.

use super::options::BindTo;
use crate::gpu::{self, Gpu};
use crate::log::say;
use crate::pin;
use anyhow::{Context, Result, ensure};
use std::path::Path;

/// The cores of each of this machine's ranks, and what they are; empty if the ranks are not bound.
#[derive(Debug, Default)]
pub struct Binding(Vec<BoundRank>);

#[derive(Debug, PartialEq, Eq)]
struct BoundRank {
    cores: Vec<usize>,
    /// As in `NUMA domain 1`.
    place: String,
}

/// This machine, as far as this process may use it.
struct Topology<'a> {
    /// `/sys`.
    root: &'a Path,
    usable: Vec<usize>,
}

impl Binding {
    pub fn of(bind_to: BindTo, ranks: usize) -> Result<Binding> {
        let topology = Topology { root: Path::new("/sys"), usable: pin::usable_cores() };
        let bound = match bind_to {
            BindTo::None => Vec::new(),
            BindTo::Core => topology.core_of_each(ranks)?,
            BindTo::Numa => topology.domain_of_each(ranks)?,
            BindTo::Gpu => topology.near_gpus(ranks, &gpu_addresses()?)?,
        };
        Ok(Binding(bound))
    }

    /// Carries out what starts rank number `local` of this machine: its process inherits this thread's cores.
    pub fn start<T>(&self, local: usize, start: impl FnOnce() -> T) -> std::io::Result<T> {
        let Some(bound) = self.0.get(local) else { return Ok(start()) };
        let before = pin::usable_cores();
        phalanx::internal::run_on(&bound.cores)?;
        let started = start();
        phalanx::internal::run_on(&before)?;
        Ok(started)
    }

    /// Says which cores each rank has; `first` is the number of this machine's first rank.
    pub fn report(&self, first: usize) {
        if self.0.is_empty() {
            say("phalanx launch: ranks are not bound to cores (--bind-to core, numa or gpu binds them)");
        }
        for (local, bound) in self.0.iter().enumerate() {
            let (rank, cores) = (first + local, pin::list(&bound.cores));
            say(format_args!("phalanx launch: rank {rank} is bound to {} (cores {cores})", bound.place));
        }
    }
}

/// The PCI addresses of the GPUs that ranks see.
fn gpu_addresses() -> Result<Vec<String>> {
    let count = gpu::count().context("--bind-to gpu")?;
    ensure!(count > 0, "--bind-to gpu: the CUDA driver sees no GPU; use --bind-to numa");
    (0..count).map(|number| Gpu::number(number)?.pci()).collect()
}

impl Topology<'_> {
    /// One core with its hardware threads for each rank, in the order of their numbers.
    fn core_of_each(&self, ranks: usize) -> Result<Vec<BoundRank>> {
        let mut cores: Vec<Vec<usize>> = Vec::new();
        for cpu in &self.usable {
            if cores.iter().any(|core| core.contains(cpu)) {
                continue;
            }
            let file = format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            cores.push(self.usable_of(&file)?);
        }
        ensure!(
            ranks <= cores.len(),
            "--bind-to core: {ranks} ranks, and this process may use {} cores; start fewer ranks, or use --bind-to numa",
            cores.len()
        );
        let bound = |cores: Vec<usize>| BoundRank { place: format!("core {}", cores[0]), cores };
        Ok(cores.into_iter().take(ranks).map(bound).collect())
    }

    /// The cores of a NUMA domain for each rank: neighbours share one, and the domains have as many ranks each as can be.
    fn domain_of_each(&self, ranks: usize) -> Result<Vec<BoundRank>> {
        let mut domains = Vec::new();
        for number in self.numbers("devices/system/node/online")? {
            let cores = self.usable_of(&format!("devices/system/node/node{number}/cpulist"))?;
            // A domain of memory alone, or that others use.
            if !cores.is_empty() {
                domains.push((number, cores));
            }
        }
        ensure!(!domains.is_empty(), "--bind-to numa: no NUMA domain has a core that this process may use");
        let bound = |local: usize| {
            let (number, cores) = &domains[local * domains.len() / ranks.max(domains.len())];
            BoundRank { cores: cores.clone(), place: format!("NUMA domain {number}") }
        };
        Ok((0..ranks).map(bound).collect())
    }

    /// The cores next to each rank's GPU: rank number `local` of a machine has GPU number `local`, modulo their number.
    fn near_gpus(&self, ranks: usize, addresses: &[String]) -> Result<Vec<BoundRank>> {
        let bound = |local: usize| {
            let number = local % addresses.len();
            let address = addresses[number].to_lowercase();
            let cores = self.usable_of(&format!("bus/pci/devices/{address}/local_cpulist"))?;
            ensure!(
                !cores.is_empty(),
                "--bind-to gpu: this process may use no core next to GPU {number} ({address}); use --bind-to none"
            );
            Ok(BoundRank { cores, place: format!("the neighbourhood of GPU {number}") })
        };
        (0..ranks).map(bound).collect()
    }

    /// The cores that a file lists, of those that this process may use.
    fn usable_of(&self, file: &str) -> Result<Vec<usize>> {
        let listed = self.numbers(file)?;
        Ok(listed.into_iter().filter(|core| self.usable.contains(core)).collect())
    }

    fn numbers(&self, file: &str) -> Result<Vec<usize>> {
        let path = self.root.join(file);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("--bind-to needs {}; use --bind-to none", path.display()))?;
        parse_list(text.trim())
            .with_context(|| format!("{} is no list of cores: {text:?}; use --bind-to none", path.display()))
    }
}

/// The numbers of a list of the kernel's, as `0-3,8`.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two NUMA domains of four cores with two hardware threads each, one of memory alone, and a GPU next to each.
    fn machine() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |file: String, text: &str| {
            let path = folder.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        };
        for cpu in 0..16 {
            let siblings = format!("{},{}", cpu % 8, cpu % 8 + 8);
            write(format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), &siblings);
        }
        write("devices/system/node/online".into(), "0-2");
        for (node, cpus) in ["0-3,8-11", "4-7,12-15", ""].iter().enumerate() {
            write(format!("devices/system/node/node{node}/cpulist"), cpus);
        }
        for (address, cpus) in [("0000:19:00.0", "4-7,12-15"), ("0000:ab:00.0", "0-3,8-11")] {
            write(format!("bus/pci/devices/{address}/local_cpulist"), cpus);
        }
        folder
    }

    fn cores(bound: Vec<BoundRank>) -> Vec<String> {
        bound.iter().map(|bound| pin::list(&bound.cores)).collect()
    }

    #[test]
    fn each_rank_has_its_cores() {
        let machine = machine();
        let all = Topology { root: machine.path(), usable: (0..16).collect() };
        assert_eq!(cores(all.core_of_each(3).unwrap()), ["0,8", "1,9", "2,10"]);
        assert_eq!(cores(all.domain_of_each(4).unwrap()), ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]);
        assert_eq!(cores(all.domain_of_each(1).unwrap()), ["0-3,8-11"]);
        let gpus = ["0000:19:00.0".to_owned(), "0000:AB:00.0".to_owned()];
        assert_eq!(
            cores(all.near_gpus(3, &gpus).unwrap()),
            ["4-7,12-15", "0-3,8-11", "4-7,12-15"],
            "the third has the first GPU again"
        );
    }

    #[test]
    fn only_what_this_process_may_use_is_given_out() {
        let machine = machine();
        let part = Topology { root: machine.path(), usable: vec![2, 3, 10] };
        assert_eq!(cores(part.core_of_each(2).unwrap()), ["2,10", "3"]);
        assert_eq!(cores(part.domain_of_each(2).unwrap()), ["2-3,10", "2-3,10"]);
        let error = part.core_of_each(3).unwrap_err().to_string();
        assert!(error.contains("3 ranks") && error.contains("2 cores"), "{error}");
        let error = part.near_gpus(1, &["0000:19:00.0".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("no core next to GPU 0"), "{error}");
        let error = part.near_gpus(1, &["0000:20:00.0".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("0000:20:00.0") && error.contains("--bind-to none"), "{error}");
    }
}
