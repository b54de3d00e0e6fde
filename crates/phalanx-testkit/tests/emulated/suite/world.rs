//! Ranks as threads of a process, each with a device, a stream and a communicator; or as processes.

use super::nccl::{Config, IN_PROGRESS, SUCCESS, UniqueId, nccl, ok};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a rank has.
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    pub comm: u64,
    pub blocking: bool,
}

/// A new id.
pub fn unique_id() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    assert_eq!(nccl().get_unique_id(&mut id), SUCCESS);
    id
}

impl Rank {
    /// Begins a rank on the device of its number.
    pub fn begin(id: UniqueId, rank: usize, ranks: usize, blocking: bool) -> Result<Rank, String> {
        let context = CudaContext::new(rank).map_err(|error| error.to_string())?;
        let stream = context.new_stream().map_err(|error| error.to_string())?;
        let mut comm = 0;
        let config = Config::new(blocking);
        let code = nccl().init_rank_config(&mut comm, ranks as i32, id, rank as i32, &config);
        let rank = Rank { rank, ranks, context, stream, comm, blocking };
        rank.done("init", code)?;
        Ok(rank)
    }

    /// The stream's handle.
    pub fn queue(&self) -> u64 {
        self.stream.cu_stream() as u64
    }

    /// An error unless a call succeeded, or was in progress and succeeded then.
    pub fn done(&self, what: &str, code: i32) -> Result<(), String> {
        if code == IN_PROGRESS && !self.blocking {
            return ok(what, nccl().settle(self.comm));
        }
        ok(what, code)
    }

    /// Ends the communicator in the recommended way.
    pub fn end(&self) -> Result<(), String> {
        self.done("finalize", nccl().finalize(self.comm))?;
        ok("destroy", nccl().destroy(self.comm))
    }

    /// Values on the device.
    pub fn upload<T: cudarc::driver::DeviceRepr + Copy>(&self, values: &[T]) -> CudaSlice<T> {
        self.stream.clone_htod(values).expect("a copy to the device")
    }

    /// Values from the device.
    pub fn download<T: cudarc::driver::DeviceRepr + Copy>(&self, values: &CudaSlice<T>) -> Vec<T> {
        let result = self.stream.clone_dtoh(values).expect("a copy from the device");
        self.stream.synchronize().expect("the stream works");
        result
    }
}

/// Waits until an operation has begun that will write to all of `output`: it holds garbage then.
pub fn begun<T: cudarc::driver::DeviceRepr>(rank: &Rank, output: &CudaSlice<T>) -> Result<(), String> {
    // A stream that waits for nothing.
    let hasty = rank.context.new_stream().map_err(|error| error.to_string())?;
    let mut seen = vec![0u8; output.len() * size_of::<T>()];
    let since = Instant::now();
    while seen.iter().any(|byte| *byte != 0xff) {
        if since.elapsed() > Duration::from_secs(20) {
            return Err("the operation does not begin".into());
        }
        // SAFETY: the memory is there; what it holds at this moment is the question.
        unsafe { cudarc::driver::result::memcpy_dtoh_async(&mut seen, at(output), hasty.cu_stream()) }
            .and_then(|()| hasty.synchronize())
            .map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The address of a slice.
pub fn at<T>(slice: &CudaSlice<T>) -> u64 {
    slice.device_ptr(slice.stream()).0
}

/// Runs a part for each rank, as threads of this process. A part that fails ends the process, since the
/// others would wait for it.
pub fn threads<T: Send>(
    ranks: usize,
    part: impl Fn(usize) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let run = |rank: usize| {
        part(rank).unwrap_or_else(|error| {
            eprintln!("rank {rank}: {error}");
            std::process::exit(1)
        })
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a rank panicked".to_owned())).collect()
    })
}

/// The id of a world of processes: rank 0 makes it and leaves it in a folder.
pub fn shared_id(folder: &str, name: &str, rank: usize) -> Result<UniqueId, String> {
    let path = Path::new(folder).join(name);
    if rank == 0 {
        let id = unique_id();
        let draft = path.with_extension("draft");
        std::fs::write(&draft, id.0)
            .and_then(|()| std::fs::rename(&draft, &path))
            .map_err(|error| error.to_string())?;
        return Ok(id);
    }
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(20) {
        if let Some(bytes) = std::fs::read(&path).ok().and_then(|bytes| bytes.try_into().ok()) {
            return Ok(UniqueId(bytes));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err("rank 0 made no id".into())
}

/// Which rank this process is.
pub fn own_rank() -> usize {
    std::env::var("PHALANX_RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0)
}
