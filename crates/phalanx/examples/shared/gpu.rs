//! What the examples on GPUs share: the ranks, and libraries that are loaded when they are needed.

use phalanx::{BackendKind, Comm};
use std::process::ExitCode;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Runs `f` as this rank, under a launcher, or else as so many thread ranks as the first argument says (2). Each has a
/// GPU.
pub fn on_ranks(name: &str, f: impl Fn(Comm) -> Result<()> + Sync) -> ExitCode {
    let run = || -> Result<()> {
        let builder = Comm::builder().backend(BackendKind::Nccl);
        if phalanx::choose()?.launcher.is_some() {
            return f(builder.init()?);
        }
        let ranks = std::env::args().nth(1).filter(|argument| !argument.starts_with("--"));
        let ranks = ranks.map_or(Ok(2), |text| text.parse());
        let ranks = ranks.map_err(|error| format!("the number of ranks: {error}"))?;
        builder.try_run(ranks, &f).map(drop)
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The error for a library of CUDA that the loader does not find.
pub fn missing(file: &str, what: &str, wheel: &str) -> Box<dyn std::error::Error + Send + Sync> {
    format!(
        "{file}.so, {what}, was not found: it comes with the CUDA toolkit and with the wheel {wheel}; add its folder \
         to LD_LIBRARY_PATH"
    )
    .into()
}
