//! Several requests at once.

use super::Request;
use crate::types::error::Result;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::thread::Thread;

/// Tests before a wait for several requests sleeps: short operations are over by then.
const POLLS: usize = 200;

/// Wakes a thread that sleeps until one of several requests is complete.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// # Sets of requests
///
/// Of one communicator or of several. `wait_any`, `wait_some` and `test_some` take a slice of `Option`s. They put `None` where a request is
/// complete, and answer its place in the slice with its result. The others keep their places.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::Request;
///
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let (rank, ranks) = (comm.rank(), comm.world_size());
///     let receive = |peer| (peer != rank).then(|| comm.start_recv(vec![0usize; 1], peer)).transpose();
///     let mut receives = (0..ranks).map(receive).collect::<phalanx::Result<Vec<_>>>()?;
///     let sends = (0..ranks).filter(|peer| *peer != rank).map(|peer| comm.start_send(vec![rank], peer));
///     let sends = sends.collect::<phalanx::Result<Vec<_>>>()?;
///     while let Some((peer, received)) = Request::wait_any(&mut receives) {
///         assert_eq!(received?, [peer]);
///     }
///     Request::wait_all(sends)?;
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl<B> Request<B> {
    /// Waits for all requests, even if some fail, and answers their buffers in order. `MPI_Waitall`.
    ///
    /// What is left of a slice of `Option`s: `Request::wait_all(requests.into_iter().flatten())`.
    ///
    /// # Errors
    /// The first error, in the order of the requests. The buffers of the others are dropped; `requests.into_iter().map(Request::wait)` has each
    /// result.
    #[doc(alias = "MPI_Waitall")]
    pub fn wait_all(requests: impl IntoIterator<Item = Request<B>>) -> Result<Vec<B>> {
        // Of all before the first error is looked for.
        let results: Vec<Result<B>> = requests.into_iter().map(Request::wait).collect();
        results.into_iter().collect()
    }

    /// Waits until one of the requests is complete, and takes it out; `None` if the slice has none. `MPI_Waitany`.
    ///
    /// Waits with the deadlines of the requests.
    #[doc(alias = "MPI_Waitany")]
    pub fn wait_any(requests: &mut [Option<Request<B>>]) -> Option<(usize, Result<B>)> {
        let place = Request::first_done(requests)?;
        requests[place].take().map(|request| (place, request.wait()))
    }

    /// Waits until at least one of the requests is complete, and takes out all that are, in their order; none if the slice has none.
    /// `MPI_Waitsome`.
    #[doc(alias = "MPI_Waitsome")]
    pub fn wait_some(requests: &mut [Option<Request<B>>]) -> Vec<(usize, Result<B>)> {
        Request::first_done(requests);
        Request::test_some(requests)
    }

    /// Takes out the requests that are complete, in their order, without waiting. `MPI_Testsome`.
    #[doc(alias = "MPI_Testsome")]
    pub fn test_some(requests: &mut [Option<Request<B>>]) -> Vec<(usize, Result<B>)> {
        let take_if_done = |(place, request): (usize, &mut Option<Request<B>>)| {
            request.take_if(Request::is_done).map(|request| (place, request.wait()))
        };
        requests.iter_mut().enumerate().filter_map(take_if_done).collect()
    }

    /// Whether [`wait_all`](Request::wait_all) would answer at once. `MPI_Testall`.
    ///
    /// What is left of a slice of `Option`s: `Request::test_all(requests.iter_mut().flatten())`.
    #[doc(alias = "MPI_Testall")]
    pub fn test_all<'r>(requests: impl IntoIterator<Item = &'r mut Request<B>>) -> bool
    where
        B: 'r,
    {
        requests.into_iter().all(Request::is_done)
    }

    /// Waits until a request is complete: its place. `None` if there is none.
    fn first_done(requests: &mut [Option<Request<B>>]) -> Option<usize> {
        let mut first = |is_done: &mut dyn FnMut(&mut Request<B>) -> bool| {
            requests.iter_mut().position(|request| request.as_mut().is_some_and(&mut *is_done))
        };
        first(&mut |_| true)?;
        for _ in 0..POLLS {
            if let Some(place) = first(&mut Request::is_done) {
                return Some(place);
            }
            std::thread::yield_now();
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            if let Some(place) = first(&mut |request| request.is_done_or_wakes(&waker)) {
                return Some(place);
            }
            std::thread::park();
        }
    }
}
