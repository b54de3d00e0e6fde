//! Device communicators: what kernels of a program's own need to reach the memory of the other ranks (NCCL's device API, 2.28).

use super::surface::Nccl;
use crate::backend::nccl::communicator::Communicator;
use crate::backend::nccl::config::needs;
use crate::backend::nccl::device_comm::{Held, KernelArgument, MOST, Words};
use crate::backend::nccl::library::Library;
use crate::backend::nccl::memory::{Buffer, Handle};
use crate::buffer::stream::GpuStream;
use crate::contract::{Call, Operation};
use crate::os::sync::lock;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use cudarc::driver::CudaStream;
use phalanx_sys::nccl::{
    cft_caps, cft_team, dev_comm_size, gin_connection, gin_type, ncclCommProperties_t,
    ncclDevCommRequirements_t, ncclDevResourceRequirements_t, ncclLLA2AHandle_t, ncclLsaBarrierHandle_t,
    ncclMultimemHandle_t, ncclResult_t, ncclTeam_t, ncclTeamRequirements_t, ncclWindow_t, version_code,
};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};

/// Ranks, every so many of the communicator's (`ncclTeam_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Team {
    /// How many there are.
    pub ranks: usize,
    /// This rank's number among them.
    pub rank: usize,
    /// By how much the communicator's numbers of two neighbours differ.
    pub stride: usize,
}

/// Which of a communicator's teams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TeamKind {
    /// All ranks.
    World,
    /// Those that load from and store to each other's memory, as over NVLink.
    Lsa,
    /// Those with the same number in their `Lsa` teams, one of each.
    Rail,
    /// Those that reach each other by logical endpoints (2.31), all at once (`NCCL_CFT_TEAM_FLAT`).
    Cft,
    /// The same by multicast and then in it (`NCCL_CFT_TEAM_HIER_MULTIMEM`, 2.31).
    CftOverMultimem,
    /// The same by `Lsa` teams (`NCCL_CFT_TEAM_HIER_LSA`, 2.31).
    CftOverLsa,
    /// Those that a multicast endpoint reaches (2.31).
    CftMultimem,
}

/// Between which ranks there is GPU-initiated networking (GIN).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GinConnection {
    /// All.
    Full,
    /// Those of a [`Rail`](TeamKind::Rail) team (2.29.7).
    Rail,
    /// Every so many (2.31).
    Stride(i32),
}

/// How GPU-initiated networking is done (`ncclGinType_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GinType {
    /// By a thread of the host.
    Proxy,
    /// By the GPU itself, as Mellanox's adapters do it.
    Gdaki,
    /// By the GPU itself, through a plugin (2.30.7).
    Gpi,
    /// By the GPU itself, as Amazon's adapters do it (2.31).
    EfaGda,
    /// One that this version of phalanx does not know.
    Other(i32),
}

impl GinType {
    /// `None` for no networking.
    fn from_code(code: c_int) -> Option<GinType> {
        match code {
            gin_type::NONE => None,
            gin_type::PROXY => Some(GinType::Proxy),
            gin_type::GDAKI => Some(GinType::Gdaki),
            gin_type::GPI => Some(GinType::Gpi),
            gin_type::EFA_GDA => Some(GinType::EfaGda),
            other => Some(GinType::Other(other)),
        }
    }

    fn code(self) -> c_int {
        match self {
            GinType::Proxy => gin_type::PROXY,
            GinType::Gdaki => gin_type::GDAKI,
            GinType::Gpi => gin_type::GPI,
            GinType::EfaGda => gin_type::EFA_GDA,
            GinType::Other(code) => code,
        }
    }
}

/// What a communicator can do (`ncclCommProperties_t`, 2.29.2). What the loaded release does not tell is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// Its GPU, as NVML numbers it.
    pub nvml_gpu: i32,
    /// Whether it can have [device communicators](Nccl::device_comm).
    pub device_api: bool,
    /// Whether NVLink's multicast is there.
    pub multimem: bool,
    /// How GPU-initiated networking is done between all ranks, if it is.
    pub gin: Option<GinType>,
    /// How many [`Lsa`](TeamKind::Lsa) teams there are (2.29.7).
    pub lsa_teams: Option<usize>,
    /// Whether put and signal of the host work (2.29.7).
    pub host_rma: Option<bool>,
    /// As `gin`, in [`Rail`](TeamKind::Rail) teams (2.29.7).
    pub rail_gin: Option<Option<GinType>>,
    /// A number that all its ranks have, and nearly no other communicator (2.31).
    pub comm_hash: Option<u64>,
    /// The smallest stride of [`GinConnection::Stride`] (2.31).
    pub gin_min_stride: Option<i32>,
    /// Between which ranks there can be GPU-initiated networking, if between any (2.31); of a stride, `gin_min_stride` tells.
    pub gin_connection: Option<Option<GinConnection>>,
    /// Which types can be asked for in [`DeviceRequirements::gin_type`] (2.31).
    pub gin_types: Option<Vec<GinType>>,
    /// Whether there are logical endpoints, with multicast, and with counters (2.32).
    pub cft: Option<(bool, bool, bool)>,
}

/// Something that a device communicator has beside what its numbers say; kernels know it by its [handle](DeviceComm::resources).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Memory of each rank, zero at first, that the others reach as that of a window: so many bytes, at a multiple of so many
    /// (a power of two; 128 at least).
    Buffer {
        /// Its length.
        bytes: usize,
        /// What its start is a multiple of.
        align: usize,
    },
    /// Barriers of a team whose ranks reach each other's memory (`ncclLsaBarrierCreateRequirement`).
    LsaBarriers {
        /// The team.
        team: Team,
        /// How many, which a kernel numbers from 0.
        count: i32,
    },
    /// Slots for an all-to-all with little latency (`ncclLLA2ACreateRequirement`): how many a block needs is
    /// [`all_to_all_slots`](Nccl::all_to_all_slots).
    AllToAllSlots {
        /// For so many blocks.
        blocks: i32,
        /// So many for each.
        slots: i32,
    },
}

