//! Optimizers, and groups of parameters that are sharded.

use phalanx::{Comm, bf16};
use phalanx_train::device::Host;
use phalanx_train::mesh::{Axis, Mesh, Placement, Plan};
use phalanx_train::optimizer::{AdamW, Matrices, Muon, Optimizer, Piece, Sgd};
use phalanx_train::sharding::{FlatLayout, Reduction, ShardedGroup};

const PARAMETERS: [(&str, &[usize]); 4] = [("a", &[5, 7]), ("b", &[3, 3]), ("c", &[9, 2]), ("d", &[1, 64])];
const STEPS: usize = 4;

/// A parameter's value at first, or a gradient of it on a rank in a step.
fn number(name: &str, element: usize, salt: usize) -> f64 {
    let name = name.bytes().next().unwrap_or(0);
    ((element * 31 + salt * 17 + usize::from(name) * 7) as f64 * 0.37).sin()
}

fn flat(layout: &FlatLayout, salt: usize) -> Vec<f64> {
    let mut numbers = vec![0.0; layout.len()];
    for (name, _, range) in layout.parameters() {
        for (element, number_of) in numbers[range].iter_mut().enumerate() {
            *number_of = number(name, element, salt);
        }
    }
    numbers
}

/// Parameters after some steps with the mean of the ranks' gradients, on one rank and without any layout.
fn alone(optimizer: &impl Optimizer<Host>, ranks: usize) -> Vec<(&'static str, Vec<f64>)> {
    let run = |(name, shape): (&'static str, &[usize])| {
        let len: usize = shape.iter().product();
        let mut parameters: Vec<f64> = (0..len).map(|element| number(name, element, 0)).collect();
        let mut states = vec![vec![0.0; len]; optimizer.states()];
        for step in 1..=STEPS {
            let salts = (0..ranks).map(|rank| step * 100 + rank);
            let sum = |element| salts.clone().map(|salt| number(name, element, salt)).sum::<f64>();
            let gradient: Vec<f64> = (0..len).map(|element| sum(element) / ranks as f64).collect();
            let mut states: Vec<_> = states.iter_mut().map(|state| &mut state[..]).collect();
            let (step, piece) = (step as u64, Piece::whole(shape));
            optimizer
                .update(&Host, step, &piece, &&gradient[..], &mut &mut parameters[..], &mut states)
                .unwrap();
        }
        (name, parameters)
    };
    PARAMETERS.into_iter().map(run).collect()
}

fn close(layout: &FlatLayout, all: &[f64], expected: &[(&str, Vec<f64>)]) {
    for (name, expected) in expected {
        for (here, expected) in all[layout.range(name).unwrap()].iter().zip(expected) {
            assert!((here - expected).abs() <= 1e-12, "{name}: {here} is not {expected}");
        }
    }
}

fn sharded_is_alone(
    optimizer: impl Optimizer<Host> + Sync,
    layout: impl Fn(usize) -> phalanx_train::Result<FlatLayout> + Sync,
) {
    for ranks in 1..=8 {
        let expected = alone(&optimizer, ranks);
        phalanx::run(ranks, |comm| {
            let layout = layout(ranks).unwrap();
            let initial = flat(&layout, 0);
            let mut group =
                ShardedGroup::<_, f64, f64>::new(&comm, &Host, layout.clone(), &initial, &optimizer).unwrap();
            for step in 1..=STEPS {
                // Used forwards, released, and used again backwards.
                group.gather(&comm).unwrap();
                group.release();
                assert_eq!(group.gather(&comm).unwrap().len(), layout.len());
                let gradient = flat(&layout, step * 100 + comm.rank());
                group.reduce_gradient(&comm, &&gradient[..], Reduction::Mean).unwrap();
                group.step(&optimizer, 1.0).unwrap();
            }
            close(&layout, group.gather(&comm).unwrap(), &expected);
            // All that is not a parameter's has stayed 0.
            let mut padding = group.gather(&comm).unwrap().clone();
            layout.parameters().for_each(|(_, _, range)| padding[range].fill(0.0));
            assert!(padding.iter().all(|number| *number == 0.0));
        })
        .unwrap();
    }
}

fn cut(ranks: usize) -> phalanx_train::Result<FlatLayout> {
    FlatLayout::new(&PARAMETERS, ranks)
}

