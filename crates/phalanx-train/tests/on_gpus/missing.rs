//! A machine without cuBLAS.

use crate::same;
use libtest_mimic::{Failed, Trial};
use phalanx::{BackendKind, Comm};
use phalanx_testkit::Scenario;
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::suite::{Condition, ignored};
use phalanx_train::device::Device;
use phalanx_train::tensor::Products;
use phalanx_train::{Error, Result};

pub const SCENARIOS: &[Scenario] =
    &[Scenario::rank("missing_cublas", |comm, _| product(&comm).map_err(|error| error.to_string()))];

/// The error says what is missing, and the GPU goes on.
fn product(comm: &Comm) -> Result<String> {
    let gpu = same::gpu(comm)?;
    let (one, mut product) = (gpu.upload(&[1.0f32])?, gpu.zeros::<f32>(1)?);
    let one = gpu.view(&one, 0..1);
    let to = &mut gpu.view_mut(&mut product, 0..1);
    let error = gpu.product([1, 1, 1], [false; 2], &one, &one, to, false).unwrap_err();
    assert!(matches!(&error, Error::Blas(text) if text.contains("LD_LIBRARY_PATH")), "{error}");
    gpu.add(1.0, &one, to)?;
    assert_eq!(gpu.download(&to.as_view())?, [1.0]);
    Ok(String::new())
}

/// On emulated GPUs of its own, whatever the machine has.
pub fn trial() -> Trial {
    let emulated = match Emulated::new() {
        Ok(emulated) => emulated,
        Err(why) => return ignored("missing_cublas", why.to_string()),
    };
    let is_installed = std::env::var_os(crate::world::EMULATED).is_none() && crate::world::has_cublas();
    let run = move || -> std::result::Result<(), Failed> {
        for name in ["libcublas.so", "libcublas.so.12"] {
            std::fs::remove_file(emulated.folder().join(name))?;
        }
        // This process may itself have found another folder with it.
        let launch = emulated.launch(Launch::new("missing_cublas", 1));
        let launch = launch.env("LD_LIBRARY_PATH", &emulated.folder().display().to_string());
        Ok(launch.env("PHALANX_BACKEND", BackendKind::Nccl.name()).reports().map(drop)?)
    };
    Trial::test("missing_cublas", run).only_if(!is_installed, "the machine has cuBLAS")
}
