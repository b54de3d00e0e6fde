//! The functions on teams.

use super::process::{INVALID_VALUE, Pe, Team, exit, initialized, nvshmem, with_own_gpu};
use super::world::TEAMS;
use crate::base::lock::lock;
use crate::base::pointers::{In, Out};
use crate::base::settings::settings;
use crate::base::violation::violation;
use std::ffi::{c_int, c_long, c_void};

/// `NVSHMEM_TEAM_INVALID`.
const INVALID: c_int = -1;
/// The first team that is not predefined.
const FIRST: c_int = 4;

/// How many of the library's team slots a team uses with multicast.
fn copies(members: usize) -> usize {
    if members > 1 { 16 } else { 1 }
}

/// Makes a team of some members of a parent. All members of the parent call this; the others get no team.
fn split(function: &'static str, pe: &Pe, parent: c_int, members: Vec<usize>) -> c_int {
    let over = pe.team(function, parent);
    pe.check_idle(function, parent);
    let free = (FIRST..TEAMS as c_int).filter(|team| !lock(&pe.state).teams.contains_key(team));
    let free = free.fold(0u64, |bits, team| bits | (1 << team));
    let mine: [u64; 14] =
        std::array::from_fn(|n| [free, members.len() as u64, members[0] as u64].get(n).copied().unwrap_or(0));
    let all = pe.world.exchange(parent as usize, pe.pe, &over.members, mine);
    if all.iter().any(|words| words[1..] != mine[1..]) {
        violation(function, "the PEs of the parent team pass different arguments");
    }
    let common = over
        .members
        .iter()
        .zip(&all)
        .filter(|(pe, _)| members.contains(pe))
        .fold(!0, |bits, (_, words)| bits & words[0]);
    let is_member = members.contains(&pe.pe);
    let slot = common.trailing_zeros() as c_int;
    let made = is_member && slot < TEAMS as c_int;
    if made && settings().multicast {
        // Of 128 slots the library itself uses 2 + 4 * 16.
        let teams =
            lock(&pe.state).teams.range(FIRST..).map(|(_, team)| copies(team.members.len())).sum::<usize>();
        if 2 + 4 * 16 + teams + copies(members.len()) > 128 {
            exit(function, "Unable to allocate enough duplicate teams");
        }
    }
    if made {
        pe.world.reset(slot as usize, pe.pe);
        lock(&pe.state).teams.insert(slot, Team { members });
    }
    pe.world.barrier(parent as usize, pe.pe, &over.members);
    if made { slot } else { INVALID }
}

nvshmem! {
    fn nvshmem_team_my_pe(team: c_int) -> c_int {
        initialized(FUNCTION, |pe| {
            let team = pe.team(FUNCTION, team);
            team.members.iter().position(|member| *member == pe.pe).map_or(INVALID, |n| n as c_int)
        })
    }

    fn nvshmem_team_n_pes(team: c_int) -> c_int {
        initialized(FUNCTION, |pe| pe.team(FUNCTION, team).members.len() as c_int)
    }

    fn nvshmem_team_translate_pe(from: c_int, number: c_int, to: c_int) -> c_int {
        initialized(FUNCTION, |pe| {
            let (from, to) = (pe.team(FUNCTION, from), pe.team(FUNCTION, to));
            let Some(member) = from.members.get(number as usize) else { return INVALID };
            to.members.iter().position(|other| other == member).map_or(INVALID, |n| n as c_int)
        })
    }

    fn nvshmem_team_split_strided(
        parent: c_int, start: c_int, stride: c_int, size: c_int, _config: In<c_void>, _mask: c_long, new: Out<c_int>,
    ) -> c_int {
        with_own_gpu(FUNCTION, |pe| {
            new.set(INVALID);
            let of = pe.team(FUNCTION, parent).members;
            let last = start + stride * (size - 1);
            if start < 0 || stride < 1 || size < 1 || last as usize >= of.len() {
                return INVALID_VALUE;
            }
            let members: Vec<usize> = (0..size).map(|n| of[(start + n * stride) as usize]).collect();
            let is_member = members.contains(&pe.pe);
            new.set(split(FUNCTION, pe, parent, members));
            // As in the library, PEs outside the team get an error status.
            c_int::from(!is_member)
        })
    }

    fn nvshmem_team_split_2d(
        parent: c_int, width: c_int, _x_config: In<c_void>, _x_mask: c_long, x: Out<c_int>,
        _y_config: In<c_void>, _y_mask: c_long, y: Out<c_int>,
    ) -> c_int {
        with_own_gpu(FUNCTION, |pe| {
            let of = pe.team(FUNCTION, parent).members;
            let width = (width as usize).min(of.len());
            let own = of.iter().position(|member| *member == pe.pe).unwrap_or(0);
            // All rows, then all columns, one after the other: all PEs take part in each split.
            for (row, members) in of.chunks(width).enumerate() {
                let made = split(FUNCTION, pe, parent, members.to_vec());
                if row == own / width {
                    x.set(made);
                }
            }
            for column in 0..width {
                let made = split(FUNCTION, pe, parent, of.iter().skip(column).step_by(width).copied().collect());
                if column == own % width {
                    y.set(made);
                }
            }
            0
        })
    }

    fn nvshmem_team_destroy(team: c_int) {
        initialized(FUNCTION, |pe| {
            let of = pe.team(FUNCTION, team);
            if team < FIRST {
                violation(FUNCTION, "a predefined team cannot be destroyed");
            }
            pe.check_idle(FUNCTION, team);
            pe.world.barrier(team as usize, pe.pe, &of.members);
            lock(&pe.state).teams.remove(&team);
        })
    }
}
