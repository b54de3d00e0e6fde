//! Ranks that are lost, groups that drop out. Lost processes are in `tests/processes`.

use phalanx::{Comm, ReduceOp};
use phalanx_train::device::Host;
use phalanx_train::elastic::{ReplicaGroups, Trainer, Training, average};
use phalanx_train::{Error, Result};
use std::num::NonZeroU64;

#[test]
fn one_of_four_that_has_no_gradient_drops_out_of_the_mean() {
    phalanx::run(4, |comm| {
        // NaN: what it has counts for nothing.
        let takes_part = comm.rank() != 2;
        let mut gradient = [if takes_part { 1.0f32 } else { f32::NAN }; 3];
        assert_eq!(average(&comm, &Host, &mut &mut gradient[..], takes_part).unwrap(), 3);
        assert_eq!(gradient, [1.0; 3]);
        assert_eq!(average(&comm, &Host, &mut &mut gradient[..], false).unwrap(), 0);
        assert_eq!(gradient, [0.0; 3]);
    })
    .unwrap();
}

#[test]
fn a_group_that_has_lost_a_rank_drops_out_as_a_whole() {
    phalanx::run(5, |comm| {
        // Groups 0 and 2 have both of their ranks, group 1 has one.
        let group = [0, 0, 1, 2, 2][comm.rank()];
        let groups = ReplicaGroups::new(&comm, group, 2).unwrap();
        assert_eq!(groups.is_some(), group != 1);
        if let Some(ReplicaGroups { within, across }) = groups {
            assert_eq!((within.world_size(), across.world_size()), (2, 2));
            let mut sum = [group];
            across.all_reduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [2]);
        }
    })
    .unwrap();
}

/// Adds (step + 1) × 78 in each step, however many ranks there are.
struct Adding {
    sum: u64,
    made: u64,
    /// The step in which this rank fails, before or after its operation.
    fails: Option<(u64, bool)>,
}

impl Training for Adding {
    fn step(&mut self, comm: &Comm, step: u64) -> Result<()> {
        let fail = |after| {
            if self.fails == Some((step, after)) { Err(Error::Usage("it fails".into())) } else { Ok(()) }
        };
        fail(false)?;
        let own = (1..=12).filter(|number| *number as usize % comm.world_size() == comm.rank());
        let mut sum = [own.sum::<u64>()];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
        fail(true)?;
        self.sum += (step + 1) * sum[0];
        self.made += 1;
        Ok(())
    }

    fn snapshot(&self) -> Result<Vec<u8>> {
        Ok(self.sum.to_le_bytes().to_vec())
    }

    fn restore(&mut self, snapshot: &[u8]) -> Result<()> {
        self.sum = u64::from_le_bytes(snapshot.try_into().unwrap());
        Ok(())
    }
}

#[test]
fn the_others_go_back_to_a_common_step_and_on_without_the_lost_one() {
    for (every, after) in [(1, false), (1, true), (4, false), (4, true)] {
        let results = phalanx::run(4, |comm| {
            let rank = comm.rank();
            let fails = [Some((6, after)), None, Some((9, after)), None][rank];
            let mut training = Adding { sum: 0, made: 0, fails };
            let mut trainer = Trainer::new(comm).snapshot_every(NonZeroU64::new(every).unwrap());
            let ended = trainer.run(&mut training, 20);
            assert_eq!(ended.is_err(), fails.is_some());
            if ended.is_ok() {
                assert_eq!(trainer.comm().world_size(), 2);
                // No more steps again than since the last snapshot, and one that another rank had not ended.
                assert!(training.made <= 20 + 2 * every, "{} steps", training.made);
                // And further, in a second run.
                trainer.run(&mut training, 22).unwrap();
                assert_eq!(training.sum, (1..=22).sum::<u64>() * 78);
            }
        });
        results.unwrap();
    }
}
