//! Facts about GPUs: what the CUDA driver and HIP report of them.

use super::facts::{fact, found, not_found};
use crate::error::explain;
use crate::gpu::{self, Gpu, Link};
use crate::size;
use anyhow::{Result, anyhow, ensure};
use phalanx_sys::hip::Api as Hip;
use phalanx_sys::nccl::{Api, RCCL};

/// The CUDA driver, its GPUs and their links.
pub fn cuda() -> Result<()> {
    let driver = match gpu::driver() {
        Ok(driver) => driver,
        Err(error) => return not_found(&error),
    };
    found("CUDA driver", driver.path(), &driver.place().origin)?;
    fact("made for CUDA", gpu::driver_version().unwrap_or_else(|error| explain(&error)))?;
    if let Some(visible) = std::env::var_os("CUDA_VISIBLE_DEVICES") {
        fact("CUDA_VISIBLE_DEVICES", visible.to_string_lossy())?;
    }
    let count = match gpu::count() {
        Ok(0) => return fact("GPUs", "none"),
        Ok(count) => count,
        Err(error) => return fact("GPUs", format!("none: {}", explain(&error))),
    };
    for number in 0..count {
        let text = describe(number).unwrap_or_else(|error| explain(&error));
        fact(format!("GPU {number}"), text)?;
    }
    let links = links(count)?;
    if count > 1 {
        fact("phalanx's own kernels", own_kernels(count, &links)?)?;
    }
    for (pairs, text) in named(links) {
        fact(pairs, text)?;
    }
    Ok(())
}

/// Whether ranks on these GPUs use phalanx's own kernels, or why not.
fn own_kernels(count: usize, links: &[(Link, Vec<String>)]) -> Result<String> {
    const VARIABLE: &str = "PHALANX_GPU_ALGORITHM";
    if std::env::var(VARIABLE).is_ok_and(|value| value == "nccl") {
        return Ok(format!("not used: {VARIABLE} is nccl"));
    }
    for number in 0..count {
        if Gpu::number(number)?.generation()? < 7 {
            return Ok(format!("not with GPU {number}: it is older than compute capability 7.0"));
        }
    }
    if let Some((_, pairs)) = links.iter().find(|(link, _)| !link.access) {
        return Ok(format!("not between {}: neither reaches the other's memory", pairs.join(", ")));
    }
    Ok(match links.iter().all(|(link, _)| link.atomics) {
        true => "between all, by LL and LL128",
        false => "between all, by LL alone: lines of 128 bytes may not arrive whole over PCIe",
    }
    .into())
}

fn describe(number: usize) -> Result<String> {
    let gpu = Gpu::number(number)?;
    let (name, memory, pci) = (gpu.name()?, size::format(gpu.memory()?), gpu.pci()?);
    Ok(format!("{name}, {memory}, compute capability {}, PCI {pci}", gpu.capability()?))
}

/// The links between all GPUs, and the pairs that have each.
fn links(count: usize) -> Result<Vec<(Link, Vec<String>)>> {
    let mut kinds: Vec<(Link, Vec<String>)> = Vec::new();
    for from in 0..count {
        for to in from + 1..count {
            let link = Gpu::number(from)?.link(Gpu::number(to)?)?;
            let pair = format!("{from}-{to}");
            match kinds.iter_mut().find(|(known, _)| *known == link) {
                Some((_, pairs)) => pairs.push(pair),
                None => kinds.push((link, vec![pair])),
            }
        }
    }
    Ok(kinds)
}

/// A line for each kind of link.
fn named(kinds: Vec<(Link, Vec<String>)>) -> Vec<(String, String)> {
    let alike = kinds.len() == 1;
    let name = |(link, pairs): (Link, Vec<String>)| {
        let pairs =
            if alike { "between any two".to_owned() } else { format!("between {}", pairs.join(", ")) };
        (pairs, show_link(&link))
    };
    kinds.into_iter().map(name).collect()
}

fn show_link(link: &Link) -> String {
    let mut text = if link.access {
        "each can reach the other's memory".to_owned()
    } else {
        "no peer access: data goes through host memory".to_owned()
    };
    if let Some(rank) = link.rank {
        text += &format!(", performance rank {rank}");
    }
    text + if link.atomics {
        ", with atomic operations (NVLink)"
    } else {
        ", without atomic operations (PCIe)"
    }
}

/// How many ranks can have an AMD GPU each, connected by RCCL. An error gives the reason for none.
pub fn usable_amd() -> Result<usize> {
    let api = Hip::load()?;
    let count = api.device_count().map_err(|error| anyhow!("HIP does not start: {}", api.describe(error)))?;
    ensure!(count > 0, "HIP sees no GPU");
    Api::load(&RCCL)?;
    Ok(count)
}

/// How many GPUs HIP sees.
pub fn hip_count() -> usize {
    Hip::load().ok().and_then(|api| api.device_count().ok()).unwrap_or(0)
}

/// HIP and AMD's GPUs.
pub fn hip() -> Result<()> {
    let api = match Hip::load() {
        Ok(api) => api,
        Err(error) => return not_found(&error),
    };
    fact("version", api.version())?;
    found("file", api.path(), &api.library().place().origin)?;
    for variable in ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] {
        if let Some(visible) = std::env::var_os(variable) {
            fact(variable, visible.to_string_lossy())?;
        }
    }
    let count = match api.device_count() {
        Ok(0) => return fact("GPUs", "none"),
        Ok(count) => count,
        Err(error) => return fact("GPUs", format!("none: {}", api.describe(error))),
    };
    for number in 0..count {
        let text = match api.properties(number) {
            Ok(gpu) => format!("{}, {}, {}", gpu.name, size::format(gpu.memory as u64), gpu.architecture),
            Err(error) => api.describe(error),
        };
        fact(format!("GPU {number}"), text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_are_alike_are_one_line() {
        let link = Link { access: true, rank: Some(0), atomics: true };
        let all = named(vec![(link, vec!["0-1".into(), "0-2".into(), "1-2".into()])]);
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].0, "between any two");
        assert!(all[0].1.contains("NVLink") && all[0].1.contains("rank 0"), "{}", all[0].1);

        let other = Link { access: false, rank: None, atomics: false };
        let two = named(vec![(link, vec!["0-1".into(), "2-3".into()]), (other, vec!["0-2".into()])]);
        assert_eq!(two[0].0, "between 0-1, 2-3");
        assert!(two[1].1.starts_with("no peer access"), "{}", two[1].1);
    }
}
