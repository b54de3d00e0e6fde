//! `phalanx perf`: measures operations and checks their results.
//!
//! The stages, each of which knows the earlier ones only by their results:
//!
//! | stage | files | result |
//! |---|---|---|
//! | options | `options.rs`, `values.rs` | [`PerfArgs`] |
//! | plan | `plan.rs`, `operation.rs`, `reduction.rs`, `layout.rs` | [`Plan`](plan::Plan) |
//! | ranks | `world.rs`, `rank.rs` | a communicator on each rank |
//! | run | `bench.rs`, `one_sided.rs`, `timing.rs`, `enqueued.rs`, `data/` | rows, for an observer |
//! | report | `reporter.rs`, `report.rs`, `compare.rs`, `export/` | table and files |

mod bench;
mod buffer;
mod case;
mod compare;
mod data;
mod device;
mod enqueued;
pub mod export;
mod figures;
pub mod layout;
mod observer;
mod one_sided;
pub mod operation;
pub mod options;
pub mod plan;
mod progress;
mod rank;
mod reduction;
pub mod report;
mod reporter;
mod start;
mod stats;
mod timing;
pub mod values;
mod view;
mod world;

use crate::exit;
use anyhow::Result;
use options::PerfArgs;
use reporter::Reporter;
use std::process::ExitCode;
use world::World;

/// Measures an operation. The exit status is 0 if all results are right, 3 if some are wrong.
pub fn run(args: &PerfArgs) -> Result<ExitCode> {
    let plan = args.plan().map_err(exit::usage)?;
    let world = World::choose(args)?;
    world.check(&plan)?;
    if !args.as_rank && !is_of_others()? {
        export::check(args)?;
    }
    let reporter = Reporter::new(args, world.kind());
    let wrong = match world {
        World::Processes(ranks) => return rank::start_processes(ranks),
        World::Threads(ranks) => rank::run_threads(ranks, &plan, reporter),
        World::Rank(_) => rank::run_process(&plan, reporter),
    };
    match wrong {
        Ok(0) => Ok(ExitCode::SUCCESS),
        Ok(_) => Ok(ExitCode::from(exit::WRONG_DATA)),
        // The rank that aborted prints the reason.
        Err(error) if args.as_rank && rank::was_aborted(&error) => Ok(ExitCode::FAILURE),
        Err(error) => Err(error),
    }
}

/// Whether rank 0 of a launcher's ranks is another process: it writes the files, which may have no place on this host.
fn is_of_others() -> Result<bool> {
    Ok(phalanx::choose()?.launcher.is_some_and(|launcher| launcher.rank > 0))
}
