//! [`Context`]: this process as a PE, from initialisation to its end.

use super::control::{Control, Step};
use super::device::{Device, failed};
use super::library;
use super::library::{LOOK, Library, within};
use super::limits::Limits;
use crate::contract::hosts::HostTopology;
use crate::gpu::backoff::Backoff;
use crate::gpu::cuda::gpu_ids;
use crate::os::sync::lock;
use crate::os::{at_exit, leave};
use crate::rendezvous::environment::Environment;
use crate::rendezvous::gpus::{Visible, settle as settle_gpu};
use crate::types::error::{Error, Result, TimeoutError, UnsupportedError, UsageError};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use cudarc::driver::{CudaContext, CudaStream};
use phalanx_sys::nvshmem::{
    OLDEST, Plugin, init_flags, init_status, nvshmemx_init_attr_t, nvshmemx_uniqueid_t, plugin, version_text,
};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What the process can do with NVSHMEM: it has at most one context at a time.
enum Process {
    Free,
    InUse,
    /// A context that did not end well; nothing can begin after it.
    Spent(Error),
}

static PROCESS: Mutex<Process> = Mutex::new(Process::Free);

/// What PEs find each other by: made by one of them, given to all others in whatever way.
///
/// Making one opens a listening socket in this process, to which the other PEs connect;
/// `NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME` chooses the network interface. The bytes are no secret from whoever can read them:
/// they are as good as an invitation. `nvshmemx_get_uniqueid`
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(nvshmemx_uniqueid_t);

impl UniqueId {
    /// Size in bytes.
    pub const BYTES: usize = nvshmemx_uniqueid_t::BYTES;

    /// A new one. Needs no GPU.
    ///
    /// # Errors
    /// [`Error::LibraryNotFound`], [`Error::Library`].
    pub fn new() -> Result<UniqueId> {
        let library = library::load()?;
        let name = "nvshmemx_get_uniqueid";
        let get = library.need(library.nvshmemx_get_uniqueid, name)?;
        plugin::UID.load(library.path())?;
        let mut id = nvshmemx_uniqueid_t::new();
        // SAFETY: a valid out-pointer whose version word is set; the function needs no initialisation.
        library.check(name, unsafe { get(&raw mut id) })?;
        Ok(UniqueId(id))
    }

    /// The bytes that the other PEs need.
    pub fn to_bytes(&self) -> [u8; UniqueId::BYTES] {
        self.0.to_bytes()
    }

    /// An id that another PE made.
    ///
    /// # Errors
    /// [`UsageError::Setting`] if the bytes are not those of an id.
    pub fn from_bytes(bytes: &[u8; UniqueId::BYTES]) -> Result<UniqueId> {
        nvshmemx_uniqueid_t::from_bytes(bytes).map(UniqueId).ok_or_else(|| {
            let value = format!("{:02x?}…", &bytes[..4]);
            let expected = "the 128 bytes of UniqueId::to_bytes, which begin with their version".into();
            UsageError::Setting { name: "the unique id".into(), value, expected }.into()
        })
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nvshmem::UniqueId(…)")
    }
}

/// Settings for a new [`Context`].
#[derive(Debug, Clone, Default)]
pub struct Builder {
    pub(crate) gpu: Option<usize>,
    pub(crate) timeout: Option<Duration>,
}

impl Builder {
    /// Which GPU this PE uses, as the process numbers those it sees. Default: the communicator's, else one that no other PE of
    /// its host has; without a communicator, the number that the launcher gives it there, or GPU 0 without a launcher.
    pub fn gpu(mut self, gpu: usize) -> Builder {
        self.gpu = Some(gpu);
        self
    }

    /// How long a wait may take: see [`Context::set_timeout`]. Default: the communicator's, else `PHALANX_TIMEOUT`.
    pub fn timeout(mut self, timeout: Duration) -> Builder {
        self.timeout = Some(timeout);
        self
    }

