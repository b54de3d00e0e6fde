//! Initialisation: the settings of a context, what is checked before the library is entered, and the call
//! that enters it.

use super::context::Context;
use super::control::PeControl;
use super::device::PeDevice;
use super::library::{self, NvshmemLibrary, within};
use super::limits::Limits;
use super::process_state::{Claim, at_process_exit};
use super::unique_id::UniqueId;
use crate::contract::hosts::HostTopology;
use crate::gpu::cuda::gpu_ids;
use crate::os::RunInstant;
use crate::os::at_exit;
use crate::rendezvous::environment::Environment;
use crate::rendezvous::gpus::{Visible, settle as settle_gpu};
use crate::types::error::{Error, Result, TimeoutError, UnsupportedError, UsageError};
use cudarc::driver::CudaContext;
use phalanx_sys::nvshmem::{
    OLDEST, Plugin, init_flags, init_status, nvshmemx_init_attr_t, nvshmemx_uniqueid_t, plugin, version_text,
};
use std::cell::{Cell, OnceCell, RefCell};
use std::ffi::{c_int, c_uint};
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

/// Settings for a new [`Context`].
#[derive(Debug, Clone, Default)]
pub struct Builder {
    pub(crate) gpu: Option<usize>,
    pub(crate) timeout: Option<Duration>,
}

impl Builder {
    /// Chooses this PE's GPU, by its number in this process. Default: the communicator's, else one that no
    /// other PE of the host has. Without a communicator: the local rank that the launcher gives, or GPU 0
    /// without a launcher.
    pub fn gpu(mut self, gpu: usize) -> Builder {
        self.gpu = Some(gpu);
        self
    }

    /// Limits each wait on the host: see [`Context::set_timeout`]. Default: the communicator's timeout, else
    /// `PHALANX_TIMEOUT`.
    pub fn timeout(mut self, timeout: Duration) -> Builder {
        self.timeout = Some(timeout);
        self
    }

    /// As [`init`](Builder::init), over channels made for the PEs.
    pub(crate) fn init_between(self, control: PeControl, topology: &HostTopology) -> Result<Context> {
        let timeout = self.limit()?;
        let (rank, ranks) = (control.rank(), control.world_size());
        check_processes(topology, &control)?;
        // Several PEs may choose one GPU here; the library decides whether it can be shared.
        let seen = gpu_ids().and_then(|ids| Visible::here(ids, self.gpu, true));
        let gpu = settle_gpu("NVSHMEM", seen, (rank, topology), |own| control.all_gather_bytes(own))?;
        // A PE that cannot go on says so before the others enter the library, where they would wait without limit.
        let ready = PreparedPe::new(gpu, Some(&plugin::UID));
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
        let ready = PreparedPe::new(self.gpu_by_launcher()?, Some(&plugin::UID))?;
        ready.begin(Some((id, pe, pes)), None, timeout)
    }

    /// As [`Context::init_from_environment`], with these settings.
    pub fn init_from_environment(self) -> Result<Context> {
        let timeout = self.limit()?;
        PreparedPe::new(self.gpu_by_launcher()?, Plugin::of_environment())?.begin(None, None, timeout)
    }

