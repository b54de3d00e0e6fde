//! Three hosts with networks of their own, which `.ci/hosts` makes on this machine: they can be cut off, slowed down, and killed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The hosts of this process's trials, with the folder of their state.
#[derive(Debug)]
pub struct NetworkedHosts(PathBuf);

/// How many there are.
pub const HOSTS: usize = 3;

static MADE: OnceLock<Result<NetworkedHosts, String>> = OnceLock::new();

/// Why there can be none, if so.
///
/// # Panics
/// If there can be none, and `PHALANX_TEST_NAMESPACES` asks for them, as in CI.
pub fn obstacle() -> Option<String> {
    let why = reason()?;
    assert!(
        std::env::var_os("PHALANX_TEST_NAMESPACES").is_none(),
        "PHALANX_TEST_NAMESPACES is set, and {why}"
    );
    Some(why)
}

#[cfg(target_os = "linux")]
fn reason() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("hosts need root".into());
    }
    let folders = std::env::var("PATH").unwrap_or_default();
    let is_there = |program: &&str| folders.split(':').any(|folder| Path::new(folder).join(program).exists());
    let missing = ["ip", "nsenter", "tc"].into_iter().find(|program| !is_there(program));
    missing.map(|program| format!("{program} is not installed"))
}

#[cfg(not(target_os = "linux"))]
fn reason() -> Option<String> {
    Some("there are no namespaces here".into())
}

/// Ends the hosts, if any were made. A process that makes some calls it at its end.
pub fn end() {
    if let Some(Ok(hosts)) = MADE.get() {
        let _ = hosts.command("down", &[]).status();
    }
}

impl NetworkedHosts {
    /// The hosts, made for the first that asks.
    ///
    /// # Errors
    /// What the script says if it cannot make them.
    pub fn get() -> Result<&'static NetworkedHosts, String> {
        let hosts = MADE.get_or_init(|| {
            let hosts = NetworkedHosts(format!("/run/testkit-hosts-{}", std::process::id()).into());
            hosts.perform("up", &[&HOSTS.to_string()]).map(|()| hosts)
        });
        hosts.as_ref().map_err(Clone::clone)
    }

    /// The script with an action.
    pub fn command(&self, action: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.ci/hosts"));
        command.env("HOSTS_DIR", &self.0).arg(action).args(arguments);
        command
    }

    /// Performs an action.
    ///
    /// # Errors
    /// What the script says.
    pub fn perform(&self, action: &str, arguments: &[&str]) -> Result<(), String> {
        let done = self.command(action, arguments).output().map_err(|error| error.to_string())?;
        match done.status.success() {
            true => Ok(()),
            false => Err(format!("hosts {action} {arguments:?}: {}", String::from_utf8_lossy(&done.stderr))),
        }
    }

    /// Does something on the hosts' network, beside them. Sockets that it opens stay there.
    ///
    /// # Errors
    /// Whatever `work` answers, or that the network cannot be entered.
    #[cfg(target_os = "linux")]
    pub fn beside<T: Send>(&self, work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
        use rustix::fd::AsFd;
        let enter = || -> Result<(), String> {
            let process =
                std::fs::read_to_string(self.0.join("switch.pid")).map_err(|error| error.to_string())?;
            let network = std::fs::File::open(format!("/proc/{}/ns/net", process.trim()));
            let network = network.map_err(|error| error.to_string())?;
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(network.as_fd(), kind)
                .map_err(|error| error.to_string())
        };
        // The thread that has gone there ends.
        let done = std::thread::scope(|scope| scope.spawn(|| enter().and_then(|()| work())).join());
        done.map_err(|_| "its thread has panicked".to_owned())?
    }

    /// There is no such network here.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(target_os = "linux"))]
    pub fn beside<T: Send>(&self, _work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
        Err("there are no namespaces here".into())
    }
}