#[test]
fn adamw_over_shards_is_adamw_on_one_rank() {
    sharded_is_alone(AdamW::new(0.01), cut);
}

#[test]
fn sgd_over_shards_is_sgd_on_one_rank() {
    sharded_is_alone(Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.01 }, cut);
}

#[test]
fn muon_over_shards_is_muon_on_one_rank() {
    sharded_is_alone(Muon::new(0.02), |ranks| FlatLayout::whole(&PARAMETERS, ranks));
}

#[test]
fn two_steps_of_each_optimizer_are_as_worked_out() {
    let mut parameters = [1.0f64];
    let (mut first, mut second) = ([0.0], [0.0]);
    let adamw = AdamW::new(0.1);
    let piece = Piece::whole(&[1]);
    for (step, gradient) in [(1, 0.5), (2, -1.5)] {
        let states = &mut [&mut first[..], &mut second[..]];
        adamw.update(&Host, step, &piece, &&[gradient][..], &mut &mut parameters[..], states).unwrap();
    }
    // Moments 0.05, then 0.9 * 0.05 - 0.15 = -0.105; 0.00025, then 0.999 * 0.00025 + 0.00225 = 0.00249975.
    assert!((first[0] + 0.105).abs() < 1e-15 && (second[0] - 0.00249975).abs() < 1e-15);
    let one = 0.999 - 0.1 * 0.5 / (0.5 + 1e-8);
    let root = (0.00249975f64 / (1.0 - 0.999 * 0.999)).sqrt();
    let two = one * 0.999 + 0.1 * (0.105 / 0.19) / (root + 1e-8);
    assert!((parameters[0] - two).abs() < 1e-12, "{} is not {two}", parameters[0]);

    // Nesterov: momentum 1 and 1.9; steps of 1.9 and 2.71 times 0.1.
    let (mut parameters, mut momentum) = ([1.0f64], [0.0]);
    let sgd = Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: true, weight_decay: 0.0 };
    for step in 1..=2 {
        let states = &mut [&mut momentum[..]];
        sgd.update(&Host, step, &piece, &&[1.0][..], &mut &mut parameters[..], states).unwrap();
    }
    assert!((parameters[0] - (1.0 - 0.19 - 0.271)).abs() < 1e-12);
}

/// The iteration works on singular values alone: of a rotated diagonal matrix each follows a x + b x³ + c x⁵.
#[test]
fn newton_schulz_moves_singular_values_and_nothing_else() {
    let Muon { coefficients, iterations, epsilon, .. } = Muon::new(0.1);
    let (sine, cosine) = 0.6f64.sin_cos();
    let values = [3.0, 0.5];
    let norm = (9.0f64 + 0.25).sqrt() + epsilon;
    let [a, b, c] = coefficients;
    let moved =
        values.map(|value| (0..iterations).fold(value / norm, |x, _| a * x + b * x.powi(3) + c * x.powi(5)));
    let rotated = |[x, y]: [f64; 2]| [[cosine * x, -sine * y], [sine * x, cosine * y], [0.0, 0.0]];
    // Three rows and two columns, and the other way round.
    let tall: Vec<f64> = rotated(values).concat();
    let expected: Vec<f64> = rotated(moved).concat();
    let turned = |m: &[f64]| -> Vec<f64> { (0..6).map(|at| m[at % 3 * 2 + at / 3]).collect() };
    for (mut matrix, [rows, columns], expected) in
        [(tall.clone(), [3, 2], expected.clone()), (turned(&tall), [2, 3], turned(&expected))]
    {
        Host.orthogonalize(rows, columns, iterations, coefficients, epsilon, &mut &mut matrix[..]).unwrap();
        for (here, expected) in matrix.iter().zip(&expected) {
            assert!((here - expected).abs() < 1e-12, "{here} is not {expected}");
        }
    }
}

