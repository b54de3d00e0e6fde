//! Where rank 0 shows results: the table, the files, the progress.
//!
//! Files are written after every row, so that an interrupted run leaves what it had.

use super::bench::Audience;
use super::compare::Saved;
use super::enqueued;
use super::export::{self, Exporter};
use super::options::PerfArgs;
use super::plan::{Plan, Registration};
use super::progress::Progress;
use super::report::{FORMAT, Memory, Options, RankGpu, RankKind, Report, Row, TimeKind};
use super::world::World;
use crate::gpu;
use crate::machine::Machine;
use anyhow::Result;
use phalanx::{BackendKind, Comm};
use std::time::SystemTime;

/// Gets the rows of a run and hands them to every exporter.
pub struct Podium {
    args: PerfArgs,
    plan: Plan,
    ranks_are: RankKind,
    machine: Machine,
    stage: Option<Stage>,
}

/// What exists once the number of ranks is known.
struct Stage {
    report: Report,
    exporters: Vec<Box<dyn Exporter>>,
    progress: Progress,
}

impl Podium {
    pub fn new(args: &PerfArgs, plan: &Plan, world: &World) -> Podium {
        Podium {
            args: args.clone(),
            plan: plan.clone(),
            ranks_are: world.kind(),
            // Now: once rank 0 is pinned it would see one core.
            machine: Machine::this(),
            stage: None,
        }
    }

    /// Says what is going to be measured, and on what: `gpus` are the ranks', if they have any.
    pub fn opens(&mut self, comm: &Comm, gpus: Vec<RankGpu>) -> Result<()> {
        let saved = match &self.args.compare {
            Some(path) => Some(Saved::load(path, self.plan.operation)?),
            None => None,
        };
        let report = Report {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            date: now(),
            machine: self.machine.clone(),
            options: self.options(comm, gpus),
            rows: Vec::new(),
        };
        let mut exporters = export::exporters(&self.args, saved)?;
        for exporter in &mut exporters {
            exporter.begin(&report)?;
        }
        let cycles = self.plan.cycles.unwrap_or(1);
        let progress = Progress::new(self.plan.rows(comm.world_size()).saturating_mul(cycles));
        self.stage = Some(Stage { report, exporters, progress });
        Ok(())
    }

    /// Says what came out.
    pub fn closes(mut self) -> Result<()> {
        if let Some(Stage { report, mut exporters, progress }) = self.stage.take() {
            progress.erase();
            for exporter in &mut exporters {
                exporter.finish(&report)?;
            }
        }
        Ok(())
    }

    fn options(&self, comm: &Comm, gpus: Vec<RankGpu>) -> Options {
        let plan = &self.plan;
        let on_gpus = !gpus.is_empty();
        let one_sided = plan.operation.is_one_sided();
        let enqueued = on_gpus && plan.operation.has_data();
        Options {
            operation: plan.operation,
            ranks: comm.world_size(),
            ranks_are: self.ranks_are,
            backend: if one_sided { "nvshmem" } else { comm.backend().name() }.to_owned(),
            min_bytes: plan.sizes.first().copied().unwrap_or(0),
            max_bytes: plan.largest(),
            step: self.args.step().to_string(),
            iterations: plan.iterations.or(enqueued.then_some(enqueued::ITERATIONS)),
            warmup: plan.warmup.or(enqueued.then_some(enqueued::WARMUP)),
            aggregate: plan.aggregate,
            checks: plan.checks,
            memory: match plan.registration {
                _ if one_sided => Memory::Symmetric,
                Registration::None if on_gpus => Memory::Gpu,
                Registration::Local if on_gpus => Memory::Registered,
                Registration::Symmetric => Memory::Symmetric,
                Registration::Local => Memory::Allocated,
                Registration::None => Memory::Private,
            },
            gpus,
            library: match on_gpus {
                _ if one_sided || comm.backend() == BackendKind::Nvshmem => gpu::nvshmem(),
                true => gpu::nccl(),
                false => None,
            },
            graph_launches: plan.graph_launches,
            blocking: plan.blocking,
            cpu_time: plan.cpu_time,
            pinned: plan.pin,
            average: plan.average(),
            time: if plan.loop_average.is_some() || enqueued {
                TimeKind::LoopAverage
            } else {
                TimeKind::Median
            },
            timeout_seconds: comm.timeout().as_secs_f64(),
            per_iteration: plan.per_iteration,
        }
    }
}

impl Audience for Podium {
    fn starts(&mut self, row: usize, size: usize) {
        if let Some(stage) = &mut self.stage {
            stage.progress.draw(row, size);
        }
    }

    fn row(&mut self, row: Row) -> Result<()> {
        if let Some(Stage { report, exporters, progress }) = &mut self.stage {
            report.rows.push(row);
            progress.hidden(|| exporters.iter_mut().try_for_each(|exporter| exporter.row(report)))?;
        }
        Ok(())
    }
}

/// The time in UTC, to the second.
fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    #[test]
    fn dates_are_utc_to_the_second() {
        let date = super::now();
        assert_eq!(date.len(), "2026-01-01T00:00:00Z".len(), "{date}");
        assert!(date.ends_with('Z'));
    }
}
