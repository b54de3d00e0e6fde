//! Whether MPI is CUDA-aware.

use crate::bootstrap::switch_from_environment;
use crate::error::Result;
use phalanx_sys::mpi::Mpi;

/// The setting for libraries that cannot be asked.
const CUDA: &str = "PHALANX_MPI_CUDA";

/// What the user says of that.
pub(super) fn told() -> Result<Option<bool>> {
    Ok(switch_from_environment(CUDA)?)
}

/// Whether an initialised MPI takes addresses of CUDA memory; if not, who says so.
pub(super) fn ask(mpi: &Mpi, told: Option<bool>) -> std::result::Result<(), String> {
    let functions = &mpi.functions;
    let (who, answer) = if let Some(told) = told {
        return if told { Ok(()) } else { Err(format!("{CUDA}=0 says that {} takes none", mpi.version)) };
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
        (_, 1) => Ok(()),
        ("", _) => Err(format!(
            "{} ({path}) cannot be asked whether it is CUDA-aware: it has neither MPIX_Query_cuda_support nor \
             MPIX_GPU_query_support",
            mpi.version
        )),
        _ => Err(format!("{} ({path}) is not CUDA-aware: {who} answers {answer}", mpi.version)),
    }
}
