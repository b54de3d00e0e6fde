//! Ports that are open.

use std::collections::{BTreeMap, BTreeSet};

/// The TCP sockets of this process that listen: where, by the number of the socket.
pub fn listening() -> BTreeMap<String, String> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let own: BTreeSet<String> = targets
        .filter_map(|target| {
            let target = target.to_string_lossy().into_owned();
            Some(target.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"].map(std::fs::read_to_string);
    let tables = tables.map(Result::unwrap_or_default);
    // number: address, remote, state (0A is LISTEN), queues, timer, retransmissions, user, timeout, inode.
    let rows =
        tables.iter().flat_map(|table| table.lines().skip(1)).map(|row| row.split_whitespace().collect());
    rows.filter(|row: &Vec<&str>| row.len() > 9 && row[3] == "0A" && own.contains(row[9]))
        .map(|row| (row[9].to_owned(), row[1].to_owned()))
        .collect()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_seen_as_long_as_it_is_there() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = format!("0100007F:{:04X}", listener.local_addr().unwrap().port());
        let connected = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(listening().values().any(|address| *address == port), "{:?}", listening());
        drop((listener, connected));
        assert!(!listening().values().any(|address| *address == port));
    }
}
