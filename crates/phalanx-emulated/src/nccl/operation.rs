//! An operation: the checked arguments of a call.

use super::communicator::Communicator;
use super::communicator::reductions::{Reduction, check_float8};
use super::result::{INVALID_ARGUMENT, INVALID_USAGE, fail};
use super::types::data_type;
use crate::arithmetic::DataType;
use crate::base::call::Code;
use crate::base::violation::violation;
use crate::cuda::memory::{self, Range, When};
use std::sync::Arc;

/// The kind of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    AllReduce,
    Broadcast { root: u32 },
    Reduce { root: u32 },
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather { root: u32 },
    Scatter { root: u32 },
    Send { peer: u32 },
    Recv { peer: u32 },
    PutSignal { peer: u32, window: u64, offset: u64, signal: i32, context: i32 },
    Signal { peer: u32, signal: i32, context: i32 },
    WaitSignal(Vec<Awaited>),
}

/// A number of signals to wait for (`ncclWaitSignalDesc_t`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Awaited {
    pub number: i32,
    pub peer: i32,
    pub signal: i32,
    pub context: i32,
}

/// An operation of one rank.
#[derive(Clone)]
pub struct Operation {
    pub function: &'static str,
    pub communicator: Arc<Communicator>,
    pub kind: Kind,
    pub send: Option<Range>,
    pub receive: Option<Range>,
    /// Elements of a block: the call's count.
    pub count: usize,
    pub dtype: DataType,
    pub reduction: Option<Reduction>,
    /// Another contribution to the reduction (`ncclAllReduceWithBias`).
    pub bias: Option<Range>,
}

/// The arguments of a call, unchecked.
pub struct Arguments {
    pub send: u64,
    pub receive: u64,
    pub count: usize,
    pub dtype: i32,
    pub reduction: Option<Reduction>,
    /// An address; 0 for none.
    pub bias: u64,
}

impl Kind {
    pub fn is_collective(&self) -> bool {
        self.code() < 8
    }

    /// The number of the kind: collectives are below 8, one-sided operations from 10 on.
    pub fn code(&self) -> u64 {
        match self {
            Kind::AllReduce => 0,
            Kind::Broadcast { .. } => 1,
            Kind::Reduce { .. } => 2,
            Kind::AllGather => 3,
            Kind::ReduceScatter => 4,
            Kind::AllToAll => 5,
            Kind::Gather { .. } => 6,
            Kind::Scatter { .. } => 7,
            Kind::Send { .. } => 8,
            Kind::Recv { .. } => 9,
            Kind::PutSignal { .. } => 10,
            Kind::Signal { .. } => 11,
            Kind::WaitSignal(_) => 12,
        }
    }

    pub fn root(&self) -> Option<u32> {
        match self {
            Kind::Broadcast { root }
            | Kind::Reduce { root }
            | Kind::Gather { root }
            | Kind::Scatter { root } => Some(*root),
            _ => None,
        }
    }

    /// How many blocks a rank sends and receives.
    fn blocks(&self, rank: u32, ranks: u32) -> (usize, usize) {
        let all = ranks as usize;
        let at = |root: &u32, blocks: usize| if *root == rank { blocks } else { 0 };
        match self {
            Kind::AllReduce => (1, 1),
            Kind::Broadcast { root } => (at(root, 1), 1),
            Kind::Reduce { root } => (1, at(root, 1)),
            Kind::AllGather => (1, all),
            Kind::ReduceScatter => (all, 1),
            Kind::AllToAll => (all, all),
            Kind::Gather { root } => (1, at(root, all)),
            Kind::Scatter { root } => (at(root, all), 1),
            Kind::Send { .. } | Kind::PutSignal { .. } => (1, 0),
            Kind::Recv { .. } => (0, 1),
            Kind::Signal { .. } | Kind::WaitSignal(_) => (0, 0),
        }
    }

