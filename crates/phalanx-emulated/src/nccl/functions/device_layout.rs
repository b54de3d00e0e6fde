//! The structures of the device API, and how they differ between releases.

use crate::base::call::Code;
use crate::base::pointers::{In, Out};
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::nccl::config::MAGIC;
use crate::nccl::result::{INVALID_USAGE, fail};
use std::ffi::c_int;

/// `ncclTeam_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Team {
    pub ranks: c_int,
    pub rank: c_int,
    pub stride: c_int,
}

/// The fields of `ncclDevCommRequirements_t` in 2.28.7. Later releases put a header before them and fields
/// behind.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Requirements {
    pub resources: In<Resource>,
    pub teams: In<MultimemTeam>,
    pub lsa_multimem: bool,
    pub barriers: c_int,
    pub lsa_barriers: c_int,
    pub rail_gin_barriers: c_int,
    pub all_to_all: [c_int; 2],
    pub gin: bool,
    pub gin_counts: [c_int; 3],
}

/// The requirements of 2.28.3.
#[repr(C)]
#[derive(Clone, Copy)]
struct FirstRequirements {
    resources: In<Resource>,
    teams: In<MultimemTeam>,
    lsa_multimem: bool,
    lsa_barriers: c_int,
}

/// The fields that `ncclDevResourceRequirements_t` has in all releases.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Resource {
    pub next: In<Resource>,
    pub size: usize,
    pub align: usize,
    pub handle: Out<u32>,
}

/// `ncclTeamRequirements_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MultimemTeam {
    pub next: In<MultimemTeam>,
    pub team: Team,
    pub multimem: bool,
    pub handle: Out<u64>,
}

/// Sizes of a structure: a version, and the size from there on.
type Since = [(c_int, usize)];

/// Sizes of `ncclDevCommRequirements_t`.
const REQUIREMENTS: &Since = &[(22902, 72), (22907, 88), (23003, 96), (23100, 120)];
/// Sizes of `ncclCommProperties_t`.
pub const PROPERTIES: &Since = &[(22902, 40), (22907, 56), (23100, 144), (23200, 152)];
/// Sizes of `ncclDevResourceRequirements_t`.
pub const RESOURCE: &Since = &[(22803, 32), (22807, 56)];
/// Sizes of `ncclDevComm`.
pub const COMM: &Since = &[(22803, 88), (22807, 200), (22907, 224), (23003, 240), (23100, 248)];
/// The offset of `useRuntimeVersion` in the requirements from 2.31 on.
const USE_RUNTIME_VERSION: usize = 104;
/// The offset of `devCommRuntimeVersionSize` in the properties from 2.31 on.
pub const RUNTIME_SIZE: usize = 136;

/// The size of a structure in a version.
pub fn of_version(sizes: &Since, version: c_int) -> usize {
    sizes.iter().rev().find(|(since, _)| *since <= version).map_or(0, |(_, size)| *size)
}

/// The version of a structure with a header. A size that does not fit the version, which the library cannot
/// notice, is a violation.
pub fn check_header(function: &str, header: In<u8>, sizes: &Since) -> Result<c_int, Code> {
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

/// The caller's requirements, and the size of the caller's `ncclDevComm`.
pub fn read(function: &str, from: In<u8>) -> Result<(Requirements, usize), Code> {
    let loaded = settings().nccl_version;
    if loaded < 22807 {
        let first = from.cast::<FirstRequirements>().get().expect("not null");
        let FirstRequirements { resources, teams, lsa_multimem, lsa_barriers } = first;
        let (barriers, rail_gin_barriers, all_to_all, gin, gin_counts) = (0, 0, [0; 2], false, [0; 3]);
        let requirements = Requirements {
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
        return Ok((requirements, of_version(COMM, loaded)));
    }
    if loaded < 22902 {
        return Ok((from.cast().get().expect("not null"), of_version(COMM, loaded)));
    }
    let version = check_header(function, from, REQUIREMENTS)?;
    let uses_runtime_version =
        version >= 23100 && from.slice(USE_RUNTIME_VERSION + 1)[USE_RUNTIME_VERSION] == 1;
    let size = of_version(COMM, if uses_runtime_version { loaded } else { version });
    Ok((from.at(16).cast().get().expect("not null"), size))
}

/// The offsets in `ncclDevComm` of the resource window's handle, and of the rank and the number of ranks.
pub fn offsets() -> (usize, usize) {
    let versioned = settings().nccl_version >= 23003;
    if versioned { (40, 8) } else { (32, 0) }
}
