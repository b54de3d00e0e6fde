//! What an attempt at a call takes: buffers in some memory, and a partner for messages.

use crate::cuda::{self, Buffer};
use phalanx::{ArrayPart, Comm, Grid, Neighbors};
use phalanx_testkit::program::Place;
use std::path::Path;

/// What a rank tries a call with.
pub struct Attempt<'a> {
    pub comm: &'a Comm,
    pub gpu: Option<&'a cuda::Gpu>,
    pub folder: &'a Path,
}

impl Attempt<'_> {
    pub fn buffer(&self, len: usize) -> Buffer<u32> {
        let content = vec![1; len];
        match self.gpu {
            None => Buffer::Host(content),
            Some(gpu) => gpu.put(self.comm, &content).expect("room in a GPU"),
        }
    }

    pub fn one(&self) -> Buffer<u32> {
        self.buffer(1)
    }

    pub fn all(&self) -> Buffer<u32> {
        self.buffer(self.comm.world_size())
    }

    pub fn ones<T: From<bool> + Clone>(&self) -> Vec<T> {
        vec![T::from(true); self.comm.world_size()]
    }

    /// Blocks of different lengths: one element more for each rank.
    pub fn counts(&self) -> Vec<usize> {
        (1..=self.comm.world_size()).collect()
    }

    pub fn block(&self) -> Buffer<u32> {
        self.buffer(self.comm.rank() + 1)
    }

    pub fn blocks(&self) -> Buffer<u32> {
        self.buffer(self.counts().iter().sum())
    }

    pub fn peer(&self) -> usize {
        (self.comm.rank() + 1) % self.comm.world_size()
    }

    pub fn ring(&self) -> Neighbors {
        Neighbors::new([self.peer()], [self.peer()])
    }

    pub fn grid(&self) -> phalanx::Result<Grid> {
        Grid::new(&[self.comm.world_size()], &[true])
    }

    pub fn part(&self) -> ArrayPart {
        ArrayPart::block(self.comm.world_size(), self.comm.rank(), self.comm.world_size())
    }

    /// Whether the second message arrives at the first receive if that has its tag.
    pub fn matches_by_tag(&self) -> phalanx::Result<bool> {
        let [first, second] = [7, 6].map(|tag| self.comm.start_recv_tagged(vec![0u32], self.peer(), tag));
        let sent = [6u32, 7].map(|tag| self.comm.start_send_tagged(vec![tag], self.peer(), tag));
        let received = [first?.wait()?, second?.wait()?];
        for request in sent {
            request?.wait()?;
        }
        Ok(received == [[7], [6]])
    }

    /// A message to the peer, which is received from one that did not send it, too.
    pub fn sends(
        &self,
        tag: u32,
        send: impl FnOnce(&Buffer<u32>, usize) -> phalanx::Result<()>,
    ) -> phalanx::Result<()> {
        let recv = self.comm.start_recv_tagged(vec![0u32], self.peer(), tag)?;
        let sent = send(&self.one(), self.peer());
        if sent.is_err() {
            self.comm.start_send_tagged(vec![1u32], self.peer(), tag)?.wait()?;
        }
        recv.wait()?;
        sent
    }

    /// A message from the peer, which is sent, and received in any case.
    pub fn receives(
        &self,
        tag: u32,
        recv: impl FnOnce(&mut Buffer<u32>, usize) -> phalanx::Result<()>,
    ) -> phalanx::Result<()> {
        let send = self.comm.start_send_tagged(vec![1u32], self.peer(), tag)?;
        let received = recv(&mut self.one(), self.peer());
        if received.is_err() {
            self.comm.recv_tagged(&mut [0u32], self.peer(), tag)?;
        }
        send.wait()?;
        received
    }
}
