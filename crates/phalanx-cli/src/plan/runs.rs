//! The saved runs as points: an operation, a place, a time.

use super::terms::turns;
use crate::perf::operation::Operation;
use crate::perf::report::{Memory, RankKind, Report, Row};
use anyhow::{Context, Result, bail, ensure};
use phalanx::internal::{Placement, Planned, Work, work};
use phalanx::{BackendKind, DType};
use std::path::PathBuf;

/// The backends whose algorithms are the library's own.
const BACKENDS: [BackendKind; 2] = [BackendKind::Host, BackendKind::Ucx];

/// An operation on buffers of one length, at a place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Case {
    pub operation: Operation,
    /// Bytes of the larger buffer of a rank.
    pub size: usize,
    /// Elements of a block.
    pub count: usize,
    pub dtype: DType,
    pub root: usize,
    pub placement: Placement,
}

/// A measured case.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    pub case: Case,
    pub work: Work,
    /// Seconds.
    pub time: f64,
}

/// A measured start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredStart {
    pub ranks: usize,
    /// Ranks that share a core, at least 1.
    pub turns: f64,
    pub seconds: f64,
}

/// The saved runs.
pub struct Runs {
    pub files: usize,
    pub backend: BackendKind,
    pub cpu: String,
    /// The first and the last day.
    pub days: [String; 2],
    pub points: Vec<Point>,
    pub starts: Vec<MeasuredStart>,
    /// The hosts of the runs share the cores of one machine.
    pub one_machine: bool,
}

impl Case {
    pub fn new(
        operation: Operation,
        size: usize,
        count: usize,
        dtype: DType,
        root: usize,
        placement: Placement,
    ) -> Case {
        Case { operation, size, count, dtype, root, placement }
    }

    /// The work by the algorithm that the backend chooses; `None` if the library has none.
    pub fn work(&self, backend: BackendKind) -> Option<Work> {
        let count = match self.operation {
            // Blocks grow with the distance: all to the other ranks, on average of this length.
            Operation::AllToAllV => self.size / self.dtype.size() / (self.placement.ranks - 1),
            _ => self.count,
        };
        let planned = Planned { operation: self.operation.name(), dtype: self.dtype, count, root: self.root };
        work(backend, &planned, &self.placement)
    }
}

impl Runs {
    /// Reads runs that belong together: one backend, one kind of ranks and memory, one CPU.
    pub fn load(paths: &[PathBuf], one_machine: bool) -> Result<Runs> {
        let mut reports: Vec<Report> = Vec::new();
        for path in paths {
            let report = Report::load(path)?;
            if let Some(first) = reports.first() {
                let (first_path, path) = (paths[0].display(), path.display());
                for (what, one, other) in differences(first, &report) {
                    ensure!(
                        one == other,
                        "the runs do not belong together: {what} {one} in {first_path}, {other} in {path}"
                    );
                }
            }
            reports.push(report);
        }
        let first = &reports[0];
        let backend = BACKENDS.into_iter().find(|backend| backend.name() == first.options.backend);
        let Some(backend) = backend else {
            bail!(
                "{}: a run of the backend {}; the algorithms of host and ucx can be planned, others belong to their libraries",
                paths[0].display(),
                first.options.backend
            );
        };
        let mut days: Vec<String> = reports.iter().map(|report| day(report).to_owned()).collect();
        days.sort();
        let mut runs = Runs {
            files: reports.len(),
            backend,
            cpu: first.machine.cpu_name().to_owned(),
            days: [days[0].clone(), days[days.len() - 1].clone()],
            points: Vec::new(),
            starts: Vec::new(),
            one_machine,
        };
        for (report, path) in reports.iter().zip(paths) {
            runs.add(report).with_context(|| path.display().to_string())?;
        }
        Ok(runs)
    }

    fn add(&mut self, report: &Report) -> Result<()> {
        let options = &report.options;
        let hosts = match options.hosts {
            Some(hosts) => hosts,
            None if self.backend == BackendKind::Host => 1,
            None => bail!("the run does not say on how many hosts it was: save it anew"),
        };
        let placement = Placement {
            ranks: options.ranks,
            hosts,
            cores: report.machine.usable_cores,
            readable: options.ranks_are == RankKind::Threads || options.memory == Memory::Allocated,
        };
        if let Some(seconds) = options.start_seconds {
            let turns = turns(&placement, self.one_machine).max(1.0);
            self.starts.push(MeasuredStart { ranks: options.ranks, turns, seconds });
        }
        let points = report.rows.iter().filter_map(|row| self.point(options.operation, row, placement));
        for point in points.collect::<Vec<Point>>() {
            self.keep(point);
        }
        Ok(())
    }

    /// Keeps the least time of each case: whatever disturbs a run makes it longer.
    fn keep(&mut self, point: Point) {
        match self.points.iter_mut().find(|known| known.case == point.case) {
            Some(known) => known.time = known.time.min(point.time),
            None => self.points.push(point),
        }
    }

    /// A row as a point, if its operation has an algorithm.
    fn point(&self, operation: Operation, row: &Row, placement: Placement) -> Option<Point> {
        if placement.ranks < 2 {
            return None;
        }
        let dtype = row.dtype.as_deref().map_or(Some(DType::U8), DType::from_name)?;
        let case = Case::new(operation, row.size, row.count, dtype, row.root.unwrap_or(0), placement);
        let time = row.out_of_place.as_ref().or(row.in_place.as_ref())?.time * 1e-6;
        (time > 0.0).then_some(Point { case, work: case.work(self.backend)?, time })
    }

    /// The place of the run with most ranks.
    pub fn largest(&self) -> Option<Placement> {
        self.points.iter().map(|point| point.case.placement).max_by_key(|place| (place.ranks, place.hosts))
    }
}

fn day(report: &Report) -> &str {
    report.date.split('T').next().unwrap_or_default()
}

/// What runs must have in common.
fn differences(one: &Report, other: &Report) -> [(&'static str, String, String); 4] {
    let both = |what, of: fn(&Report) -> String| (what, of(one), of(other));
    [
        both("backend", |report| report.options.backend.clone()),
        both("ranks are", |report| {
            if report.options.ranks_are == RankKind::Threads { "threads" } else { "processes" }.to_owned()
        }),
        both("memory", |report| format!("{:?}", report.options.memory).to_lowercase()),
        both("CPU", |report| report.machine.cpu_name().to_owned()),
    ]
}
