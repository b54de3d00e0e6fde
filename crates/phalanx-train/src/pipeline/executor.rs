//! Carrying out a schedule.

use super::schedule::{Action, Kind, Schedule};
use crate::device::{Device, Host, Number};
use crate::{Error, Result};
use phalanx::{Comm, ReduceOp, Request, Source};
use std::collections::{HashMap, VecDeque};

/// Where a stage's function is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The micro-batch.
    pub micro: usize,
    /// The chunk of this rank.
    pub chunk: usize,
    /// The stage: of all stages of the model, in the order in which data passes them.
    pub stage: usize,
    /// Whether it is the first stage, which has no input and sends no gradient back.
    pub is_first: bool,
    /// Whether it is the last stage, which has no output and gets no gradient.
    pub is_last: bool,
    /// Whether this backward leaves the gradients of the weights to [`Stage::backward_weights`].
    pub splits_backward: bool,
}

/// What a rank does with the data of its stages. It keeps its activations itself, from the forward to the end of the backward.
pub trait Stage<D: Device, T: Number> {
    /// Forward of a micro-batch: from the stage's input to its output. The first stage gets no input, and has its own data; the last one
    /// returns none, and keeps its loss.
    ///
    /// # Errors
    /// An error ends [`Pipeline::run`] on this rank, and by the deadline on the others.
    fn forward(&mut self, at: Position, input: Option<D::Buffer<T>>) -> Result<Option<D::Buffer<T>>>;

    /// Backward: from the gradient of the output to that of the input, which the first stage has not. It computes the gradients of the weights
    /// as well, unless [`splits_backward`](Position::splits_backward) is set.
    ///
    /// # Errors
    /// As [`forward`](Stage::forward).
    fn backward(&mut self, at: Position, gradient: Option<D::Buffer<T>>) -> Result<Option<D::Buffer<T>>>;

    /// The gradients of the weights, with a schedule that splits backwards ([`Schedule::zero_bubble`]).
    ///
    /// # Errors
    /// As [`forward`](Stage::forward).
    fn backward_weights(&mut self, at: Position) -> Result<()> {
        Err(Error::usage(format!(
            "the schedule splits backwards, and stage {} has no backward_weights: give it one, or take another schedule",
            at.stage
        )))
    }
}

/// Which messages between two ranks keep their order among each other. Those of one channel do not wait for those of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    /// Activations; keys and values.
    Forward,
    /// Gradients.
    Backward,
}

/// Messages between ranks, on a device.
///
/// Messages have no tags: those of one rank to another on one [`Channel`] are received in the order in which they are sent. On a GPU they
/// need a device that `Gpu::connected` made.
pub trait Messages: Device {
    /// A message under way, with its buffer.
    type Sending<T: Number>;

    /// Sends a buffer to a rank, and does not wait for it to be received.
    ///
    /// # Errors
    /// Errors of `comm`.
    fn start_send<T: Number>(
        &self,
        comm: &Comm,
        buffer: Self::Buffer<T>,
        to: usize,
        channel: Channel,
    ) -> Result<Self::Sending<T>>;

    /// Receives the next message of a rank. On a GPU, work enqueued later sees it; on the host this waits.
    ///
    /// # Errors
    /// Errors of `comm`.
    fn receive<T: Number>(
        &self,
        comm: &Comm,
        buffer: &mut Self::Buffer<T>,
        from: usize,
        channel: Channel,
    ) -> Result<()>;

    /// Whether a message is no longer under way.
    fn is_sent<T: Number>(&self, sending: &mut Self::Sending<T>) -> bool;

    /// Waits until a message is no longer under way. On a GPU, work enqueued later waits.
    ///
    /// # Errors
    /// Errors of `comm`.
    fn finish<T: Number>(&self, sending: Self::Sending<T>) -> Result<()>;
}

impl Messages for Host {
    type Sending<T: Number> = Request<Vec<T>>;

    fn start_send<T: Number>(
        &self,
        comm: &Comm,
        buffer: Vec<T>,
        to: usize,
        channel: Channel,
    ) -> Result<Request<Vec<T>>> {
        Ok(comm.start_send_tagged(buffer, to, channel as u32)?)
    }

    fn receive<T: Number>(
        &self,
        comm: &Comm,
        buffer: &mut Vec<T>,
        from: usize,
        channel: Channel,
    ) -> Result<()> {
        Ok(comm.recv_tagged(buffer, from, channel as u32)?)
    }