/// By what a kernel knows a [`Resource`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ResourceHandle([u32; 2]);

impl ResourceHandle {
    /// Of a buffer: the kernel's `ncclDevResourceHandle`, its place in 128 bytes.
    pub fn buffer(self) -> u32 {
        self.0[0]
    }

    /// Of anything else: as the kernel's `ncclLsaBarrierHandle` or `ncclLLA2AHandle` has it. To be passed by value.
    pub fn words(self) -> [u32; 2] {
        self.0
    }
}

/// What a [`DeviceComm`] shall have (`ncclDevCommRequirements_t`); by default nothing but the ranks' numbers and windows. All ranks ask for the same.
///
/// A field that the loaded release does not have is an error that says with which it came.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DeviceRequirements {
    /// Barriers of the [`Lsa`](TeamKind::Lsa) team (`ncclLsaBarrierSession`): a kernel uses one for each block, or part of the work, that waits
    /// for its like at the other ranks.
    pub lsa_barriers: i32,
    /// Whether there are multicast addresses of the `Lsa` team (NVLink SHARP). To ask for it without
    /// [`Properties::multimem`] is the library's error.
    pub lsa_multimem: bool,
    /// Barriers of all ranks, over memory and the network (2.28.7).
    pub barriers: i32,
    /// Barriers of the [`Rail`](TeamKind::Rail) team, over the network (2.28.7).
    pub rail_gin_barriers: i32,
    /// Barriers of all ranks, over the network (2.30.3).
    pub world_gin_barriers: i32,
    /// GPU-initiated networking, between these ranks (2.28.7). All else that is called `gin`, and barriers over the network, need it.
    pub gin: Option<GinConnection>,
    /// How many contexts of it, about (2.28.7); 4 unless told.
    pub gin_contexts: Option<i32>,
    /// How many of its signals, numbered from 0 (2.28.7).
    pub gin_signals: i32,
    /// How many of its counters, numbered from 0 (2.28.7).
    pub gin_counters: i32,
    /// Whether nobody else has its contexts (2.29.7).
    pub gin_exclusive_contexts: bool,
    /// How long its queues are (2.29.7); the library's choice unless told.
    pub gin_queue_depth: Option<i32>,
    /// Its traffic class (2.30.3).
    pub gin_traffic_class: Option<i32>,
    /// False if no kernel uses strong signals (2.30.7).
    pub gin_strong_signals: Option<bool>,
    /// False if no kernel signals addresses (2.30.7).
    pub gin_va_signals: Option<bool>,
    /// How it is done (2.31); the library's choice unless told.
    pub gin_type: Option<GinType>,
    /// Whether there are logical endpoints (2.31).
    pub cft: bool,
    /// Whether there are such for multicast (2.31).
    pub cft_multimem: bool,
    /// Barriers by logical endpoints (2.31).
    pub cft_barriers: i32,
    /// More, in the order of its handles in [`DeviceComm::resources`].
    pub resources: Vec<Resource>,
    /// Teams that shall have a multicast address, in the order of [`DeviceComm::multimem`].
    pub multimem_teams: Vec<Team>,
}

impl DeviceRequirements {
    /// By which ranks compare what they ask for.
    fn tag(&self) -> u32 {
        // A team is the same, whatever a rank's number in it.
        let everybodys = |team: &Team| Team { rank: 0, ..*team };
        let resource = |resource: &Resource| match resource {
            Resource::LsaBarriers { team, count } => {
                Resource::LsaBarriers { team: everybodys(team), count: *count }
            }
            other => *other,
        };
        let compared = DeviceRequirements {
            resources: self.resources.iter().map(resource).collect(),
            multimem_teams: self.multimem_teams.iter().map(everybodys).collect(),
            ..self.clone()
        };
        let mut hasher = DefaultHasher::new();
        compared.hash(&mut hasher);
        hasher.finish() as u32
    }

