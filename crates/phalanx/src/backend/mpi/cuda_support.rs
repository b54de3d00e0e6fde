//! CUDA support of the loaded MPI: which calls accept device memory.

use crate::rendezvous::environment::switch_from_environment;
use crate::types::error::Result;
use phalanx_sys::mpi::Mpi;

/// The setting for libraries without a query function.
const CUDA: &str = "PHALANX_MPI_CUDA";

/// Whether Intel MPI opens other processes' GPU memory by IPC handles. Its default does.
const INTEL_IPC: &str = "I_MPI_OFFLOAD_IPC";

/// The user's setting of `PHALANX_MPI_CUDA`.
pub(crate) fn from_environment() -> Result<Option<bool>> {
    Ok(switch_from_environment(CUDA)?)
}

/// The calls in which a CUDA-aware MPI accepts device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CudaSupport {
    AllCalls,
    /// All but reductions and `MPI_Imrecv` (Intel MPI 2021.18). In reductions it asks for IPC handles, which
    /// memory of a pool (cudarc's default) does not have; `MPI_Imrecv` copies with the host's instructions.
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

/// Queries an initialised MPI for CUDA support. The error says why there is none.
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
            // In messages it asks for IPC handles, too.
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
