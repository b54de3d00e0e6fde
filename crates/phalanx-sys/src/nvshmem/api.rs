//! The table of functions, and a loaded library.

use super::types::*;
use crate::functions::{addresses, c_name, table};
use crate::{Library, MissingFunction, NotFound};
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_void};
use std::path::Path;

/// The oldest supported release.
pub const OLDEST: u32 = version_code(3, 4, 0);

/// A function of the table, and its first release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function {
    /// The function's name.
    pub name: &'static str,
    /// The version code of the first release that is known to have the function.
    pub since: u32,
}

macro_rules! api {
    ($( since $major:literal $minor:literal { $( $name:ident($($argument:ident: $ty:ty),*) $(-> $answer:ty)?; )* } )*) => {
        table! {
            /// The functions of the loaded library; `None` where it lacks one.
            #[allow(missing_docs)]
            pub struct Functions {
                $($(pub $name: Option<unsafe extern "C" fn($($argument: $ty),*) $(-> $answer)?>,)*)*
            }
        }

        /// Every function of the table, without the reductions.
        pub const FUNCTIONS: &[Function] =
            &[$($(Function { name: stringify!($name), since: version_code($major, $minor, 0) }),*),*];

        /// The symbol of each function.
        const SYMBOLS: [&CStr; FUNCTIONS.len()] = [$($(c_name(concat!(stringify!($name), "\0"))),*),*];
    };
}

impl Functions {
    fn load(library: &Library) -> Functions {
        // SAFETY: the fields' types are those of the C headers.
        unsafe { Functions::from_addresses(addresses(library, &SYMBOLS)) }
    }

    /// The functions that the library lacks.
    fn missing(&self) -> Vec<Function> {
        let functions = FUNCTIONS.iter().zip(self.addresses());
        functions.filter(|(_, address)| address.is_none()).map(|(function, _)| *function).collect()
    }
}

