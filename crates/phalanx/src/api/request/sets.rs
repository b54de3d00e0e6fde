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
/// Of one communicator or of several. A result is at the place of its request, or comes with the place that the request had in the list.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::Request;
///
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let others = (0..3).filter(|peer| *peer != comm.rank());
///     let mut receives = others.map(|peer| comm.start_recv(vec![0u32; 1], peer)).collect::<phalanx::Result<Vec<_>>>()?;
///     for peer in (0..3).filter(|peer| *peer != comm.rank()) {
///         comm.send(&[comm.rank() as u32], peer)?;
///     }
///     while let Some((_, received)) = Request::wait_any(&mut receives) {
///         assert_ne!(received?[0] as usize, comm.rank());
///     }
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl<B> Request<B> {
    /// Waits for all requests, even if some fail. `MPI_Waitall`.
    pub fn wait_all(requests: impl IntoIterator<Item = Request<B>>) -> Vec<Result<B>> {
        requests.into_iter().map(Request::wait).collect()
    }

    /// Waits until one of the requests is complete, and takes it out of the list; `None` if the list is empty. `MPI_Waitany`.
    ///
    /// The last of the list takes its place. Waits with the deadlines of the requests.
    pub fn wait_any(requests: &mut Vec<Request<B>>) -> Option<(usize, Result<B>)> {
        let place = Request::first_done(requests)?;
        Some((place, requests.swap_remove(place).wait()))
    }

    /// Waits until at least one of the requests is complete, and takes out all that are, in their order. `MPI_Waitsome`.
    pub fn wait_some(requests: &mut Vec<Request<B>>) -> Vec<(usize, Result<B>)> {
        Request::first_done(requests);
        Request::test_some(requests)
    }

    /// Takes out the requests that are complete, in their order, without waiting. `MPI_Testsome`.
    pub fn test_some(requests: &mut Vec<Request<B>>) -> Vec<(usize, Result<B>)> {
        let mut places = 0..;
        let place_if_done = |request: &mut Request<B>| {
            let place = places.next();
            request.is_done().then_some(place).flatten()
        };
        let places: Vec<usize> = requests.iter_mut().filter_map(place_if_done).collect();
        let mut done: Vec<_> =
            places.iter().rev().map(|place| (*place, requests.remove(*place).wait())).collect();
        done.reverse();
        done
    }

    /// Whether [`wait_all`](Request::wait_all) would answer at once. `MPI_Testall`.
    pub fn test_all(requests: &mut [Request<B>]) -> bool {
        requests.iter_mut().all(Request::is_done)
    }

    /// Waits until a request is complete: its place. `None` if there is none.
    fn first_done(requests: &mut [Request<B>]) -> Option<usize> {
        if requests.is_empty() {
            return None;
        }
        for _ in 0..POLLS {
            if let Some(place) = requests.iter_mut().position(Request::is_done) {
                return Some(place);
            }
            std::thread::yield_now();
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            if let Some(place) = requests.iter_mut().position(|request| request.is_done_or_wakes(&waker)) {
                return Some(place);
            }
            std::thread::park();
        }
    }
}
