//! What the examples on host memory share: the ranks, and numbers as arguments.

use phalanx::Comm;
use std::process::ExitCode;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Runs `f` as this rank, under a launcher, or else as so many thread ranks as the first argument says (2). `f` gets the
/// further arguments.
pub fn on_ranks(name: &str, f: impl Fn(Comm, &[String]) -> Result<()> + Sync) -> ExitCode {
    let run = || -> Result<()> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let (ranks, others) =
            arguments.split_first().map_or(("2", &[][..]), |(ranks, others)| (ranks, others));
        if phalanx::choose()?.launcher.is_some() {
            return f(phalanx::init()?, others);
        }
        phalanx::try_run(number("ranks", ranks)?, |comm| f(comm, others)).map(drop)
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A number, which is an argument of this name.
pub fn number(name: &str, text: &str) -> Result<usize> {
    text.parse().map_err(|error| format!("{name}: {text:?}: {error}").into())
}