api! {
    since 3 4 {
        nvshmemx_get_uniqueid(id: *mut nvshmemx_uniqueid_t) -> c_int;
        nvshmemx_set_attr_uniqueid_args(rank: c_int, ranks: c_int, id: *const nvshmemx_uniqueid_t, attr: *mut nvshmemx_init_attr_t) -> c_int;
        nvshmemx_hostlib_init_attr(flags: c_uint, attr: *mut nvshmemx_init_attr_t) -> c_int;
        nvshmemx_hostlib_finalize();
        nvshmemx_init_status() -> c_int;
        nvshmem_query_thread(provided: *mut c_int);
        nvshmem_global_exit(status: c_int);
        nvshmemx_cumodule_init(module: module_t) -> c_int;
        nvshmemx_cumodule_finalize(module: module_t) -> c_int;
        nvshmemx_culibrary_init(library: library_t) -> c_int;
        nvshmemx_culibrary_finalize(library: library_t) -> c_int;

        nvshmem_my_pe() -> c_int;
        nvshmem_n_pes() -> c_int;
        nvshmem_info_get_version(major: *mut c_int, minor: *mut c_int);
        nvshmem_info_get_name(name: *mut c_char);
        nvshmemx_vendor_get_version_info(major: *mut c_int, minor: *mut c_int, patch: *mut c_int);

        nvshmem_malloc(bytes: usize) -> *mut c_void;
        nvshmem_calloc(count: usize, bytes: usize) -> *mut c_void;
        nvshmem_align(alignment: usize, bytes: usize) -> *mut c_void;
        nvshmem_free(start: *mut c_void);
        nvshmem_ptr(start: *const c_void, pe: c_int) -> *mut c_void;
        nvshmemx_mc_ptr(team: nvshmem_team_t, start: *const c_void) -> *mut c_void;
        nvshmemx_buffer_register(start: *mut c_void, bytes: usize) -> c_int;
        nvshmemx_buffer_unregister(start: *mut c_void) -> c_int;
        nvshmemx_buffer_register_symmetric(start: *mut c_void, bytes: usize, flags: c_int) -> *mut c_void;
        nvshmemx_buffer_unregister_symmetric(start: *mut c_void, bytes: usize) -> c_int;

        nvshmem_putmem(dest: *mut c_void, source: *const c_void, bytes: usize, pe: c_int);
        nvshmem_putmem_nbi(dest: *mut c_void, source: *const c_void, bytes: usize, pe: c_int);
        nvshmemx_putmem_on_stream(dest: *mut c_void, source: *const c_void, bytes: usize, pe: c_int, stream: stream_t);
        nvshmemx_putmem_nbi_on_stream(dest: *mut c_void, source: *const c_void, bytes: usize, pe: c_int, stream: stream_t);
        nvshmem_getmem(dest: *mut c_void, source: *const c_void, bytes: usize, pe: c_int);
        nvshmem_getmem_nbi(dest: *mut c_void, source: *const c_void, bytes: usize, pe: c_int);
        nvshmemx_getmem_on_stream(dest: *mut c_void, source: *const c_void, bytes: usize, pe: c_int, stream: stream_t);
        nvshmemx_getmem_nbi_on_stream(dest: *mut c_void, source: *const c_void, bytes: usize, pe: c_int, stream: stream_t);

        nvshmem_iput8(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int);
        nvshmem_iput16(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int);
        nvshmem_iput32(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int);
        nvshmem_iput64(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int);
        nvshmem_iget8(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int);
        nvshmem_iget16(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int);
        nvshmem_iget32(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int);
        nvshmem_iget64(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int);
        nvshmemx_iput8_on_stream(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int, stream: stream_t);
        nvshmemx_iput16_on_stream(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int, stream: stream_t);
        nvshmemx_iput32_on_stream(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int, stream: stream_t);
        nvshmemx_iput64_on_stream(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int, stream: stream_t);
        nvshmemx_iget8_on_stream(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int, stream: stream_t);
        nvshmemx_iget16_on_stream(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int, stream: stream_t);
        nvshmemx_iget32_on_stream(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int, stream: stream_t);
        nvshmemx_iget64_on_stream(dest: *mut c_void, source: *const c_void, dest_stride: isize, source_stride: isize, count: usize, pe: c_int, stream: stream_t);

        nvshmem_uint8_p(dest: *mut u8, value: u8, pe: c_int);
        nvshmem_uint16_p(dest: *mut u16, value: u16, pe: c_int);
        nvshmem_uint32_p(dest: *mut u32, value: u32, pe: c_int);
        nvshmem_uint64_p(dest: *mut u64, value: u64, pe: c_int);
        nvshmemx_uint8_p_on_stream(dest: *mut u8, value: u8, pe: c_int, stream: stream_t);
        nvshmemx_uint16_p_on_stream(dest: *mut u16, value: u16, pe: c_int, stream: stream_t);
        nvshmemx_uint32_p_on_stream(dest: *mut u32, value: u32, pe: c_int, stream: stream_t);
        nvshmemx_uint64_p_on_stream(dest: *mut u64, value: u64, pe: c_int, stream: stream_t);
        nvshmem_uint8_g(source: *const u8, pe: c_int) -> u8;
        nvshmem_uint16_g(source: *const u16, pe: c_int) -> u16;
        nvshmem_uint32_g(source: *const u32, pe: c_int) -> u32;
        nvshmem_uint64_g(source: *const u64, pe: c_int) -> u64;

        nvshmemx_putmem_signal_on_stream(dest: *mut c_void, source: *const c_void, bytes: usize, signal: *mut u64, value: u64, op: c_int, pe: c_int, stream: stream_t);
        nvshmemx_putmem_signal_nbi_on_stream(dest: *mut c_void, source: *const c_void, bytes: usize, signal: *mut u64, value: u64, op: c_int, pe: c_int, stream: stream_t);
        nvshmemx_signal_op_on_stream(signal: *mut u64, value: u64, op: c_int, pe: c_int, stream: stream_t);
        nvshmemx_signal_wait_until_on_stream(signal: *mut u64, cmp: c_int, value: u64, stream: stream_t);
        nvshmem_signal_fetch(signal: *mut u64) -> u64;
        nvshmemx_short_wait_until_on_stream(variable: *mut i16, cmp: c_int, value: i16, stream: stream_t);
        nvshmemx_ushort_wait_until_on_stream(variable: *mut u16, cmp: c_int, value: u16, stream: stream_t);
        nvshmemx_int32_wait_until_on_stream(variable: *mut i32, cmp: c_int, value: i32, stream: stream_t);
        nvshmemx_uint32_wait_until_on_stream(variable: *mut u32, cmp: c_int, value: u32, stream: stream_t);
        nvshmemx_int64_wait_until_on_stream(variable: *mut i64, cmp: c_int, value: i64, stream: stream_t);
        nvshmemx_uint64_wait_until_on_stream(variable: *mut u64, cmp: c_int, value: u64, stream: stream_t);

        nvshmem_quiet();
        nvshmem_fence();
        nvshmemx_quiet_on_stream(stream: stream_t);

        nvshmem_team_my_pe(team: nvshmem_team_t) -> c_int;
        nvshmem_team_n_pes(team: nvshmem_team_t) -> c_int;
        nvshmem_team_translate_pe(from: nvshmem_team_t, pe: c_int, to: nvshmem_team_t) -> c_int;
        nvshmem_team_split_strided(parent: nvshmem_team_t, start: c_int, stride: c_int, size: c_int, config: *const nvshmem_team_config_t, mask: c_long, new: *mut nvshmem_team_t) -> c_int;
        nvshmem_team_split_2d(parent: nvshmem_team_t, xrange: c_int, x_config: *const nvshmem_team_config_t, x_mask: c_long, x_team: *mut nvshmem_team_t, y_config: *const nvshmem_team_config_t, y_mask: c_long, y_team: *mut nvshmem_team_t) -> c_int;
        nvshmem_team_destroy(team: nvshmem_team_t);
        nvshmem_team_sync(team: nvshmem_team_t) -> c_int;
        nvshmem_barrier(team: nvshmem_team_t) -> c_int;
        nvshmem_barrier_all();
        nvshmem_sync_all();

        nvshmemx_barrier_on_stream(team: nvshmem_team_t, stream: stream_t) -> c_int;
        nvshmemx_barrier_all_on_stream(stream: stream_t);
        nvshmemx_team_sync_on_stream(team: nvshmem_team_t, stream: stream_t) -> c_int;
        nvshmemx_sync_all_on_stream(stream: stream_t);
        nvshmemx_broadcastmem_on_stream(team: nvshmem_team_t, dest: *mut c_void, source: *const c_void, bytes: usize, root: c_int, stream: stream_t) -> c_int;
        nvshmemx_fcollectmem_on_stream(team: nvshmem_team_t, dest: *mut c_void, source: *const c_void, bytes: usize, stream: stream_t) -> c_int;
        nvshmemx_alltoallmem_on_stream(team: nvshmem_team_t, dest: *mut c_void, source: *const c_void, bytes: usize, stream: stream_t) -> c_int;
    }
    since 3 8 {
        nvshmemx_flush();
        nvshmemx_flush_on_stream(stream: stream_t);
    }
}

