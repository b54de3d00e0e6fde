//! The three families of MPI libraries, with their handles and constants.

use super::functions::Handle;
use crate::Library;
use std::ffi::{CStr, c_int};

/// A family of MPI libraries with the same handles and constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// The standard ABI of MPI 5.
    StandardAbi,
    /// Open MPI: handles are addresses of the library's objects.
    OpenMpi,
    /// MPICH and its descendants, such as Intel MPI: handles are `int`s.
    Mpich,
}

impl Flavour {
    /// The flavour of a library, from its symbols.
    pub fn of(library: &Library) -> Flavour {
        type GetVersion = unsafe extern "C" fn(major: *mut c_int, minor: *mut c_int) -> c_int;
        if library.has(c"ompi_mpi_comm_world") {
            return Flavour::OpenMpi;
        }
        // A library with other handles can have the function too, and returns version -1.
        // SAFETY: the function has this type.
        let get: Option<GetVersion> = unsafe { library.symbol(c"MPI_Abi_get_version") };
        let (mut major, mut minor) = (-1, -1);
        if let Some(get) = get {
            // SAFETY: may be called before MPI is initialised; both pointers are valid.
            unsafe { get(&raw mut major, &raw mut minor) };
        }
        if major >= 1 { Flavour::StandardAbi } else { Flavour::Mpich }
    }

    /// The family's name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Flavour::StandardAbi => "MPI standard ABI",
            Flavour::OpenMpi => "Open MPI",
            Flavour::Mpich => "MPICH",
        }
    }
}

/// The predefined handles and constants that phalanx uses, named as in MPI.
#[expect(missing_docs, reason = "the names are MPI's")]
#[derive(Debug, Clone, Copy)]
pub struct Constants {
    pub comm_world: Handle,
    pub comm_null: Handle,
    pub errors_return: Handle,
    pub byte: Handle,
    pub int8: Handle,
    pub uint8: Handle,
    pub int16: Handle,
    pub uint16: Handle,
    pub int32: Handle,
    pub uint32: Handle,
    pub int64: Handle,
    pub uint64: Handle,
    pub float: Handle,
    pub double: Handle,
    pub sum: Handle,
    pub prod: Handle,
    pub band: Handle,
    pub bor: Handle,
    pub bxor: Handle,
    pub min: Handle,
    pub max: Handle,
    pub replace: Handle,
    pub no_op: Handle,
    pub info_null: Handle,
    pub mode_nocheck: c_int,
    pub mode_rdonly: c_int,
    pub mode_rdwr: c_int,
    pub comm_type_shared: c_int,
    /// The address `MPI_IN_PLACE`.
    pub in_place: usize,
    pub any_source: c_int,
    pub any_tag: c_int,
    pub tag_ub: c_int,
    pub undefined: c_int,
    pub thread_multiple: c_int,
    /// The index of `MPI_SOURCE` among the `int`s of a status; `MPI_TAG` is the next.
    pub status_source: usize,
}

impl Constants {
    /// The constants of a family. Only Open MPI's depend on the library. The error is the name of a missing symbol.
    pub(super) fn new(flavour: Flavour, library: &Library) -> Result<Constants, &'static str> {
        match flavour {
            Flavour::StandardAbi => Ok(STANDARD_ABI),
            Flavour::Mpich => Ok(MPICH),
            Flavour::OpenMpi => open_mpi(library),
        }
    }
}

const STANDARD_ABI: Constants = Constants {
    comm_world: Handle::new(0x101),
    comm_null: Handle::new(0x100),
    errors_return: Handle::new(0x143),
    byte: Handle::new(0x247),
    int8: Handle::new(0x240),
    uint8: Handle::new(0x241),
    int16: Handle::new(0x248),
    uint16: Handle::new(0x249),
    int32: Handle::new(0x250),
    uint32: Handle::new(0x251),
    int64: Handle::new(0x258),
    uint64: Handle::new(0x259),
    float: Handle::new(0x210),
    double: Handle::new(0x214),
    sum: Handle::new(0x21),
    prod: Handle::new(0x24),
    band: Handle::new(0x28),
    bor: Handle::new(0x29),
    bxor: Handle::new(0x2a),
    min: Handle::new(0x22),
    max: Handle::new(0x23),
    replace: Handle::new(0x3c),
    no_op: Handle::new(0x3d),
    info_null: Handle::new(0x130),
    mode_nocheck: 1024,
    mode_rdonly: 16,
    mode_rdwr: 32,
    comm_type_shared: 221,
    in_place: 1,
    any_source: -1,
    any_tag: -2,
    tag_ub: 501,
    undefined: -32766,
    thread_multiple: 4096,
    status_source: 0,
};

