//! The ranks of this node among all ranks of a job, and the environment variables that tell them so.

use crate::log::say;
use crate::machine::host_name;
use anyhow::{Context, Result};
use phalanx::internal::store::{Server, Settings, Token, cipher, server};
use std::process::Command;

/// This node's ranks in an attempt.
#[derive(Debug, Clone)]
pub struct Placement {
    /// The attempt's id, the same on all nodes.
    pub job: String,
    /// Restarts before this attempt.
    pub restart: u32,
    /// The rank number of this node's first rank.
    pub first: usize,
    /// Ranks on this node.
    pub ranks: usize,
    /// Ranks on all nodes.
    pub world_size: usize,
    pub node: usize,
    /// All nodes of the job, in order.
    pub nodes: Vec<PlacedNode>,
    pub store: Option<StoreAddress>,
}

/// A node of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedNode {
    /// Its host's name.
    pub host: String,
    /// Its number of ranks.
    pub ranks: usize,
}

/// How the ranks reach the job's store.
#[derive(Debug, Clone)]
pub struct StoreAddress {
    pub address: String,
    pub token: Token,
}

impl Placement {
    /// The placement on the only node, with a store on any port of the loopback interface. The store ends
    /// when it is dropped.
    ///
    /// Ranks that communicate over shared memory need no store, so a sandbox without a network is no error.
    pub fn on_one_node(ranks: usize) -> Result<(Option<Server>, Placement)> {
        let token = Token::random().context("cannot make a token")?;
        let settings = Settings { ranks: u32::try_from(ranks).ok(), ..store_settings()? };
        let server = match Server::start("127.0.0.1:0", token.clone(), settings) {
            Ok(server) => Some(server),
            Err(error) => {
                say(format_args!(
                    "phalanx launch: going on without a store, which several hosts and GPUs need: {error}"
                ));
                None
            }
        };
        let store =
            server.as_ref().map(|server| StoreAddress { address: server.address().to_string(), token });
        let (job, nodes) = (random_job_id()?, vec![PlacedNode { host: host_name(), ranks }]);
        let placement =
            Placement { job, restart: 0, first: 0, ranks, world_size: ranks, node: 0, nodes, store };
        Ok((server, placement))
    }

    /// Sets the variables of the node's rank number `local`, which may replace one that has failed.
    pub fn set_variables(&self, command: &mut Command, local: usize, replaces: bool) {
        let numbers = [
            ("PHALANX_RANK", self.first + local),
            ("PHALANX_WORLD_SIZE", self.world_size),
            ("PHALANX_LOCAL_RANK", local),
            ("PHALANX_LOCAL_WORLD_SIZE", self.ranks),
            ("PHALANX_NODE_RANK", self.node),
            ("PHALANX_NNODES", self.nodes.len()),
            ("PHALANX_RESTART_COUNT", self.restart as usize),
        ];
        for (name, number) in numbers {
            command.env(name, number.to_string());
        }
        command.env("PHALANX_JOB", &self.job);
        match replaces {
            true => command.env("PHALANX_REPLACES", (self.first + local).to_string()),
            false => command.env_remove("PHALANX_REPLACES"),
        };
        match &self.store {
            Some(store) => {
                command.env("PHALANX_STORE", &store.address).env("PHALANX_TOKEN", store.token.reveal())
            }
            None => command.env_remove("PHALANX_STORE").env_remove("PHALANX_TOKEN"),
        };
    }

    /// The node of a rank, as text: `node 1 (beta)`.
    pub fn describe_node_of(&self, rank: usize) -> String {
        let mut end = 0;
        let has_it = |node: &PlacedNode| {
            end += node.ranks;
            rank < end
        };
        match self.nodes.iter().position(has_it) {
            Some(node) => format!("node {node} ({})", self.nodes[node].host),
            None => "another node".to_owned(),
        }
    }

    /// The variables, as `NAME=value`, that only processes of this node's attempt have all of.
    pub fn marks(&self) -> [String; 2] {
        [format!("PHALANX_JOB={}", self.job), format!("PHALANX_NODE_RANK={}", self.node)]
    }
}

/// The store's settings from the environment.
pub fn store_settings() -> Result<Settings> {
    let variable = |name: &str| std::env::var(name).ok();
    let silence = server::silence_from(variable("PHALANX_HEARTBEAT_TIMEOUT").as_deref())?;
    let encrypted = cipher::encrypted_from(variable("PHALANX_STORE_TLS").as_deref())?;
    Ok(Settings { silence, encrypted, ..Settings::default() })
}

/// A job id of 128 random bits. It is a secret: the ranks of a host trust every process that knows it.
pub fn random_job_id() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("cannot make a job id")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_on_their_nodes() {
        let nodes = [("alpha", 2), ("beta", 1)].map(|(host, ranks)| PlacedNode { host: host.into(), ranks });
        let (nodes, job) = (nodes.to_vec(), String::new());
        let placement =
            Placement { job, restart: 0, first: 0, ranks: 2, world_size: 3, node: 0, nodes, store: None };
        let described = [1, 2, 3].map(|rank| placement.describe_node_of(rank));
        assert_eq!(described, ["node 0 (alpha)", "node 1 (beta)", "another node"]);
    }

    #[test]
    fn job_ids_have_128_bits_and_differ() {
        let id = random_job_id().unwrap();
        assert_eq!(id.len(), 32);
        assert!(id.chars().all(|c| c.is_ascii_hexdigit()));
        assert_ne!(id, random_job_id().unwrap());
    }
}