#[test]
fn micro_batches_add_up_and_a_factor_scales_the_gradient() {
    phalanx::run(2, |comm| {
        let optimizer = Sgd { learning_rate: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        let layout = FlatLayout::new(&[("w", [2])], 2).unwrap();
        let mut group = new(&comm, &layout, &optimizer);
        let gradient = |value: f64| {
            let mut all = vec![0.0; layout.len()];
            all[..2].fill(value);
            all
        };
        let rank = comm.rank() as f64;
        group.reduce_gradient(&comm, &&gradient(1.0 + rank)[..], Reduction::Sum).unwrap(); // 3
        group.reduce_gradient(&comm, &&gradient(4.0 + 4.0 * rank)[..], Reduction::Mean).unwrap(); // 6
        group.take_gradient(&gradient(1.0)).unwrap();
        group.step(&optimizer, 0.5).unwrap();
        assert_eq!(group.gather(&comm).unwrap()[..2], [-5.0; 2]);
        // What overflowed is forgotten.
        group.reduce_gradient(&comm, &&gradient(f64::INFINITY)[..], Reduction::Mean).unwrap();
        group.skip().unwrap();
        group.step(&optimizer, 1.0).unwrap();
        assert_eq!((group.gather(&comm).unwrap()[..2].to_vec(), group.steps()), (vec![-5.0; 2], 2));
    })
    .unwrap();
}

fn new(comm: &Comm, layout: &FlatLayout, optimizer: &Sgd) -> ShardedGroup<Host, f64, f64> {
    ShardedGroup::new(comm, &Host, layout.clone(), &vec![0.0; layout.len()], optimizer).unwrap()
}

/// Four ranks as two hosts of two: sharded inside a host, the same on both.
#[test]
fn hybrid_sharding_averages_over_all_ranks() {
    phalanx::run(4, |comm| {
        let (host, place) = (comm.rank() / 2, comm.rank() % 2);
        let shard = comm.split(Some(host as u32), 0).unwrap().unwrap();
        let replicas = comm.split(Some(place as u32), 0).unwrap().unwrap();
        let optimizer = Sgd { learning_rate: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        let layout = FlatLayout::new(&[("w", [100])], 2).unwrap();
        let mut group = new(&shard, &layout, &optimizer);
        let mut gradient = vec![0.0; layout.len()];
        gradient[..100].fill([1.0, 3.0, 10.0, 20.0][comm.rank()]);
        group.reduce_gradient_among(&shard, Some(&replicas), &&gradient[..], Reduction::Mean).unwrap();
        group.step(&optimizer, 1.0).unwrap();
        assert_eq!(group.gather(&shard).unwrap()[..100], [-8.5; 100]);
    })
    .unwrap();
}

#[test]
fn gradients_of_bf16_are_summed_in_f32() {
    phalanx::run(3, |comm| {
        let layout = FlatLayout::new(&[("w", [1])], 3).unwrap();
        let optimizer = Sgd { learning_rate: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        let initial = vec![0.0f32; layout.len()];
        let mut group =
            ShardedGroup::<_, bf16, f32>::new(&comm, &Host, layout.clone(), &initial, &optimizer).unwrap();
        let mut gradient = vec![bf16::ZERO; layout.len()];
        gradient[0] = bf16::from_f32([256.0, 1.0, 1.0][comm.rank()]);
        group.reduce_gradient(&comm, &&gradient[..], Reduction::Sum).unwrap();
        group.step(&optimizer, 1.0).unwrap();
        assert_eq!(group.gather(&comm).unwrap()[0].to_f32(), -258.0);
    })
    .unwrap();
}

#[test]
fn every_element_is_on_one_rank() {
    for ranks in 1..=9 {
        for layout in
            [FlatLayout::new(&PARAMETERS, ranks).unwrap(), FlatLayout::whole(&PARAMETERS, ranks).unwrap()]
        {
            for (name, shape) in PARAMETERS {
                let mut next = vec![0; shape.iter().product()];
                for rank in 0..ranks {
                    for (_, piece, range) in layout.pieces(rank).filter(|(piece_of, ..)| *piece_of == name) {
                        assert_eq!(piece.range.len(), range.len());
                        let whole = layout.range(name).unwrap();
                        assert_eq!(whole.start + piece.range.start, layout.part(rank).start + range.start);
                        piece.range.for_each(|element| next[element] += 1);
                    }
                }
                assert!(next.iter().all(|count| *count == 1), "{name} on {ranks}");
            }
        }
    }
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_sent() {
    let problem = |result: phalanx_train::Result<FlatLayout>| result.unwrap_err().to_string();
    assert!(
        problem(FlatLayout::new(&[("w", [1]), ("w", [2])], 2)).contains("two parameters are called \"w\"")
    );
    phalanx::run(2, |comm| {
        let muon = Muon::new(0.1);
        let group = |layout: FlatLayout, initial: usize| {
            let initial = vec![0.0f32; initial];
            ShardedGroup::<_, f32, f32>::new(&comm, &Host, layout, &initial, &muon).unwrap_err().to_string()
        };
        let bias = FlatLayout::whole(&[("bias", [4])], 2).unwrap();
        let len = bias.len();
        assert!(
            group(bias, len)
                .contains("parameter \"bias\": Muon updates matrices, not a parameter of shape [4]")
        );
        let cut = FlatLayout::new(&[("w", [20, 10])], 2).unwrap();
        let len = cut.len();
        assert!(group(cut.clone(), len).contains("\"w\" is cut between ranks"));
        assert!(group(cut, 7).contains("7 initial numbers for a layout of 256"));
        assert!(group(FlatLayout::whole(&[("w", [2, 2])], 3).unwrap(), 192).contains("a layout for 3 ranks"));
        let layout = FlatLayout::new(&[("w", [2])], 2).unwrap();
        let optimizer = Sgd { learning_rate: 1.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        let mut group = new(&comm, &layout, &optimizer);
        let wrong = group.reduce_gradient(&comm, &&[1.0][..], Reduction::Mean).unwrap_err().to_string();
        assert!(wrong.contains("a gradient of 1 numbers for a layout of 128"), "{wrong}");
    })
    .unwrap();
}

#[test]
fn prefetched_parameters_are_those_that_are_gathered() {
    phalanx::run(3, |comm| {
        let sgd = Sgd { learning_rate: 0.5, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        let mut groups: Vec<ShardedGroup<Host, f32, f32>> = (0..4)
            .map(|number| {
                let layout = FlatLayout::new(&[("w", [7, 30 + number])], 3).unwrap();
                let initial: Vec<f32> = (0..layout.len()).map(|at| (at * (number + 1)) as f32).collect();
                ShardedGroup::new(&comm, &Host, layout, &initial, &sgd).unwrap()
            })
            .collect();
        for step in 0..3 {
            for number in 0..groups.len() {
                groups[number].gather(&comm).unwrap();
                if let Some(next) = groups.get_mut(number + 1) {
                    next.prefetch(&comm).unwrap();
                    // A second time is none.
                    next.prefetch(&comm).unwrap();
                }
                let len = groups[number].layout().len();
                let expected = |at: usize| (at * (number + 1)) as f32 - 0.5 * step as f32;
                let used = groups[number].layout().range("w").unwrap();
                let parameters = groups[number].gather(&comm).map(|all| all[used.clone()].to_vec()).unwrap();
                for (at, parameter) in parameters.iter().enumerate() {
                    assert_eq!(*parameter, expected(at));
                }
                groups[number].reduce_gradient(&comm, &&vec![1.0; len][..], Reduction::Mean).unwrap();
                groups[number].release();
            }
            // One that is on its way when the step is made is of the old parameters, and is not used.
            groups[0].prefetch(&comm).unwrap();
            groups.iter_mut().for_each(|group| group.step(&sgd, 1.0).unwrap());
        }
    })
    .unwrap();
}

#[test]
fn plans_that_groups_cannot_follow_are_refused() {
    phalanx::run(2, |comm| {
        let mesh = Mesh::new(&comm, &[(Axis::Tensor, 2)]).unwrap();
        let place = |axis, placement| {
            let plan = Plan::new().rule("w", &[(axis, placement)]);
            FlatLayout::placed(&plan, mesh.shape(), mesh.rank(), &[("w", [4, 4])])
        };
        let error = place(Axis::Shard, Placement::Split(0)).unwrap_err().to_string();
        assert!(error.contains("\"w\"") && error.contains("divided along Shard themselves"), "{error}");
        assert!(place(Axis::Tensor, Placement::Partial).is_err());
        let layout = place(Axis::Tensor, Placement::Split(1)).unwrap();
        let (shard, initial) = (mesh.comm(Axis::Shard), vec![0.0f32; layout.len()]);
        let muon = Muon::new(0.1);
        let group = ShardedGroup::<_, f32, f32>::new(shard, &Host, layout, &initial, &muon);
        let error = group.unwrap_err().to_string();
        assert!(error.contains("the plan splits parameter \"w\""), "{error}");
    })
    .unwrap();
}
