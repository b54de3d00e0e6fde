//! Put and signal: one-sided operations on a peer's memory.

use super::surface::Surface;
use crate::backend::nccl::memory::{Buffer, GpuSlice};
use crate::buffer::Source;
use crate::contract::Operation;
use crate::types::dtype::Element;
use crate::types::error::{Result, UsageError};
use phalanx_sys::nccl::{ncclDataType_t, ncclWaitSignalDesc_t, version_code};
use std::ops::Range;

/// The release from which on a communicator can have more than one signal and context.
const SEVERAL_SINCE: (u32, &str) = (version_code(2, 31, 0), "2.31");

/// A signal between this rank and a peer: a number that the one raises and the other waits for. A rank alone
/// is its first: `Signal::from(peer)`, or `peer` itself where a signal is asked for.
///
/// Signals that differ in peer, index or context are counted each for itself. What goes to one peer in one
/// context is carried out in the order of the calls, and a signal says that all before it has come, whatever
/// its index; contexts are not ordered among each other.
///
/// ```no_run
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::nccl::{Config, Signal};
/// use phalanx::{BackendKind, Comm};
/// let mut config = Config::default();
/// config.rma_signals = Some(2);
/// Comm::builder().backend(BackendKind::Nccl).nccl(config).try_run(2, |comm| -> phalanx::Result<()> {
///     let (nccl, peer) = (comm.nccl().expect("the backend was chosen"), 1 - comm.rank());
///     let (mine, theirs) = (nccl.alloc::<f32>(1024)?, nccl.alloc::<f32>(1024)?);
///     let has_read = Signal { index: 1, ..Signal::from(peer) };
///     nccl.put_signal(&mine, 0..1024, peer, &theirs, 0)?;
///     nccl.wait_signals(&[(peer, 1)])?; // and what reads `theirs`, on this stream
///     nccl.signal(has_read)?;
///     nccl.wait_signals(&[(has_read, 1)])?; // the peer's part may be written again
///     comm.sync()
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signal {
    /// The other rank: the one that is told, where it is raised, and the one that tells, where it is waited
    /// for.
    pub peer: usize,
    /// Which signal of the context (`sigIdx`): less than
    /// [`Config::rma_signals`](crate::nccl::Config::rma_signals), of which there is one by default.
    pub index: usize,
    /// Which context (`ctx`): less than [`Config::rma_contexts`](crate::nccl::Config::rma_contexts), of which
    /// there is one by default.
    pub context: usize,
}

impl From<usize> for Signal {
    /// The peer's first signal, of the first context.
    fn from(peer: usize) -> Signal {
        Signal { peer, index: 0, context: 0 }
    }
}

/// A signal that the communicator has, as the library numbers it.
struct Raw {
    peer: i32,
    index: i32,
    context: i32,
}

