//! Meshes, layouts, plans and initial weights.

use phalanx::{Comm, ReduceOp};
use phalanx_train::Error;
use phalanx_train::mesh::{Axis, Init, Layout, Mesh, MeshShape, Placement, Plan, Unmatched};

/// World ranks of a communicator, in its order.
fn members(comm: &Comm, world_rank: usize) -> Vec<usize> {
    let mut all = vec![0u64; comm.world_size()];
    comm.all_gather(&[world_rank as u64], &mut all).unwrap();
    all.into_iter().map(|rank| rank as usize).collect()
}

#[test]
fn an_axis_has_the_ranks_that_differ_in_it_alone() {
    let ran = phalanx::run(8, |comm| {
        let joint: &[&[Axis]] = &[&[Axis::Shard, Axis::Data], &[Axis::Expert]];
        let dims = [(Axis::Data, 2), (Axis::Pipeline, 1), (Axis::Shard, 2), (Axis::Tensor, 2)];
        let mesh = Mesh::with_joint(&comm, &dims, joint).unwrap();
        let rank = comm.rank();
        let at = [Axis::Data, Axis::Shard, Axis::Tensor].map(|axis| mesh.coordinate(axis));
        assert_eq!(at, [rank / 4, rank / 2 % 2, rank % 2]);
        assert_eq!(members(mesh.world(), rank), (0..8).collect::<Vec<_>>());
        assert_eq!(members(mesh.comm(Axis::Data), rank), [rank % 4, rank % 4 + 4]);
        assert_eq!(members(mesh.comm(Axis::Tensor), rank), [rank / 2 * 2, rank / 2 * 2 + 1]);
        for axis in [Axis::Pipeline, Axis::Sequence, Axis::Expert] {
            assert_eq!((mesh.size(axis), mesh.coordinate(axis)), (1, 0));
            assert_eq!(members(mesh.comm(axis), rank), [rank]);
        }
        let both = mesh.joint(&[Axis::Data, Axis::Shard]).unwrap();
        assert_eq!(members(both, rank), [0, 2, 4, 6].map(|other| other + rank % 2));
        assert_eq!(members(mesh.joint(&[Axis::Expert]).unwrap(), rank), [rank]);
        assert!(mesh.joint(&[Axis::Data]).is_none());
    });
    ran.unwrap();
}

#[test]
fn a_mesh_that_does_not_fit_says_what_fits_and_nothing_is_sent() {
    phalanx::run(8, |comm| {
        if comm.rank() == 0 {
            let text = |dims: &[(Axis, usize)]| match Mesh::new(&comm, dims) {
                Err(Error::Usage(text)) => text,
                other => panic!("{other:?}"),
            };
            let three = text(&[(Axis::Data, 3), (Axis::Tensor, 4)]);
            assert!(three.contains("needs 12 ranks, and there are 8") && three.contains("Data 2"), "{three}");
            assert!(text(&[(Axis::Data, 3), (Axis::Tensor, 5)]).contains("1, 2, 4, 8"));
            assert!(text(&[(Axis::Data, 2), (Axis::Data, 4)]).contains("twice"));
            assert!(text(&[(Axis::Data, 0)]).contains("size 0"));
            assert!(matches!(Mesh::data_pipeline_tensor(&comm, 3, 1), Err(Error::Usage(_))));
        }
        Mesh::new(&comm, &[(Axis::Data, 8)]).unwrap();
    })
    .unwrap();
}

#[test]
fn the_layout_of_numr_has_tensor_innermost_then_pipeline_then_data() {
    phalanx::run(8, |comm| {
        let (mesh, rank) = (Mesh::data_pipeline_tensor(&comm, 2, 2).unwrap(), comm.rank());
        assert_eq!(members(mesh.comm(Axis::Tensor), rank), [rank & !1, rank | 1]);
        assert_eq!(members(mesh.comm(Axis::Pipeline), rank), [rank & !2, rank | 2]);
        assert_eq!(members(mesh.comm(Axis::Data), rank), [rank & !4, rank | 4]);
        let two_levels = Mesh::hierarchical(&comm).unwrap();
        assert_eq!((two_levels.size(Axis::Data), two_levels.size(Axis::Shard)), (1, 8));
    })
    .unwrap();
}

