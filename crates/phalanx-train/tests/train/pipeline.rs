//! Pipelines: schedules, and carrying them out.

use phalanx_train::device::Host;
use phalanx_train::pipeline::{
    Action, Costs, Kind, Pipeline, Position, Schedule, Stage, mean_loss, reduce_tied_gradient,
};
use phalanx_train::{Error, Result};

const WIDTH: usize = 3;

/// A stage: tanh(W x) for each sample; the last stage's loss of a sample is the sum of its outputs times the sample's number.
struct Layer {
    weights: Vec<f64>,
    /// Inputs and outputs that are kept, by micro-batch and chunk, and how many there were at most.
    kept: std::collections::HashMap<(usize, usize), (Vec<f64>, Vec<f64>)>,
    peak: usize,
    /// Gradients before the activation, until the weights' are computed.
    inner: std::collections::HashMap<(usize, usize), Vec<f64>>,
    gradients: Vec<Vec<f64>>,
    losses: Vec<(f64, usize)>,
    /// First sample and number of samples of each micro-batch.
    samples: Vec<(usize, usize)>,
}

fn weight(stage: usize, at: usize) -> f64 {
    ((stage * 37 + at * 11) as f64 * 0.61).sin()
}

fn input(sample: usize) -> impl Iterator<Item = f64> {
    (0..WIDTH).map(move |at| ((sample * 5 + at) as f64 * 0.43).cos())
}

impl Layer {
    fn new(chunks: usize, samples: &[(usize, usize)]) -> Layer {
        Layer {
            weights: Vec::new(),
            kept: Default::default(),
            peak: 0,
            inner: Default::default(),
            gradients: vec![vec![0.0; WIDTH * WIDTH]; chunks],
            losses: Vec::new(),
            samples: samples.to_vec(),
        }
    }

    fn use_stage(&mut self, stage: usize) {
        self.weights = (0..WIDTH * WIDTH).map(|at| weight(stage, at)).collect();
    }
}

impl Stage<Host, f64> for Layer {
    fn forward(&mut self, at: Position, given: Option<Vec<f64>>) -> Result<Option<Vec<f64>>> {
        self.use_stage(at.stage);
        let (first, count) = self.samples[at.micro];
        assert_eq!(given.is_none(), at.is_first);
        let input = given.unwrap_or_else(|| (first..first + count).flat_map(input).collect());
        let row =
            |x: &[f64], i: usize| (0..WIDTH).map(|j| self.weights[i * WIDTH + j] * x[j]).sum::<f64>().tanh();
        let output: Vec<f64> = input
            .chunks_exact(WIDTH)
            .flat_map(|x| (0..WIDTH).map(move |i| (x, i)))
            .map(|(x, i)| row(x, i))
            .collect();
        self.kept.insert((at.micro, at.chunk), (input, output.clone()));
        self.peak = self.peak.max(self.kept.len());
        if at.is_last {
            // The mean of the numbers first + 1, first + 2 and so on: right value 18.
            self.losses.push(((first + 1..=first + count).sum::<usize>() as f64 / count as f64, count));
        }
        Ok((!at.is_last).then_some(output))
    }

    fn backward(&mut self, at: Position, gradient: Option<Vec<f64>>) -> Result<Option<Vec<f64>>> {
        self.use_stage(at.stage);
        assert_eq!(gradient.is_none(), at.is_last);
        let (first, count) = self.samples[at.micro];
        let all: usize = self.samples.iter().map(|(_, count)| count).sum();
        let of_loss = |sample: usize| [(sample + 1) as f64 / all as f64; WIDTH];
        let gradient = gradient.unwrap_or_else(|| (first..first + count).flat_map(of_loss).collect());
        let (_, output) = &self.kept[&(at.micro, at.chunk)];
        let inner: Vec<f64> = gradient.iter().zip(output).map(|(g, y)| g * (1.0 - y * y)).collect();
        let of_input =
            |inner: &[f64], j: usize| (0..WIDTH).map(|i| inner[i] * self.weights[i * WIDTH + j]).sum();
        let of_inputs = inner.chunks_exact(WIDTH).flat_map(|x| (0..WIDTH).map(move |j| (x, j)));
        let of_inputs = of_inputs.map(|(x, j)| of_input(x, j)).collect();
        self.inner.insert((at.micro, at.chunk), inner);
        if !at.splits_backward {
            self.backward_weights(at)?;
        }
        Ok((!at.is_first).then_some(of_inputs))
    }

    fn backward_weights(&mut self, at: Position) -> Result<()> {
        let (input, _) = self.kept.remove(&(at.micro, at.chunk)).expect("it is kept");
        let inner = self.inner.remove(&(at.micro, at.chunk)).expect("it is kept");
        for (x, inner) in input.chunks_exact(WIDTH).zip(inner.chunks_exact(WIDTH)) {
            for (at_weight, gradient) in self.gradients[at.chunk].iter_mut().enumerate() {
                *gradient += inner[at_weight / WIDTH] * x[at_weight % WIDTH];
            }
        }
        Ok(())
    }
}