/// A reduction on a stream: `nvshmemx_TYPE_OP_reduce_on_stream`, `…_reducescatter_on_stream`.
pub type Reduce = unsafe extern "C" fn(
    team: nvshmem_team_t,
    dest: *mut c_void,
    source: *const c_void,
    count: usize,
    stream: stream_t,
) -> c_int;

/// The element types of reductions, as in the names of functions.
pub const REDUCE_TYPES: [&str; 12] = [
    "float", "double", "half", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
    "uint64",
];

/// The operators of reductions, as in the names of functions. The last three are for integers.
pub const REDUCE_OPS: [&str; 7] = ["sum", "prod", "min", "max", "and", "or", "xor"];

/// A function for each element type and operator.
type Reductions = [[Option<Reduce>; REDUCE_OPS.len()]; REDUCE_TYPES.len()];

fn reductions(library: &Library, what: &str) -> Reductions {
    let find = |dtype: usize, op: usize| {
        let name = format!("nvshmemx_{}_{}_{what}_on_stream", REDUCE_TYPES[dtype], REDUCE_OPS[op]);
        // SAFETY: these functions have one signature, except for the types behind their pointers.
        unsafe { library.symbol(&CString::new(name).expect("no NUL in it")) }
    };
    std::array::from_fn(|dtype| std::array::from_fn(|op| find(dtype, op)))
}

/// A loaded NVSHMEM.
#[derive(Debug)]
pub struct Api {
    library: Library,
    functions: Functions,
    reduce: Reductions,
    reduce_scatter: Reductions,
    version: u32,
}

impl std::ops::Deref for Api {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Api {
    /// Loads the library from the first of the [`places`] where it loads, and reads its version. Needs no driver and no GPU.
    ///
    /// # Errors
    /// [`NotFound`] if none loads.
    pub fn load() -> Result<Api, NotFound> {
        let library = NVSHMEM.open_among(places())?;
        let functions = Functions::load(&library);
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        if let Some(get_version) = functions.nvshmemx_vendor_get_version_info {
            // SAFETY: valid out-pointers; the function needs no initialisation.
            unsafe { get_version(&raw mut major, &raw mut minor, &raw mut patch) };
        }
        let (reduce, reduce_scatter) =
            (reductions(&library, "reduce"), reductions(&library, "reducescatter"));
        let version = version_code(major as u32, minor as u32, patch as u32);
        Ok(Api { library, functions, reduce, reduce_scatter, version })
    }

    /// The version code: 30405 is 3.4.5.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The version of OpenSHMEM that the library implements.
    pub fn openshmem_version(&self) -> Option<(u32, u32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: valid out-pointers; the function needs no initialisation.
        unsafe { (self.nvshmem_info_get_version?)(&raw mut major, &raw mut minor) };
        Some((major as u32, minor as u32))
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The reduction for indices into [`REDUCE_TYPES`] and [`REDUCE_OPS`].
    pub fn reduce(&self, dtype: usize, op: usize) -> Option<Reduce> {
        self.reduce[dtype][op]
    }

    /// The reduction that scatters its result, for the same indices.
    pub fn reduce_scatter(&self, dtype: usize, op: usize) -> Option<Reduce> {
        self.reduce_scatter[dtype][op]
    }

    /// The functions that the library lacks.
    pub fn missing(&self) -> Vec<Function> {
        self.functions.missing()
    }

    /// The error for a missing function.
    #[cold]
    pub fn lacks(&self, function: &'static str) -> MissingFunction {
        MissingFunction {
            function,
            library: NVSHMEM.name,
            version: version_text(self.version),
            path: self.path().to_owned(),
        }
    }
}
