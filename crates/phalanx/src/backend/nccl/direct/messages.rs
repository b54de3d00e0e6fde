//! Messages by an own kernel (`gpu/kernels/messages.cu`): a group's sends and receives, all at once.

use super::choose::{GpuAlgorithm, GpuTopology, Protocol};
use super::launch::{KernelArguments, KernelLaunch};
use super::setup::Direct;
use super::tunables::{
    INBOX_BYTES, LL128_LANES, LONGEST_LL, LONGEST_MESSAGE, MAX_RANKS, MESSAGES, SPREAD, WARPS,
};
use crate::backend::nccl::device::GpuDevice;
use crate::backend::nccl::parts::Part;
use crate::contract::Direction;
use crate::gpu::kernels::KernelModule;
use crate::types::error::Result;

/// `Message` in gpu/kernels/messages.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MessageArgument {
    start: u64,
    bytes: u64,
}

/// `Part` in gpu/kernels/messages.cu: the messages to a peer, or from it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PartArgument {
    remote: u64,
    own: u64,
    first: u32,
    count: u32,
    sends: u32,
    unused: u32,
}

/// `Arguments` in gpu/kernels/messages.cu.
#[repr(C)]
pub(super) struct MessageArguments {
    abort: u64,
    lanes: u64,
    parts: [PartArgument; MESSAGES],
    messages: [MessageArgument; MESSAGES],
}

fn is_send(message: &Part) -> bool {
    matches!(message.direction, Direction::Send(_))
}

/// The messages of each launch. Messages that need several launches are cut into rounds: the n-th message to and from each peer is of round
/// n. No launch has a part of a round, so on all ranks a round waits for earlier rounds only.
fn in_launches(messages: Vec<&Part>) -> Vec<Vec<&Part>> {
    if messages.len() <= MESSAGES {
        return if messages.is_empty() { Vec::new() } else { vec![messages] };
    }
    let mut rounds: Vec<Vec<&Part>> = Vec::new();
    for (place, message) in messages.iter().enumerate() {
        let is_of_pair = |other: &&&Part| other.peer == message.peer && is_send(other) == is_send(message);
        let round = messages[..place].iter().filter(is_of_pair).count();
        rounds.resize_with(rounds.len().max(round + 1), Vec::new);
        rounds[round].push(message);
    }
    // A round has at most two messages for each of the other ranks: fewer than a launch.
    const { assert!(2 * MAX_RANKS <= MESSAGES) };
    let mut launches: Vec<Vec<&Part>> = Vec::new();
    for round in rounds {
        match launches.last_mut() {
            Some(launch) if launch.len() + round.len() <= MESSAGES => launch.extend(round),
            _ => launches.push(round),
        }
    }
    launches
}

impl Direct {
    /// Whether an own kernel carries a message out: both its ends decide alike, by its length.
    pub fn carries(&self, message: &Part, rank: usize) -> bool {
        let GpuTopology { ranks, nvlink, algorithm } = self.topology;
        let longest = if nvlink { LONGEST_MESSAGE * 3 / (ranks - 1).max(3) } else { LONGEST_LL };
        let is_between_two = message.bytes > 0 && message.peer != rank;
        is_between_two && algorithm != GpuAlgorithm::Nccl && message.bytes <= longest
    }

    /// The launches that carry messages out. Each has all its messages under way at once.
    pub fn prepare_messages(
        &self,
        device: &GpuDevice,
        rank: usize,
        messages: &[Part],
    ) -> Result<Vec<KernelLaunch>> {
        let launches = in_launches(messages.iter().collect());
        launches.iter().map(|some| self.message_launch(device, rank, some)).collect()
    }

    /// Lanes of the messages to a peer, or from it. Those to and from all of them run at once.
    fn message_lanes(&self) -> usize {
        let of_both_directions = self.topology.protocol_of_rows().lanes() / 2;
        of_both_directions.min(LL128_LANES / 2 / (self.topology.ranks - 1))
    }

    fn message_launch(&self, device: &GpuDevice, rank: usize, messages: &[&Part]) -> Result<KernelLaunch> {
        let protocol = self.topology.protocol_of_rows();
        let kernels = self.loaded(device, KernelModule::Messages)?;
        let (arguments, parts) = self.message_arguments(rank, messages);
        let longest = messages.iter().map(|message| message.bytes).max().unwrap_or(0);
        let lanes = longest.div_ceil(protocol.step()).clamp(1, self.message_lanes());
        let warps = lanes.div_ceil(SPREAD).next_power_of_two().min(WARPS);
        let kernel = kernels.get(usize::from(protocol == Protocol::Ll128));
        let blocks = [lanes.div_ceil(warps) as u32, parts as u32];
        let (stream, arguments) = (messages[0].stream, KernelArguments::Messages(Box::new(arguments)));
        Ok(KernelLaunch::new(kernel, blocks, 32 * warps as u32, stream, arguments))
    }

    /// The arguments, and the number of parts: first those that send.
    fn message_arguments(&self, rank: usize, messages: &[&Part]) -> (MessageArguments, usize) {
        let (mut parts, mut buffers) =
            ([PartArgument::default(); MESSAGES], [MessageArgument::default(); MESSAGES]);
        let (mut count, mut first) = (0, 0);
        for (sends, peer) in
            [true, false].iter().flat_map(|sends| (0..self.topology.ranks).map(move |peer| (*sends, peer)))
        {
            let before = first;
            for message in messages.iter().filter(|message| message.peer == peer && is_send(message) == sends)
            {
                let start = match message.direction {
                    Direction::Send(source) => source.addr(),
                    Direction::Recv(target) => target.addr(),
                };
                buffers[first] = MessageArgument { start: start as u64, bytes: message.bytes as u64 };
                first += 1;
            }
            if first > before {
                let place = if peer < rank { peer } else { peer - 1 };
                parts[count] = PartArgument {
                    remote: self.inboxes[peer],
                    own: self.own + (place * INBOX_BYTES) as u64,
                    first: before as u32,
                    count: (first - before) as u32,
                    sends: u32::from(sends),
                    unused: 0,
                };
                count += 1;
            }
        }
        let lanes = self.message_lanes() as u64;
        (MessageArguments { abort: self.abort_word(), lanes, parts, messages: buffers }, count)
    }
}