    /// The start of the receive buffer relative to the send buffer of an operation in place, in blocks.
    fn in_place(&self, rank: u32) -> Option<i64> {
        match self {
            Kind::AllReduce | Kind::Broadcast { .. } | Kind::Reduce { .. } => Some(0),
            Kind::AllGather => Some(-i64::from(rank)),
            Kind::ReduceScatter => Some(i64::from(rank)),
            Kind::Gather { root } => Some(-i64::from(*root)),
            Kind::Scatter { root } => Some(i64::from(*root)),
            _ => None,
        }
    }
}

impl Operation {
    /// An operation from a call's arguments; `None` for an empty collective, which NCCL drops.
    pub fn new(
        function: &'static str,
        communicator: &Arc<Communicator>,
        kind: Kind,
        arguments: Arguments,
    ) -> Result<Option<Operation>, Code> {
        let Arguments { send, receive, count, dtype, reduction, bias } = arguments;
        let dtype = data_type(dtype)?;
        let (rank, ranks) = (communicator.rank, communicator.ranks);
        let peers = match &kind {
            Kind::Send { peer } | Kind::Recv { peer } => Some(*peer),
            other => other.root(),
        };
        if let Some(peer) = peers.filter(|peer| *peer >= ranks) {
            return Err(fail(
                INVALID_ARGUMENT,
                format!("{function} : invalid root or peer {} (0 to {})", peer as i32, ranks - 1),
            ));
        }
        if matches!(dtype, DataType::F8E4M3 | DataType::F8E5M2) && reduction.is_some() {
            check_float8()?;
        }
        // Empty messages are not dropped.
        if count == 0 && kind.is_collective() {
            return Ok(None);
        }
        let (sent, received) = kind.blocks(rank, ranks);
        let range = |role, address, blocks: usize| -> Result<Option<Range>, Code> {
            let len = blocks * count * dtype.size();
            if len == 0 {
                return Ok(None);
            }
            if address == 0 {
                return Err(fail(INVALID_ARGUMENT, format!("{function} : {role} argument is NULL")));
            }
            Ok(Some(Range::given(function, role, address, len)))
        };
        let send = range("the send buffer", send, sent)?;
        let receive = range("the receive buffer", receive, received)?;
        if let (Kind::AllToAll, Some(send), Some(receive)) = (&kind, &send, &receive)
            && memory::is_registered(send.address) != memory::is_registered(receive.address)
        {
            // 2.28.9 crashes, or never ends.
            violation(function, "one of the two buffers is registered and the other is not");
        }
        let bias = if bias == 0 { None } else { range("the bias", bias, 1)? };
        let operation = Operation {
            function,
            communicator: Arc::clone(communicator),
            kind,
            send,
            receive,
            count,
            dtype,
            reduction,
            bias,
        };
        operation.check_overlap();
        Ok(Some(operation))
    }

    /// Bytes of a block.
    pub fn block(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Whether the buffers share memory.
    pub fn is_in_place(&self) -> bool {
        self.send.zip(self.receive).is_some_and(|(send, receive)| send.overlaps(&receive))
    }

    fn check_overlap(&self) {
        if !self.is_in_place() {
            return;
        }
        let (Some(send), Some(receive)) = (self.send, self.receive) else { return };
        let apart = receive.address as i64 - send.address as i64;
        if self.kind.in_place(self.communicator.rank).map(|blocks| blocks * self.block() as i64)
            != Some(apart)
        {
            violation(self.function, "the buffers overlap, but not as an in-place operation");
        }
    }

    /// Ends the process if a buffer was freed since the call.
    pub fn check_buffers(&self) {
        self.send.iter().chain(&self.receive).chain(&self.bias).for_each(|range| range.check(When::Called));
    }
}

/// A valid peer's rank.
pub fn peer(function: &str, communicator: &Communicator, peer: i32) -> Result<u32, Code> {
    let known = u32::try_from(peer).ok().filter(|peer| *peer < communicator.ranks);
    known.ok_or_else(|| fail(INVALID_USAGE, format!("{function} : invalid peer {peer}")))
}
