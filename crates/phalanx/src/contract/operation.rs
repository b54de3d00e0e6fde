//! The operations of a communicator.

/// An operation of a communicator. The numbers travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Operation {
    AllReduce = 1,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    AllGatherV,
    ReduceScatterV,
    GatherV,
    ScatterV,
    AllToAllV,
    Barrier,
    Split,
    Finalize,
    Send,
    Recv,
    Init,
    Shrink,
    Grow,
    /// Allocation of memory by all ranks together.
    Alloc,
    Suspend,
    Resume,
    WaitSignals,
    /// A communicator for kernels. The requirements are in the place of the root.
    DeviceComm,
    /// Communicators of a grid of ranks. A hash of the grid is in the place of the root.
    SplitGrid,
    Scan,
    ExclusiveScan,
    /// Memory of which every rank has a part.
    Symmetric,
    /// The beginning and the end of an epoch of such memory, and its end. The memory's number is in the place of the root.
    Epoch,
    EndEpoch,
    Free,
    /// Accesses to a rank's part, and their completion. The rank is in the place of the root.
    OneSided,
    /// Memory that the ranks of a host share.
    SharedByHost,
    /// An all_reduce of rows with what follows it.
    AllReduceRmsNorm,
    /// Scratch of experts. A hash of their layout is in the place of the root.
    Experts,
    /// Tokens to experts and back. The number of the experts' scratch is in the place of the root.
    ExpertDispatch,
    ExpertCombine,
    /// FIFOs for kernels of the program.
    Peers,
    /// Reading and writing of a file by all ranks.
    File,
}

impl Operation {
    const ALL: [(Operation, &'static str); 41] = [
        (Operation::AllReduce, "all_reduce"),
        (Operation::Broadcast, "broadcast"),
        (Operation::Reduce, "reduce"),
        (Operation::AllGather, "all_gather"),
        (Operation::ReduceScatter, "reduce_scatter"),
        (Operation::AllToAll, "all_to_all"),
        (Operation::Gather, "gather"),
        (Operation::Scatter, "scatter"),
        (Operation::AllGatherV, "all_gather_v"),
        (Operation::ReduceScatterV, "reduce_scatter_v"),
        (Operation::GatherV, "gather_v"),
        (Operation::ScatterV, "scatter_v"),
        (Operation::AllToAllV, "all_to_all_v"),
        (Operation::Barrier, "barrier"),
        (Operation::Split, "split"),
        (Operation::Finalize, "finalize"),
        (Operation::Send, "send"),
        (Operation::Recv, "recv"),
        (Operation::Init, "init"),
        (Operation::Shrink, "shrink"),
        (Operation::Grow, "grow"),
        (Operation::Alloc, "alloc"),
        (Operation::Suspend, "suspend"),
        (Operation::Resume, "resume"),
        (Operation::WaitSignals, "wait_signals"),
        (Operation::DeviceComm, "device_comm"),
        (Operation::SplitGrid, "split_grid"),
        (Operation::Scan, "scan"),
        (Operation::ExclusiveScan, "exclusive_scan"),
        (Operation::Symmetric, "symmetric"),
        (Operation::Epoch, "epoch"),
        (Operation::EndEpoch, "end of an epoch"),
        (Operation::Free, "free"),
        (Operation::OneSided, "one_sided"),
        (Operation::SharedByHost, "shared_by_host"),
        (Operation::AllReduceRmsNorm, "all_reduce_rms_norm"),
        (Operation::Experts, "experts"),
        (Operation::ExpertDispatch, "expert_dispatch"),
        (Operation::ExpertCombine, "expert_combine"),
        (Operation::Peers, "peers"),
        (Operation::File, "file"),
    ];

    pub fn name(self) -> &'static str {
        Operation::ALL[self as usize - 1].1
    }

    /// One more than the largest code.
    #[cfg(feature = "metrics")]
    pub const CODES: usize = Operation::ALL.len() + 1;

    pub fn from_code(code: u8) -> Option<Operation> {
        Operation::ALL.get(usize::from(code).wrapping_sub(1)).map(|(operation, _)| *operation)
    }

    pub fn from_name(name: &str) -> Option<Operation> {
        Operation::ALL.iter().find(|(_, other)| *other == name).map(|(operation, _)| *operation)
    }

    /// Whether it is a collective with a length for each rank's block.
    pub fn has_counts(self) -> bool {
        use Operation::*;
        matches!(self, AllGatherV | ReduceScatterV | GatherV | ScatterV | AllToAllV)
    }

    /// Whether the operation has a root.
    pub fn is_rooted(self) -> bool {
        use Operation::*;
        matches!(self, Broadcast | Reduce | Gather | Scatter | GatherV | ScatterV)
    }

    pub fn reduces(self) -> bool {
        use Operation::*;
        matches!(self, AllReduce | Reduce | ReduceScatter | ReduceScatterV) || self.scans()
    }

    /// Whether each rank gets the reduction of the ranks before it.
    pub fn scans(self) -> bool {
        matches!(self, Operation::Scan | Operation::ExclusiveScan)
    }

    /// Whether it can be part of a group.
    pub fn is_queued_in_groups(self) -> bool {
        !self.is_empty_handed() && !self.allocates()
    }

    /// Whether its blocks are what the ranks ask for, and no data moves.
    pub fn allocates(self) -> bool {
        matches!(self, Operation::Alloc | Operation::Symmetric | Operation::SharedByHost)
    }

    /// Whether it belongs to a window, whose number is in the place of the root.
    pub fn is_of_window(self) -> bool {
        matches!(self, Operation::Epoch | Operation::EndEpoch | Operation::Free)
    }

    /// Whether the operation moves no data.
    pub fn is_empty_handed(self) -> bool {
        use Operation::*;
        let is_errand = matches!(
            self,
            Init | Shrink | Grow | Suspend | Resume | WaitSignals | DeviceComm | Experts | Peers | File
        );
        is_errand || self.is_of_window() || matches!(self, Barrier | Finalize | Split | SplitGrid | OneSided)
    }
}
