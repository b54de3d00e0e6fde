//! The network as text.

use super::judge::{Verdict, What};
use super::{Host, Network};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// The most hosts whose pairs are all shown; beyond, the picture does that.
const SHOWN: usize = 16;

pub fn write(out: &mut impl Write, network: &Network, verdict: &Verdict) -> io::Result<()> {
    let Network { backend, hosts, links } = network;
    writeln!(out, "{} hosts, {} links measured over the backend {backend}\n", hosts.len(), links.len())?;
    for (number, host) in hosts.iter().enumerate() {
        writeln!(out, "host {number}  {}  {}", host.name, interfaces(host))?;
    }
    if hosts.len() <= SHOWN {
        table(out, network, "GB/s from the host of the row to that of the column", |link, is_back| {
            let value = if is_back { link.bandwidth.1 } else { link.bandwidth.0 };
            format!("{:.2}", value * 1e-9)
        })?;
        table(out, network, "µs, half of a round trip of 8 bytes", |link, _| {
            format!("{:.1}", link.latency * 1e6)
        })?;
    }
    writeln!(out)?;
    differences(out, hosts)?;
    conclude(out, hosts, verdict)
}

fn interfaces(host: &Host) -> String {
    let one = |(name, speed): &(String, Option<u64>)| match speed {
        Some(speed) => format!("{name} ({} Gbit/s)", *speed as f64 / 1000.0),
        None => name.clone(),
    };
    host.interfaces.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn table(
    out: &mut impl Write,
    network: &Network,
    title: &str,
    cell: impl Fn(&super::Link, bool) -> String,
) -> io::Result<()> {
    writeln!(out, "\n{title}")?;
    let hosts = network.hosts.len();
    let heads: String = (0..hosts).map(|host| format!("{host:>9}")).collect();
    writeln!(out, "     {heads}")?;
    for row in 0..hosts {
        let of_pair = |column: usize| {
            let pair = (row.min(column), row.max(column));
            let link = network.links.iter().find(|link| link.hosts == pair);
            link.map_or_else(|| "–".to_owned(), |link| cell(link, row > column))
        };
        let cells: String = (0..hosts).map(|column| format!("{:>9}", of_pair(column))).collect();
        writeln!(out, "{row:>5}{cells}")?;
    }
    Ok(())
}

/// Versions that are not the same on all hosts.
fn differences(out: &mut impl Write, hosts: &[Host]) -> io::Result<()> {
    let versions = |host: &Host| [host.phalanx.clone(), host.kernel.clone(), host.os.clone()];
    for (place, what) in ["phalanx", "kernel", "system"].into_iter().enumerate() {
        let mut values: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for host in hosts {
            values.entry(versions(host)[place].clone()).or_default().push(&host.name);
        }
        if values.len() > 1 {
            let list: Vec<String> =
                values.iter().map(|(value, names)| format!("{value} ({})", names.join(", "))).collect();
            writeln!(out, "DIFFERENT {what}: {}", list.join("; "))?;
        }
    }
    Ok(())
}

fn conclude(out: &mut impl Write, hosts: &[Host], verdict: &Verdict) -> io::Result<()> {
    let name = |host: usize| format!("host {host} ({})", hosts[host].name);
    for slow in &verdict.slow_hosts {
        let (value, median) = (with_unit(slow.what, slow.value), with_unit(slow.what, slow.median));
        let what = match slow.what {
            What::Sending => "sends slowly",
            What::Receiving => "receives slowly",
            What::Latency => "answers late",
        };
        writeln!(
            out,
            "SLOW {} {what}: {value} at best; the median of all hosts is {median}",
            name(slow.host)
        )?;
    }
    for slow in &verdict.slow_links {
        let (value, median) = (with_unit(slow.what, slow.value), with_unit(slow.what, slow.median));
        let (from, to) = (name(slow.from), name(slow.to));
        writeln!(out, "SLOW link from {from} to {to}: {value}; the median of all links is {median}")?;
    }
    for (host, ahead) in &verdict.clocks {
        let direction = if *ahead > 0.0 { "ahead of" } else { "behind" };
        writeln!(out, "CLOCK of {} is {:.3} s {direction} host 0's", name(*host), ahead.abs())?;
    }
    if verdict.is_healthy() {
        writeln!(out, "No host and no link is slow.")?;
    }
    Ok(())
}

fn with_unit(what: What, value: f64) -> String {
    match what {
        What::Latency => format!("{:.1} µs", value * 1e6),
        What::Sending | What::Receiving => format!("{:.2} GB/s", value * 1e-9),
    }
}
