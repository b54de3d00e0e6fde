//! Settings: environment variables, read when the library is used first.
//!
//! | Variable | Meaning | Default |
//! |---|---|---|
//! | `EMULATED_DEVICES` | number of devices of the host; `CUDA_VISIBLE_DEVICES`, or else `HIP_VISIBLE_DEVICES`, chooses among them | 4 |
//! | `EMULATED_DEVICE_MEMORY` | bytes of memory of each device | 16 GiB |
//! | `EMULATED_COMPUTE_CAPABILITY` | `major.minor` | 9.0 |
//! | `EMULATED_DRIVER_VERSION` | what `cuDriverGetVersion` answers | 12080 |
//! | `EMULATED_HIP_VERSION` | what `hipRuntimeGetVersion` answers | 60443483 |
//! | `EMULATED_ASYNC_ALLOC` | `0`: no memory pools, so cudarc frees with `cuMemFree` | 1 |
//! | `EMULATED_SEED` | of all adversarial choices | 0 |
//! | `EMULATED_DELAY_US` | `least..most`: how late streams and background work are, in microseconds | `0..300` |
//! | `EMULATED_NCCL_VERSION` | `2.28.9`: reported version; layouts and types of later ones are refused | 2.32.3 |
//! | `EMULATED_FAIL` | `function:n:code`, comma-separated: the n-th call (from 1; `*` for all) answers the code and does nothing; `function@rank:n:code` counts and fails only the calls on communicators in which this process has that rank | |
//! | `EMULATED_FAIL_LATE` | the same for what non-blocking communicators do in the background: the call answers `ncclInProgress`, the state becomes the code (operations are enqueued nevertheless; those of a group count as `ncclGroupEnd`) | |
//! | `EMULATED_IN_PROGRESS` | fraction of the operations of non-blocking communicators that answer `ncclInProgress` and are enqueued late | 0.5 |
//! | `EMULATED_ASYNC_ERROR` | `n:code` or `n:code@rank`: the n-th operation of a communicator (from 1) raises an asynchronous error and never ends | |
//! | `EMULATED_WRONG` | `6`: the results of collectives on elements of this type (`ncclDataType_t`) have a wrong bit | |
//! | `EMULATED_PEER_DEATH` | what a peer's process that ended does: `hang` or `error` (`ncclRemoteError`) | `hang` |
//! | `EMULATED_MISMATCH` | what ranks that call different things do: `end` the process or `hang` | `end` |
//! | `EMULATED_INIT` | `hang`: communicators are never ready | |
//! | `EMULATED_DESTROY` | `slow`: `ncclCommDestroy` takes 0.3 s to free the communicator | |
//! | `EMULATED_ABORT` | `hang`: `ncclCommAbort` does not return | |
//! | `EMULATED_HANG_INSIDE` | `n`: in the n-th launch of operations on blocking communicators the library holds the caller until the communicator is revoked | |
//! | `EMULATED_EXIT` | `crash`: a process that exits while a communicator is there, or NVSHMEM is initialised, breaks a rule: the threads of NCCL's sockets, and NVSHMEM 3.4.5, then crash | |
//! | `EMULATED_SYNC` | `implicit`: `cuModuleLoadData` and `cuMemHostAlloc` wait for the work of all streams, as a driver may | |
//! | `EMULATED_FINALIZE` | `local`: the end of a communicator does not wait for ranks of other processes | `collective` |
//! | `EMULATED_REGISTER`, `EMULATED_WINDOWS` | `null`: registrations and windows succeed with null handles | |
//! | `EMULATED_LEAVES_DEVICE` | `1`: NCCL calls leave the communicator's device current | 0 |
//! | `EMULATED_NVSHMEM_VERSION` | `3.4.5`: what NVSHMEM reports | 3.8.0 |
//! | `EMULATED_NVSHMEM_INIT` | `half`: initialisation answers success with status 1, as 3.4.5 does when it cannot use the device; `error`: as later ones do; `hang`; `exit` | |
//! | `EMULATED_PEER_ACCESS` | `0`: peers' symmetric memory cannot be loaded from or stored to | 1 |
//! | `EMULATED_MULTICAST` | `1`: NVSHMEM has NVLink multicast: addresses, and teams that take 16 of its 128 | 0 |
//! | `EMULATED_SYMMETRIC_SIZE` | bytes of each PE's symmetric heap, which then does not grow | |
//! | `NVSHMEM_CUMEM_GRANULARITY` | as in NVSHMEM, bytes by which the heap grows, or a multiple | 512 MiB |
//! | `NCCL_COMM_BLOCKING` | as in NCCL, overrides every communicator's configuration | |
//!
//! A value that cannot be understood ends the process.

use crate::lock;
use crate::violation::violation;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock};

