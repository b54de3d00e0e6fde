//! This process as a PE, and the checks that each call goes through.

use super::world::{BOOTSTRAP, TEAMS, World};
use crate::base::call::check_fork;
use crate::base::lock::lock;
use crate::base::violation::violation;
use crate::cuda::context::{CudaContext, current};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

/// Status codes.
pub const INVALID_VALUE: i32 = 1;
pub const INTERNAL: i32 = 7;

/// States of initialisation (`nvshmemx_init_status`).
pub const NOT_INITIALIZED: i32 = 0;
pub const IS_BOOTSTRAPPED: i32 = 1;
pub const IS_INITIALIZED: i32 = 2;
pub const LIMITED_MPG: i32 = 3;

/// A PE.
pub struct Pe {
    pub world: World,
    pub pe: usize,
    pub pes: usize,
    pub context: Arc<CudaContext>,
    pub state: Mutex<State>,
    pub turns: [Turns; TEAMS],
}

/// A team's operations on streams. The team has one set of words for its barriers, so its operations take
/// turns.
#[derive(Default)]
pub struct Turns {
    /// How many are enqueued and have not ended.
    pub enqueued: AtomicUsize,
    is_busy: AtomicBool,
}

/// The changing state of a PE.
#[derive(Default)]
pub struct State {
    pub teams: BTreeMap<i32, Team>,
    /// Allocations by their start in the heap, with their length.
    pub allocations: BTreeMap<u64, u64>,
    /// The offset of the next allocation.
    pub next: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes of device memory of a growing heap.
    pub physical: u64,
    /// Callers' memory that is mapped into the heap, by its offset, with its length.
    pub mapped: BTreeMap<u64, u64>,
    /// Registered memory of this PE, by its start, with its length.
    pub registered: BTreeMap<u64, u64>,
    /// Operations that quiet completes.
    pub pending: Vec<Box<dyn FnOnce() + Send>>,
    /// Operations that become pending once their streams reach them: whether they have.
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

/// The state of initialisation.
pub fn status() -> i32 {
    lock(&PROCESS).status
}

/// This process as a PE, if it is one.
pub fn pe() -> Option<Arc<Pe>> {
    lock(&PROCESS).pe.clone()
}

/// Whether PEs have ever shared a GPU. In 3.4.5 this outlasts a new initialisation, whose status may say
/// otherwise.
static HAS_SHARED: AtomicBool = AtomicBool::new(false);

/// Sets the state of initialisation, and this process's PE.
pub fn set(status: i32, pe: Option<Arc<Pe>>) {
    HAS_SHARED.fetch_or(status == LIMITED_MPG, Ordering::AcqRel);
    *lock(&PROCESS) = Process { status, pe };
}

/// Ends the process with a message, as the library does.
pub fn exit(function: &str, why: &str) -> ! {
    eprintln!("emulated NVSHMEM: {function}: {why}, exiting");
    std::process::exit(255)
}

/// Runs the body of a function that may be called at any time; one thread at a time.
pub fn serialized<R>(function: &'static str, body: impl FnOnce() -> R) -> R {
    check_fork(function);
    let _inside = match INSIDE.try_lock() {
        Ok(inside) => inside,
        Err(TryLockError::Poisoned(inside)) => inside.into_inner(),
        Err(TryLockError::WouldBlock) => {
            violation(function, "one thread at a time may call the library (NVSHMEM_THREAD_SERIALIZED)")
        }
    };
    body()
}

/// Runs the body of a function that needs initialisation, on the PE's device.
pub fn initialized<R>(function: &'static str, body: impl FnOnce(&Arc<Pe>) -> R) -> R {
    serialized(function, || {
        let pe = lock(&PROCESS).pe.clone();
        let Some(pe) = pe else { exit(function, "nvshmem API called before nvshmem_init") };
        match current() {
            Ok(context) if context.handle == pe.context.handle => body(&pe),
            _ => violation(function, "the device with which the library was initialised is not current"),
        }
    })
}

/// As [`initialized`], for a function that the library refuses to PEs that share a GPU.
pub fn with_own_gpu<R>(function: &'static str, body: impl FnOnce(&Arc<Pe>) -> R) -> R {
    initialized(function, |pe| {
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
    /// A barrier of all PEs, apart from those of teams.
    pub fn barrier(&self) {
        self.world.barrier(BOOTSTRAP, self.pe, &self.all());
    }

    /// A barrier of all PEs. Different words on two PEs are a violation.
    pub fn agree(&self, function: &'static str, words: [u64; 2]) {
        let mut mine = [0; 14];
        mine[..2].copy_from_slice(&words);
        let all = self.world.exchange(BOOTSTRAP, self.pe, &self.all(), mine);
        if let Some(pe) = all.iter().position(|words| *words != mine) {
            violation(
                function,
                format!("PE {pe} passes {:?}, PE {} passes {words:?}", &all[pe][..2], self.pe),
            );
        }
    }

    /// All PEs.
    pub fn all(&self) -> Vec<usize> {
        lock(&self.state).teams[&0].members.clone()
    }

    /// A team. A number without a team is a violation.
    pub fn team(&self, function: &'static str, team: i32) -> Team {
        match lock(&self.state).teams.get(&team) {
            Some(team) => team.clone(),
            None => violation(function, format!("the team {team} does not exist, or was destroyed")),
        }
    }

    /// Performs an operation of a team. Two at a time are a violation.
    pub fn turn<R>(&self, function: &'static str, team: i32, operation: impl FnOnce() -> R) -> R {
        let turns = &self.turns[team as usize];
        if turns.is_busy.swap(true, Ordering::AcqRel) {
            violation(function, format!("the team {team} is in an operation on another stream"));
        }
        let result = operation();
        turns.is_busy.store(false, Ordering::Release);
        result
    }

    /// Ends the process if the team has operations on streams: the library's own barrier does not wait for
    /// them.
    pub fn check_idle(&self, function: &'static str, team: i32) {
        if self.turns[team as usize].enqueued.load(Ordering::Acquire) > 0 {
            violation(
                function,
                format!("the team {team}, whose barrier this is, has an operation on a stream"),
            );
        }
    }

    /// A valid PE's number.
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
