//! [`try_run`]: ranks as threads that may fail, and the error of the one that failed first.

use super::builder::Builder;
use super::comm::Comm;
use crate::types::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Runs `f` once for each of `ranks` ranks, as [`run`](crate::run), and answers what the ranks succeeded with, in rank order.
///
/// ```
/// use phalanx::ReduceOp;
///
/// fn main() -> phalanx::Result<()> {
///     let sums = phalanx::try_run(4, |comm| comm.all_reduce_value(comm.rank() as u64, ReduceOp::Sum))?;
///     assert_eq!(sums, [6, 6, 6, 6]);
///     Ok(())
/// }
/// ```
///
/// # Errors
/// The error of the rank that failed first in time. The others' errors are dropped: usually they only say that this rank has left. So a rank
/// whose communicator failed because of another rank counts after the others, even if it returns earlier. [`run`](crate::run) answers the
/// results of all ranks. What it refuses itself becomes an `E`, too.
///
/// If a rank panics, the panic continues here when all ranks have ended, whatever errors there are.
pub fn try_run<R, E>(
    ranks: usize,
    f: impl Fn(Comm) -> std::result::Result<R, E> + Sync,
) -> std::result::Result<Vec<R>, E>
where
    R: Send,
    E: From<Error> + Send,
{
    Comm::builder().try_run(ranks, f)
}

impl Builder {
    /// Runs ranks as threads that may fail: [`phalanx::try_run`](crate::try_run) with these settings.
    pub fn try_run<R, E>(
        self,
        ranks: usize,
        f: impl Fn(Comm) -> std::result::Result<R, E> + Sync,
    ) -> std::result::Result<Vec<R>, E>
    where
        R: Send,
        E: From<Error> + Send,
    {
        let returned = AtomicUsize::new(0);
        let results = self.run(ranks, |mut comm| {
            let lost_peer = Arc::new(AtomicBool::new(false));
            comm.lost_peer = Some(lost_peer.clone());
            f(comm).map_err(|error| {
                // A rank lets go of its communicators before it returns, so its peers may return earlier.
                let is_consequence = lost_peer.load(Ordering::Relaxed);
                (is_consequence, returned.fetch_add(1, Ordering::Relaxed), error)
            })
        })?;
        let (mut values, mut failures) = (Vec::with_capacity(ranks), Vec::new());
        for result in results {
            match result {
                Ok(value) => values.push(value),
                Err(failure) => failures.push(failure),
            }
        }
        match failures.into_iter().min_by_key(|(is_consequence, place, _)| (*is_consequence, *place)) {
            None => Ok(values),
            Some((_, _, error)) => Err(error),
        }
    }
}

impl Comm {
    /// In [`try_run`]: notes if this communicator has failed because of another rank.
    pub(super) fn note_lost_peer(&self) {
        let Some(lost_peer) = &self.lost_peer else { return };
        let blamed = match self.backend.check() {
            Err(Error::Peer(error)) => error.rank,
            Err(Error::Aborted { rank }) => rank,
            _ => return,
        };
        if blamed != self.rank() {
            lost_peer.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BackendKind, PeerEvent, ReduceOp, UsageError};
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    fn on_the_host() -> Builder {
        Comm::builder().backend(BackendKind::Host)
    }

    /// An error of the program's own, or one of phalanx.
    #[derive(Debug)]
    enum Failure {
        Own(usize),
        Phalanx(Error),
    }

    impl From<Error> for Failure {
        fn from(error: Error) -> Failure {
            Failure::Phalanx(error)
        }
    }

    #[test]
    fn the_results_are_in_rank_order() {
        let sums = on_the_host().try_run(3, |comm| {
            let sum = comm.all_reduce_value(comm.rank() as u64, ReduceOp::Sum)?;
            Ok::<_, Failure>((comm.rank(), sum))
        });
        assert_eq!(sums.unwrap(), [(0, 3), (1, 3), (2, 3)]);
    }

    /// The last rank fails, and returns when the others have: they fail as soon as it lets go of its communicators.
    fn fails_first(let_go: impl Fn(Comm, Comm) + Sync, barrier: fn(&Comm, &Comm) -> crate::Result<()>) {
        let (returned, returns) = channel();
        let (returned, returns) = (Mutex::new(returned), Mutex::new(returns));
        let ran = on_the_host().try_run(3, |comm| {
            let part = comm.duplicate()?;
            if comm.rank() < 2 {
                let result = barrier(&comm, &part);
                drop((part, comm));
                returned.lock().unwrap().send(()).unwrap();
                return Ok(result?);
            }
            let_go(comm, part);
            for _ in 0..2 {
                returns.lock().unwrap().recv().unwrap();
            }
            Err(Failure::Own(2))
        });
        assert!(matches!(ran, Err(Failure::Own(2))), "{ran:?}");
    }

    #[test]
    fn the_error_is_that_of_the_rank_that_failed_first() {
        fails_first(|comm, _part| drop(comm), |comm, _| comm.barrier());
        fails_first(|comm, _part| comm.abort(), |comm, _| comm.barrier());
        fails_first(|comm, _part| drop(comm.share()), |comm, _| comm.barrier());
        fails_first(|_comm, part| drop(part), |_, part| part.barrier());
        fails_first(|_comm, part| part.abort(), |_, part| part.barrier());
    }

    #[test]
    fn a_rank_that_succeeds_and_leaves_too_early_is_no_failure_of_its_own() {
        let ran = on_the_host().try_run(2, |comm| if comm.rank() == 0 { Ok(()) } else { comm.barrier() });
        let Err(Error::Peer(error)) = ran else { panic!("{ran:?}") };
        assert_eq!((error.rank, error.event), (0, PeerEvent::Left));
    }

    #[test]
    fn what_run_refuses_is_an_error_of_the_programs_type() {
        let ran = on_the_host().try_run(0, |_| Ok::<_, Failure>(()));
        let Err(Failure::Phalanx(Error::Usage(error))) = ran else { panic!("{ran:?}") };
        assert!(matches!(*error, UsageError::WorldSize { .. }), "{error}");
    }

    #[test]
    fn a_panic_counts_more_than_an_error() {
        let ran = std::panic::catch_unwind(|| {
            on_the_host().try_run(2, |comm| match comm.rank() {
                0 => panic!("a rank was told to panic"),
                _ => comm.barrier(),
            })
        });
        let panic = ran.expect_err("the panic goes on");
        assert_eq!(panic.downcast_ref(), Some(&"a rank was told to panic"));
    }
}
