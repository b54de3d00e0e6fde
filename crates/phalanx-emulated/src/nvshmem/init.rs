//! Beginning and end.

use super::pmi::ProcessManager;
use super::process::{
    self, IS_BOOTSTRAPPED, IS_INITIALIZED, LIMITED_MPG, NOT_INITIALIZED, Pe, State, Team, alone, exit,
    inside, nvshmem,
};
use super::world::{self, BOOTSTRAP, PES, World};
use crate::cuda::context::current;
use crate::cuda::device::physical;
use crate::lock;
use crate::pointers::Out;
use crate::settings::{Init, settings};
use crate::violation::violation;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Status codes.
pub const INVALID_VALUE: c_int = 1;
pub const INTERNAL: c_int = 7;

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
const BY_ENVIRONMENT: c_uint = 0;
const BY_UNIQUE_ID: c_uint = 8;

/// Whether the PEs were found by the environment: that stays until the process ends, whatever a later initialisation says.
static IS_KEPT: AtomicBool = AtomicBool::new(false);

fn check_version(function: &'static str, what: &str, word: c_int, size: c_int) {
    if word != (1 << 16) + size {
        violation(function, format!("the version word of {what} is {word:#x}"));
    }
}

nvshmem! {
    fn nvshmemx_get_uniqueid(id: Out<UniqueId>) -> c_int {
        alone(FUNCTION, || {
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
        alone(FUNCTION, || {
            let Some(given) = attr.as_in().get() else { return INVALID_VALUE };
            check_version(FUNCTION, "the attributes", given.version, 144);
            check_version(FUNCTION, "the arguments", given.args_version, 128);
            if rank < 0 || rank >= ranks {
                return INVALID_VALUE;
            }
            // The pointer is kept, and not what it points to.
            attr.set(Attributes { id, rank, ranks, ..given });
            0
        })
    }

    fn nvshmemx_hostlib_init_attr(flags: c_uint, attr: Out<Attributes>) -> c_int {
        alone(FUNCTION, || begin(FUNCTION, flags, attr))
    }

    fn nvshmemx_init_status() -> c_int {
        alone(FUNCTION, process::status)
    }

    fn nvshmemx_hostlib_finalize() {
        if process::status() < IS_INITIALIZED {
            exit(FUNCTION, "aborting due to error in nvshmem_finalize");
        }
        inside(FUNCTION, |pe| {
            super::rma::complete(pe, &super::rma::awaited(pe));
            for stream in pe.context.streams() {
                stream.mark().wait();
            }
            pe.barrier();
            super::memory::forget_all(pe);
            let is_kept = IS_KEPT.load(Ordering::Relaxed);
            process::set(if is_kept { IS_BOOTSTRAPPED } else { NOT_INITIALIZED }, None);
        });
    }

    fn nvshmem_global_exit(status: c_int) {
        // The bootstrap by unique id has no such function.
        alone(FUNCTION, || {
            if IS_KEPT.load(Ordering::Relaxed) {
                std::process::exit(status);
            }
        })
    }

    fn nvshmem_query_thread(provided: Out<c_int>) {
        provided.set(2);
    }

    fn nvshmem_my_pe() -> c_int {
        inside(FUNCTION, |pe| pe.pe as c_int)
    }

    fn nvshmem_n_pes() -> c_int {
        inside(FUNCTION, |pe| pe.pes as c_int)
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

fn begin(function: &'static str, flags: c_uint, attr: Out<Attributes>) -> c_int {
    crate::exit::watch_nvshmem();
    match settings().nvshmem_init {
        Init::Works => {}
        Init::Hangs => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        Init::Exits => exit(function, "aborting due to error in init"),
        // As 3.4.5 does, and as later ones do, when the device cannot be set up.
        Init::Half => {
            process::set(IS_BOOTSTRAPPED, None);
            return 0;
        }
        Init::Fails => {
            process::set(IS_BOOTSTRAPPED, None);
            return INTERNAL;
        }
    }
    let is_kept = IS_KEPT.load(Ordering::Relaxed);
    if process::status() != if is_kept { IS_BOOTSTRAPPED } else { NOT_INITIALIZED } {
        violation(function, "the library is initialised, or failed to be, already");
    }
    let Ok(context) = current() else { violation(function, "no device is current") };
    let found = match flags {
        _ if is_kept => by_environment(),
        BY_ENVIRONMENT => by_environment(),
        BY_UNIQUE_ID => {
            let Some(attr) = attr.as_in().get() else { return INVALID_VALUE };
            by_unique_id(function, attr)
        }
        _ => violation(function, format!("the flags {flags} are none")),
    };
    let Some((world, rank, ranks)) = found else { return INTERNAL };
    IS_KEPT.fetch_or(flags == BY_ENVIRONMENT, Ordering::Relaxed);
    let everybody: Vec<usize> = (0..ranks).collect();
    let alone = Team { members: vec![rank] };
    let all = Team { members: everybody };
    // The world, those who share memory, the node, and those with this number on other nodes, of which there are none.
    let teams = BTreeMap::from([(0, all.clone()), (1, all.clone()), (2, all), (3, alone)]);
    let state = Mutex::new(State { teams, ..State::default() });
    let turns = Default::default();
    let pe = Pe { world, pe: rank, pes: ranks, context, state, turns };
    let gpu = [physical(pe.context.device) as u64; 14];
    let gpus = pe.world.exchange(BOOTSTRAP, rank, &pe.all(), gpu);
    // There is no MPS that would share it out.
    let shares_gpu = gpus.iter().filter(|other| **other == gpu).count() > 1;
    process::set(if shares_gpu { LIMITED_MPG } else { IS_INITIALIZED }, Some(Arc::new(pe)));
    0
}

/// The PEs that have the same id: what they share, this one's number, how many there are.
fn by_unique_id(function: &'static str, attr: Attributes) -> Option<(World, usize, usize)> {
    check_version(function, "the arguments of the unique id", attr.uid_version, 24);
    // SAFETY: the caller's promise; it is read here and not before, as in the library.
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

/// The process manager, from the first time that peers are found by it until the process ends.
static MANAGER: Mutex<Option<ProcessManager>> = Mutex::new(None);

/// By the process manager; without one this PE is alone.
fn find_peers() -> std::io::Result<(World, usize, usize)> {
    let mut manager = lock(&MANAGER);
    if manager.is_none() {
        *manager = ProcessManager::find()?;
        if manager.is_some() {
            crate::exit::leave_process_manager();
        }
    }
    match manager.as_mut() {
        Some(manager) => meet(manager),
        None => {
            let file = world::create();
            let (process, number) = world::place(&file);
            Ok((World::open(process, number)?, 0, 1))
        }
    }
}

/// The end of the process: nobody hears whether it worked.
pub fn leave_process_manager() {
    if let Some(manager) = lock(&MANAGER).as_mut() {
        let _ = manager.leave();
    }
}

/// PE 0 makes the shared file, and all learn where it is.
fn meet(manager: &mut ProcessManager) -> std::io::Result<(World, usize, usize)> {
    static MEETINGS: AtomicUsize = AtomicUsize::new(0);
    let key = format!("world-{}", MEETINGS.fetch_add(1, Ordering::Relaxed));
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

impl Pe {
    /// All PEs meet, on the library's own account.
    pub fn barrier(&self) {
        self.world.barrier(BOOTSTRAP, self.pe, &self.all());
    }

    /// All PEs meet and say the same, or the program is wrong.
    pub fn agree(&self, function: &'static str, words: [u64; 2]) {
        let mut say = [0; 14];
        say[..2].copy_from_slice(&words);
        let heard = self.world.exchange(BOOTSTRAP, self.pe, &self.all(), say);
        if let Some(pe) = heard.iter().position(|words| *words != say) {
            violation(
                function,
                format!("PE {pe} passes {:?}, PE {} passes {words:?}", &heard[pe][..2], self.pe),
            );
        }
    }

    fn all(&self) -> Vec<usize> {
        lock(&self.state).teams[&0].members.clone()
    }
}