/// All settings.
#[derive(Debug)]
#[allow(missing_docs, reason = "the table above has them")]
pub struct Settings {
    pub devices: Vec<usize>,
    pub device_memory: u64,
    pub compute_capability: (i32, i32),
    pub driver_version: i32,
    pub hip_version: i32,
    pub async_alloc: bool,
    pub seed: u64,
    pub delay_us: (u64, u64),
    pub nccl_version: i32,
    pub failures: Vec<Failure>,
    pub late_failures: Vec<Failure>,
    pub in_progress: f64,
    pub async_error: Option<AsyncError>,
    pub wrong_type: Option<u64>,
    pub peer_death_is_error: bool,
    pub mismatch_hangs: bool,
    pub init_hangs: bool,
    pub abort_hangs: bool,
    pub destroy_is_slow: bool,
    pub hang_inside: Option<u64>,
    pub exit_crashes: bool,
    pub implicit_sync: bool,
    pub finalize_is_local: bool,
    pub null_registrations: bool,
    pub null_windows: bool,
    pub leaves_device: bool,
    pub blocking: Option<bool>,
    pub nvshmem_version: i32,
    pub nvshmem_init: Init,
    pub peer_access: bool,
    pub multicast: bool,
    pub symmetric_size: Option<u64>,
    pub heap_step: u64,
}

/// What NVSHMEM's initialisation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "EMULATED_NVSHMEM_INIT, above")]
pub enum Init {
    Works,
    Half,
    Fails,
    Hangs,
    Exits,
}

/// A function's call that fails.
#[derive(Debug)]
#[allow(missing_docs, reason = "EMULATED_FAIL, above")]
pub struct Failure {
    pub function: String,
    pub rank: Option<i32>,
    /// `None`: every call.
    pub nth: Option<u64>,
    pub code: i32,
}

/// An operation that raises an asynchronous error.
#[derive(Debug)]
#[allow(missing_docs, reason = "EMULATED_ASYNC_ERROR, above")]
pub struct AsyncError {
    pub nth: u64,
    pub code: i32,
    pub rank: Option<i32>,
}

/// The settings of this process.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(read)
}

fn read() -> Settings {
    Settings {
        devices: visible(value("EMULATED_DEVICES", 4)),
        device_memory: value("EMULATED_DEVICE_MEMORY", 16 << 30),
        compute_capability: pair("EMULATED_COMPUTE_CAPABILITY", ".", (9, 0)),
        driver_version: value("EMULATED_DRIVER_VERSION", 12080),
        hip_version: value("EMULATED_HIP_VERSION", 60_443_483),
        async_alloc: value("EMULATED_ASYNC_ALLOC", 1) != 0,
        seed: value("EMULATED_SEED", 0),
        delay_us: delay(),
        nccl_version: text("EMULATED_NCCL_VERSION").map_or(23203, |text| version(&text)),
        failures: failures("EMULATED_FAIL"),
        late_failures: failures("EMULATED_FAIL_LATE"),
        in_progress: value("EMULATED_IN_PROGRESS", 0.5),
        async_error: text("EMULATED_ASYNC_ERROR").map(|text| async_error(&text)),
        wrong_type: text("EMULATED_WRONG").map(|_| value("EMULATED_WRONG", 0)),
        peer_death_is_error: choice("EMULATED_PEER_DEATH", ["hang", "error"]),
        mismatch_hangs: choice("EMULATED_MISMATCH", ["end", "hang"]),
        init_hangs: choice("EMULATED_INIT", ["", "hang"]),
        abort_hangs: choice("EMULATED_ABORT", ["", "hang"]),
        destroy_is_slow: choice("EMULATED_DESTROY", ["", "slow"]),
        hang_inside: text("EMULATED_HANG_INSIDE").map(|_| value("EMULATED_HANG_INSIDE", 0)),
        exit_crashes: choice("EMULATED_EXIT", ["", "crash"]),
        implicit_sync: choice("EMULATED_SYNC", ["", "implicit"]),
        finalize_is_local: choice("EMULATED_FINALIZE", ["collective", "local"]),
        null_registrations: choice("EMULATED_REGISTER", ["", "null"]),
        null_windows: choice("EMULATED_WINDOWS", ["", "null"]),
        leaves_device: value("EMULATED_LEAVES_DEVICE", 0) != 0,
        blocking: text("NCCL_COMM_BLOCKING").map(|text| text != "0"),
        nvshmem_version: text("EMULATED_NVSHMEM_VERSION").map_or(30800, |text| version(&text)),
        nvshmem_init: match text("EMULATED_NVSHMEM_INIT").as_deref() {
            None => Init::Works,
            Some("half") => Init::Half,
            Some("error") => Init::Fails,
            Some("hang") => Init::Hangs,
            Some("exit") => Init::Exits,
            Some(text) => bad("EMULATED_NVSHMEM_INIT", text),
        },
        peer_access: value("EMULATED_PEER_ACCESS", 1) != 0,
        multicast: value("EMULATED_MULTICAST", 0) != 0,
        symmetric_size: text("EMULATED_SYMMETRIC_SIZE").map(|_| value("EMULATED_SYMMETRIC_SIZE", 0)),
        heap_step: value("NVSHMEM_CUMEM_GRANULARITY", 512 << 20),
    }
}

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

