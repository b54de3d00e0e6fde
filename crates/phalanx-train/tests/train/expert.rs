//! Expert parallelism.

use phalanx::{Comm, ReduceOp, bf16};
use phalanx_train::Error;
use phalanx_train::device::Host;
use phalanx_train::expert::Experts;

const WIDTH: usize = 3;
const EXPERTS: usize = 5;
const TOP: usize = 2;
const STEPS: usize = 3;

/// A number between -1 and 1 that depends on all of these.
fn number(step: usize, kind: usize, index: usize) -> f64 {
    let mut x = ((step as u64) << 48) + ((kind as u64) << 32) + index as u64 + 0x9E37_79B9;
    for _ in 0..3 {
        x ^= x >> 31;
        x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    }
    (x >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

fn weight(expert: usize, row: usize, column: usize) -> f64 {
    number(0, 1, (expert * WIDTH + row) * WIDTH + column)
}

/// Tokens of a step: all of them, in the order of the ranks that have them.
struct Step {
    tokens: Vec<f64>,
    chosen: Vec<u32>,
    weights: Vec<f64>,
    /// Gradient of the output.
    gradient: Vec<f64>,
}

impl Step {
    /// Expert 3 is never chosen.
    fn new(step: usize, tokens: usize) -> Step {
        let numbers = |kind, n: usize| (0..n).map(|i| number(step, kind, i)).collect::<Vec<_>>();
        let chosen = (0..tokens).flat_map(|token| {
            let first = (token * 7 + step * 3) % EXPERTS;
            let second = (first + 1 + token % 2) % EXPERTS;
            [first, second].map(|expert| if expert == 3 { 4 - step as u32 } else { expert as u32 })
        });
        Step {
            tokens: numbers(2, tokens * WIDTH),
            chosen: chosen.collect(),
            weights: numbers(3, tokens * TOP),
            gradient: numbers(4, tokens * WIDTH),
        }
    }
}

/// `tanh(W x)` of an expert, row by row.
fn expert_forward(expert: usize, rows: &[f64]) -> Vec<f64> {
    let row = |x: &[f64]| {
        let x = x.to_vec();
        (0..WIDTH).map(move |i| (0..WIDTH).map(|j| weight(expert, i, j) * x[j]).sum::<f64>().tanh())
    };
    rows.chunks_exact(WIDTH).flat_map(row).collect()
}

/// Gradients of the rows; that of the weights is added to `of_weights`.
fn expert_backward(
    expert: usize,
    rows: &[f64],
    outputs: &[f64],
    gradient: &[f64],
    of_weights: &mut [f64],
) -> Vec<f64> {
    let mut of_rows = vec![0.0; rows.len()];
    for at in (0..rows.len()).step_by(WIDTH) {
        for i in 0..WIDTH {
            let inner = gradient[at + i] * (1.0 - outputs[at + i].powi(2));
            for j in 0..WIDTH {
                of_weights[i * WIDTH + j] += inner * rows[at + j];
                of_rows[at + j] += inner * weight(expert, i, j);
            }
        }
    }
    of_rows
}

/// What a step of the layer gives: outputs, gradients of tokens and of routing weights, and of each expert's parameters.
#[derive(Debug, Default)]
struct Results {
    output: Vec<f64>,
    of_tokens: Vec<f64>,
    of_weights: Vec<f64>,
    of_experts: Vec<Vec<f64>>,
}

/// The layer on one rank, without any routing.
fn dense(step: &Step) -> Results {
    let tokens = step.tokens.len() / WIDTH;
    let mut results = Results {
        output: vec![0.0; tokens * WIDTH],
        of_tokens: vec![0.0; tokens * WIDTH],
        of_weights: vec![0.0; tokens * TOP],
        of_experts: vec![vec![0.0; WIDTH * WIDTH]; EXPERTS],
    };
    for choice in 0..tokens * TOP {
        let range = choice / TOP * WIDTH..(choice / TOP + 1) * WIDTH;
        let (token, gradient) = (&step.tokens[range.clone()], &step.gradient[range.clone()]);
        let (expert, weight) = (step.chosen[choice] as usize, step.weights[choice]);
        let output = expert_forward(expert, token);
        let inner: Vec<f64> = gradient.iter().map(|g| g * weight).collect();
        let of_token = expert_backward(expert, token, &output, &inner, &mut results.of_experts[expert]);
        for (at, i) in range.enumerate() {
            results.output[i] += weight * output[at];
            results.of_tokens[i] += of_token[at];
            results.of_weights[choice] += gradient[at] * output[at];
        }
    }
    results
}

fn parallel(comm: &Comm, step: &Step) -> Results {
    let experts = Experts::new(comm, EXPERTS).unwrap();
    let routing = experts.route(comm, TOP, &step.chosen, &step.weights).unwrap();
    let rows = routing.dispatch(comm, &Host, WIDTH, &&step.tokens[..]).unwrap();
    let mut outputs = vec![0.0; rows.len()];
    for expert in experts.local() {
        let range = routing.elements_of(expert, WIDTH);
        outputs[range.clone()].copy_from_slice(&expert_forward(expert, &rows[range]));
    }
    let combined = routing.combine(comm, &Host, WIDTH, &&outputs[..]).unwrap();
    let (of_outputs, of_weights) =
        routing.combine_backward(comm, &Host, WIDTH, &&step.gradient[..], &combined.returned).unwrap();
    let mut of_rows = vec![0.0; rows.len()];
    let mut of_experts = Vec::new();
    for expert in experts.local() {
        let range = routing.elements_of(expert, WIDTH);
        let mut of_parameters = vec![0.0; WIDTH * WIDTH];
        of_rows[range.clone()].copy_from_slice(&expert_backward(
            expert,
            &rows[range.clone()],
            &outputs[range.clone()],
            &of_outputs[range],
            &mut of_parameters,
        ));
        of_experts.push(of_parameters);
    }
    let of_tokens = routing.dispatch_backward(comm, &Host, WIDTH, &&of_rows[..]).unwrap();
    Results { output: combined.output, of_tokens, of_weights, of_experts }
}

fn close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= 1e-12, "{a} is not {b}");
    }
}