#[test]
fn blocks_cover_a_parameter_once_and_the_first_have_one_more() {
    let mesh = MeshShape::new(&[(Axis::Data, 2), (Axis::Shard, 3), (Axis::Tensor, 2)]).unwrap();
    let layout = Layout::replicated(&[7, 3])
        .with(Axis::Shard, Placement::Split(0))
        .with(Axis::Tensor, Placement::Split(1));
    let mut held = vec![0; 21];
    for rank in 0..mesh.ranks() {
        let block = layout.block(&mesh, rank).unwrap();
        assert_eq!((block.copies, block.copy), (2, rank / 6));
        for index in block.indices(&layout.shape).filter(|_| block.is_counted()) {
            held[index] += 1;
        }
    }
    assert_eq!(held, [1; 21]);
    let lens = |n, parts| {
        let mesh = MeshShape::new(&[(Axis::Shard, parts)]).unwrap();
        let layout = Layout::replicated(&[n]).with(Axis::Shard, Placement::Split(0));
        (0..parts).map(|rank| layout.block(&mesh, rank).unwrap().len()).collect::<Vec<_>>()
    };
    assert_eq!((lens(7, 3), lens(2, 3), lens(57, 4)), (vec![3, 2, 2], vec![1, 1, 0], vec![15, 14, 14, 14]));
    // Two axes on one dimension: the first splits the whole, the second its parts.
    let twice = Layout::replicated(&[7])
        .with(Axis::Tensor, Placement::Split(0))
        .with(Axis::Shard, Placement::Split(0));
    let starts: Vec<usize> = (0..6).map(|rank| twice.block(&mesh, rank).unwrap().ranges[0].start).collect();
    assert_eq!(starts, [0, 4, 2, 5, 3, 6]);
}

#[test]
fn stages_have_parameters_of_their_own_unless_they_are_tied() {
    let mesh = MeshShape::new(&[(Axis::Pipeline, 2), (Axis::Data, 2)]).unwrap();
    let counted = |layout: &Layout| {
        (0..4).filter(|rank| layout.block(&mesh, *rank).unwrap().is_counted()).collect::<Vec<_>>()
    };
    assert_eq!(counted(&Layout::replicated(&[2])), [0, 2]);
    assert_eq!(counted(&Layout::replicated(&[2]).with(Axis::Pipeline, Placement::Replicated)), [0]);
}

#[test]
fn two_heads_on_four_ranks_are_held_twice_counted_once_and_their_gradients_summed() {
    let gradients = phalanx::run(4, |comm| {
        let mesh = Mesh::new(&comm, &[(Axis::Tensor, 4)]).unwrap();
        let layout = Layout::replicated(&[6, 5]).with(Axis::Tensor, Placement::Heads { dim: 0, heads: 2 });
        let block = layout.local(&mesh).unwrap();
        let head = comm.rank() / 2;
        assert_eq!(block.ranges[0], head * 3..head * 3 + 3);
        let mut counted = [if block.is_counted() { block.len() as u64 } else { 0 }];
        mesh.world().all_reduce_in_place(&mut counted, ReduceOp::Sum).unwrap();
        assert_eq!(counted[0], 30);
        let mut gradient = [comm.rank() as f32 + 1.0];
        mesh.copies(Axis::Tensor, 2).unwrap().all_reduce_in_place(&mut gradient, ReduceOp::Sum).unwrap();

        let Err(Error::Usage(text)) =
            Layout::replicated(&[6]).with(Axis::Tensor, Placement::Heads { dim: 0, heads: 3 }).local(&mesh)
        else {
            panic!("3 heads on 4 ranks")
        };
        assert!(text.contains("3 heads do not fit 4 ranks") && text.contains("[1, 3, 6]"), "{text}");
        gradient[0]
    });
    assert_eq!(gradients.unwrap(), [3.0, 3.0, 7.0, 7.0]);
}

