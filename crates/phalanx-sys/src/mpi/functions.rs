//! The MPI functions that phalanx uses.

use crate::Library;
use crate::functions::{addresses, c_name, table};
use std::ffi::{CStr, c_char, c_int, c_void};

/// A handle of a communicator, type, operation, request, message, file or error handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Handle(usize);

impl Handle {
    /// The value of a variable before MPI writes a handle to it.
    pub const ZERO: Handle = Handle(0);

    /// Its value: an address, or the bits of a C `int`.
    pub const fn value(self) -> usize {
        self.0
    }

    /// The handle of this value: an address, or a C `int` (its bits, without its sign).
    pub const fn new(value: usize) -> Handle {
        Handle(value)
    }
}

/// Room for an `MPI_Status` of any implementation, which has 20 to 32 bytes. Its content is read by functions, except the
/// source, for which MPI has none before 4.1.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub struct Status([c_int; 16]);

impl Status {
    /// An empty status.
    pub const fn new() -> Status {
        Status([0; 16])
    }

    /// `MPI_SOURCE`, at the index [`Constants::status_source`](super::Constants).
    pub fn source(&self, place: usize) -> c_int {
        self.0[place]
    }

    /// `MPI_TAG`; `place` is that of `MPI_SOURCE`.
    pub fn tag(&self, place: usize) -> c_int {
        self.0[place + 1]
    }
}

impl Default for Status {
    fn default() -> Status {
        Status::new()
    }
}

/// A user-defined reduction: `inout[i] = in[i] ∘ inout[i]` for `len` elements of a type (`MPI_User_function`).
pub type UserFunction =
    unsafe extern "C" fn(input: *mut c_void, inout: *mut c_void, len: *mut c_int, datatype: *mut Handle);

pub(super) type GetText = unsafe extern "C" fn(text: *mut c_char, length: *mut c_int) -> c_int;

/// The text that a function writes. The buffer exceeds every implementation's limit of 8192 bytes.
pub(super) fn text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let mut buffer = [0 as c_char; 8193];
    let mut length = 0;
    write(buffer.as_mut_ptr(), &raw mut length);
    // The functions write at most 8192 bytes.
    buffer[8192] = 0;
    // SAFETY: the last byte of the buffer is NUL.
    unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_string_lossy().into_owned()
}

macro_rules! functions {
    (
        { $($field:ident = $name:literal ($($argument:ident: $ty:ty),*);)* }
        both { $($blocking:ident = $blocking_name:literal, $started:ident = $started_name:literal ($($part:ident: $of:ty),*);)* }
    ) => {
        table! {
        /// The functions. All return `MPI_SUCCESS` (0) or an error's code.
        #[expect(missing_docs, reason = "the names are MPI's")]
        pub struct Functions {
            $(pub $field: unsafe extern "C" fn($($argument: $ty),*) -> c_int,)*
            $(
                pub $blocking: unsafe extern "C" fn($($part: $of),*) -> c_int,
                pub $started: unsafe extern "C" fn($($part: $of,)* request: *mut Handle) -> c_int,
            )*
            /// Whether the library accepts addresses of CUDA memory (`MPIX_Query_cuda_support`).
            pub query_cuda_support: Option<unsafe extern "C" fn() -> c_int>,
            /// Whether the library accepts addresses of a kind of GPU, 0 for CUDA (`MPIX_GPU_query_support`).
            pub gpu_query_support: Option<unsafe extern "C" fn(kind: c_int, supported: *mut c_int) -> c_int>,
        }
        }

        /// The symbols of the functions. All but the last [`OPTIONAL`] are required.
        const SYMBOLS: [&CStr; Functions::FIELDS.len()] = [
            $(c_name(concat!($name, "\0")),)*
            $(c_name(concat!($blocking_name, "\0")), c_name(concat!($started_name, "\0")),)*
            c"MPIX_Query_cuda_support",
            c"MPIX_GPU_query_support",
        ];
    };
}

/// How many functions are optional.
const OPTIONAL: usize = 2;

impl Functions {
    /// The functions, or the symbol of a required one that is missing.
    pub(super) fn load(library: &Library) -> Result<Functions, &'static str> {
        let addresses = addresses(library, &SYMBOLS);
        let required = &addresses[..SYMBOLS.len() - OPTIONAL];
        if let Some(missing) = required.iter().position(Option::is_none) {
            return Err(SYMBOLS[missing].to_str().expect("the symbols are ASCII"));
        }
        // SAFETY: the fields' types are those of MPI's C binding, with handles as the module says, and the required
        // functions are there.
        Ok(unsafe { Functions::from_addresses(addresses) })
    }
}

