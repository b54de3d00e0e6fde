//! Types and constants, and the search for the library.

use crate::{Place, Search};
use std::ffi::{c_int, c_void};

/// Where NVSHMEM may be.
pub const NVSHMEM: Search = Search {
    name: "NVSHMEM",
    files: &["libnvshmem_host.so.3", "libnvshmem_host.so"],
    variable: "PHALANX_NVSHMEM_LIB",
    homes: &["NVSHMEM_HOME", "NVSHMEM_PREFIX", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"],
    wheels: &["nvidia/nvshmem/lib"],
    // The library finds its plugins in its own folder, without global symbols.
    global: false,
};

/// The places where the library may be, in the order of the search: those of [`NVSHMEM`], then those of NVIDIA's Debian
/// packages, which have a folder for each version of CUDA.
pub fn places() -> Vec<Place> {
    let mut places = NVSHMEM.places();
    if crate::environment::chosen(NVSHMEM.variable).is_some() {
        return places;
    }
    for system in ["/usr/lib/x86_64-linux-gnu/nvshmem", "/usr/lib/aarch64-linux-gnu/nvshmem"] {
        let Ok(entries) = std::fs::read_dir(system) else { continue };
        let mut versions: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        versions.sort();
        let files = versions.iter().rev().map(|version| version.join(NVSHMEM.files[0]));
        places.extend(
            files
                .filter(|file| file.exists())
                .map(|file| Place { file, origin: "the system's folders".to_owned() }),
        );
    }
    places
}

/// A team of PEs.
pub type nvshmem_team_t = i32;
/// `cudaStream_t`.
pub type stream_t = *mut c_void;
/// `CUmodule`.
pub type module_t = *mut c_void;
/// `CUlibrary`.
pub type library_t = *mut c_void;

/// The predefined teams.
#[allow(missing_docs)]
pub mod team {
    use super::nvshmem_team_t;
    pub const INVALID: nvshmem_team_t = -1;
    pub const WORLD: nvshmem_team_t = 0;
    /// PEs that can load and store each other's memory.
    pub const SHARED: nvshmem_team_t = 1;
    /// PEs of this node.
    pub const NODE: nvshmem_team_t = 2;
    /// PEs with the same number on their nodes.
    pub const SAME_MYPE_NODE: nvshmem_team_t = 3;
}

/// The results of `nvshmemx_init_status`.
#[allow(missing_docs)]
pub mod init_status {
    use std::ffi::c_int;
    pub const NOT_INITIALIZED: c_int = 0;
    /// The PEs found each other, and initialisation failed after that: no function may be called, not even finalize.
    pub const IS_BOOTSTRAPPED: c_int = 1;
    pub const IS_INITIALIZED: c_int = 2;
    /// Several PEs share a GPU: only some functions work.
    pub const LIMITED_MPG: c_int = 3;
    pub const FULL_MPG: c_int = 4;
}

/// How `nvshmemx_hostlib_init_attr` finds the other PEs.
#[allow(missing_docs)]
pub mod init_flags {
    use std::ffi::c_uint;
    /// As `NVSHMEM_BOOTSTRAP` in the environment says; by PMI without it.
    pub const ENVIRONMENT: c_uint = 0;
    pub const WITH_MPI_COMM: c_uint = 1 << 1;
    pub const WITH_SHMEM: c_uint = 1 << 2;
    pub const WITH_UNIQUEID: c_uint = 1 << 3;
}

/// The operations on a signal.
#[allow(missing_docs)]
pub mod signal_op {
    use std::ffi::c_int;
    pub const SET: c_int = 9;
    pub const ADD: c_int = 10;
}

/// The comparisons of waits.
#[allow(missing_docs)]
pub mod cmp {
    use std::ffi::c_int;
    pub const EQ: c_int = 0;
    pub const NE: c_int = 1;
    pub const GT: c_int = 2;
    pub const LE: c_int = 3;
    pub const LT: c_int = 4;
    pub const GE: c_int = 5;
}

/// The version word of a structure: the layout's number and its size.
const fn version_word<T>(number: c_int) -> c_int {
    (number << 16) + size_of::<T>() as c_int
}

/// A unique id by which PEs find each other: one PE makes it and passes it to all.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct nvshmemx_uniqueid_t {
    /// Version word.
    pub version: c_int,
    /// Opaque.
    pub internal: [u8; 124],
}

/// This PE in the bootstrap by unique id.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvshmemx_uniqueid_args_t {
    /// Version word.
    pub version: c_int,
    /// The id. The library **keeps the pointer**: the id must outlive initialisation.
    pub id: *const nvshmemx_uniqueid_t,
    /// This PE's number.
    pub myrank: c_int,
    /// The number of PEs.
    pub nranks: c_int,
}

/// Arguments of initialisation, version 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvshmemx_init_args_t {
    /// Version word.
    pub version: c_int,
    /// Arguments of the bootstrap by unique id.
    pub uid_args: nvshmemx_uniqueid_args_t,
    /// Padding.
    pub content: [u8; 96],
}

