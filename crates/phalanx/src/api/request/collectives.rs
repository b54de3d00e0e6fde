//! The methods of [`Comm`] that start a collective.

use super::{Counts, MaybeDangling, Request, Work};
use crate::api::comm::Comm;
use crate::buffer::{Owned, Target};
use crate::contract::{Call, Operation};
use crate::types::error::Result;
use crate::types::op::Reduction;
use std::mem::ManuallyDrop;

/// # Requests
///
/// Operations that go on while the rank does something else. They take their buffers, and [`Request::wait`] gives them back.
/// Lists of counts are kept until the operation is over, since `MPI_Iallgatherv` and its like read them until then: a `Vec`
/// is moved, a slice or an array copied.
///
/// Started and plain collectives are one sequence: the order of the calls is what the ranks match, and it
/// does not matter which form a rank uses. (On MPI it matters for the first one that is started on a communicator: it is
/// started on all ranks.) Messages are matched in the order of posting.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// # use phalanx::ReduceOp;
/// phalanx::run(2, |comm| -> phalanx::Result<()> {
///     let gradients = vec![1.0f32; 1000];
///     let request = comm.start_all_reduce(gradients, ReduceOp::Sum)?;
///     // … compute something else meanwhile …
///     let gradients = request.wait()?;
///     assert!(gradients.iter().all(|g| *g == 2.0));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl Comm {
    fn request<B>(
        &self,
        buffers: MaybeDangling<B>,
        counts: Counts,
        call: Call<'static>,
    ) -> Result<Request<B>> {
        let (deadline, requests) = (self.deadline, self.requests.clone());
        // A panic on the way leaks them: the operation may have been started.
        let (buffers, counts) = (ManuallyDrop::new(buffers), ManuallyDrop::new(counts));
        match requests.start(call, &self.stream, deadline) {
            Ok(outcome) => {
                let work = Work::Collective(outcome);
                Ok(Request { buffers, counts, work, deadline, requests })
            }
            Err(error) => {
                drop((ManuallyDrop::into_inner(buffers), ManuallyDrop::into_inner(counts)));
                Err(error)
            }
        }
    }

    fn request_in_place<B: Owned>(&self, buf: B, call: Call<'static>) -> Result<Request<B>> {
        let mut buf = MaybeDangling::new(buf);
        let call = call.of_type(buf.get_mut().dtype())?;
        let call = call.inside(&buf.get_mut().lend_mut(&self.stream)?, &self.stream, self.rank());
        self.request(buf, Counts::default(), call)
    }

    fn request_out_of_place<S, R>(&self, send: S, recv: R, call: Call<'static>) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let mut buffers = MaybeDangling::new((send, recv));
        let (send, recv) = buffers.get_mut();
        let call = call.of_types(send.dtype(), recv.dtype())?;
        let call = call.between(&send.lend(&self.stream)?, &recv.lend_mut(&self.stream)?, &self.stream);
        self.request(buffers, Counts::default(), call)
    }

    /// Starts a v-variant: `check` gets the lengths of both buffers, and the counts.
    fn request_of_blocks<S, R>(
        &self,
        send: S,
        recv: R,
        counts: Counts,
        check: impl for<'a> FnOnce([usize; 2], &'a Counts) -> Result<Call<'a>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let mut buffers = MaybeDangling::new((send, recv));
        let (send, recv) = buffers.get_mut();
        let call = check([send.len(), recv.len()], &counts)?;
        let call = call.of_types(send.dtype(), recv.dtype())?;
        let call = call.between(&send.lend(&self.stream)?, &recv.lend_mut(&self.stream)?, &self.stream);
        // SAFETY: the request owns the counts as it does the buffers: until the operation is over, and for ever if it is forgotten.
        // They are on the heap, and stay at their address when it is moved.
        let call = unsafe { std::mem::transmute::<Call<'_>, Call<'static>>(call) };
        self.request(buffers, counts, call)
    }

    /// Starts an [`all_reduce_in_place`](Comm::all_reduce_in_place).
    pub fn start_all_reduce<B: Owned>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Elem>>,
    ) -> Result<Request<B>> {
        let call = self.shape().whole(Operation::AllReduce, buf.len()).reducing(op);
        self.request_in_place(buf, call)
    }

    /// Starts a [`broadcast_in_place`](Comm::broadcast_in_place).
    pub fn start_broadcast<B: Owned>(&self, buf: B, root: usize) -> Result<Request<B>> {
        let call = self.shape().whole_in_place(Operation::Broadcast, buf.len(), root)?;
        self.request_in_place(buf, call)
    }

    /// Starts a [`reduce_in_place`](Comm::reduce_in_place).
    pub fn start_reduce<B: Owned>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Elem>>,
        root: usize,
    ) -> Result<Request<B>> {
        let call = self.shape().whole_in_place(Operation::Reduce, buf.len(), root)?;
        self.request_in_place(buf, call.reducing(op))
    }

    /// Starts a [`scan_in_place`](Comm::scan_in_place). `MPI_Iscan`.
    pub fn start_scan<B: Owned>(&self, buf: B, op: impl Into<Reduction<B::Elem>>) -> Result<Request<B>> {
        let call = self.shape().whole(Operation::Scan, buf.len()).reducing(op);
        self.request_in_place(buf, call)
    }

    /// Starts an [`exclusive_scan_in_place`](Comm::exclusive_scan_in_place). `MPI_Iexscan`.
    pub fn start_exclusive_scan<B: Owned>(
        &self,
        buf: B,
        op: impl Into<Reduction<B::Elem>>,
    ) -> Result<Request<B>> {
        let call = self.shape().whole(Operation::ExclusiveScan, buf.len()).reducing(op);
        self.request_in_place(buf, call)
    }

    /// Starts an [`all_gather`](Comm::all_gather).
    pub fn start_all_gather<S, R>(&self, send: S, recv: R) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().all_gather(send.len(), recv.len())?;
        self.request_out_of_place(send, recv, call)
    }

    /// Starts an [`all_gather_v`](Comm::all_gather_v).
    pub fn start_all_gather_v<S, R>(
        &self,
        send: S,
        recv: R,
        counts: impl Into<Vec<usize>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [counts.into(), Vec::new()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [counts, _]| {
            shape.all_gather_v(send, recv, counts)
        })
    }

    /// Starts a [`reduce_scatter`](Comm::reduce_scatter).
    pub fn start_reduce_scatter<S, R>(
        &self,
        send: S,
        recv: R,
        op: impl Into<Reduction<S::Elem>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().reduce_scatter(send.len(), recv.len())?;
        self.request_out_of_place(send, recv, call.reducing(op))
    }

    /// Starts a [`reduce_scatter_v`](Comm::reduce_scatter_v).
    pub fn start_reduce_scatter_v<S, R>(
        &self,
        send: S,
        recv: R,
        counts: impl Into<Vec<usize>>,
        op: impl Into<Reduction<S::Elem>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [counts.into(), Vec::new()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [counts, _]| {
            Ok(shape.reduce_scatter_v(send, recv, counts)?.reducing(op))
        })
    }

    /// Starts an [`all_to_all`](Comm::all_to_all).
    pub fn start_all_to_all<S, R>(&self, send: S, recv: R) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().all_to_all(send.len(), recv.len())?;
        self.request_out_of_place(send, recv, call)
    }

    /// Starts an [`all_to_all_v`](Comm::all_to_all_v).
    pub fn start_all_to_all_v<S, R>(
        &self,
        send: S,
        send_counts: impl Into<Vec<usize>>,
        recv: R,
        recv_counts: impl Into<Vec<usize>>,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [send_counts.into(), recv_counts.into()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [sent, received]| {
            shape.all_to_all_v(send, sent, recv, received)
        })
    }

    /// Starts a [`gather`](Comm::gather).
    pub fn start_gather<S, R>(&self, send: S, recv: R, root: usize) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().gather(send.len(), recv.len(), root)?;
        self.request_out_of_place(send, recv, call)
    }

    /// Starts a [`gather_v`](Comm::gather_v).
    pub fn start_gather_v<S, R>(
        &self,
        send: S,
        recv: R,
        counts: impl Into<Vec<usize>>,
        root: usize,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [counts.into(), Vec::new()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [counts, _]| {
            shape.gather_v(send, recv, counts, root)
        })
    }

    /// Starts a [`scatter`](Comm::scatter).
    pub fn start_scatter<S, R>(&self, send: S, recv: R, root: usize) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let call = self.shape().scatter(send.len(), recv.len(), root)?;
        self.request_out_of_place(send, recv, call)
    }

    /// Starts a [`scatter_v`](Comm::scatter_v).
    pub fn start_scatter_v<S, R>(
        &self,
        send: S,
        counts: impl Into<Vec<usize>>,
        recv: R,
        root: usize,
    ) -> Result<Request<(S, R)>>
    where
        S: Owned,
        R: Owned + Target<Elem = S::Elem>,
    {
        let (shape, counts) = (self.shape(), [counts.into(), Vec::new()]);
        self.request_of_blocks(send, recv, counts, |[send, recv], [counts, _]| {
            shape.scatter_v(send, recv, counts, root)
        })
    }

    /// Starts a [`barrier`](Comm::barrier): its [`wait`](Request::wait) returns when every rank has started or called a barrier.
    pub fn start_barrier(&self) -> Result<Request<()>> {
        self.request(MaybeDangling::new(()), Counts::default(), Call::empty(Operation::Barrier))
    }
}
