//! Tensor and sequence parallelism.

use phalanx::{Comm, bf16};
use phalanx_train::device::Host;
use phalanx_train::mesh::{Axis, Mesh};
use phalanx_train::tensor::{
    ColumnParallel, RowParallel, VocabularyParallel, exchange, gather, own_part, scatter_sum, sum,
};
use std::ops::Range;

fn number(salt: usize, at: usize) -> f64 {
    ((salt * 131 + at * 17) as f64 * 0.37).sin()
}

fn numbers(salt: usize, len: usize) -> Vec<f64> {
    (0..len).map(|at| number(salt, at)).collect()
}

/// The rule of lengths that do not divide.
fn part(comm: &Comm, whole: usize) -> Range<usize> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let start = |rank: usize| rank * (whole / ranks) + rank.min(whole % ranks);
    start(rank)..start(rank + 1)
}

fn close(here: &[f64], expected: &[f64]) {
    assert_eq!(here.len(), expected.len());
    for (here, expected) in here.iter().zip(expected) {
        assert!((here - expected).abs() < 1e-12, "{here} is not {expected}");
    }
}

/// `y = x0 + x1`, with the loss 3y on every rank.
#[test]
fn gradients_at_the_edges_of_a_region_are_as_worked_out() {
    phalanx::run(2, |comm| {
        // Leaving: y is the sum, and its gradient of 3, the same on both ranks, is that of each summand.
        let mut y = [[1.0f64], [2.0]][comm.rank()];
        sum(&comm, &mut y).unwrap();
        assert_eq!(y, [3.0]);
        // Entering: each rank's gradient of what entered.
        let mut gradient = [[3.0f64], [4.0]][comm.rank()];
        sum(&comm, &mut gradient).unwrap();
        assert_eq!(gradient, [7.0]);
        // A loss that is itself summed over the ranks counts twice.
        let mut gradient = [3.0f64];
        sum(&comm, &mut gradient).unwrap();
        assert_eq!(gradient, [6.0]);
    })
    .unwrap();
}

#[test]
fn parts_come_together_along_the_inner_dimension() {
    phalanx::run(2, |comm| {
        let own = [[1.0f32, 2.0], [3.0, 4.0]][comm.rank()];
        // [[1], [2]] and [[3], [4]].
        assert_eq!(gather(&comm, &Host, &[2, 2], 1, &&own[..]).unwrap(), [1.0, 3.0, 2.0, 4.0]);
        assert_eq!(gather(&comm, &Host, &[4], 0, &&own[..]).unwrap(), [1.0, 2.0, 3.0, 4.0]);
    })
    .unwrap();
}

#[test]
fn gathering_and_scattering_work_along_any_dimension_and_for_uneven_parts() {
    for ranks in 1..=8 {
        phalanx::run(ranks, |comm| {
            for shape in [[4, 3, 5], [1, 7, 2], [8, 8, 8], [3, 2, 1], [5, 0, 2]] {
                let len: usize = shape.iter().product();
                for dimension in 0..3 {
                    let whole = numbers(1, len);
                    // The part, element by element.
                    let own = part(&comm, shape[dimension]);
                    let index =
                        |at: usize| at / shape[dimension + 1..].iter().product::<usize>() % shape[dimension];
                    let expected: Vec<f64> =
                        (0..len).filter(|at| own.contains(&index(*at))).map(|at| whole[at]).collect();
                    let taken = own_part(&comm, &Host, &shape, dimension, &whole).unwrap();
                    assert_eq!(taken, expected);
                    assert_eq!(gather(&comm, &Host, &shape, dimension, &&taken[..]).unwrap(), whole);
                    // Summands of the ranks: rank + 1 times the same.
                    let summand: Vec<f64> = whole.iter().map(|x| x * (comm.rank() + 1) as f64).collect();
                    let scattered = scatter_sum(&comm, &Host, &shape, dimension, &summand).unwrap();
                    let times = (ranks * (ranks + 1) / 2) as f64;
                    close(&scattered, &expected.iter().map(|x| x * times).collect::<Vec<_>>());
                }
            }
        })
        .unwrap();
    }
}

/// From a part of the tokens to a part of the heads, and back; and between all other dimensions.
#[test]
fn an_exchange_moves_the_split_to_another_dimension() {
    for ranks in 1..=8 {
        phalanx::run(ranks, |comm| {
            for shape in [[8, 4, 3], [5, 7, 2], [2, 3, 9]] {
                let whole = numbers(9, shape.iter().product());
                let own = |dimension: usize| own_part(&comm, &Host, &shape, dimension, &whole).unwrap();
                for [from, to] in [[0, 1], [1, 0], [0, 2], [2, 1]] {
                    let moved = exchange(&comm, &Host, &shape, [from, to], &own(from)).unwrap();
                    assert_eq!(moved, own(to), "{shape:?} from {from} to {to} on {ranks}");
                }
            }
            let error = |dimensions| {
                exchange(&comm, &Host, &[2, 2], dimensions, &vec![0.0f32]).unwrap_err().to_string()
            };
            assert!(error([1, 1]).contains("from dimension 1 to itself"));
            assert!(error([0, 2]).contains("dimension 2 of a tensor of shape [2, 2]"));
        })
        .unwrap();
    }
}

