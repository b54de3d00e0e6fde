//! The collectives with settings of the call (`ncclAllReduceConfig` and its like), and encryption.

use super::collective::{To, operate, operate_with, plain};
use super::config::{MAGIC, UNDEFINED};
use super::group::note;
use super::operation::Kind;
use super::result::{INVALID_ARGUMENT, fail};
use crate::call::Answer;
use crate::handles::Handle;
use crate::pointers::In;
use crate::settings::settings;
use crate::violation::violation;
use std::ffi::{c_char, c_int};

/// `ncclCollConfig_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    size: usize,
    magic: u32,
    version: c_int,
    ext: usize,
    min_ctas: c_int,
    max_ctas: c_int,
    nvls_ctas: c_int,
    cluster: c_int,
    algorithms: In<c_char>,
    force: c_int,
    policy: c_int,
    profiler_tag: u64,
    /// Since 2.32.
    event: usize,
}

const ALGORITHMS: [&str; 4] = ["ring", "tree", "nvls", "nvlstree"];

fn check(function: &str, config: In<Config>) -> Answer {
    let Some(config) = config.get() else { return Ok(()) };
    if config.magic != MAGIC {
        return Err(fail(INVALID_ARGUMENT, "ncclCollConfig_t magic mismatch"));
    }
    let right = if config.version >= 23200 { 72 } else { 64 };
    if config.version > settings().nccl_version || config.version < 23100 || config.size != right {
        let (size, version) = (config.size, config.version);
        violation(function, format!("settings of version {version} and {size} bytes"));
    }
    let ranges = [
        ("minCTAs", config.min_ctas, 1..=c_int::MAX),
        ("maxCTAs", config.max_ctas, 1..=c_int::MAX),
        ("nvlsCTAs", config.nvls_ctas, 1..=c_int::MAX),
        ("cgaClusterSize", config.cluster, 0..=8),
        ("CTAPolicy", config.policy, 0..=3),
        ("forceAlgSelection", config.force, 0..=1),
    ];
    for (name, value, range) in ranges {
        if value != UNDEFINED && !range.contains(&value) {
            return Err(fail(INVALID_ARGUMENT, format!("config->{name}={value} is invalid")));
        }
    }
    // 2.32.3 was seen to have none of these for AlltoAll.
    let operation = function.trim_start_matches("nccl").trim_end_matches("Config");
    let unknown = |names: &String| {
        operation == "AlltoAll" || names.to_lowercase().split(',').any(|name| !ALGORITHMS.contains(&name))
    };
    match config.algorithms.text().filter(unknown) {
        Some(names) if config.force == 1 => {
            let text = format!("config->algSelection \"{names}\" cannot be honored for {operation}");
            Err(fail(INVALID_ARGUMENT, text))
        }
        _ => Ok(()),
    }
}

exported! {
    fn ncclAllReduceConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        note(check(FUNCTION, config))?;
        operate_with(FUNCTION, To { comm, stream }, Kind::AllReduce, plain(send, receive, count, dtype), Some(op))
    }

    fn ncclReduceConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle,
        config: In<Config>,
    ) {
        note(check(FUNCTION, config))?;
        let kind = Kind::Reduce { root: root as u32 };
        operate_with(FUNCTION, To { comm, stream }, kind, plain(send, receive, count, dtype), Some(op))
    }

    fn ncclReduceScatterConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        note(check(FUNCTION, config))?;
        operate_with(FUNCTION, To { comm, stream }, Kind::ReduceScatter, plain(send, receive, count, dtype), Some(op))
    }

    fn ncclBroadcastConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        note(check(FUNCTION, config))?;
        let kind = Kind::Broadcast { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, plain(send, receive, count, dtype))
    }

    fn ncclAllGatherConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        note(check(FUNCTION, config))?;
        operate(FUNCTION, To { comm, stream }, Kind::AllGather, plain(send, receive, count, dtype))
    }

    fn ncclAlltoAllConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        note(check(FUNCTION, config))?;
        operate(FUNCTION, To { comm, stream }, Kind::AllToAll, plain(send, receive, count, dtype))
    }

    fn ncclGatherConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        note(check(FUNCTION, config))?;
        let kind = Kind::Gather { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, plain(send, receive, count, dtype))
    }

    fn ncclScatterConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        note(check(FUNCTION, config))?;
        let kind = Kind::Scatter { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, plain(send, receive, count, dtype))
    }

    // Nothing is encrypted here; what the library refuses is refused.
    fn ncclSetEncryption(config: In<Encryption>) {
        let Some(config) = config.get().filter(|config| config.magic == MAGIC) else {
            return Err(fail(INVALID_ARGUMENT, "ncclSetEncryption: config not initialized via NCCL_ENCRYPTION_CONFIG_INITIALIZER"));
        };
        if config.mode != 0 && config.key.text().is_none_or(|key| key.len() < 32) {
            return Err(fail(INVALID_ARGUMENT, "ncclSetEncryption: config->psk must be at least 32 bytes"));
        }
        Ok(())
    }
}

/// `ncclEncryptionConfig_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Encryption {
    size: usize,
    magic: u32,
    version: c_int,
    mode: c_int,
    key: In<c_char>,
}
