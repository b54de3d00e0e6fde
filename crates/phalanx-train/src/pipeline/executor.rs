//! Carrying out a schedule.

use super::schedule::{Action, Kind, Schedule};
use crate::device::{Device, Host, Number};
use crate::{Error, Result};
use phalanx::{Comm, ReduceOp, Request, Source};

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

/// Messages between stages, on a device.
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
        tag: u32,
    ) -> Result<Self::Sending<T>>;

    /// Whether a message is no longer under way.
    fn is_sent<T: Number>(&self, sending: &mut Self::Sending<T>) -> bool;

    /// Waits until a message is no longer under way.
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
        tag: u32,
    ) -> Result<Request<Vec<T>>> {
        Ok(comm.start_send_tagged(buffer, to, tag)?)
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
    /// [`Error::Usage`] if the schedule is for another number of ranks, or too long for tags of 32 bits.
    pub fn new(comm: &Comm, schedule: Schedule) -> Result<Pipeline> {
        if schedule.ranks() != comm.world_size() {
            return Err(Error::usage(format!(
                "a schedule for {} ranks with a communicator of {}: make it for its world_size()",
                schedule.ranks(),
                comm.world_size()
            )));
        }
        let messages = schedule.micro_batches().checked_mul(2 * schedule.stages());
        if messages.is_none_or(|messages| u32::try_from(messages).is_err()) {
            return Err(Error::usage(format!(
                "{} micro-batches through {} stages: 2³² messages at most",
                schedule.micro_batches(),
                schedule.stages()
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
        let mut run = Run { schedule: &self.schedule, comm, device, sendings: Vec::new(), input_len };
        for action in self.schedule.actions(comm.rank()) {
            run.carry_out(*action, stage)?;
        }
        for sending in run.sendings {
            device.finish(sending)?;
        }
        Ok(())
    }
}

/// A schedule that is being carried out.
struct Run<'a, D: Messages, T: Number, L> {
    schedule: &'a Schedule,
    comm: &'a Comm,
    device: &'a D,
    sendings: Vec<D::Sending<T>>,
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
        match action.kind {
            Kind::Forward => {
                let input =
                    if at.is_first { None } else { Some(self.receive(action.micro, number, false)?) };
                let output = stage.forward(at, input)?;
                self.send_on(at, output, !at.is_last, number + 1, false)
            }
            Kind::Backward | Kind::BackwardInput => {
                let gradient =
                    if at.is_last { None } else { Some(self.receive(action.micro, number + 1, true)?) };
                let gradient = stage.backward(at, gradient)?;
                self.send_on(at, gradient, !at.is_first, number, true)
            }
            Kind::BackwardWeights => stage.backward_weights(at),
        }
    }

    /// Messages about the boundary before a stage: its input goes forwards, the gradient of it backwards.
    fn tag(&self, micro: usize, boundary: usize, backwards: bool) -> u32 {
        ((micro * self.schedule.stages() + boundary) * 2 + usize::from(backwards)) as u32
    }

    fn receive(&mut self, micro: usize, boundary: usize, backwards: bool) -> Result<D::Buffer<T>> {
        let from = if backwards { boundary } else { boundary - 1 } % self.schedule.ranks();
        let mut buffer = self.device.zeros((self.input_len)(micro, boundary))?;
        self.comm.recv_tagged(&mut buffer, from, self.tag(micro, boundary, backwards))?;
        Ok(buffer)
    }

    fn send_on(
        &mut self,
        at: Position,
        buffer: Option<D::Buffer<T>>,
        is_expected: bool,
        boundary: usize,
        backwards: bool,
    ) -> Result<()> {
        let what = if backwards { "the backward" } else { "the forward" };
        let expected = is_expected.then(|| (self.input_len)(at.micro, boundary));
        let len = buffer.as_ref().map(Source::len);
        if len != expected {
            let say = |len: Option<usize>| len.map_or("nothing".to_owned(), |len| format!("{len} numbers"));
            return Err(Error::usage(format!(
                "{what} of stage {} for micro-batch {} gave {}: {} are expected there",
                at.stage,
                at.micro,
                say(len),
                say(expected)
            )));
        }
        let Some(buffer) = buffer else { return Ok(()) };
        let to = if backwards { boundary - 1 } else { boundary } % self.schedule.ranks();
        let tag = self.tag(at.micro, boundary, backwards);
        let device = self.device;
        for mut sending in std::mem::take(&mut self.sendings) {
            if device.is_sent(&mut sending) { device.finish(sending)? } else { self.sendings.push(sending) }
        }
        self.sendings.push(device.start_send(self.comm, buffer, to, tag)?);
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