/// Gradients of each stage, from all ranks.
fn gradients(schedule: &Schedule, samples: &[(usize, usize)]) -> Vec<Vec<f64>> {
    let of_ranks = phalanx::run(schedule.ranks(), |comm| {
        let pipeline = Pipeline::new(&comm, schedule.clone()).unwrap();
        let mut layer = Layer::new(schedule.chunks(), samples);
        pipeline.run(&comm, &Host, &mut layer, |micro, _| samples[micro].1 * WIDTH).unwrap();
        assert_eq!(layer.peak, schedule.peak_activations(comm.rank()));
        let expected = samples.iter().map(|(_, count)| count).sum::<usize>() as f64 / 2.0 + 0.5;
        assert_eq!(mean_loss(&comm, &layer.losses).unwrap(), expected);
        layer.gradients
    })
    .unwrap();
    (0..schedule.stages())
        .map(|stage| of_ranks[stage % schedule.ranks()][stage / schedule.ranks()].clone())
        .collect()
}

fn micro_batches(counts: &[usize]) -> Vec<(usize, usize)> {
    let mut first = 0;
    let mut next = |count: &usize| {
        first += count;
        (first - count, *count)
    };
    counts.iter().map(&mut next).collect()
}

/// All schedules of so many stages, on 1 to 8 ranks.
fn schedules(stages: usize, micros: usize) -> Vec<Schedule> {
    let mut schedules = Vec::new();
    for ranks in (1..=8).filter(|ranks| stages.is_multiple_of(*ranks)) {
        if ranks == stages {
            schedules.push(Schedule::gpipe(ranks, micros).unwrap());
            schedules.push(Schedule::one_forward_one_backward(ranks, micros).unwrap());
            schedules.push(Schedule::zero_bubble(ranks, micros).unwrap());
        }
        if micros.is_multiple_of(ranks) {
            schedules.push(Schedule::interleaved(ranks, stages / ranks, micros).unwrap());
        }
    }
    schedules
}

#[test]
fn gradients_and_losses_are_those_of_one_rank() {
    for (stages, counts) in [
        (4, vec![8]),
        (4, vec![5, 3]),
        (4, vec![3, 3, 2]),
        (4, vec![2; 4]),
        (8, vec![1; 8]),
        (6, vec![1; 6]),
        (1, vec![3, 5]),
    ] {
        let samples = micro_batches(&counts);
        let all =
            gradients(&Schedule::interleaved(1, stages, 1).unwrap(), &micro_batches(&[counts.iter().sum()]));
        let schedules = schedules(stages, counts.len());
        assert!(schedules.len() >= 4);
        for schedule in schedules {
            for (here, expected) in gradients(&schedule, &samples).iter().flatten().zip(all.iter().flatten())
            {
                assert!((here - expected).abs() < 1e-12, "{stages} {counts:?}: {here} is not {expected}");
            }
        }
    }
}

#[test]
fn schedules_keep_and_wait_as_theory_says() {
    // A backward takes twice a forward.
    let bubble = |schedule: &Schedule| schedule.timeline(Costs::default()).bubble();
    let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
    for ranks in 1..=8 {
        for micros in 1..=16 {
            let theory = |chunks: usize| (ranks - 1) as f64 / (chunks * micros + ranks - 1) as f64;
            let gpipe = Schedule::gpipe(ranks, micros).unwrap();
            assert!(close(bubble(&gpipe), theory(1)));
            assert_eq!(gpipe.peak_activations(0), micros);

            let plain = Schedule::one_forward_one_backward(ranks, micros).unwrap();
            assert!(close(bubble(&plain), theory(1)), "{ranks} {micros} {}", bubble(&plain));
            let zero = Schedule::zero_bubble(ranks, micros).unwrap();
            assert!(bubble(&zero) <= bubble(&plain));
            if micros >= 2 * ranks && ranks > 1 {
                assert!(
                    bubble(&zero) < 0.5 * bubble(&plain),
                    "{ranks} {micros} {}",
                    zero.timeline(Costs::default()).to_table()
                );
            }
            for rank in 0..ranks {
                assert_eq!(plain.peak_activations(rank), (ranks - rank).min(micros));
                assert!(zero.peak_activations(rank) <= ranks);
            }
            for chunks in (2..=4).filter(|_| micros % ranks == 0) {
                let interleaved = Schedule::interleaved(ranks, chunks, micros).unwrap();
                assert!(close(bubble(&interleaved), theory(chunks)), "{ranks} {chunks} {micros}");
            }
        }
    }
}

