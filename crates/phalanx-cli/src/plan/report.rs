//! The plan: constants, errors, rows.

use super::fit::{Fit, Sample};
use super::held_out::{HeldOut, PARTS, held_out};
use super::options::PlanArgs;
use super::ranks_on;
use super::runs::{Case, Point, Runs};
use super::start::Start;
use super::terms::{Level, TERMS, Term, terms, turns};
use anyhow::{Context, Result};
use phalanx::internal::Placement;
use serde::Serialize;

/// A plan, as `--json` saves it. Times are in microseconds, bandwidths in GB/s (1e9 bytes), errors parts of 1.
#[derive(Debug, Serialize)]
pub struct Report {
    pub version: &'static str,
    pub backend: &'static str,
    pub cpu: String,
    pub runs: usize,
    pub days: [String; 2],
    pub points: Vec<Checked>,
    pub one_machine: bool,
    pub constants: Vec<Constant>,
    /// The error on a fifth of the points, predicted from the others.
    pub held_out: Option<HeldOut>,
    /// The error on each number of ranks and hosts, predicted from the others.
    pub held_out_places: Option<HeldOut>,
    pub start: Option<Start>,
    pub places: Vec<Place>,
    pub notes: Vec<String>,
}

/// A measured operation, and what the fit says of it.
#[derive(Debug, Serialize)]
pub struct Checked {
    pub operation: &'static str,
    pub ranks: usize,
    pub hosts: usize,
    pub size: usize,
    pub algorithm: &'static str,
    pub measured: f64,
    pub fitted: f64,
    /// How much of each kind of work it is, in the order of the constants.
    pub work: [f64; TERMS],
}

/// The time of a kind of work; null where no run has it.
#[derive(Debug, Serialize)]
pub struct Constant {
    pub work: Term,
    pub microseconds: Option<f64>,
}

impl Constant {
    fn new(fit: &Fit, work: Term) -> Constant {
        Constant { work, microseconds: fit.times[work as usize].map(|time| time * 1e6) }
    }
}

/// A planned number of ranks and hosts.
#[derive(Debug, Serialize)]
pub struct Place {
    pub ranks: usize,
    pub hosts: usize,
    pub cores: usize,
    pub start_seconds: Option<f64>,
    pub rows: Vec<Row>,
}

/// A planned operation.
#[derive(Debug, Serialize)]
pub struct Row {
    pub operation: &'static str,
    pub size: usize,
    pub count: usize,
    #[serde(rename = "type")]
    pub dtype: &'static str,
    pub algorithm: &'static str,
    pub time: f64,
    pub algbw: Option<f64>,
    pub busbw: Option<f64>,
    /// The time inside ranks, between the ranks of a host, and between hosts.
    pub core: f64,
    pub host: f64,
    pub switch: f64,
}

impl Report {
    pub fn new(args: &PlanArgs, runs: &Runs) -> Result<Report> {
        let samples = samples(runs);
        let measured = Fit::new(&samples)?;
        let fit = measured.with_substitutes();
        let largest = runs.largest().context("no run has a row with a time")?;
        let of_place = |index: usize| {
            let Placement { ranks, hosts, .. } = runs.points[index].case.placement;
            (ranks, hosts)
        };
        let start = Start::new(runs, &fit);
        let mut notes = Notes::default();
        let places = args.placements(largest)?.into_iter();
        let places: Vec<Place> = places
            .map(|placement| {
                notes.about(runs, &measured, &placement);
                place(args, runs, &fit, start.as_ref(), placement)
            })
            .collect::<Result<_>>()?;
        Ok(Report {
            version: env!("CARGO_PKG_VERSION"),
            backend: runs.backend.name(),
            cpu: runs.cpu.clone(),
            runs: runs.files,
            days: runs.days.clone(),
            points: checked(runs, &samples, &fit),
            one_machine: runs.one_machine,
            constants: Term::ALL.map(|work| Constant::new(&measured, work)).into(),
            held_out: held_out(&samples, |index| index % PARTS),
            held_out_places: held_out(&samples, of_place),
            start,
            places,
            notes: notes.0,
        })
    }