#[test]
fn the_first_pattern_that_matches_counts() {
    let split = |dim| [(Axis::Tensor, Placement::Split(dim))];
    let plan = Plan::new()
        .rule("layers.*.attention.[qk].weight", &split(9))
        .rule("layers.*.attention.q.weight", &split(0))
        .rule("layers.1?.**", &split(1))
        .rule("**.weight", &split(2));
    let dim = |name: &str| {
        plan.layout(name, &[4, 4, 4]).unwrap().placements.first().map(|(_, placement)| *placement)
    };
    assert_eq!(dim("layers.3.attention.q.weight"), Some(Placement::Split(0)));
    assert_eq!(dim("layers.12.mlp.up"), Some(Placement::Split(1)));
    assert_eq!(dim("layers.3.mlp.up.weight"), Some(Placement::Split(2)));
    assert_eq!(dim("weight"), Some(Placement::Split(2)));
    assert_eq!(dim("layers.3.4.attention.q.bias"), None);
    let strict = plan.clone().unmatched(Unmatched::Refused);
    assert!(strict.layout("weight", &[1]).is_ok());
    assert!(matches!(strict.layout("bias", &[1]), Err(Error::Usage(text)) if text.contains("bias")));
}

#[test]
fn initial_weights_are_the_same_in_every_layout() {
    let (rows, columns) = (13, 6);
    let whole = Layout::replicated(&[rows, columns]);
    for init in [Init::Uniform { low: -1.0, high: 3.0 }, Init::Normal { mean: 1.0, deviation: 0.5 }] {
        let one = MeshShape::new(&[]).unwrap();
        let expected: Vec<f64> = init.fill(11, "up.weight", &whole, &whole.block(&one, 0).unwrap());
        for dims in [[(Axis::Data, 2), (Axis::Tensor, 3)], [(Axis::Tensor, 5), (Axis::Shard, 2)]] {
            let mesh = MeshShape::new(&dims).unwrap();
            for dim in [0, 1] {
                let layout = whole
                    .clone()
                    .with(Axis::Tensor, Placement::Split(dim))
                    .with(Axis::Shard, Placement::Split(0));
                for rank in 0..mesh.ranks() {
                    let block = layout.block(&mesh, rank).unwrap();
                    let own: Vec<f64> = init.fill(11, "up.weight", &layout, &block);
                    let of_whole: Vec<f64> =
                        block.indices(&layout.shape).map(|index| expected[index]).collect();
                    assert_eq!(own, of_whole);
                }
            }
        }
        let other: Vec<f64> = init.fill(11, "down.weight", &whole, &whole.block(&one, 0).unwrap());
        let reseeded: Vec<f64> = init.fill(12, "up.weight", &whole, &whole.block(&one, 0).unwrap());
        assert!(expected.iter().zip(&other).chain(expected.iter().zip(&reseeded)).all(|(a, b)| a != b));
    }
}

#[test]
fn initial_weights_have_the_mean_and_deviation_asked_for() {
    let whole = Layout::replicated(&[100_000]);
    let block = whole.block(&MeshShape::new(&[]).unwrap(), 0).unwrap();
    let moments = |init: Init| {
        let all: Vec<f64> = init.fill(3, "w", &whole, &block);
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        (mean, (all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64).sqrt())
    };
    let (mean, deviation) = moments(Init::Normal { mean: 2.0, deviation: 0.5 });
    assert!((mean - 2.0).abs() < 0.01 && (deviation - 0.5).abs() < 0.01, "{mean} {deviation}");
    let (mean, deviation) = moments(Init::Uniform { low: -1.0, high: 1.0 });
    assert!(mean.abs() < 0.01 && (deviation - 1.0 / 3f64.sqrt()).abs() < 0.01, "{mean} {deviation}");
}