    fn is_sent<T: Number>(&self, sending: &mut Request<Vec<T>>) -> bool {
        sending.is_done()
    }

    fn finish<T: Number>(&self, sending: Request<Vec<T>>) -> Result<()> {
        sending.wait()?;
        Ok(())
    }
}

/// A schedule among the ranks of a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pipeline {
    schedule: Schedule,
}

impl Pipeline {
    /// Takes a schedule for the ranks of `comm`. No rank is asked.
    ///
    /// # Errors
    /// [`Error::Usage`] if the schedule is for another number of ranks.
    pub fn new(comm: &Comm, schedule: Schedule) -> Result<Pipeline> {
        if schedule.ranks() != comm.world_size() {
            return Err(Error::usage(format!(
                "a schedule for {} ranks with a communicator of {}: make it for its world_size()",
                schedule.ranks(),
                comm.world_size()
            )));
        }
        Ok(Pipeline { schedule })
    }

    /// The schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Carries the schedule out: all micro-batches forwards and backwards. Collective.
    ///
    /// `input_len` says how many numbers go into a stage (from 1 on; the first has no input) for a micro-batch, the same on the ranks that send and
    /// receive them. The gradient that comes back has the same length.
    ///
    /// # Errors
    /// Errors of `comm`, of the device and of the stages' functions; [`Error::Usage`] if a function returns a buffer of another length.
    pub fn run<D: Messages, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        stage: &mut impl Stage<D, T>,
        input_len: impl Fn(usize, usize) -> usize,
    ) -> Result<()> {
        let mut run = Run {
            schedule: &self.schedule,
            comm,
            device,
            sendings: Vec::new(),
            incoming: incoming(&self.schedule, comm.rank()),
            early: HashMap::new(),
            input_len,
        };
        for action in self.schedule.actions(comm.rank()) {
            run.carry_out(*action, stage)?;
        }
        for sending in run.sendings {
            device.finish(sending)?;
        }
        Ok(())
    }
}

/// The message about a boundary between stages, the one before stage `boundary`: its input goes forwards, the gradient of it backwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Message {
    channel: Channel,
    micro: usize,
    boundary: usize,
}

/// What the rank before sends forwards, and the rank behind backwards, in their orders.
fn incoming(schedule: &Schedule, rank: usize) -> [VecDeque<Message>; 2] {
    let ranks = schedule.ranks();
    let sent = |channel: Channel, from: usize| {
        let message = move |action: &Action| {
            let stage = schedule.stage(from, action.chunk);
            let boundary = match (action.kind, channel) {
                (Kind::Forward, Channel::Forward) => stage + 1,
                (Kind::Backward | Kind::BackwardInput, Channel::Backward) => stage,
                _ => return None,
            };
            // Nothing goes into the first stage, or out of the last.
            let is_inside = 0 < boundary && boundary < schedule.stages();
            is_inside.then_some(Message { channel, micro: action.micro, boundary })
        };
        schedule.actions(from).iter().filter_map(message).collect()
    };
    [sent(Channel::Forward, (rank + ranks - 1) % ranks), sent(Channel::Backward, (rank + 1) % ranks)]
}

/// A schedule that is being carried out.
struct Run<'a, D: Messages, T: Number, L> {
    schedule: &'a Schedule,
    comm: &'a Comm,
    device: &'a D,
    sendings: Vec<D::Sending<T>>,
    /// Messages that are still to be received, by channel.
    incoming: [VecDeque<Message>; 2],
    /// Those that came before their turn, or are of this rank to itself.
    early: HashMap<Message, D::Buffer<T>>,
    input_len: L,
}

