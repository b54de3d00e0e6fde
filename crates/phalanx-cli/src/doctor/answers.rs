//! The surveying process: loads the libraries and prints the facts.

use super::facts::{Line, heading};
use super::{gpus, libraries};
use crate::error::explain;
use crate::gpu;
use anyhow::Result;
use phalanx_sys::NotFound;
use phalanx_sys::nccl::{NCCL, RCCL};
use std::process::ExitCode;

/// Prints all facts.
pub fn print() -> Result<ExitCode> {
    heading("GPUs")?;
    gpus::cuda()?;
    heading("NCCL")?;
    libraries::nccl(&NCCL)?;
    heading("RCCL")?;
    libraries::nccl(&RCCL)?;
    heading("NVSHMEM")?;
    libraries::nvshmem()?;
    heading("Kernels compiled at run time")?;
    libraries::compiler()?;
    heading("HIP")?;
    gpus::hip()?;
    Line::Seen { cuda: gpu::count().unwrap_or(0), hip: gpus::hip_count() }.print()?;
    Line::AmdGpus(gpus::usable_amd().map_err(|error| why_none(&error))).print()?;
    Line::Gpus(gpu::usable().map_err(|error| why_none(&error))).print()?;
    Ok(ExitCode::SUCCESS)
}

/// In short: the facts above list what was tried.
fn why_none(error: &anyhow::Error) -> String {
    match error.downcast_ref::<NotFound>() {
        Some(error) => format!("{} was not found", error.library),
        None => explain(error),
    }
}
