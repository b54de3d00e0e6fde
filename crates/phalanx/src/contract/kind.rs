//! The names of the backends.

/// Which library carries a communicator's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// One rank: nothing has to be moved.
    Solo,
    /// Shared memory between the threads of a process or the processes of a host.
    Host,
    /// NVIDIA's library for GPUs: each rank has one.
    Nccl,
    /// An MPI library, found at run time.
    Mpi,
    /// AMD's library for GPUs: each rank has one.
    Rccl,
    /// NVIDIA's OpenSHMEM: each rank is a process with a GPU. Used only on request.
    Nvshmem,
    /// UCX, found at run time: host memory of processes on several hosts.
    Ucx,
    /// No backend that can be chosen: that of [`dry_run`](crate::dry_run), whose other ranks do not exist.
    DryRun,
}

impl BackendKind {
    /// The name used by `PHALANX_BACKEND` (which does not take `dry_run`).
    pub const fn name(self) -> &'static str {
        match self {
            BackendKind::Solo => "solo",
            BackendKind::Host => "host",
            BackendKind::Nccl => "nccl",
            BackendKind::Mpi => "mpi",
            BackendKind::Rccl => "rccl",
            BackendKind::Nvshmem => "nvshmem",
            BackendKind::Ucx => "ucx",
            BackendKind::DryRun => "dry_run",
        }
    }
}

impl std::fmt::Display for BackendKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
