//! The host's side of the device API: device communicators, teams, where peers' windows are. There are no kernels here that would use them.
//!
//! All ranks are of one host and reach each other's memory; there is no multicast, no network and no logical endpoint.

use super::communicator::{Communicator, Need, enter, with_window};
use super::config::MAGIC;
use super::group::{self, Job, note};
use super::result::*;
use crate::call::{Answer, Code};
use crate::handles::{self, Handle};
use crate::pointers::{In, Out};
use crate::settings::settings;
use crate::violation::violation;
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::Arc;

/// A communicator's device communicators, by the handles of their resource windows.
#[derive(Default)]
pub struct DeviceComms(BTreeSet<Handle>);

impl DeviceComms {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// `ncclTeam_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Team {
    ranks: c_int,
    rank: c_int,
    stride: c_int,
}

/// The first fields of `ncclDevCommRequirements_t` behind what 2.29.2 put before them; as many as 2.28.7 has.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Asked {
    resources: In<Resource>,
    teams: In<MultimemTeam>,
    lsa_multimem: bool,
    barriers: c_int,
    lsa_barriers: c_int,
    rail_gin_barriers: c_int,
    all_to_all: [c_int; 2],
    gin: bool,
    gin_counts: [c_int; 3],
}

/// The requirements of 2.28.3.
#[repr(C)]
#[derive(Clone, Copy)]
struct AskedFirst {
    resources: In<Resource>,
    teams: In<MultimemTeam>,
    lsa_multimem: bool,
    lsa_barriers: c_int,
}

/// What `ncclDevResourceRequirements_t` has in all releases.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Resource {
    next: In<Resource>,
    size: usize,
    align: usize,
    handle: Out<u32>,
}

/// `ncclTeamRequirements_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct MultimemTeam {
    next: In<MultimemTeam>,
    team: Team,
    multimem: bool,
    handle: Out<u64>,
}

/// A number of each version on.
type Since = [(c_int, usize)];

/// Of `ncclDevCommRequirements_t`.
const REQUIREMENTS: &Since = &[(22902, 72), (22907, 88), (23003, 96), (23100, 120)];
/// Of `ncclCommProperties_t`.
const PROPERTIES: &Since = &[(22902, 40), (22907, 56), (23100, 144), (23200, 152)];
/// Of `ncclDevResourceRequirements_t`.
const RESOURCE: &Since = &[(22803, 32), (22807, 56)];
/// Of `ncclDevComm`.
const COMM: &Since = &[(22803, 88), (22807, 200), (22907, 224), (23003, 240), (23100, 248)];
/// Where `useRuntimeVersion` is in the requirements from 2.31 on.
const USE_RUNTIME_VERSION: usize = 104;
/// Where `devCommRuntimeVersionSize` is in the properties from 2.31 on.
const RUNTIME_SIZE: usize = 136;

fn of_version(sizes: &Since, version: c_int) -> usize {
    sizes.iter().rev().find(|(since, _)| *since <= version).map_or(0, |(_, size)| *size)
}

/// Refuses a structure that says a size or version of its own that is none, as the library cannot notice.
fn check_header(function: &str, header: In<u8>, sizes: &Since) -> Result<c_int, Code> {
    let bytes = header.slice(16);
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    if word(8) != MAGIC {
        return Err(fail(
            INVALID_USAGE,
            format!("{function} : the argument must be initialized by its INITIALIZER"),
        ));
    }
    let (version, size) = (word(12) as c_int, u64::from_ne_bytes(bytes[..8].try_into().expect("8 bytes")));
    if version > settings().nccl_version {
        violation(
            function,
            format!("the structure is of version {version}, the library is {}", settings().nccl_version),
        );
    }
    let right = of_version(sizes, version);
    if size != right as u64 {
        violation(function, format!("the structure of version {version} has {right} bytes and not {size}"));
    }
    Ok(version)
}

/// What is asked for, and the size of `ncclDevComm` for the caller.
fn read(function: &str, asked: In<u8>) -> Result<(Asked, usize), Code> {
    let loaded = settings().nccl_version;
    if loaded < 22807 {
        let first = asked.cast::<AskedFirst>().get().expect("not null");
        let AskedFirst { resources, teams, lsa_multimem, lsa_barriers } = first;
        let (barriers, rail_gin_barriers, all_to_all, gin, gin_counts) = (0, 0, [0; 2], false, [0; 3]);
        let rest = Asked {
            resources,
            teams,
            lsa_multimem,
            barriers,
            lsa_barriers,
            rail_gin_barriers,
            all_to_all,
            gin,
            gin_counts,
        };
        return Ok((rest, of_version(COMM, loaded)));
    }
    if loaded < 22902 {
        return Ok((asked.cast().get().expect("not null"), of_version(COMM, loaded)));
    }
    let version = check_header(function, asked, REQUIREMENTS)?;
    let has_own = version >= 23100 && asked.slice(USE_RUNTIME_VERSION + 1)[USE_RUNTIME_VERSION] == 1;
    let size = of_version(COMM, if has_own { loaded } else { version });
    Ok((asked.at(16).cast().get().expect("not null"), size))
}

