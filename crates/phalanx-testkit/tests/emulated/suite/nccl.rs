//! NCCL's functions, as the tests call them: found by name in the library, with handles and addresses as
//! numbers.

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of 2.18, which every later version understands.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub least_ctas: c_int,
    pub most_ctas: c_int,
    pub network: usize,
    pub split_share: c_int,
    pub padding: c_int,
}

impl Config {
    /// Nothing but blocking or not is said.
    pub fn new(blocking: bool) -> Config {
        let undefined = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21801,
            blocking: c_int::from(blocking),
            cga_cluster_size: undefined,
            least_ctas: undefined,
            most_ctas: undefined,
            network: 0,
            split_share: undefined,
            padding: 0,
        }
    }
}

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
pub struct Awaited {
    pub number: c_int,
    pub peer: c_int,
    pub signal: c_int,
    pub context: c_int,
}

type H = u64;
type C = c_int;

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) = $symbol:literal;)*) => {
        /// The table. Each function is called through a method of the same name.
        pub struct Nccl {
            library: libloading::Library,
            $($name: Option<unsafe extern "C" fn($($arg),*) -> C>,)*
        }

        impl Nccl {
            fn load() -> Nccl {
                // SAFETY: the emulator's initialisers do nothing.
                let library = unsafe { libloading::Library::new("libnccl.so.2") }.expect("the library is there");
                // SAFETY: the types are those of nccl.h.
                $(let $name = unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.ok().map(|symbol| *symbol);)*
                Nccl { library, $($name,)* }
            }
        }

        functions!(@methods $($name: fn($($arg),*) = $symbol;)*);
    };
    (@methods $($name:ident: fn($($arg:ty),*) = $symbol:literal;)*) => {
        $(functions!(@method $name ($($arg),*));)*
    };
    (@method $name:ident ()) => { functions!(@emit $name ()); };
    (@method $name:ident ($a:ty)) => { functions!(@emit $name (a: $a)); };
    (@method $name:ident ($a:ty, $b:ty)) => { functions!(@emit $name (a: $a, b: $b)); };
    (@method $name:ident ($a:ty, $b:ty, $c:ty)) => { functions!(@emit $name (a: $a, b: $b, c: $c)); };
    (@method $name:ident ($a:ty, $b:ty, $c:ty, $d:ty)) => { functions!(@emit $name (a: $a, b: $b, c: $c, d: $d)); };
    (@method $name:ident ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty)) => {
        functions!(@emit $name (a: $a, b: $b, c: $c, d: $d, e: $e));
    };
    (@method $name:ident ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty, $f:ty)) => {
        functions!(@emit $name (a: $a, b: $b, c: $c, d: $d, e: $e, f: $f));
    };
    (@method $name:ident ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty, $f:ty, $g:ty)) => {
        functions!(@emit $name (a: $a, b: $b, c: $c, d: $d, e: $e, f: $f, g: $g));
    };
    (@method $name:ident ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty, $f:ty, $g:ty, $h:ty)) => {
        functions!(@emit $name (a: $a, b: $b, c: $c, d: $d, e: $e, f: $f, g: $g, h: $h));
    };
    (@method $name:ident ($a:ty, $b:ty, $c:ty, $d:ty, $e:ty, $f:ty, $g:ty, $h:ty, $i:ty, $j:ty, $k:ty)) => {
        functions!(@emit $name (a: $a, b: $b, c: $c, d: $d, e: $e, f: $f, g: $g, h: $h, i: $i, j: $j, k: $k));
    };
    (@emit $name:ident ($($arg:ident: $ty:ty),*)) => {
        impl Nccl {
            #[allow(clippy::too_many_arguments, reason = "the arguments are NCCL's")]
            pub fn $name(&self, $($arg: $ty),*) -> C {
                let function = self.$name.expect(concat!(stringify!($name), " is in the library"));
                // SAFETY: the tests pass what the function's documentation asks for, or mean to break a rule.
                unsafe { function($($arg),*) }
            }
        }
    };
}

