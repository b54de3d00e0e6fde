//! Initialisation and finalisation, and how PEs find each other.

use super::completion::{awaited, complete};
use super::heap;
use super::pmi::ProcessManager;
use super::process::{
    self, INTERNAL, INVALID_VALUE, IS_BOOTSTRAPPED, IS_INITIALIZED, LIMITED_MPG, NOT_INITIALIZED, Pe, State,
    Team, exit, initialized, nvshmem, serialized,
};
use super::world::{self, BOOTSTRAP, PES, World};
use crate::base::exit::{check_at_exit, run_at_exit};
use crate::base::lock::lock;
use crate::base::pointers::Out;
use crate::base::settings::{Init, settings};
use crate::base::violation::violation;
use crate::cuda::context::current;
use crate::cuda::device::physical;
use crate::cuda::virtual_memory;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// `nvshmemx_uniqueid_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    version: c_int,
    process: u32,
    file: c_int,
    magic: u32,
    rest: [u8; 112],
}

/// `nvshmemx_init_attr_t`, with its inner structures laid out.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Attributes {
    version: c_int,
    mpi_comm: *mut c_void,
    args_version: c_int,
    _padding: c_int,
    uid_version: c_int,
    id: *const UniqueId,
    rank: c_int,
    ranks: c_int,
    content: [u8; 96],
}

const _: () = assert!(size_of::<UniqueId>() == 128 && size_of::<Attributes>() == 144);
const _: () = assert!(std::mem::offset_of!(Attributes, uid_version) == 24);
const MAGIC: u32 = 0x656d_756c;
/// No flags: the environment says how PEs find each other.
const BY_ENVIRONMENT: c_uint = 0;
/// `NVSHMEMX_INIT_WITH_UNIQUEID`.
const BY_UNIQUE_ID: c_uint = 8;

/// Whether PEs were found by the environment. That lasts until the process ends: later initialisations use it
/// too.
static IS_KEPT: AtomicBool = AtomicBool::new(false);

fn check_version(function: &'static str, what: &str, word: c_int, size: c_int) {
    if word != (1 << 16) + size {
        violation(function, format!("{what} has the invalid version {word:#x}"));
    }
}

nvshmem! {
    fn nvshmemx_get_uniqueid(id: Out<UniqueId>) -> c_int {
        serialized(FUNCTION, || {
            let Some(given) = id.as_in().get() else { return INVALID_VALUE };
            check_version(FUNCTION, "the id", given.version, 128);
            let file = world::create();
            let (process, number) = world::place(&file);
            world::keep(file);
            id.set(UniqueId { version: given.version, process, file: number, magic: MAGIC, rest: [0; 112] });
            0
        })
    }

    fn nvshmemx_set_attr_uniqueid_args(rank: c_int, ranks: c_int, id: *const UniqueId, attr: Out<Attributes>) -> c_int {
        serialized(FUNCTION, || {
            let Some(given) = attr.as_in().get() else { return INVALID_VALUE };
            check_version(FUNCTION, "the attributes", given.version, 144);
            check_version(FUNCTION, "the arguments", given.args_version, 128);
            if rank < 0 || rank >= ranks {
                return INVALID_VALUE;
            }
            // As in the library, the id is read later, through this pointer.
            attr.set(Attributes { id, rank, ranks, ..given });
            0
        })
    }

    fn nvshmemx_hostlib_init_attr(flags: c_uint, attr: Out<Attributes>) -> c_int {
        serialized(FUNCTION, || begin(FUNCTION, flags, attr))
    }

    fn nvshmemx_init_status() -> c_int {
        serialized(FUNCTION, process::status)
    }

    fn nvshmemx_hostlib_finalize() {
        if process::status() < IS_INITIALIZED {
            exit(FUNCTION, "aborting due to error in nvshmem_finalize");
        }
        initialized(FUNCTION, |pe| {
            complete(pe, &awaited(pe));
            for stream in pe.context.streams() {
                stream.mark().wait();
            }
            pe.barrier();
            heap::forget_all(pe);
            let is_kept = IS_KEPT.load(Ordering::Relaxed);
            process::set(if is_kept { IS_BOOTSTRAPPED } else { NOT_INITIALIZED }, None);
        });
    }

    fn nvshmem_global_exit(status: c_int) {
        // Without effect after a bootstrap by unique id, as in the library.
        serialized(FUNCTION, || {
            if IS_KEPT.load(Ordering::Relaxed) {
                std::process::exit(status);
            }
        })
    }

    fn nvshmem_query_thread(provided: Out<c_int>) {
        provided.set(2);
    }

    fn nvshmem_my_pe() -> c_int {
        initialized(FUNCTION, |pe| pe.pe as c_int)
    }

    fn nvshmem_n_pes() -> c_int {
        initialized(FUNCTION, |pe| pe.pes as c_int)
    }

    fn nvshmem_info_get_version(major: Out<c_int>, minor: Out<c_int>) {
        major.set(1);
        minor.set(3);
    }

    fn nvshmem_info_get_name(name: Out<c_char>) {
        for (n, byte) in b"NVSHMEM, emulated\0".iter().enumerate() {
            name.set_nth(n, *byte as c_char);
        }
    }

    fn nvshmemx_vendor_get_version_info(major: Out<c_int>, minor: Out<c_int>, patch: Out<c_int>) {
        let version = settings().nvshmem_version;
        major.set(version / 10_000);
        minor.set(version / 100 % 100);
        patch.set(version % 100);
    }
}