    /// As [`init`](Builder::init), for PEs that meet on a channel which was made for them.
    pub(crate) fn init_between(self, control: Control, topology: &HostTopology) -> Result<Context> {
        let timeout = self.limit()?;
        let (rank, ranks) = (control.rank(), control.world_size());
        check_processes(topology, &control)?;
        // Whether PEs can share a GPU the library says.
        let seen = gpu_ids().and_then(|ids| Visible::here(ids, self.gpu, true));
        let gpu = settle_gpu("NVSHMEM", seen, (rank, topology), |own| control.tell_bytes(own))?;
        // Whoever cannot go on says so before the others are in the library, where they would wait for ever.
        let ready = Ready::new(gpu, Some(&plugin::UID));
        let agreed = control.agree(ready.is_ok(), "begin (NVSHMEM, its GPU, or an earlier context)");
        let ready = ready?;
        agreed?;
        let version = u64::from(ready.library.version());
        let mut versions = vec![0u64; ranks];
        control.all_gather(&[version], &mut versions)?;
        check_versions(&versions)?;
        let mut id = [0u8; UniqueId::BYTES];
        let mut made = Ok(());
        if rank == 0 {
            made = UniqueId::new().map(|new| id = new.to_bytes());
        }
        let agreed = control.agree(made.is_ok(), "make a unique id");
        made?;
        agreed?;
        let mut ids = vec![0u8; UniqueId::BYTES * ranks];
        control.all_gather(&id, &mut ids)?;
        id.copy_from_slice(&ids[..UniqueId::BYTES]);
        let id = UniqueId::from_bytes(&id)?;
        ready.begin(Some((id, rank, ranks)), Some(control), timeout)
    }

    /// As [`Context::init_with_id`], with these settings.
    pub fn init_with_id(self, id: UniqueId, pe: usize, pes: usize) -> Result<Context> {
        if pe >= pes || pes > c_int::MAX as usize {
            let (operation, role) = ("nvshmem::Context::init_with_id", "PE");
            return Err(UsageError::Rank { operation, role, rank: pe, world_size: pes }.into());
        }
        let timeout = self.limit()?;
        let ready = Ready::new(self.gpu_by_launcher()?, Some(&plugin::UID))?;
        ready.begin(Some((id, pe, pes)), None, timeout)
    }

    /// As [`Context::init_from_environment`], with these settings.
    pub fn init_from_environment(self) -> Result<Context> {
        let timeout = self.limit()?;
        Ready::new(self.gpu_by_launcher()?, Plugin::of_environment())?.begin(None, None, timeout)
    }

    fn gpu_by_launcher(&self) -> Result<usize> {
        match self.gpu {
            Some(gpu) => Ok(gpu),
            None => {
                let launcher = Environment::current().launcher()?;
                let number = launcher.and_then(|launcher| launcher.local_rank).unwrap_or(0);
                // A launcher that shows each process one GPU has chosen it.
                Ok(if CudaContext::device_count().is_ok_and(|gpus| gpus == 1) { 0 } else { number })
            }
        }
    }

    fn limit(&self) -> Result<Duration> {
        match self.timeout {
            Some(timeout) => Ok(timeout),
            None => Ok(crate::rendezvous::environment::timeout_from_environment()?),
        }
    }
}

/// Ranks that are threads of one process cannot be PEs.
fn check_processes(topology: &HostTopology, control: &Control) -> Result<()> {
    let mut processes = vec![0u32; control.world_size()];
    control.all_gather(&[std::process::id()], &mut processes)?;
    for rank in 0..processes.len() {
        let same = |other: &usize| processes[*other] == processes[rank] && topology.same_host(rank, *other);
        if let Some(other) = (0..rank).find(same) {
            return Err(Error::from(UnsupportedError {
                what: "NVSHMEM for ranks that are threads".into(),
                why: format!("ranks {other} and {rank} are in one process, and a process is one PE"),
                remedy: "start a process for each rank (phalanx launch, torchrun, mpirun, srun)".into(),
            }));
        }
    }
    Ok(())
}