/// Two heads of keys and values on four ranks: neighbours hold the same head, and their gradients count together.
#[test]
fn gradients_of_copied_heads_are_summed_over_the_copies() {
    phalanx::run(4, |comm| {
        let mesh = Mesh::new(&comm, &[(Axis::Tensor, 4)]).unwrap();
        let copies = mesh.copies(Axis::Tensor, 2).unwrap();
        let mut gradient = [(comm.rank() + 1) as f64];
        sum(&copies, &mut gradient).unwrap();
        assert_eq!(gradient, [3.0, 3.0, 7.0, 7.0][comm.rank()..=comm.rank()]);
        let error = mesh.copies(Axis::Tensor, 3).unwrap_err().to_string();
        assert!(error.contains('3') && error.contains('4'), "{error}");
    })
    .unwrap();
}

/// Gathering along the inner dimension, backwards: the gradients of all ranks' copies, summed, and each rank's part of it.
#[test]
fn the_backward_of_gathering_is_the_part_of_a_sum() {
    phalanx::run(2, |comm| {
        let own = [[1.0f64, 2.0], [3.0, 4.0]][comm.rank()];
        let whole = gather(&comm, &Host, &[2, 2], 1, &&own[..]).unwrap();
        // Each rank's loss is Σ wᵢ xᵢ, with weights of its own.
        let weights = [[1.0, 10.0, 100.0, 1000.0], [2.0, 20.0, 200.0, 2000.0]][comm.rank()];
        assert_eq!(whole.len(), weights.len());
        let gradient = scatter_sum(&comm, &Host, &[2, 2], 1, &weights.to_vec()).unwrap();
        assert_eq!(gradient, [[3.0, 300.0], [30.0, 3000.0]][comm.rank()]);
    })
    .unwrap();
}

#[test]
fn a_bias_behind_a_sum_is_counted_once() {
    phalanx::run(2, |comm| {
        let layer = RowParallel { inputs: 2, outputs: 1, weight: vec![1.0f64; 2], bias: Some(vec![100.0]) };
        let x = [[1.0, 2.0], [3.0, 4.0]][comm.rank()];
        assert_eq!(layer.forward(&comm, &Host, &&x[..]).unwrap(), [110.0]);
        let gradients = layer.backward(&Host, &&x[..], &&[1.0][..]).unwrap();
        assert_eq!(gradients.bias.unwrap(), [1.0]);
        assert_eq!((gradients.input, gradients.weight), (vec![1.0; 2], x.to_vec()));
    })
    .unwrap();
}

/// Two layers, `W₂ tanh(W₁ x + b₁) + b₂`, with the loss Σ y · g.
struct Layers {
    rows: usize,
    width: usize,
    hidden: usize,
}

struct Gradients {
    y: Vec<f64>,
    x: Vec<f64>,
    /// Of W₁ and b₁, and of W₂ and b₂.
    weights: [Vec<f64>; 4],
}

impl Layers {
    fn x(&self) -> Vec<f64> {
        numbers(2, self.rows * self.width)
    }

    /// This rank's part of both layers.
    fn parts(&self, own: Range<usize>) -> (ColumnParallel<Vec<f64>>, RowParallel<Vec<f64>>) {
        let Layers { width, hidden, .. } = *self;
        let (w1, b1) = (numbers(3, hidden * width), numbers(4, hidden));
        let (w2, b2) = (numbers(5, width * hidden), numbers(6, width));
        let columns = |row: usize| w2[row * hidden..][own.clone()].to_vec();
        let up = ColumnParallel {
            inputs: width,
            outputs: own.len(),
            weight: w1[own.start * width..own.end * width].to_vec(),
            bias: Some(b1[own.clone()].to_vec()),
        };
        let weight = (0..width).flat_map(columns).collect();
        (up, RowParallel { inputs: own.len(), outputs: width, weight, bias: Some(b2) })
    }

