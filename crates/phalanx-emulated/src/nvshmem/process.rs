//! This process as a PE, and what every exported function goes through.

use super::world::{TEAMS, World};
use crate::call::check_fork;
use crate::cuda::context::{Context, current};
use crate::lock;
use crate::violation::violation;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

/// How far initialisation has come (`nvshmemx_init_status`).
pub const NOT_INITIALIZED: i32 = 0;
pub const IS_BOOTSTRAPPED: i32 = 1;
pub const IS_INITIALIZED: i32 = 2;
pub const LIMITED_MPG: i32 = 3;

/// A PE.
pub struct Pe {
    pub world: World,
    pub pe: usize,
    pub pes: usize,
    pub context: Arc<Context>,
    pub state: Mutex<State>,
    pub turns: [Turns; TEAMS],
}

/// The operations of a team that are on streams: it has one place where its PEs tell each other how far they are.
#[derive(Default)]
pub struct Turns {
    /// Enqueued, and not over.
    pub enqueued: AtomicUsize,
    is_busy: AtomicBool,
}

/// What changes.
#[derive(Default)]
pub struct State {
    pub teams: BTreeMap<i32, Team>,
    /// Allocations by their start in the heap, with their length.
    pub allocations: BTreeMap<u64, u64>,
    /// Where the next one goes, and how many bytes are in use.
    pub next: u64,
    pub used: u64,
    /// Bytes of the device that the heap has, if it grows.
    pub physical: u64,
    /// Memory of the callers' that is mapped into the heap: offset and length.
    pub mapped: BTreeMap<u64, u64>,
    /// Registered memory of this PE's: start and length.
    pub registered: BTreeMap<u64, u64>,
    /// Operations that quiet completes.
    pub pending: Vec<Box<dyn FnOnce() + Send>>,
    /// Those that wait for their streams to get there: whether they have.
    pub awaited: Vec<Arc<AtomicBool>>,
}

/// A team: its members as PEs of the world.
#[derive(Clone)]
pub struct Team {
    pub members: Vec<usize>,
}

struct Process {
    status: i32,
    pe: Option<Arc<Pe>>,
}

static PROCESS: Mutex<Process> = Mutex::new(Process { status: NOT_INITIALIZED, pe: None });
static INSIDE: Mutex<()> = Mutex::new(());

pub fn status() -> i32 {
    lock(&PROCESS).status
}

/// This process as a PE, if it is one.
pub fn pe() -> Option<Arc<Pe>> {
    lock(&PROCESS).pe.clone()
}

/// PEs have shared a GPU: 3.4.5 was seen not to forget it when it is initialised anew, whatever it then answers of its status.
static HAS_SHARED: AtomicBool = AtomicBool::new(false);

pub fn set(status: i32, pe: Option<Arc<Pe>>) {
    HAS_SHARED.fetch_or(status == LIMITED_MPG, Ordering::AcqRel);
    *lock(&PROCESS) = Process { status, pe };
}

/// Ends the process as the library does, with what it says.
pub fn exit(function: &str, why: &str) -> ! {
    eprintln!("emulated NVSHMEM: {function}: {why}, exiting");
    std::process::exit(255)
}

/// Runs the body of a function that may be called at any time; one thread at a time.
pub fn alone<R>(function: &'static str, body: impl FnOnce() -> R) -> R {
    check_fork(function);
    let _inside = match INSIDE.try_lock() {
        Ok(inside) => inside,
        Err(TryLockError::Poisoned(inside)) => inside.into_inner(),
        Err(TryLockError::WouldBlock) => {
            violation(function, "one thread at a time may be inside (NVSHMEM_THREAD_SERIALIZED)")
        }
    };
    body()
}

/// Runs the body of a function that needs initialisation, on the PE's device.
pub fn inside<R>(function: &'static str, body: impl FnOnce(&Arc<Pe>) -> R) -> R {
    alone(function, || {
        let pe = lock(&PROCESS).pe.clone();
        let Some(pe) = pe else { exit(function, "nvshmem API called before nvshmem_init") };
        match current() {
            Ok(context) if context.handle == pe.context.handle => body(&pe),
            _ => violation(function, "the device with which the library was initialised is not current"),
        }
    })
}

/// The same for a function that PEs which share a GPU do not have.
pub fn with_own_gpu<R>(function: &'static str, body: impl FnOnce(&Arc<Pe>) -> R) -> R {
    inside(function, |pe| {
        if HAS_SHARED.load(Ordering::Acquire) {
            exit(
                function,
                "Called NVSHMEM API not supported with limited MPG (Multiple Processes Per GPU) runs",
            );
        }
        body(pe)
    })
}

impl Pe {
    pub fn team(&self, function: &'static str, team: i32) -> Team {
        match lock(&self.state).teams.get(&team) {
            Some(team) => team.clone(),
            None => violation(function, format!("the team {team} does not exist, or was destroyed")),
        }
    }

    /// Carries out an operation of a team: one at a time.
    pub fn turn<R>(&self, function: &'static str, team: i32, operation: impl FnOnce() -> R) -> R {
        let turns = &self.turns[team as usize];
        if turns.is_busy.swap(true, Ordering::AcqRel) {
            violation(function, format!("the team {team} is in an operation on another stream"));
        }
        let result = operation();
        turns.is_busy.store(false, Ordering::Release);
        result
    }

    /// The library's own barrier of a team waits for no stream.
    pub fn check_idle(&self, function: &'static str, team: i32) {
        if self.turns[team as usize].enqueued.load(Ordering::Acquire) > 0 {
            violation(
                function,
                format!("the team {team}, whose barrier this is, has an operation on a stream"),
            );
        }
    }

    /// A PE, checked.
    pub fn peer(&self, function: &'static str, pe: i32) -> usize {
        match usize::try_from(pe).ok().filter(|pe| *pe < self.pes) {
            Some(pe) => pe,
            None => violation(function, format!("PE {pe} does not exist")),
        }
    }
}

/// Defines exported functions. In a body, `FUNCTION` is the function's name.
macro_rules! nvshmem {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $answer:ty)? $body:block)*) => {$(
        #[allow(clippy::too_many_arguments, reason = "the arguments are the C library's")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) $(-> $answer)? {
            #[allow(dead_code, reason = "not every body names itself")]
            const FUNCTION: &str = stringify!($name);
            $body
        }
    )*};
}
pub(super) use nvshmem;
