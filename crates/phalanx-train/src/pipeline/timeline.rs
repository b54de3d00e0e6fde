//! When each action of a schedule begins and ends; tables and pictures of it.

use super::schedule::{Action, Kind, Schedule};
use crate::{Error, Result};
use std::collections::HashMap;
use std::fmt::Write as _;

/// How long actions take, in any unit. A whole backward takes as long as its two parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// A forward.
    pub forward: f64,
    /// The gradient of the input.
    pub input: f64,
    /// The gradients of the weights.
    pub weights: f64,
}

impl Default for Costs {
    /// 1 for each.
    fn default() -> Costs {
        Costs { forward: 1.0, input: 1.0, weights: 1.0 }
    }
}

impl Costs {
    fn of(&self, kind: Kind) -> f64 {
        match kind {
            Kind::Forward => self.forward,
            Kind::Backward => self.input + self.weights,
            Kind::BackwardInput => self.input,
            Kind::BackwardWeights => self.weights,
        }
    }
}

/// A schedule with times.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// Of each rank: the actions, when they begin, and when they end.
    pub ranks: Vec<Vec<(Action, f64, f64)>>,
}

/// When the parts of the work were done that others wait for: forwards and backwards of a micro-batch by stage.
#[derive(Default)]
struct Done(HashMap<(bool, usize, usize), f64>);

impl Done {
    /// When an action can begin, as far as others are concerned; `None` while what it needs is not done.
    fn ready(&self, schedule: &Schedule, rank: usize, action: Action) -> Option<f64> {
        let (stage, last) = (schedule.stage(rank, action.chunk), schedule.stages() - 1);
        let needed = match action.kind {
            Kind::Forward if stage == 0 => return Some(0.0),
            Kind::Forward => (true, action.micro, stage - 1),
            Kind::BackwardWeights => (false, action.micro, stage),
            _ if stage == last => (true, action.micro, stage),
            _ => (false, action.micro, stage + 1),
        };
        self.0.get(&needed).copied()
    }

    fn note(&mut self, schedule: &Schedule, rank: usize, action: Action, end: f64) {
        let forward = action.kind == Kind::Forward;
        if action.kind != Kind::BackwardWeights {
            self.0.insert((forward, action.micro, schedule.stage(rank, action.chunk)), end);
        }
    }
}

impl Timeline {
    pub(super) fn play(schedule: &Schedule, costs: Costs) -> Result<Timeline> {
        let mut ranks: Vec<Vec<(Action, f64, f64)>> = vec![Vec::new(); schedule.ranks()];
        let mut done = Done::default();
        loop {
            let mut went_on = false;
            for (rank, times) in ranks.iter_mut().enumerate() {
                while let Some(action) = schedule.actions(rank).get(times.len()) {
                    let Some(ready) = done.ready(schedule, rank, *action) else { break };
                    let begin = times.last().map_or(0.0, |(_, _, end)| *end).max(ready);
                    let end = begin + costs.of(action.kind);
                    done.note(schedule, rank, *action, end);
                    times.push((*action, begin, end));
                    went_on = true;
                }
            }
            if !went_on {
                break;
            }
        }
        for (rank, times) in ranks.iter().enumerate() {
            if let Some(action) = schedule.actions(rank).get(times.len()) {
                return Err(Error::usage(format!(
                    "rank {rank} waits for ever before {action}: what it needs comes after it on another rank"
                )));
            }
        }
        Ok(Timeline { ranks })
    }

    /// When the last action ends.
    pub fn total(&self) -> f64 {
        self.ranks.iter().flatten().map(|(_, _, end)| *end).fold(0.0, f64::max)
    }

    /// Part of all ranks' time in which they wait: the bubble.
    pub fn bubble(&self) -> f64 {
        let busy: f64 = self.ranks.iter().flatten().map(|(_, begin, end)| end - begin).sum();
        1.0 - busy / (self.total() * self.ranks.len() as f64)
    }

    /// A table: a line for each rank, a column for each unit of time, and the bubble.
    ///
    /// ```
    /// use phalanx_train::pipeline::{Costs, Schedule};
    ///
    /// let schedule = Schedule::one_forward_one_backward(2, 2)?;
    /// assert_eq!(schedule.timeline(Costs::default()).to_table(), "\
    /// rank 0 F0 F1 .  .  B0 B0 .  B1 B1
    /// rank 1 .  F0 B0 B0 F1 B1 B1 .  .
    /// bubble 33.3 %
    /// ");
    /// # Ok::<(), phalanx_train::Error>(())
    /// ```
    pub fn to_table(&self) -> String {
        let names = self.ranks.iter().flatten().map(|(action, ..)| action.to_string().len());
        let width = names.max().unwrap_or(0) + 1;
        let mut table = String::new();
        for (rank, times) in self.ranks.iter().enumerate() {
            let mut line = format!("rank {rank:<width$}", width = (self.ranks.len() - 1).to_string().len());
            for unit in 0..self.total().ceil() as usize {
                let middle = unit as f64 + 0.5;
                let now = times.iter().find(|(_, begin, end)| *begin <= middle && middle < *end);
                let name = now.map_or(".".to_owned(), |(action, ..)| action.to_string());
                let _ = write!(line, " {name:<width$}", width = width - 1);
            }
            table += line.trim_end();
            table.push('\n');
        }
        let _ = writeln!(table, "bubble {:.1} %", self.bubble() * 100.0);
        table
    }