    /// Forward and backward; along the sequence each rank has a part of x, y and the gradient, if `by_sequence`.
    fn run(&self, comm: &Comm, by_sequence: bool) -> Gradients {
        let own = part(comm, self.hidden);
        let (up, down) = self.parts(own);
        let shape = [self.rows, self.width];
        let mine = |whole: &Vec<f64>| own_part(comm, &Host, &shape, 0, whole).unwrap();
        let (x, g) = (self.x(), numbers(7, self.rows * self.width));
        // In: what all ranks need of x, and g.
        let all = |own: Vec<f64>| gather(comm, &Host, &shape, 0, &&own[..]).unwrap();
        let x = if by_sequence { all(mine(&x)) } else { x };
        let inner = up.forward(&Host, &&x[..]).unwrap();
        let h: Vec<f64> = inner.iter().map(|x| x.tanh()).collect();
        let y = if by_sequence {
            let summand = down.forward_unsummed(&Host, &&h[..]).unwrap();
            let mut y = scatter_sum(comm, &Host, &shape, 0, &summand).unwrap();
            down.add_bias(&Host, &mut y).unwrap();
            y
        } else {
            down.forward(comm, &Host, &&h[..]).unwrap()
        };

        let g = if by_sequence { all(mine(&g)) } else { g };
        let of_down = down.backward(&Host, &&h[..], &&g[..]).unwrap();
        let of_inner: Vec<f64> = of_down.input.iter().zip(&h).map(|(g, h)| g * (1.0 - h * h)).collect();
        let of_up = if by_sequence {
            let mut of_up = up.backward_unsummed(&Host, &&x[..], &&of_inner[..]).unwrap();
            of_up.input = scatter_sum(comm, &Host, &shape, 0, &of_up.input).unwrap();
            of_up
        } else {
            up.backward(comm, &Host, &&x[..], &&of_inner[..]).unwrap()
        };
        let weights = [of_up.weight, of_up.bias.unwrap(), of_down.weight, of_down.bias.unwrap()];
        Gradients { y, x: of_up.input, weights }
    }
}

#[test]
fn split_layers_are_those_of_one_rank() {
    for (rows, width, hidden) in [(4, 3, 8), (5, 2, 7), (9, 4, 16)] {
        let layers = Layers { rows, width, hidden };
        let alone = phalanx::run(1, |comm| layers.run(&comm, false)).unwrap().remove(0);
        for ranks in 1..=hidden.min(8) {
            for by_sequence in [false, true] {
                phalanx::run(ranks, |comm| {
                    let here = layers.run(&comm, by_sequence);
                    let (own, of_rows) = (part(&comm, hidden), part(&comm, rows));
                    let rows_of = |whole: &[f64]| match by_sequence {
                        true => whole[of_rows.start * width..of_rows.end * width].to_vec(),
                        false => whole.to_vec(),
                    };
                    close(&here.y, &rows_of(&alone.y));
                    close(&here.x, &rows_of(&alone.x));
                    close(&here.weights[0], &alone.weights[0][own.start * width..own.end * width]);
                    close(&here.weights[1], &alone.weights[1][own.clone()]);
                    let columns = |row: usize| alone.weights[2][row * hidden..][own.clone()].to_vec();
                    close(&here.weights[2], &(0..width).flat_map(columns).collect::<Vec<_>>());
                    close(&here.weights[3], &alone.weights[3]);
                })
                .unwrap();
            }
        }
    }
}

/// Norm weights see a part of the tokens on each rank: gradients 1 and 2 on one, 3 and 4 on the other.
#[test]
fn gradients_of_norm_weights_are_summed_under_sequence_parallelism() {
    phalanx::run(2, |comm| {
        let of_tokens = [[1.0f64, 2.0], [3.0, 4.0]][comm.rank()];
        let mut gradient = [of_tokens.iter().sum::<f64>()];
        sum(&comm, &mut gradient).unwrap();
        assert_eq!(gradient, [10.0]);
    })
    .unwrap();
}

#[test]
fn cross_entropy_is_as_worked_out() {
    phalanx::run(2, |comm| {
        let mut logits = [[0.0f64, 1.0], [2.0, 3.0]][comm.rank()];
        let losses = VocabularyParallel::forward(&comm, &Host, 4, &&logits[..], &[Some(3)], 0.1).unwrap();
        assert!((losses.losses()[0] - 0.590190).abs() < 1e-6, "{:?}", losses.losses());
        losses.backward(&mut &mut logits[..], &[1.0]).unwrap();
        let expected = [[0.007059, 0.062144], [0.211883, -0.281086]][comm.rank()];
        for (here, expected) in logits.iter().zip(expected) {
            assert!((here - expected).abs() < 1e-6, "{here} is not {expected}");
        }
    })
    .unwrap();
}

