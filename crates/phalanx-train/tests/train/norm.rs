//! Norms, loss scales and checksums of replicas.

use phalanx_train::Error;
use phalanx_train::device::Host;
use phalanx_train::mesh::{Axis, Init, Layout, Mesh, Placement, Plan};
use phalanx_train::norm::{LossScaler, ReplicaCheck, clip, clip_factor, global_norm, global_norm_of_groups};
use phalanx_train::optimizer::Sgd;
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};

#[test]
fn a_replica_counts_once_in_the_norm_which_has_equal_bits_everywhere() {
    let norms = phalanx::run(2, |comm| {
        let mesh = Mesh::new(&comm, &[(Axis::Tensor, 2)]).unwrap();
        let split = Layout::replicated(&[2]).with(Axis::Tensor, Placement::Split(0));
        let part = [[3.0f32], [4.0]][comm.rank()];
        global_norm(&mesh, &Host, &[(&split, &part[..]), (&Layout::replicated(&[1]), &[12.0][..])]).unwrap()
    });
    assert_eq!(norms.unwrap(), [13.0, 13.0]);
}

#[test]
fn the_norm_is_that_of_one_rank_on_every_mesh() {
    let shapes = [vec![7, 3], vec![6, 4], vec![5]];
    let weights = |layout: &Layout, mesh: &Mesh| {
        let block = layout.local(mesh).unwrap();
        Init::Normal { mean: 0.0, deviation: 1.0 }.fill::<f64>(5, "w", layout, &block)
    };
    let on = |ranks: usize, dims: &[(Axis, usize)]| {
        let ran = phalanx::run(ranks, |comm| {
            let mesh = Mesh::new(&comm, dims).unwrap();
            let layouts = [
                Layout::replicated(&shapes[0])
                    .with(Axis::Tensor, Placement::Split(1))
                    .with(Axis::Shard, Placement::Split(0)),
                Layout::replicated(&shapes[1]).with(Axis::Tensor, Placement::Heads { dim: 0, heads: 2 }),
                Layout::replicated(&shapes[2]).with(Axis::Pipeline, Placement::Replicated),
            ]
            .map(|layout| {
                if layout.placements.iter().any(|(axis, _)| *axis == Axis::Pipeline) {
                    layout
                } else {
                    layout.with(Axis::Pipeline, Placement::Replicated)
                }
            });
            let mut held: Vec<Vec<f64>> = layouts.iter().map(|layout| weights(layout, &mesh)).collect();
            let mut parts: Vec<(&Layout, &mut [f64])> =
                layouts.iter().zip(held.iter_mut().map(Vec::as_mut_slice)).collect();
            let norm = clip(&mesh, &Host, &mut parts, 2.0).unwrap();
            let views: Vec<(&Layout, &[f64])> = layouts.iter().zip(held.iter().map(Vec::as_slice)).collect();
            let clipped = global_norm(&mesh, &Host, &views).unwrap();
            (norm, clipped)
        });
        let all = ran.unwrap();
        assert!(all.iter().all(|norm| norm.0.to_bits() == all[0].0.to_bits()));
        all[0]
    };
    let one = on(1, &[]);
    assert!((one.1 - 2.0).abs() < 1e-12 && one.0 > 2.0);
    for (ranks, dims) in [
        (2, vec![(Axis::Data, 2)]),
        (3, vec![(Axis::Shard, 3)]),
        (4, vec![(Axis::Tensor, 4)]),
        (4, vec![(Axis::Pipeline, 2), (Axis::Tensor, 2)]),
        (8, vec![(Axis::Data, 2), (Axis::Shard, 2), (Axis::Tensor, 2)]),
    ] {
        let (norm, clipped) = on(ranks, &dims);
        assert!(
            (norm / one.0 - 1.0).abs() < 1e-12 && (clipped - 2.0).abs() < 1e-12,
            "{dims:?}: {norm} {one:?}"
        );
    }
}

#[test]
fn stages_of_a_pipeline_all_count() {
    let norms = phalanx::run(2, |comm| {
        let mesh = Mesh::new(&comm, &[(Axis::Pipeline, 2)]).unwrap();
        let own = [[3.0f32], [4.0]][comm.rank()];
        global_norm(&mesh, &Host, &[(&Layout::replicated(&[1]), &own[..])]).unwrap()
    });
    assert_eq!(norms.unwrap(), [5.0, 5.0]);
}

