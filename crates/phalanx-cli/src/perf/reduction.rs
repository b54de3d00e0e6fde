//! The reductions that can be measured. Their name in the output is `redop`, as in the reference benchmark.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How the ranks' contributions are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
pub enum RedOp {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
    /// The sum in which every rank's contribution is first multiplied by a factor of its own
    MulSum,
}

impl RedOp {
    pub const ALL: [RedOp; 6] = [RedOp::Sum, RedOp::Prod, RedOp::Min, RedOp::Max, RedOp::Avg, RedOp::MulSum];

    pub fn name(self) -> &'static str {
        match self {
            RedOp::Sum => "sum",
            RedOp::Prod => "prod",
            RedOp::Min => "min",
            RedOp::Max => "max",
            RedOp::Avg => "avg",
            RedOp::MulSum => "mulsum",
        }
    }

    /// A rank's factor in `mulsum`.
    pub fn factor(rank: usize) -> i64 {
        if rank.is_multiple_of(2) { 1 } else { 2 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        assert_eq!(RedOp::value_variants(), RedOp::ALL);
        for op in RedOp::ALL {
            assert_eq!(op.to_possible_value().unwrap().get_name(), op.name());
            assert_eq!(serde_json::to_value(op).unwrap(), op.name());
        }
    }
}