    /// In the layout of the loaded library; without the lists.
    fn raw(&self, library: &Library) -> Result<ncclDevCommRequirements_t> {
        let raw = ncclDevCommRequirements_t::for_version(library.version());
        let mut raw = raw.ok_or_else(|| Error::from(library.lacks("ncclDevCommCreate")))?;
        let since = |setting, minor, patch| needs(library, setting, version_code(2, minor, patch), true);
        let number = |name: &'static str, value: i32, minor, patch| {
            if value < 0 {
                return Err(negative(name, value));
            }
            if value > 0 {
                since(name, minor, patch)?;
            }
            Ok(value)
        };
        raw.lsaBarrierCount = number("lsa_barriers", self.lsa_barriers, 28, 3)?;
        raw.lsaMultimem = self.lsa_multimem;
        raw.barrierCount = number("barriers", self.barriers, 28, 7)?;
        raw.railGinBarrierCount = number("rail_gin_barriers", self.rail_gin_barriers, 28, 7)?;
        raw.worldGinBarrierCount = number("world_gin_barriers", self.world_gin_barriers, 30, 3)?;
        raw.ginSignalCount = number("gin_signals", self.gin_signals, 28, 7)?;
        raw.ginCounterCount = number("gin_counters", self.gin_counters, 28, 7)?;
        raw.cftBarrierCount = number("cft_barriers", self.cft_barriers, 31, 0)?;
        if let Some(contexts) = self.gin_contexts {
            since("gin_contexts", 28, 7)?;
            raw.ginContextCount = number("gin_contexts", contexts, 28, 7)?;
        }
        if let Some(depth) = self.gin_queue_depth {
            since("gin_queue_depth", 29, 7)?;
            raw.ginQueueDepth = number("gin_queue_depth", depth, 29, 7)?;
        }
        if self.gin_exclusive_contexts {
            since("gin_exclusive_contexts", 29, 7)?;
            raw.ginExclusiveContexts = true;
        }
        if let Some(class) = self.gin_traffic_class {
            since("gin_traffic_class", 30, 3)?;
            raw.ginTrafficClass = class;
        }
        if let Some(strong) = self.gin_strong_signals {
            since("gin_strong_signals", 30, 7)?;
            raw.ginStrongSignalsRequired = strong;
        }
        if let Some(va) = self.gin_va_signals {
            since("gin_va_signals", 30, 7)?;
            raw.ginVaSignalsRequired = va;
        }
        if let Some(ty) = self.gin_type {
            since("gin_type", 31, 0)?;
            raw.ginType = ty.code();
        }
        for (name, asked, bit) in
            [("cft", self.cft, cft_caps::CFT), ("cft_multimem", self.cft_multimem, cft_caps::MULTIMEM)]
        {
            if asked {
                since(name, 31, 0)?;
                raw.cftCaps |= bit;
            }
        }
        self.connect(library, &mut raw)?;
        Ok(raw)
    }

    fn connect(&self, library: &Library, raw: &mut ncclDevCommRequirements_t) -> Result<()> {
        let since = |setting, minor, patch| needs(library, setting, version_code(2, minor, patch), true);
        match self.gin {
            None => {}
            // Before there were kinds of connections.
            Some(GinConnection::Full) if library.version() < version_code(2, 29, 7) => {
                since("gin", 28, 7)?;
                raw.ginForceEnable = true;
            }
            Some(GinConnection::Full) => raw.ginConnectionType = gin_connection::FULL,
            Some(GinConnection::Rail) => {
                since("gin, between ranks of a rail,", 29, 7)?;
                raw.ginConnectionType = gin_connection::RAIL;
            }
            Some(GinConnection::Stride(stride)) => {
                since("gin, with a stride,", 31, 0)?;
                if stride < 1 {
                    return Err(negative("gin: the stride", stride));
                }
                raw.ginConnectionType = gin_connection::CUSTOM_STRIDE;
                raw.ginCustomStride = stride;
            }
        }
        Ok(())
    }
}

fn negative(name: &str, value: i32) -> Error {
    let expected = "a number of things, none or more; of a stride, 1 or more".to_owned();
    UsageError::Setting { name: format!("device_comm: {name}"), value: value.to_string(), expected }.into()
}

/// What the library writes to while a device communicator is made, maybe from a thread of its own: all of it stays where it is.
struct Making {
    comm: Words,
    handles: Vec<[u32; 2]>,
    resources: Vec<ncclDevResourceRequirements_t>,
    multimem: Vec<ncclMultimemHandle_t>,
    teams: Vec<ncclTeamRequirements_t>,
}

impl Making {
    fn new(asked: &DeviceRequirements) -> Making {
        let (resources, teams) = (asked.resources.len(), &asked.multimem_teams);
        let team = |team: &Team| ncclTeamRequirements_t {
            next: std::ptr::null_mut(),
            team: team.raw(),
            multimem: true,
            outMultimemHandle: std::ptr::null_mut(),
        };
        Making {
            comm: [0; MOST / 8],
            handles: vec![[0; 2]; resources],
            resources: vec![ncclDevResourceRequirements_t::NONE; resources],
            multimem: vec![ncclMultimemHandle_t { mcBasePtr: std::ptr::null_mut() }; teams.len()],
            teams: teams.iter().map(team).collect(),
        }
    }

    /// Makes the lists of what is asked for, and says where the answers go.
    ///
    /// # Safety
    /// `this` stays where it is until the library has done with the requirements.
    unsafe fn link(
        this: *mut Making,
        communicator: &Communicator,
        asked: &DeviceRequirements,
        raw: &mut ncclDevCommRequirements_t,
    ) -> Result<()> {
        // SAFETY: the caller's contract; nobody else has it yet.
        let (handles, resources, multimem, teams) = unsafe {
            let this = &mut *this;
            (
                this.handles.as_mut_ptr(),
                this.resources.as_mut_ptr(),
                this.multimem.as_mut_ptr(),
                this.teams.as_mut_ptr(),
            )
        };
        for (index, resource) in asked.resources.iter().enumerate() {
            // SAFETY: there is one of each for every resource.
            let (handle, requirement) = unsafe { (handles.add(index), resources.add(index)) };
            // SAFETY: as above.
            unsafe { require(communicator, resource, handle, requirement) }?;
            // SAFETY: as above.
            unsafe { (*requirement).next = raw.resourceRequirementsList };
            raw.resourceRequirementsList = requirement;
        }
        for index in 0..asked.multimem_teams.len() {
            // SAFETY: there is one of each for every team.
            unsafe {
                let team = teams.add(index);
                ((*team).next, (*team).outMultimemHandle) = (raw.teamRequirementsList, multimem.add(index));
                raw.teamRequirementsList = team;
            }
        }
        Ok(())
    }
}