#[test]
fn infinity_in_one_shard_makes_all_ranks_skip_and_halves_the_scale() {
    for bad in [f32::INFINITY, f32::NAN] {
        let scales = phalanx::run(3, |comm| {
            let mesh = Mesh::new(&comm, &[(Axis::Shard, 3)]).unwrap();
            let split = Layout::replicated(&[6]).with(Axis::Shard, Placement::Split(0));
            let mut scaler = LossScaler::new(65536.0).doubling_after(2);
            let mut gradient = [1.0, if comm.rank() == 1 { bad } else { 2.0 }];
            let before = gradient.map(f32::to_bits);
            let norm = clip(&mesh, &Host, &mut [(&split, &mut gradient[..])], 0.5).unwrap();
            assert_eq!(gradient.map(f32::to_bits), before);
            assert!(!scaler.update(norm));
            let halved = scaler.scale();
            assert!(scaler.update(1.0) && scaler.scale() == halved);
            assert!(scaler.update(1.0) && scaler.scale() == 65536.0);
            halved
        });
        assert_eq!(scales.unwrap(), [32768.0; 3]);
    }
    // In a copy that does not count.
    let ran = phalanx::run(2, |comm| {
        let mesh = Mesh::new(&comm, &[(Axis::Data, 2)]).unwrap();
        let gradient = [if comm.rank() == 1 { f32::INFINITY } else { 2.0 }];
        let norm = global_norm(&mesh, &Host, &[(&Layout::replicated(&[1]), &gradient[..])]).unwrap();
        LossScaler::new(65536.0).update(norm)
    });
    assert_eq!(ran.unwrap(), [false, false]);
}

#[test]
fn replicas_that_differ_are_named_by_rank_and_parameter_on_all_ranks() {
    phalanx::run(4, |comm| {
        // Two stages, each with two data ranks; the second has one parameter more.
        let mesh = Mesh::new(&comm, &[(Axis::Pipeline, 2), (Axis::Data, 2)]).unwrap();
        let layout = Layout::replicated(&[3]);
        let stage = mesh.coordinate(Axis::Pipeline);
        let mut weight = [1.0f32, 2.0, stage as f32];
        let bias = [0.5f32; 3];
        let check = ReplicaCheck::every(10);
        let run = |step, weight: &[f32; 3]| {
            let mut held = vec![("weight", &layout, &weight[..])];
            if stage == 1 {
                held.push(("bias", &layout, &bias[..]));
            }
            check.check(step, &mesh, &Host, &held)
        };
        run(10, &weight).unwrap();
        if comm.rank() == 3 {
            weight[1] = f32::from_bits(weight[1].to_bits() + 1);
        }
        run(11, &weight).unwrap();
        let Err(Error::Mismatch(text)) = run(20, &weight) else { panic!("not seen") };
        assert!(text.contains("\"weight\"") && text.contains("[3]") && text.contains("step 20"), "{text}");
        assert!(!text.contains("bias"));
    })
    .unwrap();
}

#[test]
fn a_wrong_part_is_refused_before_anything_is_sent() {
    phalanx::run(2, |comm| {
        let mesh = Mesh::new(&comm, &[(Axis::Tensor, 2)]).unwrap();
        if comm.rank() == 0 {
            let split = Layout::replicated(&[3]).with(Axis::Tensor, Placement::Split(0));
            let partial = Layout::replicated(&[3]).with(Axis::Tensor, Placement::Partial);
            for layout in [split, partial] {
                let refused = global_norm(&mesh, &Host, &[(&layout, &[1.0f32; 3][..])]);
                assert!(matches!(refused, Err(Error::Usage(_))), "{refused:?}");
            }
        }
        assert_eq!(global_norm::<Host, f32>(&mesh, &Host, &[]).unwrap(), 0.0);
    })
    .unwrap();
}

#[test]
fn sharded_groups_count_each_element_once_on_every_mesh() {
    let plan = Plan::new().rule("split", &[(Axis::Tensor, Placement::Split(0))]);
    for dims in [
        &[(Axis::Tensor, 2)][..],
        &[(Axis::Shard, 2), (Axis::Tensor, 2)],
        &[(Axis::Data, 2), (Axis::Shard, 3), (Axis::Tensor, 2)],
    ] {
        let ranks = dims.iter().map(|(_, size)| size).product();
        let norms = phalanx::run(ranks, |comm| {
            let mesh = Mesh::new(&comm, dims).unwrap();
            let whole = [("split", vec![2]), ("same", vec![1])];
            let layout = FlatLayout::placed(&plan, mesh.shape(), mesh.rank(), &whole).unwrap();
            let sgd = Sgd { learning_rate: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
            let initial = vec![0.0; layout.len()];
            let shard = mesh.comm(Axis::Shard);
            let mut group = ShardedGroup::<_, f64, f64>::new(shard, &Host, layout, &initial, &sgd).unwrap();
            // Of [3, 4] each tensor rank has one; 12 is the same on all.
            let mut gradient = vec![0.0; group.layout().len()];
            gradient[..2].copy_from_slice(&[3.0 + mesh.coordinate(Axis::Tensor) as f64, 12.0]);
            group.reduce_gradient(shard, &&gradient[..], Reduction::Mean).unwrap();
            let norm = global_norm_of_groups(&mesh, &Host, &[&group]).unwrap();
            group.step(&sgd, clip_factor(norm, 6.5).unwrap()).unwrap();
            let parameters = group.gather(shard).unwrap()[..2].to_vec();
            assert_eq!(parameters, [-1.5 - 0.5 * mesh.coordinate(Axis::Tensor) as f64, -6.0]);
            norm
        });
        assert!(norms.unwrap().iter().all(|norm| *norm == 13.0), "{dims:?}");
    }
    assert_eq!(clip_factor(f64::INFINITY, 1.0).unwrap(), 1.0);
    assert!(clip_factor(1.0, 0.0).unwrap_err().to_string().contains("limited to 0"));
}
