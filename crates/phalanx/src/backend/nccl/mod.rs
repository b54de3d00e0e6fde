//! The backend of NCCL and RCCL: each rank is a GPU, driven by a thread or a process.
//!
//! How it differs from the model: operations on device memory are enqueued on a stream and complete later
//! (`sync` waits for them); on host memory, which is copied to the GPU and back, they are complete when they
//! return. Reductions are the library's: in an order of its own, and f16, bf16 and fp8 in their own
//! precision. There are no tags. Messages are matched with the collectives in one order.
//!
//! Beside the library's communicator, the ranks share two channels. On the host channel they set up the
//! communicator and wait for each other. On the control channel they announce their calls, so that missing,
//! dead and differing ranks are found and named, which NCCL does not do. The channels hide whether ranks
//! share a host.
//!
//! | file | what |
//! |---|---|
//! | `library.rs`, `config.rs`, `collective_config.rs` | the loaded library, its answers, settings of communicators and of calls |
//! | `device.rs`, `queries.rs`, `runtime/` | the GPU, by way of CUDA's driver or HIP |
//! | `staging.rs` | host memory on its way to the GPU |
//! | `join.rs`, `adopt.rs`, `init.rs`, `shutdown.rs` | set-up of a communicator, the library's calls for it, and its end |
//! | `communicator.rs`, `waiting.rs` | the C communicator and its state; waits with a deadline |
//! | `backend.rs`, `checks.rs` | the operations of `Backend`, and the checks before them |
//! | `operation.rs`, `group.rs`, `messages.rs` | one operation from call to end; groups; posted messages |
//! | `reclaim.rs` | memory and C communicators, given back while the GPUs rest |
//! | `arrival.rs`, `watchdog.rs`, `library_lock.rs`, `ahead.rs` | what keeps a rank from hanging inside the library, on its GPU, or behind another thread |
//! | `graphs.rs` | CUDA graphs of operations |
//! | `collective.rs`, `parts.rs` | calls of the library; messages, and collectives that consist of them |
//! | `direct/` | phalanx's own kernels in place of the library's, where they are faster |
//! | `streams.rs` | events between streams, for the portable trait |
//! | `gpu_window/` | memory of other ranks' GPUs: registered, opened, copied to and from |
//! | `device_comm.rs` | device communicators, for kernels of the program |
//! | `memory/` | GPU memory that the library knows |
//! | `parameters.rs` | the library's environment variables |

mod adopt;
#[cfg(feature = "nccl")]
mod ahead;
pub(crate) mod arrival;
mod backend;
mod checks;
pub(crate) mod collective;
pub(crate) mod collective_config;
pub(crate) mod communicator;
pub(crate) mod config;
pub(crate) mod device;
pub(crate) mod device_comm;
#[cfg(feature = "nccl")]
pub(crate) mod direct;
#[cfg(feature = "nccl")]
pub(crate) mod gpu_window;
#[cfg(feature = "nccl")]
pub(crate) mod graphs;
pub(crate) mod group;
pub(crate) mod init;
mod join;
pub(crate) mod kernel_streams;
pub(crate) mod library;
pub(crate) mod library_lock;
pub(crate) mod memory;
pub(crate) mod messages;
pub(crate) mod operation;
pub(crate) mod parameters;
mod parts;
mod queries;
pub(crate) mod reclaim;
pub(crate) mod runtime;
pub(crate) mod shutdown;
pub(crate) mod staging;
pub(crate) mod streams;
pub(crate) mod waiting;
pub(crate) mod watchdog;

pub(crate) use checks::check_on_device;
pub use collective_config::CollectiveConfig;
pub use config::Config;
#[cfg(feature = "nccl")]
pub(crate) use graphs::HeldGraph;
pub(crate) use join::{available, visible};
pub use memory::{Buffer, GpuSlice, Registration};
pub use parameters::parameters;

use crate::buffer::stream::{GpuStream, Stream};
#[cfg(feature = "nccl")]
use crate::contract::messenger::MakeMessenger;
use crate::contract::{Backend, Call, Operation, Shape, Transfer};
use crate::control::host_channel::HostChannel;
use crate::os::sync::lock;
use crate::types::error::{Result, UsageError};
use communicator::Communicator;
#[cfg(feature = "nccl")]
use cudarc::driver::CudaGraph;
use messages::PostedMessages;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use streams::Events;

/// One rank's end of a communicator on GPUs.
pub(crate) struct NcclComm {
    pub(crate) communicator: Arc<Communicator>,
    host_channel: Arc<dyn HostChannel>,
    stream: GpuStream,
    pub(crate) settings: Arc<NcclSettings>,
    pub(crate) messages: Arc<PostedMessages>,
    events: Events,
    /// The stream of `RawCommunicator`, if there is one.
    portable: Mutex<Option<GpuStream>>,
    /// What moves GPU memory between hosts, from the first window on.
    #[cfg(feature = "nccl")]
    far: Mutex<Option<Arc<gpu_window::Far>>>,
}

/// Settings of a communicator, inherited by its splits.
#[derive(Debug, Clone, Default)]
pub(crate) struct NcclSettings {
    pub config: Config,
    /// Whether calls are compared between the ranks before anything is enqueued.
    pub check: bool,
    /// Whether own kernels are used, and which.
    #[cfg(feature = "nccl")]
    pub algorithm: direct::GpuAlgorithm,
    /// What carries host memory to the ranks of other hosts, if it is built in.
    #[cfg(feature = "nccl")]
    pub messenger: Option<MakeMessenger>,
    /// The thread that made all ranks (`init_all`) and probably drives them. If it waited for another rank,
    /// it would wait forever.
    pub driver: Option<ThreadId>,
}