impl<D: Messages, T: Number, L: Fn(usize, usize) -> usize> Run<'_, D, T, L> {
    fn carry_out(&mut self, action: Action, stage: &mut impl Stage<D, T>) -> Result<()> {
        let (last, number) =
            (self.schedule.stages() - 1, self.schedule.stage(self.comm.rank(), action.chunk));
        let at = Position {
            micro: action.micro,
            chunk: action.chunk,
            stage: number,
            is_first: number == 0,
            is_last: number == last,
            splits_backward: action.kind == Kind::BackwardInput,
        };
        // The messages behind the stage, and before it.
        let (micro, forward, backward) = (action.micro, Channel::Forward, Channel::Backward);
        let behind = |channel| Message { channel, micro, boundary: number + 1 };
        let before = |channel| Message { channel, micro, boundary: number };
        match action.kind {
            Kind::Forward => {
                let input = if at.is_first { None } else { Some(self.receive(before(forward))?) };
                let output = stage.forward(at, input)?;
                self.send_on(at, output, forward, (!at.is_last).then_some(behind(forward)))
            }
            Kind::Backward | Kind::BackwardInput => {
                let gradient = if at.is_last { None } else { Some(self.receive(behind(backward))?) };
                let gradient = stage.backward(at, gradient)?;
                self.send_on(at, gradient, backward, (!at.is_first).then_some(before(backward)))
            }
            Kind::BackwardWeights => stage.backward_weights(at),
        }
    }

    /// Receives messages until this one is there.
    fn receive(&mut self, message: Message) -> Result<D::Buffer<T>> {
        if let Some(buffer) = self.early.remove(&message) {
            return Ok(buffer);
        }
        let (rank, ranks) = (self.comm.rank(), self.schedule.ranks());
        let from = match message.channel {
            Channel::Forward => (rank + ranks - 1) % ranks,
            Channel::Backward => (rank + 1) % ranks,
        };
        loop {
            let next = self.incoming[message.channel as usize].pop_front();
            let next = next.expect("a schedule was played through when it was made");
            let mut buffer = self.device.alloc((self.input_len)(next.micro, next.boundary))?;
            self.device.receive(self.comm, &mut buffer, from, next.channel)?;
            if next == message {
                return Ok(buffer);
            }
            self.early.insert(next, buffer);
        }
    }

    /// Sends what a stage's function gave, if a message is expected of it.
    fn send_on(
        &mut self,
        at: Position,
        buffer: Option<D::Buffer<T>>,
        channel: Channel,
        message: Option<Message>,
    ) -> Result<()> {
        let expected = message.map(|message| (self.input_len)(message.micro, message.boundary));
        let len = buffer.as_ref().map(Source::len);
        if len != expected {
            let say = |len: Option<usize>| len.map_or("nothing".to_owned(), |len| format!("{len} numbers"));
            return Err(Error::usage(format!(
                "the {} of stage {} for micro-batch {} gave {}: {} are expected there",
                if channel == Channel::Forward { "forward" } else { "backward" },
                at.stage,
                at.micro,
                say(len),
                say(expected)
            )));
        }
        let Some((buffer, message)) = buffer.zip(message) else { return Ok(()) };
        let (rank, ranks, device) = (self.comm.rank(), self.schedule.ranks(), self.device);
        if ranks == 1 {
            self.early.insert(message, buffer);
            return Ok(());
        }
        let to = match channel {
            Channel::Forward => (rank + 1) % ranks,
            Channel::Backward => (rank + ranks - 1) % ranks,
        };
        for mut sending in std::mem::take(&mut self.sendings) {
            if device.is_sent(&mut sending) { device.finish(sending)? } else { self.sendings.push(sending) }
        }
        self.sendings.push(device.start_send(self.comm, buffer, to, channel)?);
        Ok(())
    }
}

/// The mean loss over all samples, on every rank: from the losses of the micro-batches on the last rank, each a mean over so many samples.
/// Collective; what other ranks give does not count.
///
/// # Errors
/// Errors of `comm`.
pub fn mean_loss(comm: &Comm, losses: &[(f64, usize)]) -> Result<f64> {
    let samples: usize = losses.iter().map(|(_, samples)| samples).sum();
    let sum: f64 = losses.iter().map(|(loss, samples)| loss * *samples as f64).sum();
    let mut mean = [sum / samples as f64];
    comm.broadcast_in_place(&mut mean, comm.world_size() - 1)?;
    Ok(mean[0])
}

/// Gradient of a weight that several stages share: the sum over `stages`, the ranks that have it, and then the mean over `data`, the
/// ranks that have the same stage. Collective on both.
///
/// # Errors
/// Errors of the communicators.
pub fn reduce_tied_gradient<D: Device, T: Number>(
    stages: &Comm,
    data: Option<&Comm>,
    gradient: &mut D::ViewMut<'_, T>,
) -> Result<()> {
    stages.all_reduce_in_place(gradient, ReduceOp::Sum)?;
    if let Some(data) = data {
        data.all_reduce_in_place(gradient, ReduceOp::Avg)?;
    }
    Ok(())
}
