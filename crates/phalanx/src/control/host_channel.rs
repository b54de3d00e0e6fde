//! The communicator in host memory that other backends use for set-up and control: small exchanges, split, grow.

use super::endpoint::Endpoint;
use crate::contract::{Backend, BackendKind, Blocks, Call, Operation};
use crate::types::dtype::DType;
use crate::types::error::Result;

/// A communicator of host memory, as other backends use it: to exchange a few words, to split, to grow.
///
/// The host backend implements it. Backends hold it as `dyn HostChannel`, so none depends on another.
pub(crate) trait HostChannel: Backend {
    /// The rank's end of the channel.
    fn endpoint(&self) -> &Endpoint;

    /// Gives up messages and collectives, and keeps the rank's end.
    fn into_endpoint(self: Box<Self>) -> Endpoint;

    /// A channel over another endpoint.
    fn over(&self, endpoint: Endpoint) -> Box<dyn HostChannel>;

    /// [`Backend::split`].
    ///
    /// # Safety
    /// As for [`Backend::split`].
    unsafe fn part(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn HostChannel>>>;

    /// [`Backend::grow`]: all ranks and the joiners meet in a region of their own. The joiners are told the backend.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    unsafe fn grown(&self, joiners: usize, backend: BackendKind) -> Result<(Box<dyn HostChannel>, u64)>;

    /// Whether its ranks are threads of this process.
    fn is_of_threads(&self) -> bool {
        self.endpoint().world.is_of_threads()
    }

    /// The world rank of the communicator's rank 0.
    fn first_member(&self) -> usize {
        self.endpoint().members()[0]
    }

    /// An all_gather of a few words, as a step of `split` or of another backend's set-up.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn tell_all(&self, own: &[u64], all: &mut [u64]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.tell_all_in(Call::empty(Operation::Split), own, all) }
    }

    /// [`tell_all`](Self::tell_all) as a step of this call.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn tell_all_in(&self, call: Call<'_>, own: &[u64], all: &mut [u64]) -> Result<()> {
        assert_eq!(all.len(), own.len() * self.world_size(), "a block for each rank");
        let call = Call {
            dtype: DType::U64,
            send: own.as_ptr().cast(),
            recv: all.as_mut_ptr().cast(),
            blocks: Blocks::Equal(own.len()),
            ..call
        };
        // SAFETY: the caller's contract; one block of words, and room for one from each rank.
        unsafe { self.collective(&call) }
    }

    /// Gives bytes and gets everybody's, in rank order, as a step of another backend's set-up.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn tell_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let ranks = self.world_size();
        let mut lens = vec![0u64; ranks];
        // SAFETY: the caller's contract.
        unsafe { self.tell_all(&[own.len() as u64], &mut lens) }?;
        let longest = lens.iter().map(|len| *len as usize).max().unwrap_or(0);
        let mut send = own.to_vec();
        send.resize(longest, 0);
        let mut all = vec![0u8; longest * ranks];
        let call = Call {
            send: send.as_ptr(),
            recv: all.as_mut_ptr(),
            blocks: Blocks::Equal(longest),
            ..Call::empty(Operation::Split)
        };
        // SAFETY: the caller's contract; one block of the longest, and room for one from each rank.
        unsafe { self.collective(&call) }?;
        let of_rank = |(rank, len): (usize, &u64)| all[rank * longest..][..*len as usize].to_vec();
        Ok(lens.iter().enumerate().map(of_rank).collect())
    }
}