    /// The time of a kind of work in microseconds.
    pub fn constant(&self, work: Term) -> Option<f64> {
        self.constants[work as usize].microseconds
    }
}

fn samples(runs: &Runs) -> Vec<Sample> {
    let sample = |point: &Point| Sample {
        terms: terms(&point.work, &point.case.placement, runs.one_machine),
        time: point.time,
    };
    runs.points.iter().map(sample).collect()
}

fn checked(runs: &Runs, samples: &[Sample], fit: &Fit) -> Vec<Checked> {
    let check = |(point, sample): (&Point, &Sample)| Checked {
        operation: point.case.operation.name(),
        ranks: point.case.placement.ranks,
        hosts: point.case.placement.hosts,
        size: point.case.size,
        algorithm: point.work.algorithm,
        measured: sample.time * 1e6,
        fitted: fit.time(&sample.terms).map_or(0.0, |time| time * 1e6),
        work: sample.terms,
    };
    runs.points.iter().zip(samples).map(check).collect()
}

/// What a reader of the plan must know of its assumptions, each once.
#[derive(Default)]
struct Notes(Vec<String>);

impl Notes {
    fn add(&mut self, note: String) {
        if !self.0.contains(&note) {
            self.0.push(note);
        }
    }

    fn about(&mut self, runs: &Runs, fit: &Fit, placement: &Placement) {
        let most =
            |of: fn(&Placement) -> usize| runs.points.iter().map(|point| of(&point.case.placement)).max();
        for (what, asked, seen) in [
            ("ranks", placement.ranks, most(|placement| placement.ranks)),
            ("hosts", placement.hosts, most(|placement| placement.hosts)),
        ] {
            if let Some(seen) = seen.filter(|seen| asked > *seen) {
                self.add(format!("The runs have up to {seen} {what}; more are extrapolated."));
            }
        }
        let crowded = placement.on_a_host() > placement.cores;
        let level = if placement.hosts > 1 {
            [Term::SwitchWait, Term::SwitchTurn]
        } else {
            [Term::HostWait, Term::HostTurn]
        };
        if fit.times[level[usize::from(crowded)] as usize].is_none() {
            let (planned, seen) =
                if crowded { ("share cores", "have one each") } else { ("have a core each", "share cores") };
            self.add(format!(
                "The planned ranks {planned}, those of the runs {seen}: the runs' latency was taken."
            ));
        }
    }
}

fn place(
    args: &PlanArgs,
    runs: &Runs,
    fit: &Fit,
    start: Option<&Start>,
    placement: Placement,
) -> Result<Place> {
    let rows = args.cases(placement)?.iter().map(|case| row(runs, fit, case)).collect::<Result<_>>()?;
    let Placement { ranks, hosts, cores, .. } = placement;
    Ok(Place {
        ranks,
        hosts,
        cores,
        start_seconds: start.map(|start| start.simulate(ranks, turns(&placement, false))),
        rows,
    })
}

fn row(runs: &Runs, fit: &Fit, case: &Case) -> Result<Row> {
    let Placement { ranks, hosts, .. } = case.placement;
    let (name, place) = (case.operation.name(), ranks_on(ranks, hosts));
    let work = case.work(runs.backend).with_context(|| {
        format!("the backend {} has no {name} among {place} that could be planned", runs.backend)
    })?;
    let terms = terms(&work, &case.placement, false);
    let parts = fit.parts(&terms).with_context(|| format!("{name} among {place}"))?;
    let of = |level: Level| -> f64 {
        (0..TERMS).filter(|&term| Term::ALL[term].level() == level).map(|term| parts[term] * 1e6).sum()
    };
    let seconds: f64 = parts.iter().sum();
    let algbw = case.operation.algorithm_bandwidth(case.size, ranks, seconds);
    Ok(Row {
        operation: name,
        size: case.size,
        count: case.count,
        dtype: if case.operation.has_data() { case.dtype.name() } else { "none" },
        algorithm: work.algorithm,
        time: seconds * 1e6,
        algbw,
        busbw: algbw.map(|algbw| algbw * case.operation.bus_factor(ranks)),
        core: of(Level::Core),
        host: of(Level::Host),
        switch: of(Level::Switch),
    })
}
