//! The host's part of the device API: device communicators, teams, and addresses of peers' windows.
//!
//! All ranks are on one host and reach each other's memory. There is no multicast, no network and no logical
//! endpoint, and no kernel runs here that would use a device communicator.

use super::device_layout::{
    COMM, PROPERTIES, RESOURCE, RUNTIME_SIZE, Resource, Team, check_header, of_version, offsets, read,
};
use crate::base::call::Answer;
use crate::base::handles::{self, Handle};
use crate::base::pointers::{In, Out};
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::nccl::communicator::{Communicator, Need, enter, with_window};
use crate::nccl::config::MAGIC;
use crate::nccl::group::{self, nccl, record};
use crate::nccl::job::Job;
use crate::nccl::result::*;
use std::ffi::c_int;
use std::sync::Arc;

fn create(function: &'static str, comm: Handle, requirements: In<u8>, to: Out<u8>) -> Answer {
    let call = enter(function, comm, Need::Ready)?;
    if requirements.is_null() || to.is_null() {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : a NULL argument")));
    }
    let (requirements, size) = read(function, requirements)?;
    if requirements.gin || requirements.lsa_multimem {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : not supported by all ranks")));
    }
    // The lists are copied during the call. Their handles are written when the device communicator is ready.
    let mut resources = Vec::new();
    let mut next = requirements.resources.get();
    while let Some(resource) = next {
        resources.push((resource.size, resource.align as u64, resource.handle));
        next = resource.next.get();
    }
    let mut teams = Vec::new();
    let mut next = requirements.teams.get();
    while let Some(team) = next {
        teams.push((team.team.ranks, team.multimem, team.handle));
        next = team.next.get();
    }
    let mut body = Vec::new();
    for number in [requirements.lsa_barriers, requirements.barriers, requirements.rail_gin_barriers] {
        body.extend(number.to_ne_bytes());
    }
    resources.iter().for_each(|(size, ..)| body.extend(size.to_ne_bytes()));
    teams.iter().for_each(|(ranks, multimem, _)| body.extend([*ranks as u8, u8::from(*multimem)]));
    let number = call.next_exchange();
    let communicator = Arc::clone(&call);
    drop(call);
    let worker = Arc::clone(&communicator);
    let job = move || {
        let Ok(all) = worker.exchange(number, worker.all_ranks(), &body) else { return INTERNAL_ERROR };
        if all.iter().any(|theirs| *theirs != body) {
            violation(function, "the ranks ask for different device communicators");
        }
        worker.random.delay();
        let mut place = 0;
        for (size, align, handle) in &resources {
            place = u64::next_multiple_of(place, 128.max(*align));
            handle.set((place / 128) as u32);
            place += *size as u64;
        }
        teams.iter().for_each(|(.., handle)| handle.set(0));
        let handle = handles::fresh();
        worker.state().device_comms.insert(handle);
        let bytes = to.slice(size);
        bytes.fill(0xd5);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let (window, ranks) = offsets();
        if ranks > 0 {
            put(0, &MAGIC.to_ne_bytes());
            put(4, &settings().nccl_version.to_ne_bytes());
        }
        put(ranks, &worker.rank.to_ne_bytes());
        put(ranks + 4, &worker.ranks.to_ne_bytes());
        put(window, &handle.to_ne_bytes());
        SUCCESS
    };
    group::run(Job { function, communicator, body: Box::new(job) })
}

/// A team of a communicator's ranks. As in the library, an error gives an empty team.
fn team(comm: Handle, function: &'static str, of: impl FnOnce(&Communicator) -> Team) -> Team {
    enter(function, comm, Need::Idle).map_or(Team::default(), |call| of(&call))
}

fn world(comm: &Communicator) -> Team {
    Team { ranks: comm.ranks as c_int, rank: comm.rank as c_int, stride: 1 }
}

/// The address of a rank's memory in a window: a call on the window's communicator.
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

/// Writes a requirement, in the size of the reported version.
fn require(to: Out<Resource>, size: usize, handle: Out<u32>) {
    to.cast::<u8>().slice(of_version(RESOURCE, settings().nccl_version)).fill(0);
    to.set(Resource { next: In::null(), size, align: 4, handle });
}

nccl! {
    fn ncclDevCommCreate(comm: Handle, requirements: In<u8>, to: Out<u8>) {
        record(create(FUNCTION, comm, requirements, to))
    }

    fn ncclDevCommDestroy(comm: Handle, device: In<u8>) {
        let call = enter(FUNCTION, comm, Need::Idle)?;
        let (window, _) = offsets();
        let handle = device.at(window).cast::<Handle>().get().expect("not null");
        if !call.state().device_comms.remove(&handle) {
            violation(FUNCTION, "this device communicator does not belong to the communicator, or was destroyed");
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
        // Device API, no multicast.
        put(32, &[1, 0]);
        if version >= 22907 {
            // One team, and puts by the host.
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

/// Defines exported functions that return no status.
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
