//! Messages between GPUs.
//!
//! A send of NCCL holds its stream until it is received, and the operations of a communicator run one after another. So each
//! *line* (a direction between two neighbours, on a channel) is a communicator of those two, with a stream of its own. Messages of
//! a line are received in the order in which they are sent, and no line waits for another.

use super::{Channel, Messages};
use crate::device::{Device, Gpu, Number};
use crate::{Error, Result};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream};
use phalanx::Comm;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Of the two ranks of a line's communicator.
const SENDER: usize = 0;
const RECEIVER: usize = 1;

/// A direction between two neighbours, on a channel.
#[derive(Debug)]
struct Line {
    comm: Comm,
    stream: Arc<CudaStream>,
}

/// The lines of a rank, by the rank at the other end.
#[derive(Debug)]
pub(crate) struct Lines {
    rank: usize,
    ranks: usize,
    outgoing: HashMap<(usize, Channel), Line>,
    incoming: HashMap<(usize, Channel), Line>,
}

/// What a rank is in a set of lines of which each rank has at most one.
fn role(rank: usize, ranks: usize, distance: usize, set: usize) -> Option<(usize, usize)> {
    // The lines of a ring in two sets; in three, if it has an odd number of ranks.
    let set_of = |sender: usize| if ranks % 2 == 1 && sender == ranks - 1 { 2 } else { sender % 2 };
    let before = (rank + ranks - distance) % ranks;
    if set_of(rank) == set {
        Some((rank, (rank + distance) % ranks))
    } else if set_of(before) == set {
        Some((before, rank))
    } else {
        None
    }
}

impl Lines {
    /// Makes and connects all lines. Collective.
    fn open(gpu: &Gpu, comm: &Comm) -> Result<Lines> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let mut lines = Lines { rank, ranks, outgoing: HashMap::new(), incoming: HashMap::new() };
        // To the next rank and to the one before, which are one if there are two.
        let distances = [1, ranks - 1];
        let distances = &distances[..(ranks - 1).min(2)];
        for channel in [Channel::Forward, Channel::Backward] {
            for distance in distances {
                for set in 0..2 + ranks % 2 {
                    let role = role(rank, ranks, *distance, set);
                    let color = role.map(|(sender, _)| sender as u32);
                    let key = i64::from(role.is_some_and(|(_, receiver)| receiver == rank));
                    let Some((pair, (sender, receiver))) = comm.split(color, key)?.zip(role) else {
                        continue;
                    };
                    let line = Line { comm: pair, stream: gpu.stream().context().new_stream()? };
                    line.connect(gpu)?;
                    if rank == sender {
                        lines.outgoing.insert((receiver, channel), line);
                    } else {
                        lines.incoming.insert((sender, channel), line);
                    }
                }
            }
        }
        Ok(lines)
    }
}

impl Line {
    /// Sends something once: the library connects at the first message, for which it waits.
    fn connect(&self, gpu: &Gpu) -> Result<()> {
        let mut nothing = gpu.zeros::<f32>(1)?;
        if self.comm.rank() == SENDER {
            self.send(&nothing)?
        } else {
            self.receive(&mut nothing)?
        }
        Ok(self.comm.sync()?)
    }

    fn send<T: Number>(&self, buffer: &CudaSlice<T>) -> Result<()> {
        Ok(self.comm.on(&self.stream)?.send(buffer, RECEIVER)?)
    }

    fn receive<T: Number>(&self, buffer: &mut CudaSlice<T>) -> Result<()> {
        Ok(self.comm.on(&self.stream)?.recv(buffer, SENDER)?)
    }
}

/// A message under way between GPUs, with its buffer.
#[derive(Debug)]
pub struct Sending<T> {
    buffer: CudaSlice<T>,
    /// Behind the message, on its line.
    sent: CudaEvent,
}

impl Gpu {
    /// This GPU with connections to the ranks before and behind this one in `comm`, for a pipeline or a ring among its ranks. Collective, and
    /// it waits for them.
    ///
    /// # Errors
    /// Errors of `comm` and of the driver.
    pub fn connected(&self, comm: &Comm) -> Result<Gpu> {
        let mut connected = self.clone();
        connected.lines = Some(Arc::new(Mutex::new(Lines::open(self, comm)?)));
        Ok(connected)
    }

    /// Calls `f` with the lines to and from other ranks of `comm`.
    fn with_lines<R>(&self, comm: &Comm, f: impl FnOnce(&Lines) -> Result<R>) -> Result<R> {
        let lines = self.lines.as_ref().ok_or_else(|| {
            Error::usage("messages between GPUs need connections: use the device that Gpu::connected gives for this communicator")
        })?;
        let lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        if (lines.rank, lines.ranks) != (comm.rank(), comm.world_size()) {
            return Err(Error::usage(format!(
                "connections of rank {} of {} with a communicator in which this is rank {} of {}: use Gpu::connected for it",
                lines.rank,
                lines.ranks,
                comm.rank(),
                comm.world_size()
            )));
        }
        f(&lines)
    }
}

/// There are lines to neighbours alone.
fn far(rank: usize, peer: usize) -> Error {
    Error::usage(format!(
        "a message between the ranks {rank} and {peer}: GPUs have connections to the ranks before and behind them"
    ))
}

impl Messages for Gpu {
    type Sending<T: Number> = Sending<T>;

    fn start_send<T: Number>(
        &self,
        comm: &Comm,
        buffer: CudaSlice<T>,
        to: usize,
        channel: Channel,
    ) -> Result<Sending<T>> {
        self.with_lines(comm, |lines| {
            let line = lines.outgoing.get(&(to, channel)).ok_or_else(|| far(lines.rank, to))?;
            line.send(&buffer)?;
            let sent = line.stream.record_event(None)?;
            Ok(Sending { buffer, sent })
        })
    }

    fn receive<T: Number>(
        &self,
        comm: &Comm,
        buffer: &mut CudaSlice<T>,
        from: usize,
        channel: Channel,
    ) -> Result<()> {
        self.with_lines(comm, |lines| {
            let line = lines.incoming.get(&(from, channel)).ok_or_else(|| far(lines.rank, from))?;
            // New memory, for which the line need not wait until the stream comes to this call.
            *buffer = self.alloc_on(&line.stream, buffer.len())?;
            line.receive(buffer)
        })
    }

    fn is_sent<T: Number>(&self, sending: &mut Sending<T>) -> bool {
        sending.sent.is_complete()
    }

    /// Work that is enqueued later waits for the message, and the host does not.
    fn finish<T: Number>(&self, sending: Sending<T>) -> Result<()> {
        // cudarc frees it on the stream, behind its readers.
        drop(sending.buffer);
        Ok(())
    }
}
