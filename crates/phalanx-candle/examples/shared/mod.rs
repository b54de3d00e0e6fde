//! What the examples share: ranks as threads, or under a launcher.

use candle_core::Result;
use phalanx_candle::Ranks;
use std::process::ExitCode;

/// Runs `f` on each rank: on so many threads, or else as the rank that a launcher made of this process.
pub fn on_ranks(threads: Option<usize>, f: impl Fn(&Ranks) -> Result<()> + Sync) -> ExitCode {
    let run = || -> Result<()> {
        let Some(threads) = threads else {
            let ranks = Ranks::init()?;
            f(&ranks)?;
            return ranks.finalize();
        };
        Ranks::try_run(threads, |ranks| f(&ranks).and_then(|()| ranks.finalize())).map(drop)
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