#[test]
fn outputs_and_gradients_are_those_of_one_rank() {
    for ranks in 1..=EXPERTS {
        // The second rank of two and more has no tokens; the others have 4, 5, 6 and so on.
        let lens: Vec<usize> = (0..ranks).map(|rank| if rank == 1 { 0 } else { 4 + rank }).collect();
        phalanx::run(ranks, |comm| {
            for step in 0..STEPS {
                let all = Step::new(step, lens.iter().sum());
                let before: usize = lens[..comm.rank()].iter().sum();
                let own = before..before + lens[comm.rank()];
                let part = |all: &[f64], n: usize| all[own.start * n..own.end * n].to_vec();
                let step = Step {
                    tokens: part(&all.tokens, WIDTH),
                    chosen: all.chosen[own.start * TOP..own.end * TOP].to_vec(),
                    weights: part(&all.weights, TOP),
                    gradient: part(&all.gradient, WIDTH),
                };
                let (here, expected) = (parallel(&comm, &step), dense(&all));
                close(&here.output, &part(&expected.output, WIDTH));
                close(&here.of_tokens, &part(&expected.of_tokens, WIDTH));
                close(&here.of_weights, &part(&expected.of_weights, TOP));
                let local = Experts::new(&comm, EXPERTS).unwrap().local();
                for (of_expert, expected) in here.of_experts.iter().zip(&expected.of_experts[local]) {
                    close(of_expert, expected);
                }
            }
        })
        .unwrap();
    }
}

#[test]
fn an_idle_expert_has_a_gradient_of_zeros() {
    phalanx::run(2, |comm| {
        for _ in 0..3 {
            // All tokens are rank 0's, and go to its expert.
            let tokens = if comm.rank() == 0 { vec![1.0f64, 2.0] } else { Vec::new() };
            let experts = Experts::new(&comm, 2).unwrap();
            let routing =
                experts.route(&comm, 1, &vec![0; tokens.len()], &vec![1.0f64; tokens.len()]).unwrap();
            let rows = routing.dispatch(&comm, &Host, 1, &&tokens[..]).unwrap();
            assert_eq!(rows.len(), [2, 0][comm.rank()]);
            let mut of_parameters = [0.0; 4];
            for row in &rows[routing.elements_of(comm.rank(), 1)] {
                of_parameters.iter_mut().for_each(|gradient| *gradient += row);
            }
            assert_eq!(of_parameters, [[3.0; 4], [0.0; 4]][comm.rank()]);
            let combined = routing.combine(&comm, &Host, 1, &&rows[..]).unwrap();
            assert_eq!(combined.output, tokens);
            let statistics = routing.statistics(&comm).unwrap();
            assert_eq!((statistics.tokens.clone(), statistics.dropped), (vec![2, 0], 0));
            assert_eq!((statistics.imbalance(), statistics.idle().collect::<Vec<_>>()), (2.0, vec![1]));
            assert_eq!(statistics.balance_loss(&[0.75, 0.25]), 1.5);
        }
    })
    .unwrap();
}

