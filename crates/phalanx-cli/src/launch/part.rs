//! What the ranks of this node are told: their place among all ranks, and where the job's store is.

use anyhow::{Context, Result};
use phalanx::store::{Server, Settings, Token, cipher, server};
use std::process::Command;

/// This node's part of an attempt.
#[derive(Debug, Clone)]
pub struct Part {
    /// The attempt's id, the same on all nodes.
    pub job: String,
    /// How often the job was restarted.
    pub restart: u32,
    /// The number of this node's first rank.
    pub first: usize,
    /// How many ranks this node has.
    pub ranks: usize,
    /// How many all nodes have.
    pub world_size: usize,
    pub node: usize,
    pub nodes: usize,
    pub store: Option<StoreAt>,
}

/// How the ranks reach the job's store.
#[derive(Debug, Clone)]
pub struct StoreAt {
    pub address: String,
    pub token: Token,
}

impl Part {
    /// Tells a process which rank it is.
    pub fn tell(&self, command: &mut Command, local: usize) {
        let numbers = [
            ("PHALANX_RANK", self.first + local),
            ("PHALANX_WORLD_SIZE", self.world_size),
            ("PHALANX_LOCAL_RANK", local),
            ("PHALANX_LOCAL_WORLD_SIZE", self.ranks),
            ("PHALANX_NODE_RANK", self.node),
            ("PHALANX_NNODES", self.nodes),
            ("PHALANX_RESTART_COUNT", self.restart as usize),
        ];
        for (name, number) in numbers {
            command.env(name, number.to_string());
        }
        command.env("PHALANX_JOB", &self.job);
        match &self.store {
            Some(store) => {
                command.env("PHALANX_STORE", &store.address).env("PHALANX_TOKEN", store.token.reveal())
            }
            None => command.env_remove("PHALANX_STORE").env_remove("PHALANX_TOKEN"),
        };
    }

    /// What all processes of this part have in their environment, and no others.
    pub fn marks(&self) -> [String; 2] {
        [format!("PHALANX_JOB={}", self.job), format!("PHALANX_NODE_RANK={}", self.node)]
    }
}

/// The only node: the store listens on the loopback interface, on any port. It ends when it is dropped.
///
/// Only what goes beyond shared memory needs it, so a sandbox without a network is no obstacle.
pub fn alone(ranks: usize) -> Result<(Option<Server>, Part)> {
    let token = Token::random().context("cannot make a token")?;
    let settings = Settings { ranks: u32::try_from(ranks).ok(), ..settings()? };
    let server = match Server::start("127.0.0.1:0", token.clone(), settings) {
        Ok(server) => Some(server),
        Err(error) => {
            crate::log::say(format_args!(
                "phalanx launch: going on without a store, which several hosts and GPUs need: {error}"
            ));
            None
        }
    };
    let store = server.as_ref().map(|server| StoreAt { address: server.address().to_string(), token });
    let job = job_id()?;
    let part = Part { job, restart: 0, first: 0, ranks, world_size: ranks, node: 0, nodes: 1, store };
    Ok((server, part))
}

/// The store's settings, from the environment.
pub fn settings() -> Result<Settings> {
    let variable = |name: &str| std::env::var(name).ok();
    let silence = server::silence_from(variable("PHALANX_HEARTBEAT_TIMEOUT").as_deref())?;
    let encrypted = cipher::encrypted_from(variable("PHALANX_STORE_TLS").as_deref())?;
    Ok(Settings { silence, encrypted, ..Settings::default() })
}

/// A fresh id that no other job has and nobody can guess: the ranks of a host trust whoever knows it.
pub fn job_id() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("cannot make a job id")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_ids_have_128_bits_and_differ() {
        let id = job_id().unwrap();
        assert_eq!(id.len(), 32);
        assert!(id.chars().all(|c| c.is_ascii_hexdigit()));
        assert_ne!(id, job_id().unwrap());
    }
}