/// Checks at the process's exit that NVSHMEM was finalised. Registered at every initialisation, as the
/// library does: the last one runs before the functions that the program registered earlier.
extern "C" fn check_finalized() {
    if process::status() >= IS_INITIALIZED {
        violation("exit", "NVSHMEM was not finalized");
    }
}

fn begin(function: &'static str, flags: c_uint, attr: Out<Attributes>) -> c_int {
    check_at_exit(check_finalized);
    virtual_memory::set_heap(heap::is_mapped);
    match settings().nvshmem_init {
        Init::Works => {}
        Init::Hangs => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        Init::Exits => exit(function, "aborting due to error in init"),
        // The device cannot be set up, in 3.4.5.
        Init::Half => {
            process::set(IS_BOOTSTRAPPED, None);
            return 0;
        }
        // The same in later versions.
        Init::Fails => {
            process::set(IS_BOOTSTRAPPED, None);
            return INTERNAL;
        }
    }
    let is_kept = IS_KEPT.load(Ordering::Relaxed);
    if process::status() != if is_kept { IS_BOOTSTRAPPED } else { NOT_INITIALIZED } {
        violation(function, "the library was initialised before, or failed to initialise");
    }
    let Ok(context) = current() else { violation(function, "the thread has no current device") };
    let found = match flags {
        _ if is_kept => by_environment(),
        BY_ENVIRONMENT => by_environment(),
        BY_UNIQUE_ID => {
            let Some(attr) = attr.as_in().get() else { return INVALID_VALUE };
            by_unique_id(function, attr)
        }
        _ => violation(function, format!("the flags {flags} are not valid")),
    };
    let Some((world, rank, ranks)) = found else { return INTERNAL };
    IS_KEPT.fetch_or(flags == BY_ENVIRONMENT, Ordering::Relaxed);
    let pes: Vec<usize> = (0..ranks).collect();
    let alone = Team { members: vec![rank] };
    let all = Team { members: pes };
    // The predefined teams: the world, shared memory, the node, and PEs of this number on other nodes.
    let teams = BTreeMap::from([(0, all.clone()), (1, all.clone()), (2, all), (3, alone)]);
    let state = Mutex::new(State { teams, ..State::default() });
    let turns = Default::default();
    let pe = Pe { world, pe: rank, pes: ranks, context, state, turns };
    let gpu = [physical(pe.context.device) as u64; 14];
    let gpus = pe.world.exchange(BOOTSTRAP, rank, &pe.all(), gpu);
    // PEs on one GPU share it without MPS.
    let shares_gpu = gpus.iter().filter(|other| **other == gpu).count() > 1;
    process::set(if shares_gpu { LIMITED_MPG } else { IS_INITIALIZED }, Some(Arc::new(pe)));
    0
}

/// The job of a unique id: its shared file, this PE's number, and the number of PEs.
fn by_unique_id(function: &'static str, attr: Attributes) -> Option<(World, usize, usize)> {
    check_version(function, "the arguments of the unique id", attr.uid_version, 24);
    // SAFETY: the caller keeps the id valid until here, where the library reads it.
    let id = unsafe { attr.id.read() };
    if id.magic != MAGIC || attr.ranks as usize > PES {
        return None;
    }
    let world = World::open(id.process, id.file).ok()?;
    Some((world, attr.rank as usize, attr.ranks as usize))
}

fn by_environment() -> Option<(World, usize, usize)> {
    let unknown =
        |error: &std::io::Error| eprintln!("emulated NVSHMEM: the bootstrap by the environment: {error}");
    find_peers().inspect_err(unknown).ok()
}

/// The process manager, from the first initialisation by the environment until the process ends.
static MANAGER: Mutex<Option<ProcessManager>> = Mutex::new(None);

/// The job of the process manager; without one, a job of this PE alone.
fn find_peers() -> std::io::Result<(World, usize, usize)> {
    let mut manager = lock(&MANAGER);
    if manager.is_none() {
        *manager = ProcessManager::find()?;
        if manager.is_some() {
            run_at_exit(leave_process_manager);
        }
    }
    match manager.as_mut() {
        Some(manager) => share_file(manager),
        None => {
            let file = world::create();
            let (process, number) = world::place(&file);
            Ok((World::open(process, number)?, 0, 1))
        }
    }
}

/// Tells the process manager at the process's exit that nothing failed. Hydra ends the other ranks of a rank
/// that ends without it.
extern "C" fn leave_process_manager() {
    if let Some(manager) = lock(&MANAGER).as_mut() {
        let _ = manager.leave();
    }
}

/// Makes the shared file on PE 0, and opens it on all.
fn share_file(manager: &mut ProcessManager) -> std::io::Result<(World, usize, usize)> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let key = format!("world-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    if manager.rank == 0 {
        let file = world::create();
        let (process, number) = world::place(&file);
        world::keep(file);
        manager.put(&key, &format!("{process}:{number}"))?;
    }
    manager.barrier()?;
    let place = manager.get(&key)?;
    let (process, number) = place.split_once(':').ok_or(std::io::ErrorKind::InvalidData)?;
    let process = process.parse().map_err(std::io::Error::other)?;
    let number = number.parse().map_err(std::io::Error::other)?;
    Ok((World::open(process, number)?, manager.rank, manager.ranks))
}