/// Attributes of initialisation, layout version 1. Libraries with version 2 accept it, too.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvshmemx_init_attr_t {
    /// Version word.
    pub version: c_int,
    /// A pointer to an `MPI_Comm`.
    pub mpi_comm: *mut c_void,
    /// The other arguments.
    pub args: nvshmemx_init_args_t,
}

/// Configuration of a team.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvshmem_team_config_t {
    /// Version word.
    pub version: c_int,
    /// Unused by the library; -1 is the default.
    pub num_contexts: c_int,
    /// The id of a team that is made from one (layout version 2).
    pub uniqueid: u64,
    /// Padding.
    pub padding: [u8; 48],
}

const _: () = {
    assert!(size_of::<nvshmemx_uniqueid_t>() == 128);
    assert!(size_of::<nvshmemx_uniqueid_args_t>() == 24);
    assert!(size_of::<nvshmemx_init_args_t>() == 128);
    assert!(size_of::<nvshmemx_init_attr_t>() == 144);
    assert!(size_of::<nvshmem_team_config_t>() == 64);
    assert!(std::mem::offset_of!(nvshmemx_init_attr_t, mpi_comm) == 8);
    assert!(std::mem::offset_of!(nvshmemx_init_attr_t, args.version) == 16);
    assert!(std::mem::offset_of!(nvshmemx_init_attr_t, args.uid_args.version) == 24);
    assert!(std::mem::offset_of!(nvshmemx_init_attr_t, args.uid_args.id) == 32);
    assert!(std::mem::offset_of!(nvshmemx_init_attr_t, args.uid_args.myrank) == 40);
    assert!(std::mem::offset_of!(nvshmemx_init_attr_t, args.uid_args.nranks) == 44);
};

impl nvshmemx_uniqueid_t {
    /// Size of an id.
    pub const BYTES: usize = 128;

    /// As `NVSHMEMX_UNIQUEID_INITIALIZER`.
    pub const fn new() -> nvshmemx_uniqueid_t {
        nvshmemx_uniqueid_t { version: version_word::<nvshmemx_uniqueid_t>(1), internal: [0; 124] }
    }

    /// The bytes that the other PEs need.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.version.to_ne_bytes());
        bytes[4..].copy_from_slice(&self.internal);
        bytes
    }

    /// The inverse of [`to_bytes`](Self::to_bytes); `None` if the version word is not that of an id.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<nvshmemx_uniqueid_t> {
        let mut id = nvshmemx_uniqueid_t::new();
        let (word, internal) = bytes.split_at(4);
        id.internal.copy_from_slice(internal);
        (*word == id.version.to_ne_bytes()).then_some(id)
    }
}

impl Default for nvshmemx_uniqueid_t {
    fn default() -> nvshmemx_uniqueid_t {
        nvshmemx_uniqueid_t::new()
    }
}

impl nvshmemx_init_attr_t {
    /// As `NVSHMEMX_INIT_ATTR_INITIALIZER` of version 1.
    pub const fn new() -> nvshmemx_init_attr_t {
        nvshmemx_init_attr_t {
            version: version_word::<nvshmemx_init_attr_t>(1),
            mpi_comm: std::ptr::null_mut(),
            args: nvshmemx_init_args_t {
                version: version_word::<nvshmemx_init_args_t>(1),
                uid_args: nvshmemx_uniqueid_args_t {
                    version: version_word::<nvshmemx_uniqueid_args_t>(1),
                    id: std::ptr::null(),
                    myrank: -1,
                    nranks: -1,
                },
                content: [0; 96],
            },
        }
    }
}

impl Default for nvshmemx_init_attr_t {
    fn default() -> nvshmemx_init_attr_t {
        nvshmemx_init_attr_t::new()
    }
}

/// The version code of a release: 30405 is 3.4.5.
pub const fn version_code(major: u32, minor: u32, patch: u32) -> u32 {
    major * 10_000 + minor * 100 + patch
}

/// A version code as text: 30405 is 3.4.5.
pub fn version_text(code: u32) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_keep_their_version_word() {
        let mut id = nvshmemx_uniqueid_t::new();
        assert_eq!(id.version, 0x10080);
        id.internal[0] = 7;
        id.internal[123] = 9;
        let bytes = id.to_bytes();
        assert!(nvshmemx_uniqueid_t::from_bytes(&bytes) == Some(id));
        assert!(nvshmemx_uniqueid_t::from_bytes(&[0; 128]).is_none());
    }

    #[test]
    fn attributes_have_the_words_of_version_1() {
        let attr = nvshmemx_init_attr_t::new();
        assert_eq!(
            [attr.version, attr.args.version, attr.args.uid_args.version],
            [(1 << 16) + 144, (1 << 16) + 128, (1 << 16) + 24]
        );
    }

    #[test]
    fn versions() {
        assert_eq!(version_text(version_code(3, 4, 5)), "3.4.5");
        assert_eq!(version_text(version_code(3, 12, 0)), "3.12.0");
    }
}
