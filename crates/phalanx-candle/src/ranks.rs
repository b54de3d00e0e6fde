//! [`Ranks`]: a communicator for tensors.

use crate::error::{AnyError, failed, usage};
use candle_core::{Device, Result};
use phalanx::{Comm, SharedComm};
use std::time::Duration;

/// The ranks that work on tensors together, as one of them sees it. A layer or an optimiser keeps a clone.
///
/// Every rank makes the same calls in the same order. A difference (operation, shape, type) is an error on all ranks; a rank that is
/// missing is named by the others' errors at the deadline ([`phalanx_error`](crate::phalanx_error)).
#[derive(Clone, Debug)]
pub struct Ranks {
    comm: SharedComm,
    device: Device,
}

impl Ranks {
    /// The ranks of the launcher's job (`phalanx launch`, torchrun, mpirun, srun): [`phalanx::init`].
    pub fn init() -> Result<Ranks> {
        Ranks::new(phalanx::init().map_err(failed)?)
    }

    /// The ranks of a communicator.
    ///
    /// With a GPU, tensors are on it, and work runs on a stream that candle and phalanx share. Memory that tensors free stays with the process,
    /// for the next ones. Otherwise tensors are on the CPU.
    pub fn new(comm: Comm) -> Result<Ranks> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = comm.gpu() {
            let device = Device::new_cuda_with_stream(gpu)?;
            if let Device::Cuda(cuda) = &device {
                let kept = phalanx_train::device::keep_freed_memory(cuda.cuda_stream().context());
                kept.map_err(candle_core::Error::wrap)?;
            }
            return Ranks::on_device(comm, device);
        }
        Ranks::on_device(comm, Device::Cpu)
    }

    /// A communicator of this rank whose tensors are on this device, on whose stream its operations run.
    fn on_device(comm: Comm, device: Device) -> Result<Ranks> {
        let comm = comm.share();
        #[cfg(feature = "cuda")]
        let comm = match &device {
            Device::Cuda(cuda) => comm.on(&cuda.cuda_stream()).map_err(failed)?,
            _ => comm,
        };
        Ok(Ranks { comm, device })
    }

    /// Runs ranks as threads of this process: what `rank` returns on each, in rank order.
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use phalanx::ReduceOp;
    /// use phalanx_candle::Ranks;
    ///
    /// let sums = Ranks::try_run(3, |ranks| {
    ///     let mine = Tensor::new(&[ranks.rank() as f32, 1.0], ranks.device())?;
    ///     ranks.all_reduce(&mine, ReduceOp::Sum)?.to_vec1::<f32>()
    /// })?;
    /// assert_eq!(sums, [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// The error of the rank that failed first, as for [`phalanx::try_run`]; or the ranks could not be made.
    pub fn try_run<T: Send>(count: usize, rank: impl Fn(Ranks) -> Result<T> + Sync) -> Result<Vec<T>> {
        let ran = phalanx::try_run(count, |comm| Ranks::new(comm).and_then(&rank).map_err(AnyError));
        ran.map_err(|AnyError(error)| error)
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Where this rank's tensors are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The communicator, for what has no method here.
    pub fn comm(&self) -> &SharedComm {
        &self.comm
    }

    /// The ranks of the same colour, in the order of `key`; `None` leaves this rank out. Collective.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Ranks>> {
        let part = self.comm.with(|comm| comm.split(color, key)).map_err(failed)?;
        part.map(|comm| Ranks::on_device(comm, self.device.clone())).transpose()
    }

    /// The ranks along the dimensions of a grid. With 8 ranks, `grid(&[4, 2])` gives those of the same column (4 of them), and those of the
    /// same row (2, next to each other). Collective: [`Comm::split_grid`].
    pub fn grid(&self, sizes: &[usize]) -> Result<Vec<Ranks>> {
        let dimensions: Vec<[usize; 1]> = (0..sizes.len()).map(|dimension| [dimension]).collect();
        let groups: Vec<&[usize]> = dimensions.iter().map(|dimension| &dimension[..]).collect();
        let comms = self.comm.with(|comm| comm.split_grid(sizes, &groups)).map_err(failed)?;
        comms.into_iter().map(|comm| Ranks::on_device(comm, self.device.clone())).collect()
    }

    /// The same ranks with another deadline.
    pub fn within(&self, timeout: Duration) -> Result<Ranks> {
        Ok(Ranks { comm: self.comm.within(timeout).map_err(failed)?, device: self.device.clone() })
    }

    /// Waits until every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        self.comm.barrier().map_err(failed)
    }

    /// Waits until this rank's operations are complete.
    pub fn sync(&self) -> Result<()> {
        self.comm.sync().map_err(failed)
    }

    /// Ends the communicator, on all ranks together. Later calls through any clone answer an error.
    pub fn finalize(&self) -> Result<()> {
        self.comm.finalize().map_err(failed)
    }

    /// An error that says that a rank does not exist.
    pub(crate) fn check_rank(&self, operation: &str, role: &str, rank: usize) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        let last = self.world_size() - 1;
        Err(usage(format!("{operation}: {role} {rank} does not exist; the ranks are 0 to {last}")))
    }
}