    /// A picture, as SVG: a row for each rank, a box for each action.
    pub fn to_svg(&self) -> String {
        const UNIT: f64 = 28.0;
        const ROW: f64 = 26.0;
        const LEFT: f64 = 56.0;
        let (width, height) = (LEFT + self.total() * UNIT + 8.0, ROW * (self.ranks.len() + 1) as f64 + 8.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n"
        );
        for (rank, times) in self.ranks.iter().enumerate() {
            let top = ROW * rank as f64 + 4.0;
            let _ = writeln!(svg, "<text x=\"4\" y=\"{}\">rank {rank}</text>", top + 15.0);
            for (action, begin, end) in times {
                let fill = match action.kind {
                    Kind::Forward => "#9ec5f4",
                    Kind::Backward => "#a8d8a8",
                    Kind::BackwardInput => "#c3e6b0",
                    Kind::BackwardWeights => "#f2d59b",
                };
                let (x, long) = (LEFT + begin * UNIT, (end - begin) * UNIT);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x}\" y=\"{top}\" width=\"{long}\" height=\"{}\" fill=\"{fill}\" stroke=\"#555\"/><text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{action}</text>",
                    ROW - 4.0,
                    x + long / 2.0,
                    top + 15.0
                );
            }
        }
        let bottom = ROW * self.ranks.len() as f64 + 19.0;
        let _ = writeln!(
            svg,
            "<text x=\"4\" y=\"{bottom}\">bubble {:.1} %</text>\n</svg>",
            self.bubble() * 100.0
        );
        svg
    }
}

/// Puts the gradients of weights where a rank would wait, and before a forward for which there is no room: a rank keeps as many
/// micro-batches as there are ranks. Times are those of the default costs.
pub(super) fn fill_with_weights(schedule: &Schedule) -> Vec<Vec<Action>> {
    struct Rank {
        next: usize,
        free: f64,
        kept: usize,
        /// Micro-batches whose weights' gradients are to be computed.
        waiting: std::collections::VecDeque<usize>,
        actions: Vec<Action>,
    }
    let costs = Costs::default();
    let new = || Rank { next: 0, free: 0.0, kept: 0, waiting: Default::default(), actions: Vec::new() };
    let mut ranks: Vec<Rank> = (0..schedule.ranks()).map(|_| new()).collect();
    let mut done = Done::default();
    // Always the rank that is free first, so that what it needs has been done if it can be by then.
    loop {
        let open =
            |(at, rank): &(usize, &Rank)| rank.next < schedule.actions(*at).len() || !rank.waiting.is_empty();
        let order = |a: &(usize, &Rank), b: &(usize, &Rank)| a.1.free.total_cmp(&b.1.free);
        let Some((at, _)) = ranks.iter().enumerate().filter(open).min_by(order) else {
            return ranks.into_iter().map(|rank| rank.actions).collect();
        };
        let rank = &mut ranks[at];
        let next = schedule.actions(at).get(rank.next).copied();
        let is_full = next.is_some_and(|next| next.kind == Kind::Forward && rank.kept == schedule.ranks());
        let ready =
            next.and_then(|next| done.ready(schedule, at, next)).is_some_and(|ready| ready <= rank.free);
        let action = match rank.waiting.front() {
            Some(micro) if !ready || is_full => {
                Action { kind: Kind::BackwardWeights, micro: *micro, chunk: 0 }
            }
            _ if ready => next.expect("it is ready"),
            // It waits for a moment.
            _ => {
                rank.free += 0.5;
                continue;
            }
        };
        rank.free += costs.of(action.kind);
        done.note(schedule, at, action, rank.free);
        match action.kind {
            Kind::Forward => rank.kept += 1,
            Kind::BackwardWeights => {
                rank.kept -= 1;
                rank.waiting.pop_front();
            }
            _ => rank.waiting.push_back(action.micro),
        }
        if action.kind != Kind::BackwardWeights {
            rank.next += 1;
        }
        rank.actions.push(action);
    }
}
