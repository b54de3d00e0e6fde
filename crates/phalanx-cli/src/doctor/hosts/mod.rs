//! `phalanx doctor --hosts`: the network between the hosts of a job, measured by one rank of each.
//!
//! | file | what |
//! |---|---|
//! | `rounds.rs` | which pairs are measured together: each host is in one pair at a time |
//! | `measure.rs` | a pair's latency, bandwidth and clocks |
//! | `judge.rs` | which hosts and links are slow |
//! | `view.rs`, `heat_map.rs` | the tables, and the picture |

mod heat_map;
mod judge;
mod measure;
mod rounds;
mod view;

use super::options::DoctorArgs;
use crate::machine::{Machine, host_name};
use crate::{file, picture::Format};
use anyhow::{Result, bail, ensure};
use measure::Link;
use phalanx::{BackendKind, Comm};
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// What a host says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Host {
    name: String,
    phalanx: String,
    kernel: String,
    os: String,
    /// Interfaces that are up, with their speed in Mbit/s where the driver says it.
    interfaces: Vec<(String, Option<u64>)>,
}

/// What a host has found out.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    host: Host,
    links: Vec<Link>,
}

/// Everything about the job's hosts.
struct Network {
    backend: BackendKind,
    hosts: Vec<Host>,
    /// Each pair that was measured, once.
    links: Vec<Link>,
}

/// Measures with the other ranks of the job; rank 0 prints. The exit status is 1 if a host or a link is slow.
pub fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let picture =
        args.picture.as_deref().map(|path| format_of(path).map(|format| (path, format))).transpose()?;
    let comm = Comm::builder().timeout(args.timeout).init()?;
    if let Some((path, _)) = picture.filter(|_| comm.rank() == 0) {
        file::check_writable(path)?;
    }
    let network = explore(&comm)?;
    let mut is_healthy = [1u8];
    if let Some(network) = network {
        let verdict = judge::judge(&network.links, network.hosts.len());
        let mut out = io::stdout().lock();
        view::write(&mut out, &network, &verdict)?;
        out.flush()?;
        is_healthy = [u8::from(verdict.is_healthy())];
        if let Some((path, format)) = picture {
            file::write(path, &heat_map::draw(&network, format)?)?;
        }
    }
    comm.broadcast_in_place(&mut is_healthy, 0)?;
    comm.finalize()?;
    Ok(if is_healthy == [1] { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn format_of(path: &Path) -> Result<Format> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => Ok(Format::Svg),
        Some("png") => Ok(Format::Png),
        _ => bail!("--picture {}: give it the ending .svg or .png", path.display()),
    }
}

/// One rank of each host measures. Answers the result on rank 0.
fn explore(comm: &Comm) -> Result<Option<Network>> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let of_host = comm.split_by(&(comm.host_topology().host_of(comm.rank()), host_name(), boot))?;
    let leaders = comm.split((of_host.rank() == 0).then_some(0), 0)?;
    let hosts = comm.all_reduce_value(u32::from(leaders.is_some()), phalanx::ReduceOp::Sum)?;
    ensure!(
        hosts > 1,
        "--hosts measures between hosts, and all {} ranks are on this one: start `phalanx doctor --hosts` as a job, by phalanx launch \
         --nnodes, mpirun or srun",
        comm.world_size()
    );
    let Some(leaders) = leaders else { return Ok(None) };
    let mut links = Vec::new();
    for round in rounds::rounds(leaders.world_size()) {
        leaders.barrier()?;
        if let Some(peer) = round[leaders.rank()] {
            links.extend(measure::measure(&leaders, peer)?);
        }
    }
    let reports = leaders.gather_object(&Report { host: Host::this(), links }, 0)?;
    Ok(reports.map(|reports| {
        let (hosts, links): (Vec<Host>, Vec<Vec<Link>>) =
            reports.into_iter().map(|report| (report.host, report.links)).unzip();
        Network { backend: comm.backend(), hosts, links: links.concat() }
    }))
}

impl Host {
    fn this() -> Host {
        let machine = Machine::this();
        let unknown = || "unknown".to_owned();
        Host {
            name: host_name(),
            phalanx: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: machine.kernel.unwrap_or_else(unknown),
            os: machine.os.unwrap_or_else(unknown),
            interfaces: interfaces().unwrap_or_default(),
        }
    }
}

/// The interfaces that are up, but for loopback.
fn interfaces() -> io::Result<Vec<(String, Option<u64>)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/sys/class/net")? {
        let entry = entry?;
        let read = |name: &str| std::fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != "lo" && matches!(read("operstate").trim(), "up" | "unknown") {
            // Drivers that do not know it say -1, or refuse.
            found.push((name, read("speed").trim().parse().ok()));
        }
    }
    found.sort();
    Ok(found)
}
