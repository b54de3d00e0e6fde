//! Whether MPI is CUDA-aware.

use crate::rendezvous::environment::switch_from_environment;
use crate::types::error::Result;
use phalanx_sys::mpi::Mpi;

/// The setting for libraries that cannot be asked.
const CUDA: &str = "PHALANX_MPI_CUDA";

/// Whether Intel MPI lets processes look into each other's GPU memory. Its default does.
const INTEL_IPC: &str = "I_MPI_OFFLOAD_IPC";

/// What the user says of whether MPI is CUDA-aware.
pub(crate) fn from_environment() -> Result<Option<bool>> {
    Ok(switch_from_environment(CUDA)?)
}

/// Where a CUDA-aware MPI takes CUDA memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CudaSupport {
    AllCalls,
    /// Intel MPI 2021.18: not in reductions, in which it asks for handles that memory of a pool, as cudarc's is, does not have; and
    /// not in `MPI_Imrecv`, which copies with the host's instructions.
    WithoutReductions,
}

impl CudaSupport {
    fn of(version: &str) -> CudaSupport {
        if version.starts_with("Intel(R) MPI") {
            CudaSupport::WithoutReductions
        } else {
            CudaSupport::AllCalls
        }
    }
}

/// Whether an initialised MPI takes addresses of CUDA memory; if not, who says so.
pub(crate) fn query(mpi: &Mpi, forced: Option<bool>) -> std::result::Result<CudaSupport, String> {
    let functions = &mpi.functions;
    let aware = CudaSupport::of(&mpi.version);
    let (who, answer) = if let Some(forced) = forced {
        return if forced {
            Ok(aware)
        } else {
            Err(format!("{CUDA}=0 says that {} takes none", mpi.version))
        };
    } else if let Some(query) = functions.query_cuda_support {
        // SAFETY: MPI is initialised.
        ("MPIX_Query_cuda_support", unsafe { query() })
    } else if let Some(query) = functions.gpu_query_support {
        let mut answer = 0;
        // SAFETY: MPI is initialised; 0 is CUDA; the variable takes the answer.
        unsafe { query(0, &raw mut answer) };
        ("MPIX_GPU_query_support", answer)
    } else {
        ("", 0)
    };
    let path = mpi.library.path().display();
    match (who, answer) {
        (_, 1)
            if aware == CudaSupport::WithoutReductions
                && std::env::var_os(INTEL_IPC).is_none_or(|value| value != "0") =>
        {
            // It asks for handles in messages, too.
            Err(format!("{} takes memory of pools, which cudarc's is, only with {INTEL_IPC}=0", mpi.version))
        }
        (_, 1) => Ok(aware),
        ("", _) => Err(format!(
            "{} ({path}) cannot be asked whether it is CUDA-aware: it has neither MPIX_Query_cuda_support nor \
             MPIX_GPU_query_support",
            mpi.version
        )),
        _ => Err(format!("{} ({path}) is not CUDA-aware: {who} answers {answer}", mpi.version)),
    }
}