/// Says what a resource needs, and where its handle goes.
///
/// # Safety
/// Both pointers are valid as long as the library has the requirement.
unsafe fn require(
    communicator: &Communicator,
    resource: &Resource,
    handle: *mut [u32; 2],
    requirement: *mut ncclDevResourceRequirements_t,
) -> Result<()> {
    let library = communicator.library;
    match *resource {
        Resource::Buffer { bytes, align } => {
            if !align.is_power_of_two() {
                let (name, value) = ("device_comm: the align of a buffer".to_owned(), align.to_string());
                return Err(UsageError::Setting { name, value, expected: "a power of two".into() }.into());
            }
            let buffer = ncclDevResourceRequirements_t {
                bufferSize: bytes,
                bufferAlign: align,
                outBufferHandle: handle.cast(),
                ..ncclDevResourceRequirements_t::NONE
            };
            // SAFETY: the caller's contract.
            unsafe { requirement.write(buffer) };
            Ok(())
        }
        Resource::LsaBarriers { count, .. } if count < 0 => Err(negative("the count of LsaBarriers", count)),
        Resource::LsaBarriers { team, count } => {
            let name = "ncclLsaBarrierCreateRequirement";
            let create = library.need(library.ncclLsaBarrierCreateRequirement, name)?;
            let handle = handle.cast::<ncclLsaBarrierHandle_t>();
            // SAFETY: the caller's contract; a handle has two words.
            communicator.call(name, |_| unsafe { create(team.raw(), count, handle, requirement) })
        }
        Resource::AllToAllSlots { blocks, slots } if blocks.min(slots) < 0 => {
            Err(negative("the blocks and slots of AllToAllSlots", blocks.min(slots)))
        }
        Resource::AllToAllSlots { blocks, slots } => {
            let name = "ncclLLA2ACreateRequirement";
            let create = library.need(library.ncclLLA2ACreateRequirement, name)?;
            let handle = handle.cast::<ncclLLA2AHandle_t>();
            // SAFETY: as above.
            communicator.call(name, |_| unsafe { create(blocks, slots, handle, requirement) })
        }
    }
}

/// A communicator as kernels have it (`ncclDevComm`): they get it by value, and with it the windows, barriers and resources of all
/// ranks. Made by [`Nccl::device_comm`].
///
/// A kernel is compiled with the headers of the very release that is loaded, since each has another layout:
/// [`Program::nccl`](crate::jit::Program::nccl) finds them. It is launched with [`jit::device_comm`](crate::jit::device_comm), or by cudarc with
/// [`argument`](DeviceComm::argument). A kernel with barriers waits for its like at the other ranks: all launch it, and a launch has no more
/// blocks than run at once.
///
/// Dropping it waits, with a bound, for the streams that it was launched on, and gives it back (`ncclDevCommDestroy`). It may outlive its
/// communicator, whose end gives it back, too; kernels must not be launched with it then. What NCCL cannot do is end a kernel that waits for a
/// rank that does not come: [`sync`](DeviceComm::sync) says who that is, but the GPU is held until the process ends, unless the kernel itself
/// gives up (barriers can, from 2.30 on).
pub struct DeviceComm {
    communicator: Arc<Communicator>,
    held: Arc<Held>,
    number: NonZeroU64,
    len: usize,
    resources: Vec<ResourceHandle>,
    multimem: Vec<u64>,
    has_lsa_multimem: bool,
}

impl DeviceComm {
    /// `ncclDevComm`, as large as the loaded release has it.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: words that live as long, read as bytes; there are as many.
        unsafe { std::slice::from_raw_parts(self.held.start().cast(), self.len) }
    }

    /// The argument of a kernel that cudarc launches on this stream, which is waited for before the library gets it back:
    /// `stream.launch_builder(&kernel).arg(device_comm.argument(&stream)?)`.
    ///
    /// # Errors
    /// [`UsageError::Memory`] for a stream of another GPU, and the communicator's own if it has failed or ended.
    pub fn argument(&self, stream: &Arc<CudaStream>) -> Result<&KernelArgument> {
        self.launched_on(&GpuStream::Cuda(stream.clone()))?;
        Ok(&self.held.argument)
    }

    /// A kernel is about to be launched there.
    pub(crate) fn launched_on(&self, stream: &GpuStream) -> Result<()> {
        let communicator = &self.communicator;
        communicator.check_owner()?;
        communicator.check()?;
        let device = communicator.device;
        if communicator.has_ended() {
            return Err(Error::from(UnsupportedError {
                what: "a kernel with a device communicator".into(),
                why: "its communicator has ended, and took it back".into(),
                remedy: "keep the communicator as long as kernels are launched".into(),
            }));
        }
        if !device.has(stream) {
            return Err(UsageError::Memory {
                memory: format!("a stream of {}", stream.describe()),
                wanted: format!("GPU {} of the device communicator", device.ordinal()),
                remedy: "launch the kernel on the communicator's GPU (Comm::gpu)",
            }
            .into());
        }
        let mut users = lock(&self.held.users);
        if users.iter().any(|known| known.raw() == stream.raw()) {
            return Ok(());
        }
        // A program may make a stream for each of its steps.
        let _current = device.enter();
        let is_done = |user: &GpuStream| {
            matches!(device.is_captured(user.raw()), Ok(false))
                && matches!(device.is_idle(user.raw()), Ok(true))
        };
        users.retain(|user| !is_done(user));
        users.push(stream.clone());
        Ok(())
    }

    /// Waits for the kernels that were launched with it, and what else is on their streams, with the communicator's deadline.
    ///
    /// # Errors
    /// The communicator's verdict, as of [`Comm::sync`](crate::Comm::sync), where a rank is gone or the deadline passes.
    pub fn sync(&self) -> Result<()> {
        self.communicator.check_owner()?;
        let errand = self.communicator.errand();
        self.held.users().iter().try_for_each(|stream| self.communicator.wait_for(stream.raw(), &errand))
    }

    /// The handles of [`DeviceRequirements::resources`], in their order.
    pub fn resources(&self) -> &[ResourceHandle] {
        &self.resources
    }

    /// The multicast addresses of [`DeviceRequirements::multimem_teams`], in their order, as the kernel's `ncclMultimemHandle` has them; 0 where
    /// there is none.
    pub fn multimem(&self) -> &[u64] {
        &self.multimem
    }

    /// Where the [`Lsa`](TeamKind::Lsa) team's multicast address of an element of a window is (`ncclGetLsaMultimemDevicePointer`, 2.29.2); `None` where
    /// there is no multicast.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it was made without [`lsa_multimem`](DeviceRequirements::lsa_multimem), since then all ranks would have to ask.
    pub fn lsa_multimem_pointer<T: Element>(&self, buffer: &Buffer<T>, offset: usize) -> Result<Option<u64>> {
        if !self.has_lsa_multimem {
            return Err(Error::from(UnsupportedError {
                what: "a multicast address of the LSA team".into(),
                why: "the device communicator was made without".into(),
                remedy: "ask for it: DeviceRequirements::lsa_multimem".into(),
            }));
        }
        let (name, communicator) = ("ncclGetLsaMultimemDevicePointer", &*self.communicator);
        let get = communicator.library.need(communicator.library.ncclGetLsaMultimemDevicePointer, name)?;
        let (window, offset) = place(&self.communicator, buffer, offset)?;
        // SAFETY: a window of the communicator, which is there; the out-pointer is written during the call.
        address(communicator, name, |start| unsafe { get(window, offset, start) })
    }

    /// The same of a team of [`multimem`](DeviceComm::multimem) (`ncclGetMultimemDevicePointer`, 2.29.2), by its number there.
    ///
    /// # Panics
    /// If there is no such team.
    pub fn multimem_pointer<T: Element>(
        &self,
        team: usize,
        buffer: &Buffer<T>,
        offset: usize,
    ) -> Result<Option<u64>> {
        let (name, communicator) = ("ncclGetMultimemDevicePointer", &*self.communicator);
        let get = communicator.library.need(communicator.library.ncclGetMultimemDevicePointer, name)?;
        let (window, offset) = place(&self.communicator, buffer, offset)?;
        let base = self.multimem[team];
        if base == 0 {
            return Ok(None);
        }
        let team = ncclMultimemHandle_t { mcBasePtr: base as *mut c_void };
        // SAFETY: as above, and a handle that the library gave.
        address(communicator, name, |start| unsafe { get(window, offset, team, start) })
    }
}