fn check_versions(versions: &[u64]) -> Result<()> {
    match versions.iter().position(|version| *version != versions[0]) {
        None => Ok(()),
        Some(pe) => Err(Error::from(UnsupportedError {
            what: "NVSHMEM with libraries of different versions".into(),
            why: format!(
                "PE 0 has {}, PE {pe} has {}",
                version_text(versions[0] as u32),
                version_text(versions[pe] as u32)
            ),
            remedy: "install one version everywhere, or name it with PHALANX_NVSHMEM_LIB".into(),
        })),
    }
}

/// All that can be had before the other PEs are needed.
struct Ready {
    library: &'static Library,
    device: Device,
    claim: Claim,
}

/// The process's right to have a context. Given back when it is dropped, unless the library was entered.
struct Claim {
    entered: bool,
}

impl Claim {
    fn new() -> Result<Claim> {
        let mut process = lock(&PROCESS);
        match &*process {
            Process::Free => {
                *process = Process::InUse;
                Ok(Claim { entered: false })
            }
            Process::Spent(error) => Err(error.clone()),
            Process::InUse => Err(Error::from(UnsupportedError {
                what: "a second NVSHMEM context".into(),
                why: "a process is one PE, and this one has a context already".into(),
                remedy: "finalize that one first, or pass it on".into(),
            })),
        }
    }

    /// No other context can follow.
    fn spend(error: &Error) {
        *lock(&PROCESS) = Process::Spent(error.clone());
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut process = lock(&PROCESS);
        if matches!(&*process, Process::InUse) {
            *process = if self.entered { Process::Spent(abandoned()) } else { Process::Free };
        }
    }
}

/// The process exits. A library that has not been finalized, which is not for one process to do, would crash in its handler (3.4.5:
/// `bootstrap_finalize`).
fn end(status: Option<c_int>) {
    let is_left = matches!(&*lock(&PROCESS), Process::InUse | Process::Spent(_));
    if let (true, Some(status)) = (is_left, status) {
        leave(status);
    }
}

#[cold]
fn abandoned() -> Error {
    Error::from(UnsupportedError {
        what: "another NVSHMEM context".into(),
        why: "this process's last one was dropped, or failed, without being finalized, and the library keeps its state"
            .into(),
        remedy: "call Context::finalize on every PE; after a failure end the process".into(),
    })
}

/// What initialisation answered.
struct Begun {
    code: c_int,
    function: &'static str,
    status: c_int,
    pe: c_int,
    pes: c_int,
}

impl Ready {
    fn new(gpu: usize, plugin: Option<&Plugin>) -> Result<Ready> {
        let claim = Claim::new()?;
        let library = library::load()?;
        if library.version() < OLDEST {
            return Err(Error::from(UnsupportedError {
                what: format!("NVSHMEM {}", version_text(library.version())),
                why: format!("{} is the oldest that phalanx can use", version_text(OLDEST)),
                remedy: "install a newer one, or name it with PHALANX_NVSHMEM_LIB".into(),
            }));
        }
        let device = Device::open(gpu)?;
        if let Some(plugin) = plugin {
            plugin.load(library.path())?;
        }
        Ok(Ready { library, device, claim })
    }