functions! {
    {
        initialized = "MPI_Initialized"(flag: *mut c_int);
        finalized = "MPI_Finalized"(flag: *mut c_int);
        init_thread = "MPI_Init_thread"(argc: *mut c_int, argv: *mut c_void, required: c_int, provided: *mut c_int);
        query_thread = "MPI_Query_thread"(provided: *mut c_int);
        is_thread_main = "MPI_Is_thread_main"(flag: *mut c_int);
        finalize = "MPI_Finalize"();
        abort = "MPI_Abort"(comm: Handle, code: c_int);
        error_string = "MPI_Error_string"(code: c_int, text: *mut c_char, length: *mut c_int);
        comm_rank = "MPI_Comm_rank"(comm: Handle, rank: *mut c_int);
        comm_size = "MPI_Comm_size"(comm: Handle, size: *mut c_int);
        comm_dup = "MPI_Comm_dup"(comm: Handle, new: *mut Handle);
        comm_split = "MPI_Comm_split"(comm: Handle, color: c_int, key: c_int, new: *mut Handle);
        comm_group = "MPI_Comm_group"(comm: Handle, group: *mut Handle);
        group_incl = "MPI_Group_incl"(group: Handle, n: c_int, ranks: *const c_int, new: *mut Handle);
        group_free = "MPI_Group_free"(group: *mut Handle);
        comm_create_group = "MPI_Comm_create_group"(comm: Handle, group: Handle, tag: c_int, new: *mut Handle);
        comm_free = "MPI_Comm_free"(comm: *mut Handle);
        comm_set_errhandler = "MPI_Comm_set_errhandler"(comm: Handle, handler: Handle);
        comm_get_attr = "MPI_Comm_get_attr"(comm: Handle, key: c_int, value: *mut c_void, flag: *mut c_int);
        type_contiguous = "MPI_Type_contiguous"(count: c_int, datatype: Handle, new: *mut Handle);
        type_create_hindexed = "MPI_Type_create_hindexed"(count: c_int, lengths: *const c_int, places: *const isize, datatype: Handle, new: *mut Handle);
        type_commit = "MPI_Type_commit"(datatype: *mut Handle);
        type_free = "MPI_Type_free"(datatype: *mut Handle);
        op_create = "MPI_Op_create"(function: UserFunction, commutes: c_int, new: *mut Handle);
        isend = "MPI_Isend"(buffer: *const c_void, count: c_int, datatype: Handle, dest: c_int, tag: c_int, comm: Handle, request: *mut Handle);
        iprobe = "MPI_Iprobe"(source: c_int, tag: c_int, comm: Handle, flag: *mut c_int, status: *mut Status);
        improbe = "MPI_Improbe"(source: c_int, tag: c_int, comm: Handle, flag: *mut c_int, message: *mut Handle, status: *mut Status);
        imrecv = "MPI_Imrecv"(buffer: *mut c_void, count: c_int, datatype: Handle, message: *mut Handle, request: *mut Handle);
        test = "MPI_Test"(request: *mut Handle, flag: *mut c_int, status: *mut Status);
        comm_split_type = "MPI_Comm_split_type"(comm: Handle, kind: c_int, key: c_int, info: Handle, new: *mut Handle);
        win_allocate = "MPI_Win_allocate"(bytes: isize, unit: c_int, info: Handle, comm: Handle, base: *mut c_void, window: *mut Handle);
        win_allocate_shared = "MPI_Win_allocate_shared"(bytes: isize, unit: c_int, info: Handle, comm: Handle, base: *mut c_void, window: *mut Handle);
        win_shared_query = "MPI_Win_shared_query"(window: Handle, rank: c_int, bytes: *mut isize, unit: *mut c_int, base: *mut c_void);
        win_set_errhandler = "MPI_Win_set_errhandler"(window: Handle, handler: Handle);
        win_lock_all = "MPI_Win_lock_all"(assert: c_int, window: Handle);
        win_unlock_all = "MPI_Win_unlock_all"(window: Handle);
        win_sync = "MPI_Win_sync"(window: Handle);
        win_flush = "MPI_Win_flush"(rank: c_int, window: Handle);
        win_flush_all = "MPI_Win_flush_all"(window: Handle);
        win_flush_local = "MPI_Win_flush_local"(rank: c_int, window: Handle);
        win_free = "MPI_Win_free"(window: *mut Handle);
        put = "MPI_Put"(source: *const c_void, count: c_int, datatype: Handle, rank: c_int, at: isize, its_count: c_int, its_type: Handle, window: Handle);
        get = "MPI_Get"(target: *mut c_void, count: c_int, datatype: Handle, rank: c_int, at: isize, its_count: c_int, its_type: Handle, window: Handle);
        accumulate = "MPI_Accumulate"(source: *const c_void, count: c_int, datatype: Handle, rank: c_int, at: isize, its_count: c_int, its_type: Handle, op: Handle, window: Handle);
        fetch_and_op = "MPI_Fetch_and_op"(value: *const c_void, result: *mut c_void, datatype: Handle, rank: c_int, at: isize, op: Handle, window: Handle);
        get_accumulate = "MPI_Get_accumulate"(value: *const c_void, count: c_int, datatype: Handle, result: *mut c_void, result_count: c_int, result_type: Handle, rank: c_int, at: isize, its_count: c_int, its_type: Handle, op: Handle, window: Handle);
        compare_and_swap = "MPI_Compare_and_swap"(value: *const c_void, expected: *const c_void, result: *mut c_void, datatype: Handle, rank: c_int, at: isize, window: Handle);
        get_count = "MPI_Get_count"(status: *const Status, datatype: Handle, count: *mut c_int);
    }
    both {
        barrier = "MPI_Barrier", ibarrier = "MPI_Ibarrier"(comm: Handle);
        bcast = "MPI_Bcast", ibcast = "MPI_Ibcast"(buffer: *mut c_void, count: c_int, datatype: Handle, root: c_int, comm: Handle);
        reduce = "MPI_Reduce", ireduce = "MPI_Ireduce"(send: *const c_void, recv: *mut c_void, count: c_int, datatype: Handle, op: Handle, root: c_int, comm: Handle);
        allreduce = "MPI_Allreduce", iallreduce = "MPI_Iallreduce"(send: *const c_void, recv: *mut c_void, count: c_int, datatype: Handle, op: Handle, comm: Handle);
        reduce_scatter_block = "MPI_Reduce_scatter_block", ireduce_scatter_block = "MPI_Ireduce_scatter_block"(send: *const c_void, recv: *mut c_void, count: c_int, datatype: Handle, op: Handle, comm: Handle);
        reduce_scatter = "MPI_Reduce_scatter", ireduce_scatter = "MPI_Ireduce_scatter"(send: *const c_void, recv: *mut c_void, counts: *const c_int, datatype: Handle, op: Handle, comm: Handle);
        allgather = "MPI_Allgather", iallgather = "MPI_Iallgather"(send: *const c_void, send_count: c_int, send_type: Handle, recv: *mut c_void, recv_count: c_int, recv_type: Handle, comm: Handle);
        allgatherv = "MPI_Allgatherv", iallgatherv = "MPI_Iallgatherv"(send: *const c_void, send_count: c_int, send_type: Handle, recv: *mut c_void, counts: *const c_int, offsets: *const c_int, recv_type: Handle, comm: Handle);
        gather = "MPI_Gather", igather = "MPI_Igather"(send: *const c_void, send_count: c_int, send_type: Handle, recv: *mut c_void, recv_count: c_int, recv_type: Handle, root: c_int, comm: Handle);
        gatherv = "MPI_Gatherv", igatherv = "MPI_Igatherv"(send: *const c_void, send_count: c_int, send_type: Handle, recv: *mut c_void, counts: *const c_int, offsets: *const c_int, recv_type: Handle, root: c_int, comm: Handle);
        scatter = "MPI_Scatter", iscatter = "MPI_Iscatter"(send: *const c_void, send_count: c_int, send_type: Handle, recv: *mut c_void, recv_count: c_int, recv_type: Handle, root: c_int, comm: Handle);
        scatterv = "MPI_Scatterv", iscatterv = "MPI_Iscatterv"(send: *const c_void, counts: *const c_int, offsets: *const c_int, send_type: Handle, recv: *mut c_void, recv_count: c_int, recv_type: Handle, root: c_int, comm: Handle);
        alltoall = "MPI_Alltoall", ialltoall = "MPI_Ialltoall"(send: *const c_void, send_count: c_int, send_type: Handle, recv: *mut c_void, recv_count: c_int, recv_type: Handle, comm: Handle);
    }
}

