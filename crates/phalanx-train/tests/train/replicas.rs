//! Groups that drop out of an average.

use phalanx::ReduceOp;
use phalanx_train::device::Host;
use phalanx_train::replicas::{ReplicaGroups, average, average_over};

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

#[test]
fn a_rank_that_has_finished_counts_by_the_initial_world_but_not_among_participants() {
    let ends = phalanx::run(4, |comm| {
        let has_finished = comm.rank() == 1;
        let mut parameters = [10.0f64, 20.0];
        let mut means = Vec::new();
        for by_initial_world in [false, true] {
            let mut gradient = [1.0f64; 2];
            let mut view = &mut gradient[..];
            let participants = if by_initial_world {
                average_over(&comm, &Host, &mut view, !has_finished, 4)
            } else {
                average(&comm, &Host, &mut view, !has_finished)
            };
            assert_eq!(participants.unwrap(), 3);
            parameters.iter_mut().zip(gradient).for_each(|(number, gradient)| *number -= gradient);
            means.push(gradient[0]);
        }
        (means, parameters)
    })
    .unwrap();
    assert!(ends.iter().all(|end| *end == (vec![1.0, 0.75], [8.25, 18.25])), "{ends:?}");
}

#[test]
fn a_mean_over_no_ranks_is_refused() {
    phalanx::run(2, |comm| {
        let error = average_over(&comm, &Host, &mut &mut [1.0f32][..], true, 0).unwrap_err().to_string();
        assert!(error.contains("over 0 ranks"), "{error}");
    })
    .unwrap();
}

#[test]
fn a_group_that_comes_back_gets_its_state_from_the_others() {
    phalanx::run(6, |comm| {
        // Three groups of two. Group 1 has lost its first rank: its other rank is rank 1 here, and the new one comes last.
        let had = [Some(0), Some(1), Some(0), Some(2), Some(2), None][comm.rank()];
        let (group, groups) = ReplicaGroups::refill(&comm, had, 3, 2).unwrap();
        assert_eq!(group, had.unwrap_or(1));
        // Each rank of a group has a part of the model; the parts are of different lengths. Group 2 has missed a step.
        let steps = [8, 8, 8, 7, 7, 0][comm.rank()];
        let place = groups.within.rank();
        let part = |steps: u8, place: usize| vec![steps * 10 + place as u8; 100 + place];
        let mut state = if had.is_some() { part(steps, place) } else { Vec::new() };
        if had == Some(1) {
            state = part(8, 1); // It had the second place.
        }
        assert_eq!(groups.catch_up(u64::from(steps), &mut state).unwrap(), 8);
        assert_eq!(state, part(8, place));
        // Now all have the same, and nothing is sent.
        assert_eq!(groups.catch_up(8, &mut state).unwrap(), 8);
        assert_eq!(state, part(8, place));
    })
    .unwrap();
}

#[test]
fn groups_of_which_none_is_whole_are_told_so_on_all_ranks() {
    phalanx::run(4, |comm| {
        let (_, groups) = ReplicaGroups::refill(&comm, Some(comm.rank() as u32 / 2), 2, 2).unwrap();
        let error = groups.catch_up([3, 4, 4, 3][comm.rank()], &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("load a checkpoint"), "{error}");
        // At the beginning there is nothing to bring.
        assert_eq!(groups.catch_up(0, &mut vec![1]).unwrap(), 0);
        let error = ReplicaGroups::refill(&comm, Some(0), 2, 2).unwrap_err().to_string();
        assert!(error.contains("4 ranks cannot be 2 groups of 2"), "{error}");
    })
    .unwrap();
}
