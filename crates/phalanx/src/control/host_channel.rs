//! Host channel: the communicator of host memory that other backends use for set-up and control.

use super::endpoint::Endpoint;
use crate::contract::{Backend, BackendKind, Blocks, Call, Direction, Operation, RankGrid};
use crate::os::random_number;
use crate::types::dtype::DType;
use crate::types::error::Result;

/// A communicator of host memory, as other backends use it: to gather a few words, to split, to grow.
///
/// The host backend implements it, and UCX's to split in the same way; UCX's holds one of the ranks of its host. Backends hold it as `dyn HostChannel`, so that no backend depends on another.
pub(crate) trait HostChannel: Backend {
    /// This rank's end of the channel.
    fn endpoint(&self) -> &Endpoint;

    /// Keeps this rank's end of the channel, without messages and collectives.
    fn into_endpoint(self: Box<Self>) -> Endpoint;

    /// A host channel over another endpoint.
    fn over(&self, endpoint: Endpoint) -> Result<Box<dyn HostChannel>>;

    /// Makes `history` the fingerprint of all collectives so far. The next one is a step of an operation of more ranks, which has it.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn set_history(&self, history: u64);

    /// [`Backend::split`] that returns host channels.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    unsafe fn split_channel(&self, color: Option<u32>, key: i64) -> Result<Option<Box<dyn HostChannel>>>;

    /// [`Backend::split_grid`] that returns host channels.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    unsafe fn split_channel_grid(&self, grid: &RankGrid<'_>) -> Result<Vec<Box<dyn HostChannel>>>;

    /// [`Backend::grow`]: all ranks and the joiners join in a new region. The joiners learn the backend.
    ///
    /// # Safety
    /// As for [`Backend::split`].
    unsafe fn grow_channel(
        &self,
        joiners: usize,
        backend: BackendKind,
    ) -> Result<(Box<dyn HostChannel>, u64)>;

    /// A message of two words to or from another rank, apart from the user's: a step of a split by the members alone.
    ///
    /// # Safety
    /// The direction has room for two words, until this returns.
    unsafe fn exchange_words(&self, direction: Direction, rank: usize) -> Result<()>;

    /// Whether its ranks are threads of this process.
    fn is_of_threads(&self) -> bool {
        self.endpoint().world.is_of_threads()
    }

    /// Whether the job has one host, whose memory its ranks share.
    fn shares_memory(&self) -> bool {
        self.endpoint().world.topology().is_none()
    }

    /// The world rank of the communicator's rank 0.
    fn first_member(&self) -> usize {
        self.endpoint().members()[0]
    }

    /// An all_gather of a few words from each rank, as a step of `split` or of another backend's set-up.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn all_gather_words(&self, own: &[u64], all: &mut [u64]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.all_gather_words_in(Call::empty(Operation::Split), own, all) }
    }

    /// The number of a growth by so many joiners, on which the ranks agree: random, so that nobody meets those of an earlier attempt.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn number_growth(&self, joiners: usize) -> Result<u64> {
        let own = [random_number("each meeting needs a number of its own")?];
        let mut all = vec![0u64; self.world_size()];
        let call = Call { root: joiners, ..Call::empty(Operation::Grow) };
        // SAFETY: the caller's contract.
        unsafe { self.all_gather_words_in(call, &own, &mut all) }?;
        Ok(all[0])
    }

    /// [`all_gather_words`](Self::all_gather_words) as a step of `call`, which errors name.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn all_gather_words_in(&self, call: Call<'_>, own: &[u64], all: &mut [u64]) -> Result<()> {
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

    /// An all_gather of bytes, as many as each rank likes, in rank order. A step of another backend's set-up.
    ///
    /// # Safety
    /// As for [`Backend::collective`].
    unsafe fn all_gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let ranks = self.world_size();
        let mut lens = vec![0u64; ranks];
        // SAFETY: the caller's contract.
        unsafe { self.all_gather_words(&[own.len() as u64], &mut lens) }?;
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