impl NcclSettings {
    /// Settings, with what the environment says of own kernels.
    pub fn from_environment(config: Config, check: bool) -> Result<NcclSettings> {
        #[cfg(feature = "nccl")]
        let algorithm = match config.gpu_algorithm {
            Some(algorithm) => algorithm,
            None => direct::GpuAlgorithm::of_variable("PHALANX_GPU_ALGORITHM")?,
        };
        Ok(NcclSettings {
            config,
            check,
            #[cfg(feature = "nccl")]
            algorithm,
            #[cfg(feature = "nccl")]
            messenger: None,
            driver: None,
        })
    }

    /// Settings of ranks that this thread makes and drives.
    pub fn driven_here(check: bool) -> Result<Arc<NcclSettings>> {
        let driver = Some(std::thread::current().id());
        Ok(Arc::new(NcclSettings { driver, ..NcclSettings::from_environment(Config::default(), check)? }))
    }
}

/// The handle of a stream that is another one in each thread (`CU_STREAM_PER_THREAD`, `hipStreamPerThread`).
const PER_THREAD: usize = 2;

impl NcclComm {
    /// The backend behind a communicator, if it is this one.
    pub fn of(backend: &dyn Backend) -> Option<&NcclComm> {
        (backend as &dyn std::any::Any).downcast_ref()
    }

    /// A new channel in host memory between the same ranks. Collective.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    pub unsafe fn host_channel(&self) -> Result<Box<dyn HostChannel>> {
        // SAFETY: the caller's contract.
        let channel = unsafe { self.host_channel.split_channel(Some(0), self.rank() as i64) }?;
        Ok(channel.expect("everybody has a colour"))
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape { rank: self.rank(), world_size: self.world_size() }
    }

    /// The ordinal of its GPU.
    pub fn gpu(&self) -> usize {
        self.communicator.device.ordinal()
    }

    /// Keeps a stream alive on which operations will be enqueued.
    pub fn adopt(&self, stream: &GpuStream) -> Result<()> {
        let device = &self.communicator.device;
        if stream.raw().0.addr() == PER_THREAD {
            return Err(UsageError::Setting {
                name: "Comm::on".into(),
                value: "the per-thread default stream (0x2)".into(),
                expected: "a stream that is the same in every thread, since others wait for it, too: CudaContext::new_stream, \
                           or default_stream"
                    .into(),
            }
            .into());
        }
        if !device.has(stream) {
            return Err(UsageError::Memory {
                memory: format!("a stream of {}", stream.describe()),
                wanted: format!("GPU {} of {} (and its primary context)", device.ordinal(), self.kind()),
                remedy: "make the stream on the communicator's GPU (Comm::gpu)",
            }
            .into());
        }
        self.communicator.adopt(stream)
    }

    /// Makes a separate stream for `RawCommunicator`, so that communication overlaps the application's
    /// kernels.
    pub fn make_portable(&self) -> Result<Stream> {
        let stream = self.communicator.device.new_stream()?;
        *lock(&self.portable) = Some(stream.clone());
        self.adopt(&stream)?;
        Ok(Stream::gpu(stream))
    }

    fn portable_stream(&self) -> GpuStream {
        lock(&self.portable).clone().unwrap_or_else(|| self.stream.clone())
    }

    /// Whether its ranks are threads of this process.
    pub fn is_of_threads(&self) -> bool {
        self.host_channel.is_of_threads()
    }

    /// Takes a CUDA graph of operations that were captured on this communicator.
    #[cfg(feature = "nccl")]
    pub fn hold(&self, graph: CudaGraph, stream: GpuStream) -> Arc<HeldGraph> {
        self.communicator.hold(graph, stream)
    }

    /// Launches a CUDA graph of operations that were captured on this communicator.
    #[cfg(feature = "nccl")]
    pub fn launch<'a, 'env: 'a>(
        &self,
        graph: &HeldGraph,
        calls: impl Iterator<Item = &'a Call<'env>>,
        transfers: impl Iterator<Item = &'a Transfer>,
    ) -> Result<()> {
        self.flush()?;
        self.communicator.check_awake(Operation::Barrier)?;
        for transfer in transfers {
            self.communicator.next_message(transfer);
        }
        for call in calls {
            self.communicator.next_collective(call, self.communicator.own_kernel(call).is_some());
        }
        self.communicator.launch(graph)
    }

    /// Carries out the posted messages, or waits for the thread that does.
    #[inline(always)]
    pub fn flush(&self) -> Result<()> {
        if self.messages.are_pending() { self.flush_messages() } else { Ok(()) }
    }

    #[cold]
    fn flush_messages(&self) -> Result<()> {
        self.communicator.check_owner()?;
        let _carrying = self.messages.carry();
        let (transfers, ids) = self.messages.take();
        let Some(first) = transfers.first() else { return Ok(()) };
        let result = self.check_driver(first.operation()).and_then(|()| {
            // SAFETY: the contract of `post`: the memory is valid until its id is settled, which `wait` and
            // `test` do when it is complete: when `_carrying` is dropped, or the group ends that this thread
            // has open.
            unsafe { operation::messages(&self.communicator, &transfers, self.settings.check) }
        });
        match &result {
            Err(error) => self.messages.fail(ids, error),
            Ok(()) if group::is_open() => self.messages.leave_to_group(ids),
            Ok(()) => {}
        }
        result
    }
}
