use super::*;
use crate::types::error::{Error, PeerEvent};
use crate::types::op::ReduceOp;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs ranks as threads.
fn ranks<R: Send>(count: usize, rank: impl Fn(SharedComm) -> Result<R> + Sync) -> Vec<Result<R>> {
    let ended = Comm::builder().backend(BackendKind::Host).timeout(Duration::from_secs(20));
    let ended = ended.run(count, |comm| rank(comm.share())).expect("ranks start");
    ended.into_iter().collect()
}

fn is_ended(outcome: &Result<()>) -> bool {
    matches!(outcome, Err(Error::Usage(error)) if matches!(**error, UsageError::Ended))
}

#[test]
fn it_is_for_several_threads() {
    fn several<T: Clone + Send + Sync + 'static>() {}
    several::<SharedComm>();
    let sums = ranks(3, |ranks| {
        let one = |_| {
            let ranks = ranks.clone();
            move || {
                (0..200).try_for_each(|_| {
                    let mut sum = [1u64];
                    ranks.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
                    assert_eq!(sum, [3]);
                    Ok(())
                })
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|number| scope.spawn(one(number))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
        })
    });
    sums.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn a_kept_view_has_its_own_deadline() {
    let outcomes = ranks(2, |ranks| {
        let hasty = ranks.within(Duration::from_millis(50))?;
        assert_eq!(hasty.with(|comm| Ok(comm.timeout()))?, Duration::from_millis(50));
        assert_eq!(ranks.with(|comm| Ok(comm.timeout()))?, Duration::from_secs(20));
        ranks.barrier()?;
        if ranks.rank() == 0 {
            hasty.recv(&mut [0u8], 1)
        } else {
            std::thread::sleep(Duration::from_millis(400));
            Ok(())
        }
    });
    assert!(matches!(outcomes[0], Err(Error::Timeout(_))), "{outcomes:?}");
}

#[test]
fn finalize_through_one_handle_ends_all() {
    let outcomes = ranks(2, |ranks| {
        let other = ranks.clone();
        let view = ranks.within(Duration::from_secs(9))?;
        ranks.with(|_| {
            // Inside it cannot end, and nothing waits for ever.
            assert!(is_ended(&other.finalize()));
            assert!(other.abort().is_err());
            other.barrier()
        })?;
        other.finalize()?;
        for ended in [ranks.finalize(), view.barrier(), ranks.abort(), ranks.within(Duration::ZERO).map(drop)]
        {
            assert!(is_ended(&ended), "{ended:?}");
        }
        Ok(())
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn the_last_handle_leaves() {
    let outcomes = ranks(2, |ranks| {
        let other = ranks.clone();
        drop(ranks);
        if other.rank() == 1 {
            return Ok(());
        }
        other.barrier()
    });
    let Err(Error::Peer(peer)) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert_eq!((peer.rank, &peer.event), (1, &PeerEvent::Left));
}

#[test]
fn a_panic_inside_leaves_the_others_with_a_working_lock() {
    let outcomes = ranks(2, |ranks| {
        let panicked =
            catch_unwind(AssertUnwindSafe(|| ranks.with(|_| -> Result<()> { panic!("on purpose") })));
        assert!(panicked.is_err());
        ranks.barrier()
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}

#[test]
fn buffers_of_two_types_are_refused() {
    use crate::types::dtype::DType;
    use crate::{AnySource, AnyTarget};
    let outcomes = ranks(2, |ranks| {
        let (send, mut recv) = ([1.0f32; 2], [0u32; 2]);
        let refused = |outcome: Result<()>| {
            let Err(Error::Usage(refusal)) = outcome else { panic!("{outcome:?}") };
            let UsageError::Types { send, recv, .. } = *refusal else { panic!("{refusal:?}") };
            assert_eq!((send, recv), (DType::F32, DType::U32));
        };
        let send = AnySource::from(&send[..]);
        refused(ranks.all_reduce(&send, &mut AnyTarget::from(&mut recv[..]), ReduceOp::Sum));
        refused(ranks.send_recv(&send, 0, &mut AnyTarget::from(&mut recv[..]), 1));
        let mut target = AnyTarget::from(&mut recv[..]);
        refused(ranks.with(|comm| comm.group(|group| group.all_to_all(&send, &mut target))));
        let misplaced = AnySource::from_bytes(&[0; 6], DType::F32).map(drop);
        assert!(misplaced.unwrap_err().to_string().contains("multiple of 4"));
        // Nothing was enqueued.
        ranks.barrier()
    });
    outcomes.into_iter().for_each(|outcome| outcome.unwrap());
}
