//! `phalanx perf`: options, then ranks, then the run, then what is made of its results.
//!
//! A stage knows the ones before it only by what they hand over: a plan, rows, a report.

mod bench;
mod buffer;
mod case;
mod compare;
mod data;
mod device;
mod enqueued;
mod export;
mod layout;
mod one_sided;
mod operation;
pub mod options;
mod plan;
mod podium;
mod progress;
mod reduction;
mod report;
mod start;
mod stats;
mod timing;
mod view;
mod world;

use anyhow::Result;
use options::PerfArgs;
use podium::Podium;
use std::process::ExitCode;
use world::World;

/// Measures an operation. The exit status says whether all results were right.
pub fn run(args: &PerfArgs) -> Result<ExitCode> {
    let plan = args.plan()?;
    let world = World::choose(args)?;
    world.check(&plan)?;
    if let World::Processes(ranks) = world {
        return world::start_processes(ranks);
    }
    let podium = Podium::new(args, &plan, &world);
    match world.run(&plan, podium) {
        Ok(0) => Ok(ExitCode::SUCCESS),
        Ok(_) => Ok(ExitCode::FAILURE),
        // The rank that aborted says why.
        Err(error) if args.as_rank && world::was_aborted(&error) => Ok(ExitCode::FAILURE),
        Err(error) => Err(error),
    }
}