impl Surface<'_> {
    /// The numbers of a signal, if the communicator has it.
    fn raw_signal(&self, operation: &'static str, signal: Signal) -> Result<Raw> {
        self.comm.shape().check_rank(operation, "peer", signal.peer)?;
        let config = &self.comm.settings.config;
        let number = |part, value: usize, setting, configured: Option<i32>| {
            let library = self.comm.communicator.library;
            let has_several = library.version() >= SEVERAL_SINCE.0;
            let count = if has_several { configured.unwrap_or(1) } else { 1 };
            match i32::try_from(value) {
                Ok(value) if value < count => Ok(value),
                _ => Err(UsageError::Setting {
                    name: format!("{operation}: {part}"),
                    value: value.to_string(),
                    expected: if has_several {
                        format!(
                            "less than {count}, the communicator's nccl::Config::{setting}: set that to more when it is made"
                        )
                    } else {
                        format!(
                            "0, since {} {} has only one: load NCCL {} or newer",
                            library.name(),
                            self.version(),
                            SEVERAL_SINCE.1
                        )
                    },
                }),
            }
        };
        Ok(Raw {
            peer: signal.peer as i32,
            index: number("index", signal.index, "rma_signals", config.rma_signals)?,
            context: number("context", signal.context, "rma_contexts", config.rma_contexts)?,
        })
    }

    /// Writes a range of a buffer into a peer's part of a window, at an offset in elements, and then raises
    /// the [signal](Signal) (`ncclPutSignal`, 2.29.2). The peer sees the data after
    /// [`wait_signals`](Surface::wait_signals).
    ///
    /// Both buffers are symmetric windows of this communicator. A communicator's first one-sided operation is
    /// collective: the library connects the ranks in it. When the target may be written is between the ranks:
    /// a peer that reads its part before it has waited for the signal sees something of both. One that drops
    /// it does no harm after its own first one-sided operation: from then on windows stay, with their memory,
    /// until the communicator ends on their rank. What must not be is a target that its rank dropped before
    /// that, or whose communicator has ended there.
    ///
    /// # Errors
    /// Before anything is enqueued: a peer or a signal that is not there, a range that does not fit, a buffer
    /// that is no window of this communicator ([`Unsupported`](crate::Error::Unsupported)).
    #[doc(alias = "ncclPutSignal")]
    pub fn put_signal<T: Element, M: GpuSlice<T>>(
        &self,
        source: &Buffer<T, M>,
        range: Range<usize>,
        signal: impl Into<Signal>,
        target: &Buffer<T, M>,
        offset: usize,
    ) -> Result<()> {
        let communicator = &self.comm.communicator;
        let name = "ncclPutSignal";
        let put = communicator.library.need(communicator.library.ncclPutSignal, name)?;
        let signal = self.raw_signal("put_signal", signal.into())?;
        let count = range.end.saturating_sub(range.start);
        // Nothing may be anywhere, but an address behind the window would be refused.
        let start = if count == 0 { 0 } else { range.start };
        let fits = |buffer, actual, expected: Option<usize>, rule| match expected {
            Some(expected) if expected <= actual => Ok(()),
            _ => {
                let expected = expected.unwrap_or(usize::MAX);
                Err(UsageError::Length { operation: "put_signal", buffer, actual, expected, rule })
            }
        };
        fits("source", source.len(), Some(range.end), "the end of the range")?;
        fits("range", range.end, Some(range.start), "its start, behind which it ends")?;
        fits("target", target.len(), offset.checked_add(count), "the offset and the length of the range")?;
        source.window_of(communicator)?;
        let window = target.window_of(communicator)?;
        self.comm.refuse_driver("put_signal")?;
        self.prepare()?;
        communicator.admit(Operation::Send)?;
        // The target, too: it must not be given back before.
        let (loan, _kept) = (source.lend(self.stream)?, target.lend(self.stream)?);
        let source = loan.span().start.cast_const().wrapping_byte_add(start * size_of::<T>());
        let stream = self.stream.raw().0;
        let (bytes, offset) = (count * size_of::<T>(), offset * size_of::<T>());
        communicator.begin_one_sided();
        communicator.used(self.stream.raw());
        // SAFETY: the source is lent until the operation is enqueued, and the range is in it; the window
        // holds the target range on every rank.
        communicator.call(name, |comm| unsafe {
            put(
                source.cast(),
                bytes,
                ncclDataType_t::Uint8,
                signal.peer,
                window,
                offset,
                signal.index,
                signal.context,
                0,
                comm,
                stream,
            )
        })
    }

    /// Raises a [signal](Signal) without data (`ncclSignal`, 2.29.2).
    ///
    /// # Errors
    /// Before anything is enqueued: a peer or a signal that is not there.
    pub fn signal(&self, signal: impl Into<Signal>) -> Result<()> {
        let communicator = &self.comm.communicator;
        let raise = communicator.library.need(communicator.library.ncclSignal, "ncclSignal")?;
        let Raw { peer, index, context } = self.raw_signal("signal", signal.into())?;
        self.comm.refuse_driver("signal")?;
        self.prepare()?;
        communicator.admit(Operation::Send)?;
        communicator.begin_one_sided();
        communicator.used(self.stream.raw());
        let stream = self.stream.raw().0;
        // SAFETY: a usable communicator and a stream of its device.
        communicator.call("ncclSignal", |comm| unsafe { raise(peer, index, context, 0, comm, stream) })
    }

    /// The stream goes on when so many of each [signal](Signal) have come (`ncclWaitSignal`, 2.29.2): pairs
    /// of a signal, or a peer, and a number. To wait for none is no operation, which matters for the first.
    /// Where [`Comm::sync`](crate::Comm::sync) ends at its deadline, since signals do not come, the error
    /// names these peers.
    ///
    /// # Errors
    /// Before anything is enqueued: a peer or a signal that is not there, more than 2³¹ - 1 of one.
    #[doc(alias = "ncclWaitSignal")]
    pub fn wait_signals<S: Into<Signal> + Copy>(&self, signals: &[(S, u32)]) -> Result<()> {
        let communicator = &self.comm.communicator;
        let wait = communicator.library.need(communicator.library.ncclWaitSignal, "ncclWaitSignal")?;
        let mut descriptions = Vec::with_capacity(signals.len());
        for &(signal, count) in signals {
            let Raw { peer, index, context } = self.raw_signal("wait_signals", signal.into())?;
            let count = i32::try_from(count).map_err(|_| UsageError::Overflow {
                operation: "wait_signals",
                what: "the number of signals",
                value: count.to_string(),
                limit: i32::MAX.to_string(),
            })?;
            // The library refuses to wait for none.
            if count > 0 {
                descriptions.push(ncclWaitSignalDesc_t { opCnt: count, peer, sigIdx: index, ctx: context });
            }
        }
        self.comm.refuse_driver("wait_signals")?;
        self.prepare()?;
        if descriptions.is_empty() {
            return Ok(());
        }
        communicator.admit(Operation::WaitSignals)?;
        communicator.begin_one_sided();
        communicator.awaits(self.stream.raw(), descriptions.iter().map(|signals| signals.peer as usize));
        let (count, stream) = (descriptions.len() as i32, self.stream.raw().0);
        // SAFETY: a usable communicator; the descriptions are read during the call.
        communicator
            .call("ncclWaitSignal", |comm| unsafe { wait(count, descriptions.as_mut_ptr(), comm, stream) })
    }
}
