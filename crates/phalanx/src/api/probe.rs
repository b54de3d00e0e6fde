//! Messages of which the receiver does not know the sender, the tag or the length.

use super::comm::Comm;
use super::values::received;
use crate::buffer::Output;
use crate::contract::{Envelope, Wanted};
use crate::types::dtype::Plain;
use crate::types::error::Result;

/// # Messages from any rank, and of any length
///
/// On host memory and MPI; other backends answer [`Error::Unsupported`](crate::Error::Unsupported). Messages of one sender and tag are
/// received in the order in which they were sent. On the host, a message that is found so is copied once more than one whose receive
/// was posted before it came.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// // Workers send as many results as they have, whenever they have them.
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     if comm.rank() > 0 {
///         return comm.send(&vec![comm.rank() as u64; comm.rank()], 0);
///     }
///     for _ in 1..comm.world_size() {
///         let (results, envelope) = comm.recv_vec::<u64>(None, None)?;
///         assert_eq!(results, vec![envelope.source as u64; envelope.source]);
///     }
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl Comm {
    /// Waits for a message from `source` with `tag` (`None`: any), and says what has come, without receiving it. `MPI_Probe`.
    ///
    /// # Errors
    /// As for a receive: a timeout that names the ranks whose message has not come, or the rank that is gone. Where any rank may send,
    /// one that has left is no error, as long as another is there.
    #[doc(alias = "MPI_Probe")]
    pub fn probe(&self, source: impl Into<Option<usize>>, tag: impl Into<Option<u32>>) -> Result<Envelope> {
        let wanted = self.wanted(source.into(), tag.into())?;
        let _limited = self.limited();
        self.recorder.noted(self.backend.probe(wanted))
    }

    /// [`probe`](Comm::probe) without waiting: `None` if there is no such message yet. `MPI_Iprobe`.
    #[doc(alias = "MPI_Iprobe")]
    pub fn try_probe(
        &self,
        source: impl Into<Option<usize>>,
        tag: impl Into<Option<u32>>,
    ) -> Result<Option<Envelope>> {
        let wanted = self.wanted(source.into(), tag.into())?;
        self.recorder.noted(self.backend.try_probe(wanted))
    }

    /// Receives a message from whichever rank sends one with tag 0, and says from which it was. It must have the buffer's length.
    /// All ranks get their turn: if many have sent, it is another one's each time. `MPI_Recv` from `MPI_ANY_SOURCE`.
    #[doc(alias = "MPI_ANY_SOURCE")]
    pub fn recv_any<R: Output + ?Sized>(&self, buf: &mut R) -> Result<usize> {
        Ok(self.recv_any_tagged(buf, 0)?.source)
    }

    /// [`recv_any`](Comm::recv_any) with a tag, or any tag (`None`).
    pub fn recv_any_tagged<R: Output + ?Sized>(
        &self,
        buf: &mut R,
        tag: impl Into<Option<u32>>,
    ) -> Result<Envelope> {
        let envelope = self.probe(None, tag)?;
        self.recv_tagged(buf, envelope.source, envelope.tag)?;
        Ok(envelope)
    }

    /// Receives a message of any length, from `source` with `tag` (`None`: any).
    ///
    /// # Errors
    /// [`UsageError::Setting`](crate::UsageError::Setting) if its bytes are no whole number of elements; it is not received then.
    #[doc(alias = "MPI_Mprobe")]
    pub fn recv_vec<T: Plain>(
        &self,
        source: impl Into<Option<usize>>,
        tag: impl Into<Option<u32>>,
    ) -> Result<(Vec<T>, Envelope)> {
        let envelope = self.probe(source, tag)?;
        let len = envelope.count::<T>()?;
        let received = received(len, |place| self.recv_tagged(place, envelope.source, envelope.tag))?;
        Ok((received, envelope))
    }

    fn wanted(&self, source: Option<usize>, tag: Option<u32>) -> Result<Wanted> {
        source.map_or(Ok(()), |source| self.shape().check_rank("probe", "source", source))?;
        Ok(Wanted { source, tag })
    }
}
