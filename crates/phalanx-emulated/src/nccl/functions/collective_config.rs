//! Collectives with a configuration of the call (such as `ncclAllReduceConfig`), and encryption.

use super::operate::{To, buffers, operate, operate_with};
use crate::base::call::Answer;
use crate::base::handles::Handle;
use crate::base::pointers::In;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::nccl::config::{MAGIC, UNDEFINED};
use crate::nccl::group::{nccl, record};
use crate::nccl::operation::Kind;
use crate::nccl::result::{INVALID_ARGUMENT, fail};
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
        violation(function, format!("no settings have version {version} and {size} bytes"));
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
    // AlltoAll has none of these algorithms (2.32.3).
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

nccl! {
    fn ncclAllReduceConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        record(check(FUNCTION, config))?;
        operate_with(FUNCTION, To { comm, stream }, Kind::AllReduce, buffers(send, receive, count, dtype), Some(op))
    }

    fn ncclReduceConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Handle, stream: Handle,
        config: In<Config>,
    ) {
        record(check(FUNCTION, config))?;
        let kind = Kind::Reduce { root: root as u32 };
        operate_with(FUNCTION, To { comm, stream }, kind, buffers(send, receive, count, dtype), Some(op))
    }

    fn ncclReduceScatterConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, op: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        record(check(FUNCTION, config))?;
        operate_with(FUNCTION, To { comm, stream }, Kind::ReduceScatter, buffers(send, receive, count, dtype), Some(op))
    }

    fn ncclBroadcastConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        record(check(FUNCTION, config))?;
        let kind = Kind::Broadcast { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, buffers(send, receive, count, dtype))
    }

    fn ncclAllGatherConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        record(check(FUNCTION, config))?;
        operate(FUNCTION, To { comm, stream }, Kind::AllGather, buffers(send, receive, count, dtype))
    }

    fn ncclAlltoAllConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        record(check(FUNCTION, config))?;
        operate(FUNCTION, To { comm, stream }, Kind::AllToAll, buffers(send, receive, count, dtype))
    }

    fn ncclGatherConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        record(check(FUNCTION, config))?;
        let kind = Kind::Gather { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, buffers(send, receive, count, dtype))
    }

    fn ncclScatterConfig(
        send: u64, receive: u64, count: usize, dtype: c_int, root: c_int, comm: Handle, stream: Handle, config: In<Config>,
    ) {
        record(check(FUNCTION, config))?;
        let kind = Kind::Scatter { root: root as u32 };
        operate(FUNCTION, To { comm, stream }, kind, buffers(send, receive, count, dtype))
    }

    // Checks the arguments as the library does, and encrypts nothing.
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