/// Where `ncclDevComm` has the handle of its resource window, and the numbers of the ranks.
fn places() -> (usize, usize) {
    let versioned = settings().nccl_version >= 23003;
    if versioned { (40, 8) } else { (32, 0) }
}

fn create(function: &'static str, comm: Handle, asked: In<u8>, to: Out<u8>) -> Answer {
    let call = enter(function, comm, Need::Ready)?;
    if asked.is_null() || to.is_null() {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : a NULL argument")));
    }
    let (asked, size) = read(function, asked)?;
    if asked.gin || asked.lsa_multimem {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : not supported by all ranks")));
    }
    // Copied during the call; what it points to is written when the thing is made.
    let mut resources = Vec::new();
    let mut next = asked.resources.get();
    while let Some(resource) = next {
        resources.push((resource.size, resource.align as u64, resource.handle));
        next = resource.next.get();
    }
    let mut teams = Vec::new();
    let mut next = asked.teams.get();
    while let Some(team) = next {
        teams.push((team.team.ranks, team.multimem, team.handle));
        next = team.next.get();
    }
    let mut body = Vec::new();
    for number in [asked.lsa_barriers, asked.barriers, asked.rail_gin_barriers] {
        body.extend(number.to_ne_bytes());
    }
    resources.iter().for_each(|(size, ..)| body.extend(size.to_ne_bytes()));
    teams.iter().for_each(|(ranks, multimem, _)| body.extend([*ranks as u8, u8::from(*multimem)]));
    let number = call.next_exchange();
    let communicator = Arc::clone(&call);
    drop(call);
    let worker = Arc::clone(&communicator);
    let job = move || {
        let Ok(all) = worker.exchange(number, worker.everyone(), &body) else { return INTERNAL_ERROR };
        if all.iter().any(|theirs| *theirs != body) {
            violation(function, "the ranks ask for different device communicators");
        }
        worker.random.dawdle();
        let mut place = 0;
        for (size, align, handle) in &resources {
            place = u64::next_multiple_of(place, 128.max(*align));
            handle.set((place / 128) as u32);
            place += *size as u64;
        }
        teams.iter().for_each(|(.., handle)| handle.set(0));
        let handle = handles::fresh();
        worker.state().device_comms.0.insert(handle);
        let bytes = to.slice(size);
        bytes.fill(0xd5);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let (window, ranks) = places();
        if ranks > 0 {
            put(0, &MAGIC.to_ne_bytes());
            put(4, &settings().nccl_version.to_ne_bytes());
        }
        put(ranks, &worker.rank.to_ne_bytes());
        put(ranks + 4, &worker.ranks.to_ne_bytes());
        put(window, &handle.to_ne_bytes());
        SUCCESS
    };
    group::work(Job { function, communicator, body: Box::new(job) })
}

/// Everybody, with every so many.
fn team(comm: Handle, function: &'static str, of: impl FnOnce(&Communicator) -> Team) -> Team {
    // As the library does, instead of an error.
    enter(function, comm, Need::Idle).map_or(Team::default(), |call| of(&call))
}

fn world(comm: &Communicator) -> Team {
    Team { ranks: comm.ranks as c_int, rank: comm.rank as c_int, stride: 1 }
}

