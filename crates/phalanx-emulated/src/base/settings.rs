//! Settings of the emulator: environment variables, read at the first use of the library.
//!
//! | Variable | Meaning | Default |
//! |---|---|---|
//! | `EMULATED_DEVICES` | number of devices of the host; `CUDA_VISIBLE_DEVICES`, or else `HIP_VISIBLE_DEVICES`, selects among them | 4 |
//! | `EMULATED_DEVICE_MEMORY` | bytes of memory of each device | 16 GiB |
//! | `EMULATED_COMPUTE_CAPABILITY` | `major.minor` | 9.0 |
//! | `EMULATED_DRIVER_VERSION` | version that `cuDriverGetVersion` reports | 12080 |
//! | `EMULATED_HIP_VERSION` | version that `hipRuntimeGetVersion` reports | 60443483 |
//! | `EMULATED_ASYNC_ALLOC` | `0`: no memory pools, so cudarc frees with `cuMemFree` | 1 |
//! | `EMULATED_SEED` | seed of all random choices | 0 |
//! | `EMULATED_DELAY_US` | `least..most`: delay of streams and background work, in microseconds | `0..300` |
//! | `EMULATED_NCCL_VERSION` | `2.28.9`: reported version; structures and types of later versions are refused | 2.32.3 |
//! | `EMULATED_FAIL` | `function:n:code`, comma-separated: the n-th call (from 1; `*` for all) returns the code and does nothing; `function@rank:n:code` counts and fails only calls on communicators in which this process has that rank | |
//! | `EMULATED_FAIL_LATE` | as `EMULATED_FAIL`, for background work of non-blocking communicators: the call returns `ncclInProgress`, then the state becomes the code (operations are enqueued nevertheless; operations of a group count as `ncclGroupEnd`) | |
//! | `EMULATED_IN_PROGRESS` | fraction of the operations of non-blocking communicators that return `ncclInProgress` and are enqueued late | 0.5 |
//! | `EMULATED_ASYNC_ERROR` | `n:code` or `n:code@rank`: the n-th operation of a communicator (from 1) raises an asynchronous error and never ends | |
//! | `EMULATED_WRONG` | `6`: results of collectives on elements of this type (`ncclDataType_t`) have one wrong bit | |
//! | `EMULATED_PEER_DEATH` | effect of a peer process's end: `hang` or `error` (`ncclRemoteError`) | `hang` |
//! | `EMULATED_MISMATCH` | effect of ranks that call different operations: `end` the process or `hang` | `end` |
//! | `EMULATED_RANKS_OF_AN_ID` | the most ranks of a communicator for each of its unique ids: with more it is not made | |
//! | `EMULATED_INIT` | `hang`: communicators never become ready | |
//! | `EMULATED_DESTROY` | `slow`: `ncclCommDestroy` takes 0.5 s to free the communicator, and `ncclCommAbort` of the process's last rank | |
//! | `EMULATED_ABORT` | `hang`: `ncclCommAbort` does not return | |
//! | `EMULATED_HANG_INSIDE` | `n`: the n-th launch of operations on blocking communicators (from 1) does not return until the communicator is revoked | |
//! | `EMULATED_EXIT` | `crash`: exiting with a live communicator or an initialised NVSHMEM is a violation; threads of NCCL's sockets, and NVSHMEM 3.4.5, crash in that case | |
//! | `EMULATED_SYNC` | `implicit`: `cuModuleLoadData` and `cuMemHostAlloc` wait for the work of all streams, as a driver may | |
//! | `EMULATED_FINALIZE` | `local`: the end of a communicator does not wait for ranks of other processes | `collective` |
//! | `EMULATED_REGISTER`, `EMULATED_WINDOWS` | `null`: registrations and windows succeed with null handles | |
//! | `EMULATED_LEAVES_DEVICE` | `1`: NCCL calls leave the communicator's device current | 0 |
//! | `EMULATED_NVSHMEM_VERSION` | `3.4.5`: version that NVSHMEM reports | 3.8.0 |
//! | `EMULATED_NVSHMEM_INIT` | `half`: initialisation returns success with status 1, as 3.4.5 does when it cannot use the device; `error`: it fails, as later versions do; `hang`; `exit` | |
//! | `EMULATED_NVLINK` | devices that NVLink connects with each other: `2` pairs 0 with 1, 2 with 3, …; the others reach each other over PCIe | all |
//! | `EMULATED_PEER_ACCESS` | `0`: loads and stores do not reach symmetric memory of peers | 1 |
//! | `EMULATED_MULTICAST` | `1`: NVSHMEM has NVLink multicast: multicast addresses, and teams that use 16 of its 128 team slots | 0 |
//! | `EMULATED_SYMMETRIC_SIZE` | bytes of each PE's symmetric heap, which then does not grow | |
//! | `NVSHMEM_CUMEM_GRANULARITY` | as in NVSHMEM: the heap grows by a multiple of this number of bytes | 512 MiB |
//! | `NCCL_COMM_BLOCKING` | as in NCCL: overrides every communicator's configuration | |
//!
//! A value that does not parse ends the process.

use super::lock::lock;
use super::violation::violation;
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
    pub ranks_of_an_id: Option<usize>,
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
    pub nvlink: usize,
    pub peer_access: bool,
    pub multicast: bool,
    pub symmetric_size: Option<u64>,
    pub heap_step: u64,
}

/// How NVSHMEM's initialisation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "EMULATED_NVSHMEM_INIT, above")]
pub enum Init {
    Works,
    Half,
    Fails,
    Hangs,
    Exits,
}

/// A call that fails.
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
        ranks_of_an_id: text("EMULATED_RANKS_OF_AN_ID").map(|_| value("EMULATED_RANKS_OF_AN_ID", 0)),
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
        nvlink: value("EMULATED_NVLINK", usize::MAX),
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
    violation("settings", format!("{name}={text} is not a valid value"))
}

fn value<T: FromStr>(name: &str, default: T) -> T {
    text(name).map_or(default, |text| text.parse().unwrap_or_else(|_| bad(name, &text)))
}

/// Whether a variable has the second of two words. The first is the default.
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
        // As in CUDA, the first entry without a device ends the list.
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

/// Where a failure strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum When {
    /// In the call, which does nothing.
    Called,
    /// In the background work of the call.
    Late,
}

/// The code with which this call of a function fails, if the settings say so. With `rank`, the calls on
/// communicators in which this process has that rank are counted; without, all calls.
pub(crate) fn failure(when: When, function: &str, rank: Option<i32>) -> Option<i32> {
    /// Calls are counted by function and rank.
    type Counted = (When, String, Option<i32>);
    static CALLS: Mutex<BTreeMap<Counted, u64>> = Mutex::new(BTreeMap::new());
    let all = if when == When::Called { &settings().failures } else { &settings().late_failures };
    let matches = |failure: &&Failure| failure.function == function && failure.rank == rank;
    // Most runs configure no failure: they skip the lock.
    all.iter().find(matches)?;
    let mut calls = lock(&CALLS);
    let count = calls.entry((when, function.to_owned(), rank)).or_default();
    *count += 1;
    let mut matching = all.iter().filter(matches);
    matching.find(|failure| failure.nth.is_none_or(|nth| nth == *count)).map(|failure| failure.code)
}
