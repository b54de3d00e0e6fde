//! What NVIDIA ships and works without a GPU: its compilers, its headers, NCCL's library, NVTX, and UCX.

mod kernels;
mod nccl;
mod nvtx;
mod ucx;

use libtest_mimic::Arguments;
use phalanx_testkit::processes;
use phalanx_testkit::suite::{self, Share};
use std::process::ExitCode;

/// How much of the suite a sample is: the examples' kernels take the compilers long.
const SHARES: &[Share] = &[("kernels/examples/", 3)];

/// What takes the compilers seconds.
const SLOW: &[&str] =
    &["kernels/examples/", "kernels/nvshmem/error_with_its_line", "kernels/nvshmem/unresolved"];

fn main() -> ExitCode {
    if let Some(code) =
        kernels::serve().or_else(|| processes::serve(&[nccl::SCENARIOS, nvtx::SCENARIOS].concat()))
    {
        return code;
    }
    let trials = kernels::trials()
        .into_iter()
        .chain(nccl::trials())
        .chain(nvtx::trials())
        .chain(ucx::trials())
        .collect();
    suite::run(&Arguments::from_args(), trials, SHARES, SLOW)
}
