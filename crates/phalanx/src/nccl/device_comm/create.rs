//! Creating a device communicator: requirements in, handles and addresses out.

use super::DeviceComm;
use super::requirements::{DeviceRequirements, Resource, ResourceHandle, negative};
use super::teams::Team;
use crate::backend::nccl::communicator::Communicator;
use crate::backend::nccl::device_comm::{Held, KernelArgument, MOST, Words};
use crate::backend::nccl::kernel_streams::KernelStreams;
use crate::backend::nccl::memory::Handle;
use crate::contract::{Call, Operation};
use crate::nccl::Nccl;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use phalanx_sys::nccl::{
    dev_comm_size, ncclDevCommRequirements_t, ncclDevResourceRequirements_t, ncclLLA2AHandle_t,
    ncclLsaBarrierHandle_t, ncclMultimemHandle_t, ncclTeamRequirements_t, version_code,
};
use std::ffi::c_int;
use std::sync::Arc;

/// Memory that the library writes while it creates a device communicator, possibly from its own thread. It
/// must not move.
struct CreateOutputs {
    comm: Words,
    handles: Vec<[u32; 2]>,
    resources: Vec<ncclDevResourceRequirements_t>,
    multimem: Vec<ncclMultimemHandle_t>,
    teams: Vec<ncclTeamRequirements_t>,
}

impl CreateOutputs {
    fn new(asked: &DeviceRequirements) -> CreateOutputs {
        let (resources, teams) = (asked.resources.len(), &asked.multimem_teams);
        let team = |team: &Team| ncclTeamRequirements_t {
            next: std::ptr::null_mut(),
            team: team.raw(),
            multimem: true,
            outMultimemHandle: std::ptr::null_mut(),
        };
        CreateOutputs {
            comm: [0; MOST / 8],
            handles: vec![[0; 2]; resources],
            resources: vec![ncclDevResourceRequirements_t::NONE; resources],
            multimem: vec![ncclMultimemHandle_t { mcBasePtr: std::ptr::null_mut() }; teams.len()],
            teams: teams.iter().map(team).collect(),
        }
    }

    /// Links the requirements into the library's lists, with the addresses for their results.
    ///
    /// # Safety
    /// `this` stays where it is until the library has done with the requirements.
    unsafe fn link(
        this: *mut CreateOutputs,
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

/// Fills in a resource's requirement, with the address for its handle.
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

impl Nccl<'_> {
    /// Makes a device communicator, for kernels of the program (`ncclDevCommCreate`, 2.28.3).
    ///
    /// Collective. All ranks arrive first, so that a rank that is missing or requests something else is
    /// named.
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
    /// [`Error::MissingFunction`](crate::Error::MissingFunction) if the library is too old for it;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for requirements that it does not have; the
    /// library's own where the ranks cannot have what is asked for, such as symmetric memory
    /// ([`Properties::device_api`](crate::nccl::Properties::device_api)).
    #[doc(alias = "ncclDevCommCreate")]
    pub fn device_comm(&self, requirements: &DeviceRequirements) -> Result<DeviceComm> {
        let communicator = &self.comm.communicator;
        let library = communicator.library;
        let name = "ncclDevCommCreate";
        let create = library.need(library.ncclDevCommCreate, name)?;
        library.need(library.ncclDevCommDestroy, "ncclDevCommDestroy")?;
        let mut raw = requirements.raw(library)?;
        let len = self.device_comm_size(&mut raw)?;
        // Leaked until the library, on whatever thread, has finished with it.
        let outputs: *mut CreateOutputs = Box::into_raw(Box::new(CreateOutputs::new(requirements)));
        // SAFETY: as said.
        let linked = unsafe { CreateOutputs::link(outputs, communicator, requirements, &mut raw) };
        let call = Call { root: requirements.tag() as usize, ..Call::empty(Operation::DeviceComm) };
        if let Err(error) = linked.and_then(|()| self.gather(&call)) {
            // SAFETY: made above; the library has not seen it.
            drop(unsafe { Box::from_raw(outputs) });
            return Err(error);
        }
        if requirements.gin.is_some() {
            // From here on peers may write to this rank's windows, whatever it does itself.
            communicator.begin_one_sided();
        }
        raw.with_pointer(library.version(), |raw| {
            // SAFETY: a usable communicator; the requirements are copied during the call, and what they point
            // to stays; there is room for `ncclDevComm` of this release.
            communicator.call(name, |comm| unsafe { create(comm, raw, (&raw mut (*outputs).comm).cast()) })
        })
        // The other ranks would wait inside the library for this one.
        .map_err(|error| communicator.refused(error, &communicator.auxiliary_call()))?;
        // SAFETY: made above, and nothing is in progress any more.
        let outputs = unsafe { Box::from_raw(outputs) };
        let held = Arc::new(Held { argument: KernelArgument(outputs.comm), users: KernelStreams::default() });
        Ok(DeviceComm {
            communicator: communicator.clone(),
            number: communicator.keep_registration(Handle::Device(held.clone())),
            held,
            len,
            resources: outputs.handles.into_iter().map(ResourceHandle).collect(),
            multimem: outputs.multimem.iter().map(|team| team.mcBasePtr as u64).collect(),
            has_lsa_multimem: requirements.lsa_multimem,
        })
    }

    /// Size of `ncclDevComm` in bytes. From 2.31 on the library reports it, if its own layout is requested.
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

    /// How many slots [`Resource::AllToAllSlots`](crate::nccl::Resource::AllToAllSlots) takes for each block,
    /// for so many elements of so many bytes at most (`ncclLLA2ACalcSlots`, 2.28.3).
    ///
    /// # Errors
    /// [`Error::MissingFunction`](crate::Error::MissingFunction) if the library is too old for it;
    /// [`UsageError::Overflow`](crate::UsageError::Overflow) for more than 2³¹ - 1.
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
}
