//! Groups that drop out of an average.

use phalanx::ReduceOp;
use phalanx_train::device::Host;
use phalanx_train::replicas::{ReplicaGroups, average};

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