    /// Initialises the library. Every PE comes here, or none does.
    fn begin(
        mut self,
        place: Option<(UniqueId, usize, usize)>,
        control: Option<Control>,
        timeout: Duration,
    ) -> Result<Context> {
        let library = self.library;
        // What is needed afterwards is there before the library is entered.
        library.need(library.nvshmemx_hostlib_finalize, "nvshmemx_hostlib_finalize")?;
        self.claim.entered = true;
        let look = |since| control.as_ref().map_or(Ok(()), |control| control.look(since));
        let call = initialization(library, self.device.context.clone(), place)?;
        let begun = within("nvshmemx_hostlib_init_attr", timeout, look, call);
        // Every time: each initialisation has the library register a handler of its own, before which ours must be called. Also if it
        // failed: part of the library may be there, or still at it.
        at_exit(end);
        let begun = begun
            .and_then(|begun| begun.ok_or_else(|| late("nvshmemx_hostlib_init_attr", 0, place, timeout)));
        let begun = begun.and_then(|begun| check_begun(library, begun)).and_then(|begun| {
            // Whoever failed leaves the control channel, so that this answers an error for those who did not.
            control
                .as_ref()
                .map_or(Ok(()), |control| control.agree(true, "initialise NVSHMEM"))
                .map(|()| begun)
        });
        // A context that failed is never finalized: that would end the process.
        let begun = begun.inspect_err(Claim::spend)?;
        let mut context = Context {
            library,
            device: self.device,
            control,
            pe: begun.pe as usize,
            pes: begun.pes as usize,
            timeout: Cell::new(timeout),
            steps: Cell::new(0),
            allocations: Cell::new(0),
            failed: OnceCell::new(),
            heap: RefCell::default(),
            heap_is_dynamic: OnceCell::new(),
            teams: Cell::new(0),
            looked: Cell::new(Instant::now()),
            limits: Limits::unknown(),
            claim: self.claim,
            one_thread: PhantomData,
        };
        let fits = context.check_fit(&begun, place);
        if let Err(error) = context.together(fits, "use the library as it began") {
            context.finalize()?;
            if begun.status == init_status::LIMITED_MPG {
                // The library does not forget it (3.4.5): the next barrier would end the process, also with a GPU for each PE.
                *lock(&PROCESS) = Process::Spent(error.clone());
            }
            return Err(error);
        }
        context.limits = Limits::of(&context)?;
        Ok(context)
    }
}

/// The call that initialises, to be made in a thread of its own.
fn initialization(
    library: &'static Library,
    context: Arc<CudaContext>,
    place: Option<(UniqueId, usize, usize)>,
) -> Result<impl FnOnce() -> Result<Begun> + Send + 'static> {
    let set_name = "nvshmemx_set_attr_uniqueid_args";
    let set = library.need(library.nvshmemx_set_attr_uniqueid_args, set_name)?;
    let init = library.need(library.nvshmemx_hostlib_init_attr, "nvshmemx_hostlib_init_attr")?;
    let status = library.need(library.nvshmemx_init_status, "nvshmemx_init_status")?;
    let my_pe = library.need(library.nvshmem_my_pe, "nvshmem_my_pe")?;
    let n_pes = library.need(library.nvshmem_n_pes, "nvshmem_n_pes")?;
    Ok(move || {
        context.bind_to_thread()?;
        // Boxed, since the attributes keep a pointer to the id. If the library never returns, neither is dropped.
        let mut attr = Box::new(nvshmemx_init_attr_t::new());
        let mut flags: c_uint = init_flags::ENVIRONMENT;
        let id = Box::new(place.map_or(nvshmemx_uniqueid_t::new(), |(id, _, _)| id.0));
        if let Some((_, pe, pes)) = place {
            flags = init_flags::WITH_UNIQUEID;
            // SAFETY: valid pointers; the id is in a box that outlives initialisation.
            let code = unsafe { set(pe as c_int, pes as c_int, &raw const *id, &raw mut *attr) };
            if code != 0 {
                return Ok(Begun { code, function: set_name, status: 0, pe: 0, pes: 0 });
            }
        }
        // The environment says everything by itself, and one of its ways wants no attributes.
        let attr = if place.is_some() { &raw mut *attr } else { std::ptr::null_mut() };
        // SAFETY: the layout and its version words are those of version 1, which all libraries of version 3 accept; the
        // device is current; nothing else is inside the library.
        let code = unsafe { init(flags, attr) };
        // SAFETY: needs no initialisation.
        let status = unsafe { status() };
        let (mut pe, mut pes) = (0, 0);
        if code == 0 && status >= init_status::IS_INITIALIZED {
            // SAFETY: initialised.
            (pe, pes) = unsafe { (my_pe(), n_pes()) };
        }
        Ok(Begun { code, function: "nvshmemx_hostlib_init_attr", status, pe, pes })
    })
}

/// An error if the library does not say that it is initialised: some versions answer success when they are not.
fn check_begun(library: &Library, begun: Result<Begun>) -> Result<Begun> {
    let begun = begun?;
    let Begun { code, function, status, .. } = begun;
    if code == 0 && status >= init_status::IS_INITIALIZED {
        return Ok(begun);
    }
    let state = match status {
        init_status::NOT_INITIALIZED => "the PEs did not find each other",
        init_status::IS_BOOTSTRAPPED => "the PEs found each other, but the GPU could not be set up",
        _ => "initialisation did not end",
    };
    let text = format!(
        "{}; status {status}: {state}; NVSHMEM_DEBUG=WARN tells more; another attempt needs a new process",
        library::status_text(code)
    );
    Err(library.error(function, code, text).fatal())
}