/// Loss and gradients of whole rows, on one rank and without any trick.
fn dense(logits: &[f64], vocabulary: usize, targets: &[Option<u32>], smoothing: f64) -> (Vec<f64>, Vec<f64>) {
    let (mut losses, mut gradients) = (Vec::new(), Vec::new());
    for (row, target) in logits.chunks_exact(vocabulary).zip(targets) {
        let total: f64 = row.iter().map(|z| z.exp()).sum();
        let weight = |word: usize| {
            smoothing / vocabulary as f64 + if *target == Some(word as u32) { 1.0 - smoothing } else { 0.0 }
        };
        let counts = f64::from(u8::from(target.is_some()));
        let loss = |(word, z): (usize, &f64)| weight(word) * (total.ln() - z);
        losses.push(counts * row.iter().enumerate().map(loss).sum::<f64>());
        gradients
            .extend(row.iter().enumerate().map(|(word, z)| counts * (z.exp() / total - weight(word)) * 0.5));
    }
    (losses, gradients)
}

#[test]
fn cross_entropy_over_any_number_of_ranks_is_that_of_one() {
    const ROWS: usize = 6;
    for vocabulary in [5, 8, 19] {
        let logits: Vec<f64> = numbers(8, ROWS * vocabulary).iter().map(|x| x * 5.0).collect();
        let targets: Vec<Option<u32>> =
            (0..ROWS).map(|row| (row != 2).then_some((row * 7 % vocabulary) as u32)).collect();
        for smoothing in [0.0, 0.1] {
            let (expected, gradients) = dense(&logits, vocabulary, &targets, smoothing);
            // With 8 ranks and 5 words, some ranks have none.
            for ranks in 1..=8 {
                phalanx::run(ranks, |comm| {
                    let own = part(&comm, vocabulary);
                    let columns = |whole: &[f64]| -> Vec<f64> {
                        whole.chunks_exact(vocabulary).flat_map(|row| row[own.clone()].to_vec()).collect()
                    };
                    let mut mine = columns(&logits);
                    let losses = VocabularyParallel::forward(
                        &comm,
                        &Host,
                        vocabulary,
                        &&mine[..],
                        &targets,
                        smoothing,
                    )
                    .unwrap();
                    close(losses.losses(), &expected);
                    assert!((losses.mean() - expected.iter().sum::<f64>() / 5.0).abs() < 1e-12);
                    losses.backward(&mut &mut mine[..], &[0.5; ROWS]).unwrap();
                    close(&mine, &columns(&gradients));
                    // In bf16, to its precision.
                    let mut short: Vec<bf16> = columns(&logits).into_iter().map(bf16::from_f64).collect();
                    let losses = VocabularyParallel::forward(
                        &comm,
                        &Host,
                        vocabulary,
                        &&short[..],
                        &targets,
                        smoothing,
                    )
                    .unwrap();
                    for (here, expected) in losses.losses().iter().zip(&expected) {
                        assert!((here - expected).abs() < 0.05, "{here} is not {expected}");
                    }
                    losses.backward(&mut &mut short[..], &[0.5; ROWS]).unwrap();
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn great_logits_give_finite_losses_and_gradients() {
    phalanx::run(2, |comm| {
        let mut logits = [[1e4f32, -1e4], [0.0, 1e4]][comm.rank()];
        let losses = VocabularyParallel::forward(&comm, &Host, 4, &&logits[..], &[Some(1)], 0.1).unwrap();
        assert!(losses.mean().is_finite() && losses.mean() > 1e4);
        losses.backward(&mut &mut logits[..], &[1.0]).unwrap();
        assert!(logits.iter().all(|gradient| gradient.is_finite()));
    })
    .unwrap();
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_sent() {
    phalanx::run(2, |comm| {
        let text = gather(&comm, &Host, &[2, 2], 2, &&[1.0f32][..]).unwrap_err().to_string();
        assert!(
            text.contains("dimension 2 of a tensor of shape [2, 2]: it has the dimensions 0 to 1"),
            "{text}"
        );
        let text = gather(&comm, &Host, &[2, 2], 1, &&[1.0f32][..]).unwrap_err().to_string();
        assert!(text.contains("1 numbers of this rank's part: 2 are expected"), "{text}");
        let forward = |targets: &[Option<u32>], smoothing: f64| {
            VocabularyParallel::forward(&comm, &Host, 4, &&[0.0f32; 2][..], targets, smoothing)
                .unwrap_err()
                .to_string()
        };
        assert!(forward(&[Some(4)], 0.0).contains("target 4 of a vocabulary of 4"));
        assert!(forward(&[Some(1); 2], 0.0).contains("2 logits for 2 rows and words"));
        assert!(forward(&[Some(1)], 1.5).contains("a label smoothing of 1.5"));
        let layer = ColumnParallel { inputs: 3, outputs: 1, weight: vec![0.0f32; 3], bias: None };
        let text = layer.forward(&Host, &&[0.0f32; 4][..]).unwrap_err().to_string();
        assert!(text.contains("4 numbers of the input for a layer of 3 inputs and 1 outputs"), "{text}");
    })
    .unwrap();
}