/// A mean over 4 tokens on 2 ranks: expert 0's tokens have the gradients 1 and 3, one on each rank, and expert 1's 2 and 10.
#[test]
fn gradients_of_experts_are_means_as_without_expert_parallelism() {
    phalanx::run(2, |comm| {
        let of_tokens = [[1.0f64, 2.0], [3.0, 10.0]][comm.rank()];
        // Each rank's loss is the mean over its two tokens.
        let own = of_tokens.map(|gradient| gradient / 2.0);

        let experts = Experts::new(&comm, 2).unwrap();
        let routing = experts.route(&comm, 1, &[0, 1], &[1.0f64; 2]).unwrap();
        let returned = routing.combine(&comm, &Host, 1, &&[0.0; 2][..]).unwrap().returned;
        let (rows, _) = routing.combine_backward(&comm, &Host, 1, &&own[..], &returned).unwrap();
        let parallel = rows.iter().sum::<f64>() * experts.gradient_factor();
        assert_eq!(parallel, [1.0, 3.0][comm.rank()]);

        let mut without = own;
        comm.all_reduce_in_place(&mut without, ReduceOp::Avg).unwrap();
        assert_eq!(without[comm.rank()], parallel);
    })
    .unwrap();
}

#[test]
fn first_choices_come_before_second_ones_where_the_capacity_is_short() {
    phalanx::run(2, |comm| {
        let experts = Experts::new(&comm, 2).unwrap().with_capacity(2).unwrap();
        // Expert 0 is the second choice of token 0, and the first of the others.
        let chosen = [1, 0, 0, 1, 0, 1, 0, 1];
        let routing = experts.route(&comm, 2, &chosen, &[0.5f64; 8]).unwrap();
        // Expert 0: tokens 1 and 2, by their first choices. Expert 1: token 0 by its first, token 1 by its second.
        assert_eq!((routing.dropped(), routing.rows()), (4, 4));
        let tokens = [1.0f64, 10.0, 100.0, 1000.0];
        let rows = routing.dispatch(&comm, &Host, 1, &&tokens[..]).unwrap();
        assert_eq!(rows, [[10.0, 100.0, 10.0, 100.0], [1.0, 10.0, 1.0, 10.0]][comm.rank()]);
        let combined = routing.combine(&comm, &Host, 1, &&rows[..]).unwrap();
        assert_eq!(combined.output, [0.5, 10.0, 50.0, 0.0]);
        let (_, of_weights) =
            routing.combine_backward(&comm, &Host, 1, &&[1.0; 4][..], &combined.returned).unwrap();
        assert_eq!(of_weights, [1.0, 0.0, 10.0, 10.0, 100.0, 0.0, 0.0, 0.0]);
        assert_eq!(routing.statistics(&comm).unwrap().dropped, 8);
    })
    .unwrap();
}

#[test]
fn weighted_sums_of_bf16_are_rounded_once() {
    let outputs = phalanx::run(2, |comm| {
        let experts = Experts::new(&comm, 3).unwrap();
        let routing = experts.route(&comm, 3, &[0, 1, 2], &[1.0f32; 3]).unwrap();
        // 256 + 1 + 1 in bf16, step by step, is 256.
        let rows = routing.dispatch(&comm, &Host, 1, &&[bf16::ONE][..]).unwrap();
        let mut rows = rows;
        for expert in experts.local() {
            rows[routing.elements_of(expert, 1)].fill(bf16::from_f32(if expert == 0 { 256.0 } else { 1.0 }));
        }
        routing.combine(&comm, &Host, 1, &&rows[..]).unwrap().output[0].to_f32()
    });
    assert_eq!(outputs.unwrap(), [258.0; 2]);
}

#[test]
fn what_makes_no_sense_is_an_error_on_every_rank() {
    let error = |result: phalanx_train::Result<phalanx_train::expert::Routing>| match result {
        Err(Error::Usage(text)) => text,
        other => panic!("{other:?}"),
    };
    phalanx::run(3, |comm| {
        let experts = Experts::new(&comm, 4).unwrap();
        assert_eq!((experts.of(0), experts.of(1), experts.of(2)), (0..2, 2..3, 3..4));
        for (chosen, weights, says) in [
            (vec![0, 4], vec![1.0f32; 2], "token 1 goes to expert 4: the experts are 0 to 3"),
            (vec![0, 1], vec![1.0; 3], "2 chosen experts and 3 weights"),
        ] {
            let wrong = comm.rank() == 1;
            let text = if wrong {
                error(experts.route(&comm, 1, &chosen, &weights))
            } else {
                error(experts.route(&comm, 1, &[0], &[1.0f32]))
            };
            let expected = if wrong { says } else { "rank 1 cannot route its tokens" };
            assert!(text.contains(expected), "{text}");
        }
        assert!(Experts::new(&comm, 2).unwrap_err().to_string().contains("2 experts for 3 ranks"));
        assert!(experts.clone().with_capacity(0).is_err());
        // A wrong length is refused before anything is sent, and the others wait for nobody: all have it here.
        let routing = experts.route(&comm, 1, &[0], &[1.0f32]).unwrap();
        let text = routing.dispatch(&comm, &Host, 2, &&[1.0f32; 3][..]).unwrap_err().to_string();
        assert!(text.contains("3 numbers for 1 tokens of 2: 2 are needed"), "{text}");
        // The communicator is as it was.
        routing.dispatch(&comm, &Host, 1, &&[1.0f32][..]).unwrap();
    })
    .unwrap();
}