/// The error for a call of the library that did not come back.
fn late(
    function: &'static str,
    sequence: u64,
    place: Option<(UniqueId, usize, usize)>,
    waited: Duration,
) -> Error {
    let reporter = place.map_or(0, |(_, pe, _)| pe);
    TimeoutError { operation: function.into(), sequence, reporter, waited, missing: Vec::new() }.into()
}

/// This process as a PE of NVSHMEM.
///
/// There is one at a time in a process. It stays on the thread that made it, and so does what borrows it:
/// ```compile_fail,E0277
/// # fn f(context: phalanx::nvshmem::Context) {
/// std::thread::spawn(move || context.quiet());
/// # }
/// ```
///
/// Memory borrows it, so nothing can be used after its end:
/// ```compile_fail,E0505
/// # fn f(context: phalanx::nvshmem::Context) -> phalanx::Result<()> {
/// let memory = context.alloc::<f32>(10)?;
/// context.finalize()?;
/// memory.free()
/// # }
/// ```
///
/// [`finalize`](Context::finalize) ends it, on all PEs together. Dropping it cannot do that: the library then stays
/// initialised, its memory allocated, and no other context can be made in this process. A line in the log says so.
pub struct Context {
    pub(crate) library: &'static Library,
    pub(crate) device: Device,
    pub(crate) control: Option<Control>,
    pe: usize,
    pes: usize,
    timeout: Cell<Duration>,
    /// Number of the last collective call, and of the last allocation.
    steps: Cell<u64>,
    allocations: Cell<u64>,
    failed: OnceCell<Error>,
    /// What is allocated on the heap: start and bytes.
    pub(crate) heap: RefCell<BTreeMap<CUdeviceptr, u64>>,
    /// Whether it grows, once that is known.
    pub(crate) heap_is_dynamic: OnceCell<bool>,
    /// Teams that were split off and not destroyed.
    pub(crate) teams: Cell<usize>,
    /// When it was last seen whether all PEs are there.
    looked: Cell<Instant>,
    pub(crate) limits: Limits,
    claim: Claim,
    one_thread: PhantomData<*mut ()>,
}

impl Context {
    /// Settings for a new context.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Makes this process one of `pes` PEs that have the same id. The others' calls of the library are not compared here,
    /// and a missing PE is noticed by the timeout alone.
    ///
    /// # Errors
    /// As for [`init`](Context::init).
    pub fn init_with_id(id: UniqueId, pe: usize, pes: usize) -> Result<Context> {
        Context::builder().init_with_id(id, pe, pes)
    }

    /// Lets the library find the other PEs by the launcher's environment: `NVSHMEM_BOOTSTRAP` names the way, PMI by
    /// default (`NVSHMEM_BOOTSTRAP_PMI` chooses PMI, PMI-2 or PMIx). The library keeps what it found until the process
    /// ends, for every later context. As for [`init_with_id`](Context::init_with_id) in all else.
    ///
    /// # Errors
    /// As for [`init`](Context::init); [`Error::LibraryNotFound`], too, if the library's plugin for that way cannot be loaded (those for
    /// PMIx in NVIDIA's wheels fit some releases of PMIx only).
    pub fn init_from_environment() -> Result<Context> {
        Context::builder().init_from_environment()
    }

    /// The number of this PE, from 0. `nvshmem_my_pe`
    pub fn my_pe(&self) -> usize {
        self.pe
    }

    /// How many PEs there are. `nvshmem_n_pes`
    pub fn n_pes(&self) -> usize {
        self.pes
    }

    /// This PE's GPU and its primary context.
    pub fn cuda_context(&self) -> &Arc<CudaContext> {
        &self.device.context
    }

