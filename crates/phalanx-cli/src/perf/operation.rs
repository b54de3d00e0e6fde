//! The operations that can be measured, and their bandwidths.
//!
//! Formulas are those of the reference benchmark, so that figures can be compared.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// An operation that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Operation {
    /// Every rank gets the reduction of all ranks' buffers
    AllReduce,
    /// The sum in which a closure adds two elements (host memory)
    AllReduceWith,
    /// The same reduction of eight buffers in one call, in place; the size is that of all together (host memory)
    AllReduceCoalesced,
    /// Every rank gets the blocks of all ranks
    AllGather,
    /// Every rank gets the objects of all ranks: vectors of so many bytes (host memory)
    AllGatherObject,
    /// Every rank gets its block of the reduction
    ReduceScatter,
    /// Every rank gets the root's buffer
    Broadcast,
    /// The root gets the reduction of all ranks' buffers
    Reduce,
    /// Every rank gets the reduction of the buffers of the ranks up to it
    Scan,
    /// Every rank gets the reduction of the buffers of the ranks before it
    ExclusiveScan,
    /// Every rank sends a block to every rank
    #[value(alias = "alltoall")]
    AllToAll,
    /// The same with blocks of different sizes: more for ranks farther away
    #[value(alias = "alltoallv")]
    AllToAllV,
    /// The root gets the blocks of all ranks
    Gather,
    /// Every rank gets a block from the root
    Scatter,
    /// Every rank sends to the next and receives from the one before
    #[value(alias = "sendrecv")]
    SendRecv,
    /// The same, received from whichever rank sends
    RecvAny,
    /// Every rank exchanges blocks with the next and with the one before
    NeighborAllToAll,
    /// Rank 0 sends to rank 1 and gets an answer; the time is that of one way
    #[value(alias = "pingpong")]
    PingPong,
    /// Every rank waits until all have called it
    Barrier,
    /// All ranks agree on a flag, which holds when ranks are lost meanwhile
    Agree,
    /// all_gather made of pairwise exchanges; needs 2, 4, 8, … ranks
    Hypercube,
    /// Every rank writes to the memory of the next (NVSHMEM)
    Put,
    /// Every rank reads the memory of the next (NVSHMEM)
    Get,
    /// A put with a signal; every rank waits for the signal of the one before (NVSHMEM)
    PutSignal,
}

/// Whether input and output are different buffers or the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    OutOfPlace,
    InPlace,
}