    fn gpu_by_launcher(&self) -> Result<usize> {
        match self.gpu {
            Some(gpu) => Ok(gpu),
            None => {
                let launcher = Environment::current().launcher()?;
                let number = launcher.and_then(|launcher| launcher.local_rank).unwrap_or(0);
                // A launcher that shows each process one GPU has already chosen.
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

/// An error for ranks that are threads of one process: a process is one PE.
fn check_processes(topology: &HostTopology, control: &PeControl) -> Result<()> {
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

/// A PE that is ready to enter the library: all that needs no other PE.
struct PreparedPe {
    library: &'static NvshmemLibrary,
    device: PeDevice,
    claim: Claim,
}

/// The result of the initialising calls.
struct InitAnswer {
    code: c_int,
    function: &'static str,
    status: c_int,
    pe: c_int,
    pes: c_int,
}

impl PreparedPe {
    fn new(gpu: usize, plugin: Option<&Plugin>) -> Result<PreparedPe> {
        let claim = Claim::new()?;
        let library = library::load()?;
        if library.version() < OLDEST {
            return Err(Error::from(UnsupportedError {
                what: format!("NVSHMEM {}", version_text(library.version())),
                why: format!("{} is the oldest that phalanx can use", version_text(OLDEST)),
                remedy: "install a newer one, or name it with PHALANX_NVSHMEM_LIB".into(),
            }));
        }
        let device = PeDevice::open(gpu)?;
        if let Some(plugin) = plugin {
            plugin.load(library.path())?;
        }
        Ok(PreparedPe { library, device, claim })
    }

    /// Initialises the library. Collective: every PE calls this, or none.
    fn begin(
        mut self,
        place: Option<(UniqueId, usize, usize)>,
        control: Option<PeControl>,
        timeout: Duration,
    ) -> Result<Context> {
        let library = self.library;
        // Functions that are needed later are looked up before the library is entered.
        library.need(library.nvshmemx_hostlib_finalize, "nvshmemx_hostlib_finalize")?;
        self.claim.entered = true;
        let look = |since| control.as_ref().map_or(Ok(()), |control| control.look(since));
        let call = initialization(library, self.device.context.clone(), place)?;
        let begun = within("nvshmemx_hostlib_init_attr", timeout, look, call);
        // Each initialisation lets the library register an exit handler, before which ours must run. Needed
        // also after a failure: part of the library may be initialised, or still running.
        at_exit(at_process_exit);
        let begun = begun
            .and_then(|begun| begun.ok_or_else(|| late("nvshmemx_hostlib_init_attr", 0, place, timeout)));
        let begun = begun.and_then(|begun| check_begun(library, begun)).and_then(|begun| {
            // A PE that failed leaves the channel, so that this returns an error on the others.
            control
                .as_ref()
                .map_or(Ok(()), |control| control.agree(true, "initialise NVSHMEM"))
                .map(|()| begun)
        });
        // A failed context is never finalized: that would end the process.
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
            looked: Cell::new(RunInstant::now()),
            limits: Limits::unknown(),
            claim: self.claim,
            one_thread: PhantomData,
        };
        let fits = context.check_fit(&begun, place);
        if let Err(error) = context.together(fits, "use the library as it began") {
            context.finalize()?;
            if begun.status == init_status::LIMITED_MPG {
                // The library keeps this state (3.4.5): the next barrier would end the process, even with a
                // GPU for each PE.
                Claim::spend(&error);
            }
            return Err(error);
        }
        context.limits = Limits::of(&context)?;
        Ok(context)
    }
}

/// The initialising call, to run in a thread of its own.
fn initialization(
    library: &'static NvshmemLibrary,
    context: Arc<CudaContext>,
    place: Option<(UniqueId, usize, usize)>,
) -> Result<impl FnOnce() -> Result<InitAnswer> + Send + 'static> {
    let set_name = "nvshmemx_set_attr_uniqueid_args";
    let set = library.need(library.nvshmemx_set_attr_uniqueid_args, set_name)?;
    let init = library.need(library.nvshmemx_hostlib_init_attr, "nvshmemx_hostlib_init_attr")?;
    let status = library.need(library.nvshmemx_init_status, "nvshmemx_init_status")?;
    let my_pe = library.need(library.nvshmem_my_pe, "nvshmem_my_pe")?;
    let n_pes = library.need(library.nvshmem_n_pes, "nvshmem_n_pes")?;
    Ok(move || {
        context.bind_to_thread()?;
        // Boxed, since the attributes keep a pointer to the id. If the library never returns, neither is
        // dropped.
        let mut attr = Box::new(nvshmemx_init_attr_t::new());
        let mut flags: c_uint = init_flags::ENVIRONMENT;
        let id = Box::new(place.map_or(nvshmemx_uniqueid_t::new(), |(id, _, _)| id.0));
        if let Some((_, pe, pes)) = place {
            flags = init_flags::WITH_UNIQUEID;
            // SAFETY: valid pointers; the id is in a box that outlives initialisation.
            let code = unsafe { set(pe as c_int, pes as c_int, &raw const *id, &raw mut *attr) };
            if code != 0 {
                return Ok(InitAnswer { code, function: set_name, status: 0, pe: 0, pes: 0 });
            }
        }
        // With the environment no attributes are needed, and one of its bootstraps rejects them.
        let attr = if place.is_some() { &raw mut *attr } else { std::ptr::null_mut() };
        // SAFETY: the layout and its version words are those of version 1, which all libraries of version 3
        // accept; the device is current; nothing else is inside the library.
        let code = unsafe { init(flags, attr) };
        // SAFETY: needs no initialisation.
        let status = unsafe { status() };
        let (mut pe, mut pes) = (0, 0);
        if code == 0 && status >= init_status::IS_INITIALIZED {
            // SAFETY: initialised.
            (pe, pes) = unsafe { (my_pe(), n_pes()) };
        }
        Ok(InitAnswer { code, function: "nvshmemx_hostlib_init_attr", status, pe, pes })
    })
}

/// An error unless the library reports that it is initialised: some versions return success without.
fn check_begun(library: &NvshmemLibrary, begun: Result<InitAnswer>) -> Result<InitAnswer> {
    let begun = begun?;
    let InitAnswer { code, function, status, .. } = begun;
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

/// The timeout error for an initialisation that did not return.
fn late(
    function: &'static str,
    sequence: u64,
    place: Option<(UniqueId, usize, usize)>,
    waited: Duration,
) -> Error {
    let reporter = place.map_or(0, |(_, pe, _)| pe);
    TimeoutError { operation: function.into(), sequence, reporter, waited, missing: Vec::new() }.into()
}

impl Context {
    /// An error if the library's state after initialisation cannot be used here.
    fn check_fit(&self, begun: &InitAnswer, place: Option<(UniqueId, usize, usize)>) -> Result<()> {
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
}