functions! {
    get_version: fn(*mut C) = "ncclGetVersion";
    get_unique_id: fn(*mut UniqueId) = "ncclGetUniqueId";
    init_rank: fn(*mut H, C, UniqueId, C) = "ncclCommInitRank";
    init_rank_config: fn(*mut H, C, UniqueId, C, *const Config) = "ncclCommInitRankConfig";
    init_rank_scalable: fn(*mut H, C, C, C, *const UniqueId, *const Config) = "ncclCommInitRankScalable";
    init_all: fn(*mut H, C, *const C) = "ncclCommInitAll";
    finalize: fn(H) = "ncclCommFinalize";
    destroy: fn(H) = "ncclCommDestroy";
    abort: fn(H) = "ncclCommAbort";
    revoke: fn(H, C) = "ncclCommRevoke";
    split: fn(H, C, C, *mut H, *const Config) = "ncclCommSplit";
    shrink: fn(H, *mut C, C, *mut H, *const Config, C) = "ncclCommShrink";
    comm_unique_id: fn(H, *mut UniqueId) = "ncclCommGetUniqueId";
    grow: fn(H, C, *const UniqueId, C, *mut H, *const Config) = "ncclCommGrow";
    async_error: fn(H, *mut C) = "ncclCommGetAsyncError";
    count: fn(H, *mut C) = "ncclCommCount";
    device: fn(H, *mut C) = "ncclCommCuDevice";
    rank: fn(H, *mut C) = "ncclCommUserRank";
    all_reduce: fn(u64, u64, usize, C, C, H, H) = "ncclAllReduce";
    reduce: fn(u64, u64, usize, C, C, C, H, H) = "ncclReduce";
    reduce_scatter: fn(u64, u64, usize, C, C, H, H) = "ncclReduceScatter";
    broadcast: fn(u64, u64, usize, C, C, H, H) = "ncclBroadcast";
    all_gather: fn(u64, u64, usize, C, H, H) = "ncclAllGather";
    all_to_all: fn(u64, u64, usize, C, H, H) = "ncclAlltoAll";
    gather: fn(u64, u64, usize, C, C, H, H) = "ncclGather";
    scatter: fn(u64, u64, usize, C, C, H, H) = "ncclScatter";
    send: fn(u64, usize, C, C, H, H) = "ncclSend";
    recv: fn(u64, usize, C, C, H, H) = "ncclRecv";
    put_signal: fn(u64, usize, C, C, H, usize, C, C, C, H, H) = "ncclPutSignal";
    signal: fn(C, C, C, C, H, H) = "ncclSignal";
    wait_signal: fn(C, *const Awaited, H, H) = "ncclWaitSignal";
    group_start: fn() = "ncclGroupStart";
    group_end: fn() = "ncclGroupEnd";
    pre_mul_sum: fn(*mut C, u64, C, C, H) = "ncclRedOpCreatePreMulSum";
    destroy_op: fn(C, H) = "ncclRedOpDestroy";
    mem_alloc: fn(*mut u64, usize) = "ncclMemAlloc";
    mem_free: fn(u64) = "ncclMemFree";
    register: fn(H, u64, usize, *mut H) = "ncclCommRegister";
    deregister: fn(H, H) = "ncclCommDeregister";
    window: fn(H, u64, usize, *mut H, C) = "ncclCommWindowRegister";
    close_window: fn(H, H) = "ncclCommWindowDeregister";
    suspend: fn(H, C) = "ncclCommSuspend";
    resume: fn(H) = "ncclCommResume";
    mem_stats: fn(H, C, *mut u64) = "ncclCommMemStats";
}

pub const SUCCESS: C = 0;
pub const INVALID_ARGUMENT: C = 4;
pub const INVALID_USAGE: C = 5;
pub const REMOTE_ERROR: C = 6;
pub const IN_PROGRESS: C = 7;

/// The loaded library.
pub fn nccl() -> &'static Nccl {
    static NCCL: OnceLock<Nccl> = OnceLock::new();
    NCCL.get_or_init(Nccl::load)
}

impl Nccl {
    /// Whether the loader finds a function.
    pub fn has(&self, symbol: &str) -> bool {
        // SAFETY: the address is not used.
        unsafe { self.library.get::<*const ()>(symbol.as_bytes()) }.is_ok()
    }

    /// The text of the last error.
    pub fn last_error(&self) -> String {
        // SAFETY: the type is that of nccl.h.
        let function = unsafe {
            self.library.get::<unsafe extern "C" fn(H) -> *const std::ffi::c_char>(b"ncclGetLastError\0")
        };
        // SAFETY: it answers a string.
        unsafe { CStr::from_ptr(function.expect("it is there")(0)) }.to_string_lossy().into_owned()
    }

    /// The communicator's state.
    pub fn state(&self, comm: H) -> C {
        let mut state = -1;
        assert_eq!(self.async_error(comm, &mut state), SUCCESS);
        state
    }

    /// Waits until a communicator is no longer in progress, and answers its state then.
    pub fn settle(&self, comm: H) -> C {
        let since = Instant::now();
        loop {
            match self.state(comm) {
                IN_PROGRESS if since.elapsed() < Duration::from_secs(30) => {
                    std::thread::sleep(Duration::from_micros(50))
                }
                state => return state,
            }
        }
    }
}

/// An error unless a call answered this code.
pub fn expect(what: &str, code: C, expected: C) -> Result<(), String> {
    if code == expected {
        return Ok(());
    }
    Err(format!("{what} answered {code} and not {expected}; the last error: {}", nccl().last_error()))
}

/// An error unless a call succeeded.
pub fn ok(what: &str, code: C) -> Result<(), String> {
    expect(what, code, SUCCESS)
}