impl Operation {
    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::AllReduceWith => "all_reduce_with",
            Operation::AllReduceCoalesced => "all_reduce_coalesced",
            Operation::AllGather => "all_gather",
            Operation::AllGatherObject => "all_gather_object",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::Broadcast => "broadcast",
            Operation::Reduce => "reduce",
            Operation::Scan => "scan",
            Operation::ExclusiveScan => "exclusive_scan",
            Operation::AllToAll => "all_to_all",
            Operation::AllToAllV => "all_to_all_v",
            Operation::Gather => "gather",
            Operation::Scatter => "scatter",
            Operation::SendRecv => "send_recv",
            Operation::RecvAny => "recv_any",
            Operation::NeighborAllToAll => "neighbor_all_to_all",
            Operation::PingPong => "ping_pong",
            Operation::Barrier => "barrier",
            Operation::Agree => "agree",
            Operation::Hypercube => "hypercube",
            Operation::Put => "put",
            Operation::Get => "get",
            Operation::PutSignal => "put_signal",
        }
    }

    /// Whether contributions are combined, so that `--op` matters.
    pub fn reduces(self) -> bool {
        use Operation::*;
        matches!(self, AllReduce | AllReduceCoalesced | ReduceScatter | Reduce | Scan | ExclusiveScan)
    }

    /// Whether one rank is special, so that `--root` matters.
    pub fn has_root(self) -> bool {
        matches!(self, Operation::Broadcast | Operation::Reduce | Operation::Gather | Operation::Scatter)
    }

    /// Whether a rank accesses another's memory, which needs NVSHMEM.
    pub fn is_one_sided(self) -> bool {
        matches!(self, Operation::Put | Operation::Get | Operation::PutSignal)
    }

    /// Whether it moves data at all.
    pub fn has_data(self) -> bool {
        !matches!(self, Operation::Barrier | Operation::Agree)
    }

    /// Whether its buffers must be in host memory.
    pub fn is_on_host(self) -> bool {
        use Operation::*;
        matches!(self, AllReduceWith | AllReduceCoalesced | AllGatherObject | NeighborAllToAll)
    }

    /// The places in which it is measured: those in which it exists.
    pub fn places(self) -> &'static [Place] {
        use Operation::*;
        match self {
            AllToAllV | SendRecv | RecvAny | NeighborAllToAll | AllGatherObject | PingPong | Barrier
            | Agree | Put | Get | PutSignal => &[Place::OutOfPlace],
            AllReduceCoalesced => &[Place::InPlace],
            _ => &[Place::OutOfPlace, Place::InPlace],
        }
    }

    /// Why this many ranks cannot perform it; `None` if they can.
    pub fn objection(self, ranks: usize) -> Option<String> {
        match self {
            Operation::PingPong if ranks < 2 => Some("ping_pong needs at least 2 ranks".to_owned()),
            Operation::Hypercube if !ranks.is_power_of_two() => {
                Some(format!("hypercube needs 1, 2, 4, 8, … ranks, not {ranks}"))
            }
            _ => None,
        }
    }

    /// The share of the measured time that is reported: a ping-pong is two messages.
    pub fn time_share(self) -> f64 {
        if self == Operation::PingPong { 0.5 } else { 1.0 }
    }

    /// The algorithm bandwidth in GB/s (1e9 bytes); `bytes` is the row's size. `None` if nothing is moved.
    pub fn algorithm_bandwidth(self, bytes: usize, ranks: usize, seconds: f64) -> Option<f64> {
        let bytes = match self {
            Operation::Barrier | Operation::Agree => return None,
            // The reference benchmark leaves out a rank's own block here, instead of in the factor.
            Operation::Hypercube => bytes as f64 * (ranks - 1) as f64 / ranks as f64,
            _ => bytes as f64,
        };
        Some(bytes / seconds / 1e9)
    }

    /// Bus bandwidth divided by algorithm bandwidth. Bus bandwidths can be compared with the hardware's,
    /// whatever the number of ranks.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks as f64;
        match self {
            Operation::AllReduce | Operation::AllReduceWith | Operation::AllReduceCoalesced => {
                2.0 * (n - 1.0) / n
            }
            Operation::AllGather
            | Operation::AllGatherObject
            | Operation::ReduceScatter
            | Operation::AllToAll
            | Operation::AllToAllV
            | Operation::Gather
            | Operation::Scatter => (n - 1.0) / n,
            Operation::Broadcast
            | Operation::Reduce
            | Operation::Scan
            | Operation::ExclusiveScan
            | Operation::SendRecv
            | Operation::RecvAny
            | Operation::NeighborAllToAll
            | Operation::PingPong
            | Operation::Barrier
            | Operation::Agree
            | Operation::Hypercube
            | Operation::Put
            | Operation::Get
            | Operation::PutSignal => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for operation in Operation::value_variants() {
            let value = operation.to_possible_value().unwrap();
            assert_eq!(value.get_name(), operation.name());
            assert_eq!(serde_json::to_value(operation).unwrap(), operation.name());
        }
    }

    #[test]
    fn bandwidths_are_those_of_the_reference_benchmark() {
        // 1 GB in half a second on 4 ranks.
        let busbw = |operation: Operation| {
            let algbw = operation.algorithm_bandwidth(1_000_000_000, 4, 0.5).unwrap();
            algbw * operation.bus_factor(4)
        };
        assert_eq!(busbw(Operation::AllReduce), 3.0);
        for operation in [
            Operation::AllGather,
            Operation::ReduceScatter,
            Operation::AllToAll,
            Operation::AllToAllV,
            Operation::Gather,
            Operation::Scatter,
            Operation::Hypercube,
        ] {
            assert_eq!(busbw(operation), 1.5, "{}", operation.name());
        }
        for operation in [
            Operation::Broadcast,
            Operation::Reduce,
            Operation::SendRecv,
            Operation::RecvAny,
            Operation::NeighborAllToAll,
            Operation::PingPong,
            Operation::Put,
            Operation::Get,
            Operation::PutSignal,
        ] {
            assert_eq!(busbw(operation), 2.0, "{}", operation.name());
        }
        assert_eq!(Operation::Barrier.algorithm_bandwidth(0, 4, 0.5), None);
    }

    #[test]
    fn one_rank_moves_nothing_over_the_bus() {
        assert_eq!(Operation::AllReduce.bus_factor(1), 0.0);
        assert_eq!(Operation::AllGather.bus_factor(1), 0.0);
    }
}