impl Drop for DeviceComm {
    fn drop(&mut self) {
        if let Err(error) = self.communicator.end_registration(self.number) {
            tracing::warn!(
                rank = self.communicator.rank,
                "a device communicator is left to the library until its communicator ends: {error}"
            );
        }
    }
}

impl fmt::Debug for DeviceComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceComm").field("rank", &self.communicator.rank).field("bytes", &self.len).finish()
    }
}

/// A logical endpoint of a peer's memory, and where in it (2.31).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Endpoint {
    /// Its number (`ncclCftLeId`).
    pub id: u32,
    /// Bytes from its start.
    pub offset: usize,
}

impl Team {
    fn raw(&self) -> ncclTeam_t {
        let number = |value: usize| c_int::try_from(value).unwrap_or(c_int::MAX);
        ncclTeam_t { nRanks: number(self.ranks), rank: number(self.rank), stride: number(self.stride) }
    }
}

/// The window of a buffer, and how many bytes an element is from its start.
fn place<T: Element>(
    communicator: &Arc<Communicator>,
    buffer: &Buffer<T>,
    offset: usize,
) -> Result<(ncclWindow_t, usize)> {
    communicator.check()?;
    let window = buffer.window_of(communicator)?;
    if offset >= buffer.len() {
        return Err(UsageError::Length {
            operation: "a pointer into a window",
            buffer: "buffer",
            actual: buffer.len(),
            expected: offset.saturating_add(1),
            rule: "more than the offset",
        }
        .into());
    }
    Ok((window, offset * size_of::<T>()))
}

/// An address that the library answers.
fn address(
    communicator: &Communicator,
    name: &'static str,
    get: impl FnOnce(*mut *mut c_void) -> ncclResult_t,
) -> Result<Option<u64>> {
    let mut start = std::ptr::null_mut();
    communicator.call(name, |_| get(&raw mut start))?;
    Ok((!start.is_null()).then_some(start as u64))
}