    /// A stream of the context's own, on which symmetric memory is known to cudarc.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.device.stream
    }

    /// How long a wait on the host may take.
    pub fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    /// Changes [`timeout`](Context::timeout) for the calls that follow.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
        if let Some(control) = &self.control {
            control.set_timeout(timeout);
        }
    }

    /// The loaded library's version, as `major.minor.patch`.
    pub fn version(&self) -> String {
        version_text(self.library.version())
    }

    /// Waits, with the timeout, until the work on a stream is complete.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Peer`]: what is on the stream waits for a PE that is not there. Final.
    pub fn sync(&self, stream: &CudaStream) -> Result<()> {
        self.check()?;
        self.device.check(stream)?;
        self.device.enter()?;
        let mut patience = Backoff::new();
        // What is put to a PE that is gone is complete all the same.
        if patience.since.saturating_duration_since(self.looked.get()) > LOOK {
            self.looked.set(patience.since);
            self.look(patience.since).map_err(|error| self.fail(error))?;
        }
        while !self.device.is_idle(stream).map_err(|error| self.fail(error))? {
            if patience.pause() {
                self.look(patience.since).map_err(|error| self.fail(error))?;
                if patience.since.elapsed() > self.timeout() {
                    return Err(self.fail(self.late("the work on a stream")));
                }
            }
        }
        Ok(())
    }

    /// Ends NVSHMEM in this process, on all PEs together. Collective. Memory that was not freed is freed by it; whatever
    /// the GPU still does is waited for. Another context can be made afterwards. `nvshmemx_hostlib_finalize`
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Peer`] if a PE does not come: the library then stays as it is.
    pub fn finalize(mut self) -> Result<()> {
        let name = "nvshmemx_hostlib_finalize";
        let finalize = self.library.need(self.library.nvshmemx_hostlib_finalize, name)?;
        self.drain()?;
        // SAFETY: initialised (its status was checked), once for each initialisation; nothing borrows the context.
        self.collectively(Step::new(name, [0; 3]), move || unsafe { finalize() })?;
        // Nobody leaves while another's library may still wait for it.
        if let Some(control) = &self.control {
            control.agree(true, "finalize NVSHMEM").map_err(|error| self.fail(error))?;
        }
        self.claim.entered = false;
        Ok(())
    }

    /// Ends the whole job from within: the library tells the launcher's process manager, where there is one, and every
    /// process ends with this status. `nvshmem_global_exit`
    ///
    /// # Errors
    /// [`Error::MissingFunction`]. It returns also where the library knows no process manager (the bootstrap by unique
    /// id); this process then has to be ended by the program.
    pub fn global_exit(self, status: i32) -> Result<()> {
        let exit = self.library.need(self.library.nvshmem_global_exit, "nvshmem_global_exit")?;
        // SAFETY: initialised.
        unsafe { exit(status) };
        Ok(())
    }
}

/// For the other files of this module.
impl Context {
    /// An error if the library began in another way than can be used here.
    fn check_fit(&self, begun: &Begun, place: Option<(UniqueId, usize, usize)>) -> Result<()> {
        if begun.status == init_status::LIMITED_MPG {
            return Err(Error::from(UnsupportedError {
                what: format!("NVSHMEM with several PEs on GPU {}", self.device.context.ordinal()),
                why: "without MPS, or with more than all of its threads in use, the library ends the process in waits, \
                      barriers and collectives"
                    .into(),
                remedy: "give each PE a GPU of its own (Builder::gpu), or share it out with MPS \
                         (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), in a new process: the library keeps it until the process ends"
                    .into(),
            }));
        }
        match place {
            Some((_, pe, pes)) if (pe, pes) != (self.pe, self.pes) => Err(Error::from(UnsupportedError {
                what: format!("NVSHMEM as PE {pe} of {pes}"),
                why: format!(
                    "the library found its PEs by the environment (NVSHMEM_BOOTSTRAP) before, and keeps them until the \
                     process ends: this is PE {} of {}",
                    self.pe, self.pes
                ),
                remedy: "use Context::init_from_environment again, or never before another bootstrap".into(),
            })),
            _ => Ok(()),
        }
    }

    /// The error that every call answers, if there was one that is final.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Notes an error after which the library cannot be used.
    #[cold]
    pub(crate) fn fail(&self, error: Error) -> Error {
        if self.failed.set(error.clone()).is_ok() {
            tracing::error!(
                pe = self.pe,
                "NVSHMEM cannot be used any more: {error}; end this process, with std::process::abort if its GPU may still \
                 wait for something"
            );
        }
        self.failed.get().cloned().unwrap_or(error)
    }

    pub(crate) fn late(&self, function: &'static str) -> Error {
        let (operation, sequence, reporter) = (function.into(), self.steps.get(), self.pe);
        TimeoutError { operation, sequence, reporter, waited: self.timeout(), missing: Vec::new() }.into()
    }

    pub(crate) fn look(&self, since: Instant) -> Result<()> {
        self.control.as_ref().map_or(Ok(()), |control| control.look(since))
    }

    /// Before a call of the library: the context works, and its device is current.
    #[inline]
    pub(crate) fn enter(&self) -> Result<()> {
        self.check()?;
        self.device.enter()
    }

    /// Allocations are told apart by their numbers, which are the same on all PEs.
    pub(crate) fn next_allocation(&self) -> u64 {
        self.allocations.set(self.allocations.get() + 1);
        self.allocations.get()
    }

    #[inline]
    pub(crate) fn check_pe(&self, operation: &'static str, pe: usize) -> Result<c_int> {
        if pe < self.pes {
            return Ok(pe as c_int);
        }
        Err(UsageError::Rank { operation, role: "PE", rank: pe, world_size: self.pes }.into())
    }

    /// A call of the library in which all PEs take part: after they have met, with the timeout.
    pub(crate) fn collectively<R: Send + 'static>(
        &self,
        step: Step,
        call: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        self.meet(&step)?;
        self.bounded(step.describe(), call)
    }

    /// Waits until all PEs have come to the same call.
    pub(crate) fn meet(&self, step: &Step) -> Result<()> {
        self.check()?;
        self.steps.set(self.steps.get() + 1);
        match &self.control {
            Some(control) => control.meet(self.steps.get(), step).map_err(|error| self.fail(error)),
            None => Ok(()),
        }
    }

    /// Whether all PEs could do something: an error of this PE's, else one that names a PE.
    pub(crate) fn together<T>(&self, mine: Result<T>, what: &str) -> Result<T> {
        let Some(control) = &self.control else { return mine };
        let agreed = control.agree(mine.is_ok(), what);
        let mine = mine?;
        agreed.map(|()| mine)
    }

    /// A call of the library that may wait for other PEs, with the timeout.
    pub(crate) fn bounded<R: Send + 'static>(
        &self,
        what: String,
        call: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R> {
        self.check()?;
        let context = self.device.context.clone();
        let call = move || context.bind_to_thread().map(|()| call());
        match within("NVSHMEM", self.timeout(), |since| self.look(since), call) {
            Ok(Some(Ok(answer))) => Ok(answer),
            Ok(Some(Err(error))) => Err(self.fail(error.into())),
            Ok(None) => {
                let (sequence, reporter, waited) = (self.steps.get(), self.pe, self.timeout());
                let error = TimeoutError { operation: what, sequence, reporter, waited, missing: Vec::new() };
                Err(self.fail(error.into()))
            }
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Waits, with the timeout, until the GPU has done all it was given, on whatever stream.
    pub(crate) fn drain(&self) -> Result<()> {
        // SAFETY: the context is current in the thread that calls it.
        match self.bounded("the work of the GPU".into(), || unsafe { sys::cuCtxSynchronize() })? {
            CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(self.fail(failed("cuCtxSynchronize", error, true))),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.claim.entered {
            tracing::error!(
                pe = self.pe,
                "an NVSHMEM context was dropped and not finalized: the library stays initialised and its memory \
                 allocated; call Context::finalize on every PE"
            );
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("nvshmem::Context")
            .field("version", &self.version())
            .field("my_pe", &self.pe)
            .field("n_pes", &self.pes)
            .field("gpu", &self.device.context.ordinal())
            .finish()
    }
}