fn bad(name: &str, text: &str) -> ! {
    violation("settings", format!("{name}={text} cannot be understood"))
}

fn value<T: FromStr>(name: &str, default: T) -> T {
    text(name).map_or(default, |text| text.parse().unwrap_or_else(|_| bad(name, &text)))
}

/// Whether the second of two words was chosen; the first is the default.
fn choice(name: &str, words: [&str; 2]) -> bool {
    text(name).is_some_and(|text| match words.iter().position(|word| *word == text) {
        Some(index) => index == 1,
        None => bad(name, &text),
    })
}

fn pair<T: FromStr>(name: &str, between: &str, default: (T, T)) -> (T, T) {
    let Some(text) = text(name) else { return default };
    let halves = text.split_once(between).map(|(a, b)| (a.parse(), b.parse()));
    let Some((Ok(first), Ok(second))) = halves else { bad(name, &text) };
    (first, second)
}

fn delay() -> (u64, u64) {
    let (least, most) = pair("EMULATED_DELAY_US", "..", (0, 300));
    if least > most {
        bad("EMULATED_DELAY_US", &format!("{least}..{most}"));
    }
    (least, most)
}

fn visible(devices: usize) -> Vec<usize> {
    match std::env::var("CUDA_VISIBLE_DEVICES").or_else(|_| std::env::var("HIP_VISIBLE_DEVICES")) {
        Err(_) => (0..devices).collect(),
        // As in CUDA, the first entry that is not a device ends the list.
        Ok(list) => {
            list.split(',').map_while(|one| one.trim().parse().ok().filter(|n| *n < devices)).collect()
        }
    }
}

/// The code of a version such as 2.28.9.
fn version(text: &str) -> i32 {
    let parts: Result<Vec<i32>, _> = text.split('.').map(str::parse).collect();
    match parts.as_deref() {
        Ok([major, minor, patch]) => major * 10000 + minor * 100 + patch,
        _ => bad("the version", text),
    }
}

fn failures(name: &str) -> Vec<Failure> {
    text(name).map_or_else(Vec::new, |text| text.split(',').map(|text| one_failure(name, text)).collect())
}

fn one_failure(name: &str, text: &str) -> Failure {
    let refuse = || -> ! { bad(name, text) };
    let parts: Vec<&str> = text.split(':').collect();
    let [function, nth, code] = parts[..] else { refuse() };
    let (function, rank) = match function.split_once('@') {
        Some((function, rank)) => (function, Some(rank.parse().unwrap_or_else(|_| refuse()))),
        None => (function, None),
    };
    let nth = (nth != "*").then(|| nth.parse().unwrap_or_else(|_| refuse()));
    Failure { function: function.into(), rank, nth, code: code.parse().unwrap_or_else(|_| refuse()) }
}

fn async_error(text: &str) -> AsyncError {
    let refuse = || -> ! { bad("EMULATED_ASYNC_ERROR", text) };
    let (numbers, rank) = match text.split_once('@') {
        Some((numbers, rank)) => (numbers, Some(rank.parse::<i32>().unwrap_or_else(|_| refuse()))),
        None => (text, None),
    };
    let Some((nth, code)) = numbers.split_once(':') else { refuse() };
    let (Ok(nth), Ok(code)) = (nth.parse(), code.parse()) else { refuse() };
    AsyncError { nth, code, rank }
}

/// When a failure happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum When {
    /// Instead of the call.
    Called,
    /// In the background.
    Late,
}

/// The code with which this call of a function is to fail: a call as such (`rank` is `None`), or one on a
/// communicator in which this process has a rank.
pub(crate) fn failure(when: When, function: &str, rank: Option<i32>) -> Option<i32> {
    /// What is counted: each function on its own, and on each rank.
    type Counted = (When, String, Option<i32>);
    static CALLS: Mutex<BTreeMap<Counted, u64>> = Mutex::new(BTreeMap::new());
    let all = if when == When::Called { &settings().failures } else { &settings().late_failures };
    let told = |failure: &&Failure| failure.function == function && failure.rank == rank;
    // Most runs are told of no failure at all.
    all.iter().find(told)?;
    let mut calls = lock(&CALLS);
    let count = calls.entry((when, function.to_owned(), rank)).or_default();
    *count += 1;
    let mut told = all.iter().filter(told);
    told.find(|failure| failure.nth.is_none_or(|nth| nth == *count)).map(|failure| failure.code)
}