/// The communicator of a window, on which this is a call, and where its ranks have it.
fn pointer(function: &'static str, window: Handle, offset: usize, rank: c_int, to: Out<u64>) -> Answer {
    let Some(communicator) = with_window(window) else {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : {window:#x} is no window")));
    };
    let call = enter(function, communicator.handle, Need::Idle)?;
    let start = call.state().windows.start_at(window, rank, offset);
    let Some(start) = start else {
        return Err(fail(
            INVALID_ARGUMENT,
            format!("{function} : no rank {rank}, or an offset behind the window"),
        ));
    };
    to.set(start);
    Ok(())
}

fn not_here(function: &str) -> Answer {
    Err(fail(INVALID_USAGE, format!("{function} : not supported by the communicator")))
}

/// Writes a requirement, of which each release has as much as it knows.
fn require(to: Out<Resource>, size: usize, handle: Out<u32>) {
    to.cast::<u8>().slice(of_version(RESOURCE, settings().nccl_version)).fill(0);
    to.set(Resource { next: In::null(), size, align: 4, handle });
}

exported! {
    fn ncclDevCommCreate(comm: Handle, asked: In<u8>, to: Out<u8>) {
        note(create(FUNCTION, comm, asked, to))
    }

    fn ncclDevCommDestroy(comm: Handle, device: In<u8>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        let (window, _) = places();
        let handle = device.at(window).cast::<Handle>().get().expect("not null");
        if !call.state().device_comms.0.remove(&handle) {
            violation(FUNCTION, "this is no device communicator of the communicator, or no longer one");
        }
        Ok(())
    }

    fn ncclLsaBarrierCreateRequirement(team: Team, count: c_int, handle: Out<u32>, to: Out<Resource>) {
        handle.nth(1).set(count as u32);
        let words = 3 * count + count * team.ranks;
        require(to, words as usize * 4, handle);
        Ok(())
    }

    fn ncclLLA2ACreateRequirement(blocks: c_int, slots: c_int, handle: Out<u32>, to: Out<Resource>) {
        handle.nth(1).set(slots as u32);
        let cells = blocks * (1 + 2 * slots);
        require(to, cells as usize * 16, handle);
        Ok(())
    }

    fn ncclGinBarrierCreateRequirement(comm: Handle, _team: Team, _count: c_int, _handle: Out<u32>, _to: Out<Resource>) {
        enter(FUNCTION, comm, Need::Idle)?;
        not_here(FUNCTION)
    }

    fn ncclCommQueryProperties(comm: Handle, to: Out<u8>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        let version = check_header(FUNCTION, to.as_in(), PROPERTIES)?;
        let bytes = to.slice(of_version(PROPERTIES, version));
        bytes[16..].fill(0);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        for (index, value) in [call.rank, call.ranks, call.device as u32, call.device as u32].into_iter().enumerate() {
            put(16 + index * 4, &value.to_ne_bytes());
        }
        // It has the device API, and no multicast.
        put(32, &[1, 0]);
        if version >= 22907 {
            // One team, and what the host puts works.
            put(40, &1u32.to_ne_bytes());
            put(44, &[1]);
        }
        if version >= 23100 {
            put(56, &call.number.to_ne_bytes());
            put(RUNTIME_SIZE, &(of_version(COMM, settings().nccl_version) as u64).to_ne_bytes());
        }
        Ok(())
    }

    fn ncclGetLsaDevicePointer(window: Handle, offset: usize, rank: c_int, to: Out<u64>) {
        pointer(FUNCTION, window, offset, rank, to)
    }

    fn ncclGetPeerDevicePointer(window: Handle, offset: usize, rank: c_int, to: Out<u64>) {
        pointer(FUNCTION, window, offset, rank, to)
    }

    fn ncclGetLsaMultimemDevicePointer(_window: Handle, _offset: usize, to: Out<u64>) {
        // There is no multicast.
        to.set(0);
        Ok(())
    }

    fn ncclGetMultimemDevicePointer(_window: Handle, _offset: usize, _team: u64, to: Out<u64>) {
        to.set(0);
        Ok(())
    }

    fn ncclGetCftDeviceLeInfo(_window: Handle, _offset: usize, _rank: c_int, _team: Team, _id: Out<u32>, _to: Out<usize>) {
        not_here(FUNCTION)
    }

    fn ncclGetPeerDeviceLeInfo(_window: Handle, _offset: usize, _rank: c_int, _id: Out<u32>, _to: Out<usize>) {
        not_here(FUNCTION)
    }

    fn ncclGetMultimemDeviceLeInfo(_window: Handle, _offset: usize, _id: Out<u32>, _to: Out<usize>) {
        not_here(FUNCTION)
    }
}

/// Functions that answer no code.
macro_rules! answers {
    ($(fn $name:ident($($argument:ident: $ty:ty),*) -> $answer:ty $body:block)*) => {$(
        #[allow(non_snake_case, reason = "the names are the C libraries'")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $ty),*) -> $answer $body
    )*};
}

answers! {
    fn ncclTeamWorld(comm: Handle) -> Team {
        team(comm, "ncclTeamWorld", world)
    }

    fn ncclTeamLsa(comm: Handle) -> Team {
        team(comm, "ncclTeamLsa", world)
    }

    fn ncclTeamRail(comm: Handle) -> Team {
        team(comm, "ncclTeamRail", |comm| Team { ranks: 1, rank: 0, stride: comm.ranks as c_int })
    }

    fn ncclTeamCft(comm: Handle, _mode: c_int) -> Team {
        team(comm, "ncclTeamCft", |_| Team::default())
    }

    fn ncclTeamCftMultimem(comm: Handle) -> Team {
        team(comm, "ncclTeamCftMultimem", |_| Team::default())
    }

    fn ncclTeamRankToWorld(comm: Handle, of: Team, rank: c_int) -> c_int {
        let world = team(comm, "ncclTeamRankToWorld", world);
        world.rank + (rank - of.rank) * of.stride
    }

    fn ncclTeamRankToLsa(comm: Handle, of: Team, rank: c_int) -> c_int {
        let lsa = team(comm, "ncclTeamRankToLsa", world);
        lsa.rank + (rank - of.rank) * of.stride
    }

    fn ncclLLA2ACalcSlots(elements: c_int, element_size: c_int) -> c_int {
        elements * ((element_size + 7) / 8)
    }
}