table! {
/// The functions of MPI-IO, which a library may be built without.
#[expect(missing_docs, reason = "the names are MPI's")]
pub struct FileFunctions {
    pub open: unsafe extern "C" fn(comm: Handle, path: *const c_char, mode: c_int, info: Handle, file: *mut Handle) -> c_int,
    pub close: unsafe extern "C" fn(file: *mut Handle) -> c_int,
    pub set_view: unsafe extern "C" fn(file: Handle, start: i64, element: Handle, places: Handle, representation: *const c_char, info: Handle) -> c_int,
    pub read_at_all: unsafe extern "C" fn(file: Handle, at: i64, buffer: *mut c_void, count: c_int, datatype: Handle, status: *mut Status) -> c_int,
    pub write_at_all: unsafe extern "C" fn(file: Handle, at: i64, buffer: *const c_void, count: c_int, datatype: Handle, status: *mut Status) -> c_int,
}
}

impl FileFunctions {
    /// All of them, if the library has them.
    pub(super) fn load(library: &Library) -> Option<FileFunctions> {
        let symbols = [
            c"MPI_File_open",
            c"MPI_File_close",
            c"MPI_File_set_view",
            c"MPI_File_read_at_all",
            c"MPI_File_write_at_all",
        ];
        let addresses = addresses(library, &symbols);
        // SAFETY: the fields' types are those of MPI's C binding, with handles as the module says, and all are there.
        addresses.iter().all(Option::is_some).then(|| unsafe { FileFunctions::from_addresses(addresses) })
    }
}

impl Functions {
    /// MPI's text for an error code.
    pub fn describe(&self, code: c_int) -> String {
        // SAFETY: may be called at any time; both pointers are valid.
        text(|buffer, length| unsafe { (self.error_string)(code, buffer, length) })
    }
}
