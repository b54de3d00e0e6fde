//! Reports a run on rank 0: the table, the files, the progress.
//!
//! Files are written after every row, so that an interrupted run leaves its rows.

use super::compare::Saved;
use super::enqueued;
use super::export::{self, Exporter};
use super::observer::Observer;
use super::options::PerfArgs;
use super::plan::{Plan, Registration};
use super::progress::Progress;
use super::report::{FORMAT, Memory, Options, RankGpu, RankKind, Report, Row, TimeKind};
use super::values;
use crate::gpu;
use crate::machine::Machine;
use anyhow::Result;
use phalanx::{BackendKind, Comm};
use std::time::{Duration, SystemTime};

/// What a report needs before there are ranks.
pub struct Reporter {
    args: PerfArgs,
    ranks_are: RankKind,
    machine: Machine,
    start: Option<Duration>,
}

/// The report of a run.
pub struct RunningReport {
    report: Report,
    exporters: Vec<Box<dyn Exporter>>,
    progress: Progress,
}

impl Reporter {
    /// Call it before rank 0 is pinned: a pinned thread sees one core.
    pub fn new(args: &PerfArgs, ranks_are: RankKind) -> Reporter {
        Reporter { args: args.clone(), ranks_are, machine: Machine::this(), start: None }
    }

    /// Adds how long it took until there was a communicator.
    pub fn started_within(self, start: Duration) -> Reporter {
        Reporter { start: Some(start), ..self }
    }

    /// Begins the report: everything but the rows. `gpus` are the ranks', if they have any.
    pub fn begin(self, comm: &Comm, plan: &Plan, gpus: Vec<RankGpu>) -> Result<RunningReport> {
        let saved = match &self.args.compare {
            Some(path) => Some(Saved::load(path, plan.operation)?),
            None => None,
        };
        let report = Report {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            date: now(),
            options: self.options(comm, plan, gpus),
            machine: self.machine,
            rows: Vec::new(),
        };
        let mut exporters = export::exporters(&self.args, saved);
        for exporter in &mut exporters {
            exporter.begin(&report)?;
        }
        let cycles = plan.cycles.unwrap_or(1);
        let progress = Progress::new(plan.rows(comm.world_size()).saturating_mul(cycles));
        Ok(RunningReport { report, exporters, progress })
    }

    fn options(&self, comm: &Comm, plan: &Plan, gpus: Vec<RankGpu>) -> Options {
        let on_gpus = !gpus.is_empty();
        let one_sided = plan.operation.is_one_sided();
        let enqueued = on_gpus && plan.operation.has_data();
        Options {
            operation: plan.operation,
            ranks: comm.world_size(),
            ranks_are: self.ranks_are,
            hosts: Some(comm.host_topology().num_hosts()),
            start_seconds: self.start.map(|start| start.as_secs_f64()),
            backend: if one_sided { "nvshmem" } else { comm.backend().name() }.to_owned(),
            min_bytes: plan.sizes.first().copied().unwrap_or(0),
            max_bytes: plan.largest(),
            step: self.args.step().to_string(),
            iterations: plan.iterations.or(enqueued.then_some(enqueued::ITERATIONS)),
            warmup: plan.warmup.or(enqueued.then_some(enqueued::WARMUP)),
            aggregate: plan.aggregate,
            checks: plan.checks,
            gpu_algorithm: plan.algorithm.map(values::name_of).filter(|_| on_gpus),
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

impl RunningReport {
    /// Writes the end of the report.
    pub fn finish(mut self) -> Result<()> {
        self.progress.erase();
        self.exporters.iter_mut().try_for_each(|exporter| exporter.finish(&self.report))
    }
}

impl Observer for RunningReport {
    fn row_begins(&mut self, row: usize, size: usize) {
        self.progress.draw(row, size);
    }

    fn row_complete(&mut self, row: Row) -> Result<()> {
        let RunningReport { report, exporters, progress } = self;
        report.rows.push(row);
        progress.hidden(|| exporters.iter_mut().try_for_each(|exporter| exporter.row(report)))
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
