//! The options of `phalanx plan`.

use super::runs::Case;
use super::{ranks_on, usage};
use crate::perf::layout::BufferLengths;
use crate::perf::operation::Operation;
use crate::perf::plan::{Step, sizes};
use crate::perf::values::{self, Choice};
use crate::{exit, parse, size};
use anyhow::{Result, bail, ensure};
use phalanx::DType;
use phalanx::internal::Placement;
use std::path::PathBuf;

/// Predict what an operation takes among other numbers of ranks and hosts.
///
/// Fits the cost of waits, messages, bytes and reductions to runs that `phalanx perf --json` has saved, inside a rank, between the ranks
/// of a host, and between hosts. Each operation is counted along the algorithm that the library would choose. The error on points that
/// the fit has not seen is printed above the table.
///
/// The runs are of one backend (host or ucx) and one kind of machine. Give runs of several operations, sizes and numbers of ranks; what
/// no run has done cannot be planned.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct PlanArgs {
    /// Runs saved with `phalanx perf --json`.
    #[arg(required = true, value_name = "RUN.json")]
    pub runs: Vec<PathBuf>,

    /// The operation.
    #[arg(short = 'O', long, value_enum, default_value = "all_reduce")]
    pub operation: Operation,
    /// The number of ranks, or several numbers [default: as in the largest run]
    #[arg(short = 'n', long, value_name = "N,…", value_parser = many, value_delimiter = ',', allow_negative_numbers = true)]
    ranks: Vec<usize>,
    /// The number of hosts that the ranks are on: one for all, or one for each number of ranks [default: as in the largest run]
    #[arg(short = 'H', long, value_name = "N,…", value_parser = many, value_delimiter = ',', allow_negative_numbers = true)]
    hosts: Vec<usize>,
    /// Cores of a host that its ranks may use [default: as in the runs]
    #[arg(long, value_name = "N", value_parser = values::count, allow_negative_numbers = true)]
    cores: Option<usize>,
    /// The hosts of the runs were one machine, whose cores they shared: containers, or namespaces. Planned hosts have cores of their own.
    #[arg(long)]
    pub one_machine: bool,

    /// The smallest size of a rank's larger buffer [default: 8]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", value_parser = size::parse)]
    min: Option<usize>,
    /// The largest size [default: 64M]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", value_parser = size::parse)]
    max: Option<usize>,
    /// Multiply a size by this to get the next one.
    #[arg(short = 'f', long = "stepfactor", value_name = "N", value_parser = parse::count, default_value = "8")]
    factor: usize,
    /// The element type.
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", value_parser = dtype, default_value = "f32")]
    dtype: DType,

    /// Write the plan to this JSON file, with all constants and errors. - is standard output; the table then goes to standard error.
    #[arg(short = 'J', long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Example:
  for n in 2 4; do for op in all_reduce broadcast all_gather barrier; do
    phalanx perf $op -p $n -b 8 -e 2M -f 8 -n 20 -J run-$op-$n.json; done; done
  phalanx plan run-*.json
  phalanx plan run-*.json --operation all_gather --ranks 16,32,64 --cores 64 -J plan.json";

/// The most ranks and hosts: their squares are counted.
const MOST: usize = 10_000_000;
const DEFAULT_MIN: usize = 8;
const DEFAULT_MAX: usize = 64 << 20;

fn many(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MOST).contains(number));
    number.ok_or_else(|| format!("{text:?} is no number: expected 1 to {MOST}"))
}

fn dtype(text: &str) -> Result<DType, String> {
    match values::dtype(text)? {
        Choice::One(dtype) => Ok(dtype),
        Choice::All => Err("a plan is of one type".to_owned()),
    }
}

impl PlanArgs {
    /// The places that the options ask for; what they leave open is as in the run with most ranks.
    pub fn placements(&self, largest: Placement) -> Result<Vec<Placement>> {
        let or = |given: &[usize], default| if given.is_empty() { vec![default] } else { given.to_vec() };
        let (ranks, hosts) = (or(&self.ranks, largest.ranks), or(&self.hosts, largest.hosts));
        let number = ranks.len().max(hosts.len());
        if ![ranks.len(), hosts.len()].iter().all(|len| [1, number].contains(len)) {
            bail!(usage(format!(
                "--ranks has {} numbers and --hosts {}: give as many, or one of either",
                ranks.len(),
                hosts.len()
            )));
        }
        let at = |numbers: &[usize], index: usize| numbers[index.min(numbers.len() - 1)];
        let cores = self.cores.unwrap_or(largest.cores);
        let place = |index| {
            let (ranks, hosts) = (at(&ranks, index), at(&hosts, index));
            if ranks < hosts || ranks < 2 {
                let place = ranks_on(ranks, hosts);
                bail!(usage(format!("{place}: give at least a rank for each host, and 2 in all")));
            }
            Ok(Placement { ranks, hosts, cores, ..largest })
        };
        (0..number).map(place).collect()
    }

    /// The cases of a place, by size.
    pub fn cases(&self, placement: Placement) -> Result<Vec<Case>> {
        let element = self.dtype.size();
        if !self.operation.has_data() {
            return Ok(vec![Case::new(self.operation, 0, 0, DType::U8, 0, placement)]);
        }
        let min = self.min.unwrap_or(DEFAULT_MIN.min(self.max.unwrap_or(DEFAULT_MIN)));
        let sizes = sizes(min, self.max.unwrap_or(DEFAULT_MAX.max(min)), Step::Times(self.factor));
        let case = |bytes: usize| {
            let lengths = BufferLengths::new(self.operation, bytes, element, placement.ranks)?;
            let size = lengths.larger() * element;
            Some(Case::new(self.operation, size, lengths.count, self.dtype, 0, placement))
        };
        let cases: Vec<Case> = sizes.map_err(exit::usage)?.into_iter().filter_map(case).collect();
        ensure!(
            !cases.is_empty(),
            usage(format!(
                "no size holds an element for each of {} ranks: raise --maxbytes",
                placement.ranks
            ))
        );
        Ok(cases)
    }
}
