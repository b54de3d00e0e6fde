//! Two network namespaces with a wire between them, for tests that cut it.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// The IPv6 addresses of the ends.
pub const SECOND: [&str; 2] = ["fd77::1", "fd77::2"];

/// Two namespaces, A and B. Dropping removes them.
pub struct Network {
    names: [String; 2],
    addresses: [String; 2],
}

/// Why there can be no namespaces; `None` if there can.
pub fn obstacle() -> Option<String> {
    Network::new().err()
}

impl Network {
    pub fn new() -> Result<Network, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (pid, n) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let network = Network {
            names: ["a", "b"].map(|end| format!("phx{pid}{end}{n}")),
            addresses: ["10.213.57.1", "10.213.57.2"].map(str::to_owned),
        };
        for name in &network.names {
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        let [a, b] = &network.names;
        ip(&format!("link add wire netns {a} type veth peer name wire netns {b}"))?;
        for (name, address) in network.names.iter().zip(&network.addresses) {
            ip(&format!("-n {name} address add {address}/24 dev wire"))?;
            ip(&format!("-n {name} link set wire up"))?;
        }
        for (name, address) in network.names.iter().zip(SECOND) {
            // A kernel without IPv6 has no second address.
            let _ = ip(&format!("-n {name} address add {address}/64 dev wire nodad"));
        }
        Ok(network)
    }

    /// Sets `/etc/hosts` of an end: call it before the first command there. Later calls change the file of what runs.
    pub fn set_hosts(&self, end: usize, hosts: &str) -> std::io::Result<()> {
        let folder = format!("/etc/netns/{}", self.names[end]);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(format!("{folder}/hosts"), hosts)
    }

    /// The address of end 0 or 1.
    pub fn address(&self, end: usize) -> &str {
        &self.addresses[end]
    }

    /// The command in the namespace of an end.
    pub fn inside(&self, end: usize, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &self.names[end]]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }

    /// Joins the wire again after [`cut`](Network::cut).
    pub fn join(&self) -> Result<(), String> {
        ip(&format!("-n {} link set wire up", self.names[1]))
    }

    /// Cuts the wire in both directions.
    pub fn cut(&self) -> Result<(), String> {
        ip(&format!("-n {} link set wire down", self.names[1]))
    }

    /// Cuts the wire from `end`; the other direction still works.
    pub fn cut_from(&self, end: usize) -> Result<(), String> {
        // It sends to a hardware address that does not exist.
        let (name, other) = (&self.names[end], &self.addresses[1 - end]);
        ip(&format!("-n {name} neighbour replace {other} lladdr 02:00:00:00:00:99 dev wire nud permanent"))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns delete {name}"));
            let _ = std::fs::remove_dir_all(format!("/etc/netns/{name}"));
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("ip: {e}"))?;
    let why = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {}", why.trim())) }
}
