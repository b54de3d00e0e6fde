//! [`Ranks`]: a communicator for modules.

#[cfg(feature = "cuda")]
use crate::gpu::Gpu;
use crate::{Error, Result};
use burn::tensor::Device;
#[cfg(feature = "cuda")]
use phalanx::BackendKind;
use phalanx::{Comm, SharedComm};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The ranks that train a module together, as one of them sees it. A module keeps a clone in a field with `#[module(skip)]`.
///
/// Every rank makes the same calls in the same order. A difference is an error on all ranks; a rank that is missing is named by the others'
/// errors at the deadline.
#[derive(Clone, Debug)]
pub struct Ranks {
    comm: SharedComm,
    #[cfg(feature = "cuda")]
    pub(crate) gpu: Option<Gpu>,
    pub(crate) sums_in_f32: bool,
    /// Hashes of the modules that all ranks have alike.
    pub(crate) agreed: Arc<Mutex<HashSet<u64>>>,
}

impl Ranks {
    /// The ranks of the launcher's job (`phalanx launch`, torchrun, mpirun, srun): [`phalanx::init`].
    pub fn init() -> Result<Ranks> {
        Ranks::new(phalanx::init()?)
    }

    /// The ranks of a communicator.
    ///
    /// # Errors
    /// [`Error::Comm`] if the driver refuses to use the rank's GPU.
    pub fn new(comm: Comm) -> Result<Ranks> {
        #[cfg(feature = "cuda")]
        let gpu = comm.gpu().filter(|_| comm.backend() == BackendKind::Nccl).map(Gpu::new).transpose()?;
        let comm = comm.share();
        #[cfg(feature = "cuda")]
        let comm = gpu.as_ref().map_or(Ok(comm.clone()), |gpu| gpu.place(&comm))?;
        Ok(Ranks {
            comm,
            #[cfg(feature = "cuda")]
            gpu,
            sums_in_f32: false,
            agreed: Arc::default(),
        })
    }

    /// Runs ranks as threads of this process: what `rank` returns on each, in rank order.
    ///
    /// Each rank makes its own module. A clone of another thread's shares the running statistics.
    ///
    /// # Errors
    /// The error of the rank that failed first, as for [`phalanx::try_run`]; or the ranks could not be made.
    pub fn try_run<T: Send>(count: usize, rank: impl Fn(Ranks) -> Result<T> + Sync) -> Result<Vec<T>> {
        phalanx::try_run(count, |comm| rank(Ranks::new(comm)?))
    }

    /// The same ranks, which send gradients of bf16 and f16 as f32, twice as much. The same on all ranks. In shared memory sums are made in f32
    /// in any case; this is for libraries that round on the way.
    #[must_use]
    pub fn sums_in_f32(self) -> Ranks {
        Ranks { sums_in_f32: true, ..self }
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Where this rank's tensors are: with the feature `cuda` and phalanx's backend NCCL, this rank's GPU; else burn's CPU backend, flex.
    /// `device().autodiff()` is for training.
    pub fn device(&self) -> Device {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return gpu.device.clone();
        }
        Device::flex()
    }

    /// Whether tensors are on a GPU.
    pub(crate) fn has_gpu(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.gpu.is_some();
        #[cfg(not(feature = "cuda"))]
        return false;
    }

    /// A seed that differs from rank to rank, for `Device::seed` (dropout) and augmentation; what must be equal on all takes `seed` itself.
    ///
    /// Ranks as threads share burn's random numbers of the CPU, so there the order of the threads decides what each gets.
    pub fn rank_seed(&self, seed: u64) -> u64 {
        // SplitMix64's first number of a stream for each rank: neighbouring seeds and ranks are unrelated.
        let mut z = seed.wrapping_add((self.rank() as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The communicator, for what has no method here.
    pub fn comm(&self) -> &SharedComm {
        &self.comm
    }

    /// The same ranks with another deadline.
    pub fn within(&self, timeout: Duration) -> Result<Ranks> {
        Ok(Ranks { comm: self.comm.within(timeout)?, ..self.clone() })
    }

    /// Rank 0's choice, on all ranks. Collective.
    pub fn decide(&self, choice: bool) -> Result<bool> {
        let mut chosen = [u8::from(choice)];
        self.comm.broadcast_in_place(&mut chosen, 0)?;
        Ok(chosen[0] != 0)
    }

    /// Waits until this rank's operations are complete. On GPUs they are enqueued when their calls return, so this is where a lost rank is found.
    pub fn sync(&self) -> Result<()> {
        Ok(self.comm.sync()?)
    }

    /// Waits until every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        Ok(self.comm.barrier()?)
    }

    /// Ends the communicator, on all ranks together. Later calls through any clone answer an error.
    pub fn finalize(&self) -> Result<()> {
        Ok(self.comm.finalize()?)
    }
}

/// An argument that makes no sense: what, and what to do. Nothing was sent.
pub(crate) fn usage<T>(text: String) -> Result<T> {
    Err(Error::Usage(text))
}