#[test]
fn messages_that_are_needed_in_another_order_than_they_are_sent_are_kept() {
    let action = |kind, micro| Action { kind, micro, chunk: 0 };
    let (forward, backward) = (|micro| action(Kind::Forward, micro), |micro| action(Kind::Backward, micro));
    let first = vec![forward(0), forward(1), forward(2), backward(0), backward(1), backward(2)];
    let last = vec![forward(2), backward(2), forward(0), forward(1), backward(1), backward(0)];
    let samples = [(0, 3), (3, 1), (4, 2)];
    let crossed = gradients(&Schedule::of(2, 1, 3, vec![first, last]).unwrap(), &samples);
    let plain = gradients(&Schedule::gpipe(2, 3).unwrap(), &samples);
    for (here, expected) in crossed.iter().flatten().zip(plain.iter().flatten()) {
        assert!((here - expected).abs() < 1e-12, "{here} is not {expected}");
    }
}

#[test]
fn what_cannot_be_carried_out_is_refused_when_it_is_made() {
    let problem = |schedule: Result<Schedule>| match schedule {
        Err(Error::Usage(text)) => text,
        other => panic!("{other:?}"),
    };
    let text = problem(Schedule::interleaved(4, 2, 6));
    assert!(
        text.contains(
            "6 micro-batches in an interleaved schedule of 4 ranks: take a multiple of 4, such as 8"
        ),
        "{text}"
    );
    assert!(problem(Schedule::gpipe(0, 1)).contains("1 micro-batches, 1 chunks on each of 0 ranks"));
    assert!(problem(Schedule::gpipe(2, 0)).contains("0 micro-batches"));
    let [forward, backward] =
        [Kind::Forward, Kind::Backward].map(|kind| move |micro| Action { kind, micro, chunk: 0 });
    let text = problem(Schedule::of(1, 1, 1, vec![vec![backward(0), forward(0)]]));
    assert!(text.contains("rank 0: micro-batch 0 in chunk 0 has [Backward, Forward]"), "{text}");
    assert!(problem(Schedule::of(1, 1, 1, vec![vec![forward(1)]])).contains("rank 0: there is no F1"));
    // Rank 0 wants the gradient of 1 before it has sent 0.
    let crossed = vec![
        vec![forward(1), backward(1), forward(0), backward(0)],
        vec![forward(0), backward(0), forward(1), backward(1)],
    ];
    let text = problem(Schedule::of(2, 1, 2, crossed));
    assert!(text.contains("rank 0 waits for ever before B1"), "{text}");
    phalanx::run(3, |comm| {
        let error = Pipeline::new(&comm, Schedule::gpipe(2, 2).unwrap()).unwrap_err().to_string();
        assert!(error.contains("a schedule for 2 ranks with a communicator of 3"), "{error}");
    })
    .unwrap();
}

/// A stage of another length, and one without the half of a backward that the schedule asks for.
#[test]
fn a_stage_that_does_not_fit_is_an_error_that_says_so() {
    struct Wrong;
    impl Stage<Host, f32> for Wrong {
        fn forward(&mut self, at: Position, _: Option<Vec<f32>>) -> Result<Option<Vec<f32>>> {
            Ok((at.stage == 0).then(|| vec![0.0; 2]))
        }
        fn backward(&mut self, _: Position, _: Option<Vec<f32>>) -> Result<Option<Vec<f32>>> {
            Ok(None)
        }
    }
    for (schedule, len, says) in [
        (
            Schedule::gpipe(1, 1).unwrap(),
            2,
            "the forward of stage 0 for micro-batch 0 gave 2 numbers: nothing",
        ),
        (Schedule::interleaved(1, 2, 1).unwrap(), 3, "gave 2 numbers: 3 numbers are expected"),
        (
            Schedule::interleaved(1, 2, 1).unwrap(),
            2,
            "the backward of stage 1 for micro-batch 0 gave nothing: 2 numbers",
        ),
    ] {
        phalanx::run(1, |comm| {
            let pipeline = Pipeline::new(&comm, schedule.clone()).unwrap();
            let error = pipeline.run(&comm, &Host, &mut Wrong, |_, _| len).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        })
        .unwrap();
    }
}

/// Two stages of a model share a weight, on two ranks each of which has other data.
#[test]
fn a_tied_weights_gradient_is_summed_over_stages_and_averaged_over_data() {
    phalanx::run(4, |comm| {
        let (stage, data) = (comm.rank() / 2, comm.rank() % 2);
        let stages = comm.split(Some(data as u32), 0).unwrap().unwrap();
        let replicas = comm.split(Some(stage as u32), 0).unwrap().unwrap();
        let mut gradient = [[1.0f64, 3.0], [10.0, 20.0]][stage][data];
        reduce_tied_gradient::<Host, f64>(&stages, Some(&replicas), &mut std::slice::from_mut(&mut gradient))
            .unwrap();
        assert_eq!(gradient, 17.0);
    })
    .unwrap();
}

#[test]
fn a_picture_has_every_action_and_the_bubble() {
    let schedule = Schedule::interleaved(2, 2, 2).unwrap();
    let svg = schedule.timeline(Costs::default()).to_svg();
    for rank in 0..2 {
        for action in schedule.actions(rank) {
            assert!(svg.contains(&format!(">{action}</text>")), "{action}");
        }
    }
    assert!(svg.contains("bubble 20.0 %"), "{svg}");
}