impl Nccl<'_> {
    /// Makes what kernels of the program's own need of this communicator (`ncclDevCommCreate`, 2.28.3). Collective: the ranks meet first, so
    /// that one that is missing, or asks for something else, is named.
    ///
    /// ```no_run
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::cudarc::driver::LaunchConfig;
    /// use phalanx::jit::{Module, Program, device_comm, value, writes};
    /// use phalanx::nccl::DeviceRequirements;
    ///
    /// let comm = phalanx::init()?;
    /// let nccl = comm.nccl().expect("NCCL");
    /// let mut requirements = DeviceRequirements::default();
    /// requirements.lsa_barriers = 1;
    /// let device = nccl.device_comm(&requirements)?;
    /// let mut counter = nccl.alloc::<u32>(1)?;
    /// let image = Program::new("count.cu", r#"
    ///     #include <nccl_device.h>
    ///     extern "C" __global__ void count(ncclDevComm comm, ncclWindow_t window, unsigned* own) {
    ///         for (int peer = 0; peer < comm.lsaSize; peer++)
    ///             atomicAdd_system((unsigned*)ncclGetLsaPointer(window, 0, peer), 1);
    ///         ncclLsaBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), comm, ncclTeamTagLsa(), 0);
    ///         barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
    ///     }"#).nccl().compile_for(nccl.context())?;
    /// let stream = nccl.context().new_stream()?;
    /// let count = Module::load(nccl.context(), &image)?.kernel("count")?;
    /// let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    /// let window = counter.window()?;
    /// // SAFETY: the arguments are the kernel's, which stays within the window, and all ranks launch it.
    /// unsafe { count.launch(&stream, config, [device_comm(&device), value(&window), writes(&mut counter)])? };
    /// device.sync()?; // each rank's counter is now the number of ranks
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::MissingFunction`] if the library is too old for it; [`Error::Unsupported`] for requirements that it does not have; the library's own where
    /// the ranks cannot have what is asked for, such as symmetric memory ([`Properties::device_api`]).
    pub fn device_comm(&self, requirements: &DeviceRequirements) -> Result<DeviceComm> {
        let communicator = &self.comm.communicator;
        let library = communicator.library;
        let name = "ncclDevCommCreate";
        let create = library.need(library.ncclDevCommCreate, name)?;
        library.need(library.ncclDevCommDestroy, "ncclDevCommDestroy")?;
        let mut raw = requirements.raw(library)?;
        let len = self.device_comm_size(&mut raw)?;
        // Left where it is unless the library has done with it, from whatever thread.
        let making: *mut Making = Box::into_raw(Box::new(Making::new(requirements)));
        // SAFETY: as said.
        let linked = unsafe { Making::link(making, communicator, requirements, &mut raw) };
        let call = Call { root: requirements.tag() as usize, ..Call::empty(Operation::DeviceComm) };
        if let Err(error) = linked.and_then(|()| self.gather(&call)) {
            // SAFETY: made above; the library has not seen it.
            drop(unsafe { Box::from_raw(making) });
            return Err(error);
        }
        if requirements.gin.is_some() {
            // From here on peers may write to this rank's windows, whatever it does itself.
            communicator.begin_one_sided();
        }
        raw.with_pointer(library.version(), |raw| {
            // SAFETY: a usable communicator; the requirements are copied during the call, and what they point to stays; there is room for
            // `ncclDevComm` of this release.
            communicator.call(name, |comm| unsafe { create(comm, raw, (&raw mut (*making).comm).cast()) })
        })
        // The others wait inside for a rank that could not.
        .map_err(|error| communicator.refused(error, &communicator.errand()))?;
        // SAFETY: made above, and nothing is in progress any more.
        let making = unsafe { Box::from_raw(making) };
        let held = Arc::new(Held { argument: KernelArgument(making.comm), users: Mutex::default() });
        Ok(DeviceComm {
            communicator: communicator.clone(),
            number: communicator.keep_registration(Handle::Device(held.clone())),
            held,
            len,
            resources: making.handles.into_iter().map(ResourceHandle).collect(),
            multimem: making.multimem.iter().map(|team| team.mcBasePtr as u64).collect(),
            has_lsa_multimem: requirements.lsa_multimem,
        })
    }

    /// How large `ncclDevComm` is. From 2.31 on the library says so, if it is asked for its own layout.
    fn device_comm_size(&self, raw: &mut ncclDevCommRequirements_t) -> Result<usize> {
        let library = self.comm.communicator.library;
        let mut len = dev_comm_size(library.version());
        if library.version() >= version_code(2, 31, 0) {
            raw.useRuntimeVersion = true;
            len = self.raw_properties()?.devCommRuntimeVersionSize;
        }
        if len > MOST {
            return Err(Error::from(UnsupportedError {
                what: "a device communicator".into(),
                why: format!(
                    "{} {} has {len} bytes for it, more than {MOST}",
                    library.name(),
                    self.version()
                ),
                remedy: "load an older one, or use a newer phalanx".into(),
            }));
        }
        Ok(len)
    }

    fn raw_properties(&self) -> Result<ncclCommProperties_t> {
        let communicator = &self.comm.communicator;
        let library = communicator.library;
        let name = "ncclCommQueryProperties";
        let query = library.need(library.ncclCommQueryProperties, name)?;
        let properties = ncclCommProperties_t::for_version(library.version());
        let mut properties = properties.ok_or_else(|| Error::from(library.lacks(name)))?;
        // SAFETY: a usable communicator; the structure is written during the call.
        communicator.call(name, |comm| unsafe { query(comm, &raw mut properties) })?;
        Ok(properties)
    }

    /// What the communicator can do (`ncclCommQueryProperties`, 2.29.2).
    ///
    /// # Errors
    /// [`Error::MissingFunction`] if the library is too old for it.
    pub fn properties(&self) -> Result<Properties> {
        let raw = self.raw_properties()?;
        let version = self.comm.communicator.library.version();
        let has = |minor, patch| version >= version_code(2, minor, patch);
        let connection = match raw.ginConnectionType {
            gin_connection::FULL => Some(GinConnection::Full),
            gin_connection::RAIL => Some(GinConnection::Rail),
            gin_connection::CUSTOM_STRIDE => Some(GinConnection::Stride(raw.ginMinStride)),
            _ => None,
        };
        let supported = |code: &usize| raw.ginSupport[*code];
        let types = || (0..raw.ginSupport.len()).filter(supported);
        Ok(Properties {
            nvml_gpu: raw.nvmlDev,
            device_api: raw.deviceApiSupport,
            multimem: raw.multimemSupport,
            gin: GinType::from_code(if has(29, 7) { raw.ginType } else { raw.ginType_v22902.into() }),
            lsa_teams: has(29, 7).then_some(raw.nLsaTeams as usize),
            host_rma: has(29, 7).then_some(raw.hostRmaSupport),
            rail_gin: has(29, 7).then_some(GinType::from_code(raw.railedGinType)),
            comm_hash: has(31, 0).then_some(raw.commHash),
            gin_min_stride: has(31, 0).then_some(raw.ginMinStride),
            gin_connection: has(31, 0).then_some(connection),
            gin_types: has(31, 0)
                .then(|| types().filter_map(|code| GinType::from_code(code as c_int)).collect()),
            cft: has(32, 0).then_some((raw.cftSupport, raw.cftMulticastSupport, raw.cftCountedSupport)),
        })
    }

    /// One of the communicator's teams (`ncclTeamWorld`, `ncclTeamLsa`, `ncclTeamRail`, 2.28.3; `ncclTeamCft`, `ncclTeamCftMultimem`, 2.31). Not collective.
    ///
    /// # Errors
    /// [`Error::MissingFunction`] if the library is too old for it; [`Error::Unsupported`] if there is no such team, as where the ranks cannot
    /// have symmetric memory.
    pub fn team(&self, kind: TeamKind) -> Result<Team> {
        let communicator = &self.comm.communicator;
        let library = communicator.library;
        let cft = |mode| {
            let team = library.need(library.ncclTeamCft, "ncclTeamCft")?;
            // SAFETY: a usable communicator.
            self.raw_team("ncclTeamCft", move |comm| unsafe { team(comm, mode) })
        };
        let (function, name) = match kind {
            TeamKind::World => (library.ncclTeamWorld, "ncclTeamWorld"),
            TeamKind::Lsa => (library.ncclTeamLsa, "ncclTeamLsa"),
            TeamKind::Rail => (library.ncclTeamRail, "ncclTeamRail"),
            TeamKind::CftMultimem => (library.ncclTeamCftMultimem, "ncclTeamCftMultimem"),
            TeamKind::Cft => return cft(cft_team::FLAT),
            TeamKind::CftOverMultimem => return cft(cft_team::HIER_MULTIMEM),
            TeamKind::CftOverLsa => return cft(cft_team::HIER_LSA),
        };
        let team = library.need(function, name)?;
        // SAFETY: as above.
        self.raw_team(name, move |comm| unsafe { team(comm) })
    }

    fn raw_team(
        &self,
        name: &'static str,
        get: impl FnOnce(phalanx_sys::nccl::ncclComm_t) -> ncclTeam_t,
    ) -> Result<Team> {
        let mut team = ncclTeam_t::default();
        self.comm.communicator.call(name, |comm| {
            team = get(comm);
            ncclResult_t::Success
        })?;
        // What the library answers instead of an error has no ranks.
        if team.nRanks < 1 || !(0..team.nRanks).contains(&team.rank) {
            return Err(Error::from(UnsupportedError {
                what: format!("a team ({name})"),
                why: format!("{} has none for this communicator", self.comm.communicator.library.name()),
                remedy: "look at Nccl::properties, and NCCL_DEBUG=INFO".into(),
            }));
        }
        Ok(Team {
            ranks: team.nRanks as usize,
            rank: team.rank as usize,
            stride: usize::try_from(team.stride).unwrap_or(0),
        })
    }

    /// The communicator's number of a rank of a team (`ncclTeamRankToWorld`, 2.28.3).
    ///
    /// # Errors
    /// [`UsageError::Rank`] if the team has no such rank.
    pub fn rank_in_world(&self, team: Team, rank: usize) -> Result<usize> {
        let library = self.comm.communicator.library;
        self.rank_in(library.ncclTeamRankToWorld, "ncclTeamRankToWorld", team, rank)
    }

    /// The number in the [`Lsa`](TeamKind::Lsa) team of a rank of a team that is in both (`ncclTeamRankToLsa`, 2.28.3).
    ///
    /// # Errors
    /// [`UsageError::Rank`] if the team has no such rank. What is not in the `Lsa` team has no number there, and the answer is none of its ranks.
    pub fn rank_in_lsa(&self, team: Team, rank: usize) -> Result<usize> {
        let library = self.comm.communicator.library;
        self.rank_in(library.ncclTeamRankToLsa, "ncclTeamRankToLsa", team, rank)
    }

    fn rank_in(
        &self,
        function: Option<unsafe extern "C" fn(phalanx_sys::nccl::ncclComm_t, ncclTeam_t, c_int) -> c_int>,
        name: &'static str,
        team: Team,
        rank: usize,
    ) -> Result<usize> {
        let communicator = &self.comm.communicator;
        let function = communicator.library.need(function, name)?;
        let size = crate::contract::Shape { rank: team.rank, world_size: team.ranks };
        size.check_rank("a rank of a team", "rank", rank)?;
        let mut number = 0;
        communicator.call(name, |comm| {
            // SAFETY: a usable communicator, and a rank of the team.
            number = unsafe { function(comm, team.raw(), rank as c_int) };
            ncclResult_t::Success
        })?;
        Ok(usize::try_from(number).unwrap_or(usize::MAX))
    }

    /// How many slots [`Resource::AllToAllSlots`] takes for each block, for so many elements of so many bytes at most (`ncclLLA2ACalcSlots`, 2.28.3).
    ///
    /// # Errors
    /// [`Error::MissingFunction`] if the library is too old for it; [`UsageError::Overflow`] for more than 2³¹ - 1.
    pub fn all_to_all_slots(&self, elements: usize, element_size: usize) -> Result<i32> {
        let library = self.comm.communicator.library;
        let slots = library.need(library.ncclLLA2ACalcSlots, "ncclLLA2ACalcSlots")?;
        let number = |what: &'static str, value: usize| {
            c_int::try_from(value).map_err(|_| UsageError::Overflow {
                operation: "all_to_all_slots",
                what,
                value: value.to_string(),
                limit: c_int::MAX.to_string(),
            })
        };
        let (elements, size) =
            (number("the elements", elements)?, number("the bytes of an element", element_size)?);
        // SAFETY: a function of two numbers.
        Ok(unsafe { slots(elements, size) })
    }

    /// Where an element of a rank's part of a window is in this GPU's addresses (`ncclGetPeerDevicePointer`, 2.29.2); `None` where it does not reach that
    /// rank's memory. The offset is in elements. The address is for kernels, as long as the window lives.
    ///
    /// # Errors
    /// A buffer that is no window of this communicator, an offset behind its end, a rank that is not there.
    pub fn peer_pointer<T: Element>(
        &self,
        buffer: &Buffer<T>,
        offset: usize,
        rank: usize,
    ) -> Result<Option<u64>> {
        let (name, communicator) = ("ncclGetPeerDevicePointer", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetPeerDevicePointer, name)?;
        self.comm.shape().check_rank("peer_pointer", "rank", rank)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        // SAFETY: a window of the communicator, which is there; the out-pointer is written during the call.
        address(communicator, name, |start| unsafe { get(window, offset, rank as c_int, start) })
    }

    /// The same by the rank's number in the [`Lsa`](TeamKind::Lsa) team (`ncclGetLsaDevicePointer`, 2.29.2).
    ///
    /// # Errors
    /// As of [`peer_pointer`](Nccl::peer_pointer); the library's own for a rank that is not there.
    pub fn lsa_pointer<T: Element>(&self, buffer: &Buffer<T>, offset: usize, lsa_rank: usize) -> Result<u64> {
        let (name, communicator) = ("ncclGetLsaDevicePointer", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetLsaDevicePointer, name)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        let rank = c_int::try_from(lsa_rank).unwrap_or(c_int::MAX);
        // SAFETY: as above.
        let start = address(communicator, name, |start| unsafe { get(window, offset, rank, start) })?;
        Ok(start.unwrap_or(0))
    }

    /// Where a window starts on this rank, as the library has it (`ncclWinGetUserPtr`, 2.29.2).
    ///
    /// # Errors
    /// As of [`peer_pointer`](Nccl::peer_pointer).
    pub fn window_start<T: Element>(&self, buffer: &Buffer<T>) -> Result<u64> {
        let (name, communicator) = ("ncclWinGetUserPtr", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclWinGetUserPtr, name)?;
        let window = buffer.window_of(communicator)?;
        let mut start = std::ptr::null_mut();
        // SAFETY: as above.
        communicator.call(name, |comm| unsafe { get(comm, window, &raw mut start) })?;
        Ok(start as u64)
    }

    /// The logical endpoint of an element of a rank's part of a window (`ncclGetPeerDeviceLeInfo`, 2.31).
    ///
    /// # Errors
    /// As of [`peer_pointer`](Nccl::peer_pointer); the library's own where there are no endpoints.
    pub fn peer_endpoint<T: Element>(
        &self,
        buffer: &Buffer<T>,
        offset: usize,
        rank: usize,
    ) -> Result<Endpoint> {
        let (name, communicator) = ("ncclGetPeerDeviceLeInfo", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetPeerDeviceLeInfo, name)?;
        self.comm.shape().check_rank("peer_endpoint", "rank", rank)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        // SAFETY: a window of the communicator, which is there; the out-pointers are written during the call.
        endpoint(communicator, name, |id, to| unsafe { get(window, offset, rank as c_int, id, to) })
    }

    /// The same by the rank's number in a team of logical endpoints (`ncclGetCftDeviceLeInfo`, 2.31).
    ///
    /// # Errors
    /// As of [`peer_endpoint`](Nccl::peer_endpoint).
    pub fn cft_endpoint<T: Element>(
        &self,
        buffer: &Buffer<T>,
        offset: usize,
        team: Team,
        rank: usize,
    ) -> Result<Endpoint> {
        let (name, communicator) = ("ncclGetCftDeviceLeInfo", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetCftDeviceLeInfo, name)?;
        let size = crate::contract::Shape { rank: team.rank, world_size: team.ranks };
        size.check_rank("cft_endpoint", "rank", rank)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        let get = |id, to| {
            // SAFETY: as above, and a rank of the team.
            unsafe { get(window, offset, rank as c_int, team.raw(), id, to) }
        };
        endpoint(communicator, name, get)
    }

    /// The same of the multicast endpoint (`ncclGetMultimemDeviceLeInfo`, 2.31).
    ///
    /// # Errors
    /// As of [`peer_endpoint`](Nccl::peer_endpoint).
    pub fn multimem_endpoint<T: Element>(&self, buffer: &Buffer<T>, offset: usize) -> Result<Endpoint> {
        let (name, communicator) = ("ncclGetMultimemDeviceLeInfo", &self.comm.communicator);
        let get = communicator.library.need(communicator.library.ncclGetMultimemDeviceLeInfo, name)?;
        let (window, offset) = place(communicator, buffer, offset)?;
        // SAFETY: as above.
        endpoint(communicator, name, |id, to| unsafe { get(window, offset, id, to) })
    }
}

/// An endpoint that the library answers.
fn endpoint(
    communicator: &Communicator,
    name: &'static str,
    get: impl FnOnce(*mut u32, *mut usize) -> ncclResult_t,
) -> Result<Endpoint> {
    let (mut id, mut offset) = (0, 0);
    communicator.call(name, |_| get(&raw mut id, &raw mut offset))?;
    Ok(Endpoint { id, offset })
}

#[cfg(feature = "jit")]
impl crate::jit::sealed::Sealed for DeviceComm {}

#[cfg(feature = "jit")]
impl crate::jit::DeviceHandle for DeviceComm {
    fn as_bytes(&self) -> &[u8] {
        DeviceComm::as_bytes(self)
    }

    fn launched_on(&self, stream: &GpuStream) -> Result<()> {
        DeviceComm::launched_on(self, stream)
    }
}