const MPICH: Constants = Constants {
    comm_world: Handle::new(0x4400_0000),
    comm_null: Handle::new(0x0400_0000),
    errors_return: Handle::new(0x5400_0001),
    byte: Handle::new(0x4c00_010d),
    int8: Handle::new(0x4c00_0137),
    uint8: Handle::new(0x4c00_013b),
    int16: Handle::new(0x4c00_0238),
    uint16: Handle::new(0x4c00_023c),
    int32: Handle::new(0x4c00_0439),
    uint32: Handle::new(0x4c00_043d),
    int64: Handle::new(0x4c00_083a),
    uint64: Handle::new(0x4c00_083e),
    float: Handle::new(0x4c00_040a),
    double: Handle::new(0x4c00_080b),
    sum: Handle::new(0x5800_0003),
    prod: Handle::new(0x5800_0004),
    band: Handle::new(0x5800_0006),
    bor: Handle::new(0x5800_0008),
    bxor: Handle::new(0x5800_000a),
    min: Handle::new(0x5800_0002),
    max: Handle::new(0x5800_0001),
    replace: Handle::new(0x5800_000d),
    no_op: Handle::new(0x5800_000e),
    info_null: Handle::new(0x1c00_0000),
    mode_nocheck: 1024,
    mode_rdonly: 2,
    mode_rdwr: 8,
    comm_type_shared: 1,
    in_place: usize::MAX,
    any_source: -2,
    any_tag: -1,
    tag_ub: 0x6440_0001,
    undefined: -32766,
    thread_multiple: 3,
    status_source: 2,
};

fn open_mpi(library: &Library) -> Result<Constants, &'static str> {
    let object = |name: &'static CStr| {
        // SAFETY: the object's address is the handle, and is not followed here.
        let address: Option<*const ()> = unsafe { library.symbol(name) };
        address
            .map(|address| Handle::new(address as usize))
            .ok_or_else(|| name.to_str().expect("the names here are ASCII"))
    };
    Ok(Constants {
        comm_world: object(c"ompi_mpi_comm_world")?,
        comm_null: object(c"ompi_mpi_comm_null")?,
        errors_return: object(c"ompi_mpi_errors_return")?,
        byte: object(c"ompi_mpi_byte")?,
        int8: object(c"ompi_mpi_int8_t")?,
        uint8: object(c"ompi_mpi_uint8_t")?,
        int16: object(c"ompi_mpi_int16_t")?,
        uint16: object(c"ompi_mpi_uint16_t")?,
        int32: object(c"ompi_mpi_int32_t")?,
        uint32: object(c"ompi_mpi_uint32_t")?,
        int64: object(c"ompi_mpi_int64_t")?,
        uint64: object(c"ompi_mpi_uint64_t")?,
        float: object(c"ompi_mpi_float")?,
        double: object(c"ompi_mpi_double")?,
        sum: object(c"ompi_mpi_op_sum")?,
        prod: object(c"ompi_mpi_op_prod")?,
        band: object(c"ompi_mpi_op_band")?,
        bor: object(c"ompi_mpi_op_bor")?,
        bxor: object(c"ompi_mpi_op_bxor")?,
        min: object(c"ompi_mpi_op_min")?,
        max: object(c"ompi_mpi_op_max")?,
        replace: object(c"ompi_mpi_op_replace")?,
        no_op: object(c"ompi_mpi_op_no_op")?,
        info_null: object(c"ompi_mpi_info_null")?,
        mode_nocheck: 1,
        mode_rdonly: 2,
        mode_rdwr: 8,
        comm_type_shared: 0,
        in_place: 1,
        any_source: -1,
        any_tag: -1,
        tag_ub: 0,
        undefined: -32766,
        thread_multiple: 3,
        status_source: 0,
    })
}
