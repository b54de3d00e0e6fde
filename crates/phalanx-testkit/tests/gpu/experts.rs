//! Dispatch and combine of experts by own kernels: on the machine's GPUs if a trial has enough of them, else on emulated ones with
//! the emulator's model of the kernels.

use crate::failures::{self, SLACK, TIMEOUT};
use crate::own_kernels::{DEADLINE, free_bytes};
use crate::world::{done, download, expect, must, stream};
use libtest_mimic::{Failed, Trial};
use phalanx::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use phalanx::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr};
use phalanx::nccl::{ExpertLayout, Experts};
use phalanx::{Comm, DType, Error, F8E4M3, bf16};
use phalanx_testkit::emulated::{Emulated, on_own_kernels};
use phalanx_testkit::fault::Fault;
use phalanx_testkit::processes::{Launch, phase, ranks_per_gpu};
use phalanx_testkit::random::Random;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use phalanx_testkit::{Number, Scenario};
use std::sync::Arc;
use std::time::Instant;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("experts/routing", routing),
    Scenario::rank("experts/scaled", scaled),
    Scenario::rank("experts/repeated", repeated),
    Scenario::rank("experts/graphs", graphs),
    Scenario::rank("experts/two", two),
    Scenario::rank("experts/usage", usage),
    Scenario::rank("experts/memory", memory),
    Scenario::rank("experts/absent", absent),
    Scenario::rank("experts/mismatch", mismatch),
    Scenario::rank("experts/refused", refused),
    Scenario::rank("experts/endless", endless),
];

/// A trial's scenario, and its worlds: an algorithm, the kind of the ranks, and their number.
type Worlds = (&'static str, &'static [(&'static str, &'static str, usize)]);

const WORLDS: [Worlds; 10] = [
    (
        "routing",
        &[
            ("ll", "threads", 2),
            ("auto", "processes", 2),
            ("auto", "threads", 4),
            ("ll", "processes", 4),
            ("auto", "threads", 8),
            ("auto", "processes", 8),
        ],
    ),
    ("scaled", &[("auto", "threads", 2), ("ll", "processes", 3)]),
    ("repeated", &[("auto", "threads", 2), ("ll", "processes", 2), ("auto", "processes", 4)]),
    ("graphs", &[("auto", "threads", 2), ("ll", "processes", 3)]),
    ("two", &[("auto", "threads", 3), ("ll", "processes", 2)]),
    ("usage", &[("auto", "threads", 2)]),
    ("memory", &[("auto", "threads", 2), ("auto", "processes", 3)]),
    ("absent", &[("auto", "threads", 3), ("ll", "processes", 2)]),
    ("mismatch", &[("auto", "threads", 2)]),
    ("refused", &[("nccl", "threads", 2)]),
];

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (scenario, worlds) in WORLDS {
        for (algorithm, kind, ranks) in worlds {
            let name = format!("experts/{scenario}/{algorithm}/{kind}/{ranks}");
            let trial = Trial::test(name, move || {
                Ok(on_own_kernels(algorithm, *ranks, launch(scenario, kind, *ranks)).map(drop)?)
            });
            let is_alone = scenario != "memory" || ranks_per_gpu() == 1;
            trials.push(trial.only_if(is_alone, "what is free on a shared GPU changes with the others"));
        }
    }
    trials.push(Trial::test("experts/killed", killed));
    trials
}

fn launch(scenario: &str, kind: &str, ranks: usize) -> Launch {
    let name = format!("experts/{scenario}");
    let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name).expect("a scenario");
    let launch =
        Launch::new(scenario.name, ranks).arg(kind).deadline(DEADLINE).env("PHALANX_BACKEND", "nccl");
    if kind == "threads" { launch.on_threads() } else { launch }
}

/// What the routing of a trial is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Router {
    /// Any experts, of some tokens one that does not exist, or one twice. Some ranks have no tokens.
    Random,
    /// Only the last expert.
    LastOnly,
    /// Full ranks, whose tokens go to the experts of every second rank.
    EverySecondRank,
}

/// What one rank dispatches.
struct Input<T> {
    tokens: Vec<T>,
    scales: Vec<f32>,
    routing: Vec<i64>,
    weights: Vec<f32>,
}

/// The inputs of all ranks: the same on each of them.
fn inputs<T: Number>(layout: &ExpertLayout, ranks: usize, router: Router, seed: u64) -> Vec<Input<T>> {
    let mut random = Random::new(seed);
    let each = layout.experts / ranks;
    let expert = |random: &mut Random| match router {
        Router::Random => match random.below(12) {
            0 => -1,
            1 => [layout.experts as i64, i64::MIN, i64::MAX, 1 << 33][random.below(4)],
            _ => random.below(layout.experts) as i64,
        },
        Router::LastOnly => layout.experts as i64 - 1,
        Router::EverySecondRank => (random.below(ranks.div_ceil(2)) * 2 * each + random.below(each)) as i64,
    };
    let input = |rank: usize, random: &mut Random| {
        let is_empty = router == Router::Random && (rank + seed as usize) % 3 == 1;
        let all = router == Router::EverySecondRank;
        let n = if is_empty {
            0
        } else if all {
            layout.max_tokens
        } else {
            1 + random.below(layout.max_tokens)
        };
        let values = |len: usize, random: &mut Random| -> Vec<f32> {
            (0..len).map(|_| random.below(2001) as f32 / 1000.0 - 1.0).collect()
        };
        Input {
            tokens: (0..n * layout.hidden).map(|_| T::from_pattern(random.next_u64() & 0x3f7f)).collect(),
            scales: values(n * layout.scales, random),
            routing: (0..n * layout.top_k).map(|_| expert(random)).collect(),
            weights: values(n * layout.top_k, random),
        }
    };
    (0..ranks).map(|rank| input(rank, &mut random)).collect()
}

/// What an expert makes of a value.
fn expert_of_value<T: Number>(expert: usize, value: T) -> bf16 {
    bf16::from_f32((value.bits() % 251) as f32 * (0.5 + expert as f32 / 8.0) - 20.0)
}

/// The places of the rows that an expert gets: rank and token.
fn rows_of<T>(layout: &ExpertLayout, inputs: &[Input<T>], expert: usize) -> Vec<(usize, usize)> {
    let of_rank = |(rank, input): (usize, &Input<T>)| {
        let chosen: Vec<_> =
            input.routing.chunks_exact(layout.top_k).map(|of| of.contains(&(expert as i64))).collect();
        (0..chosen.len()).filter(|token| chosen[*token]).map(|token| (rank, token)).collect::<Vec<_>>()
    };
    inputs.iter().enumerate().flat_map(of_rank).collect()
}

/// The combined output of a rank.
fn output_of<T: Number>(
    layout: &ExpertLayout,
    input: &Input<T>,
    expert_of_value: impl Fn(usize, T) -> bf16,
) -> Vec<bf16> {
    let (hidden, top_k) = (layout.hidden, layout.top_k);
    let mut output = Vec::new();
    for (token, values) in input.tokens.chunks_exact(hidden).enumerate() {
        let mut sums = vec![0f32; hidden];
        for choice in token * top_k..(token + 1) * top_k {
            let Ok(expert) = usize::try_from(input.routing[choice]) else { continue };
            if expert < layout.experts {
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += input.weights[choice] * expert_of_value(expert, *value).to_f32();
                }
            }
        }
        output.extend(sums.into_iter().map(bf16::from_f32));
    }
    output
}

/// A rank's buffers of a layer, on one stream.
struct Buffers<T> {
    stream: Arc<CudaStream>,
    tokens: CudaSlice<T>,
    scales: CudaSlice<f32>,
    routing: CudaSlice<i64>,
    narrow_routing: CudaSlice<i32>,
    weights: CudaSlice<f32>,
    rows: CudaSlice<T>,
    row_scales: CudaSlice<f32>,
    counts: CudaSlice<i32>,
    output: CudaSlice<bf16>,
}

/// One element more than needed, so that nothing is empty.
fn upload<T: Number + DeviceRepr>(stream: &Arc<CudaStream>, values: &[T]) -> Result<CudaSlice<T>, String> {
    let mut all = values.to_vec();
    all.push(T::from_small(1));
    stream.clone_htod(&all).context(|| "upload".into())
}

fn narrowed(routing: &[i64]) -> Vec<i32> {
    routing.iter().map(|expert| i32::try_from(*expert).unwrap_or(-7)).collect()
}

impl<T: Number + DeviceRepr> Buffers<T> {
    fn new(stream: &Arc<CudaStream>, experts: &Experts<'_>, input: &Input<T>) -> Result<Buffers<T>, String> {
        let layout = experts.layout();
        let rows = vec![T::from_pattern(0x35); experts.rows() * layout.hidden];
        Ok(Buffers {
            stream: stream.clone(),
            tokens: upload(stream, &input.tokens)?,
            scales: upload(stream, &input.scales)?,
            routing: upload(stream, &input.routing)?,
            narrow_routing: upload(stream, &narrowed(&input.routing))?,
            weights: upload(stream, &input.weights)?,
            rows: stream.clone_htod(&rows).context(|| "rows".into())?,
            row_scales: upload(stream, &vec![7.0; experts.rows() * layout.scales])?,
            counts: stream.clone_htod(&vec![-1; experts.local().len()]).context(|| "counts".into())?,
            output: upload(
                stream,
                &vec![bf16::from_f32(3.0); input.routing.len() / layout.top_k * layout.hidden],
            )?,
        })
    }

    fn dispatch(&mut self, experts: &mut Experts<'_>, is_narrow: bool) -> phalanx::Result<()> {
        let layout = *experts.layout();
        let tokens = self.tokens.slice(..self.tokens.len() - 1);
        let routing = self.routing.slice(..self.routing.len() - 1);
        let narrow = self.narrow_routing.slice(..self.narrow_routing.len() - 1);
        if layout.scales == 0 {
            return match is_narrow {
                true => experts.dispatch(&self.stream, &tokens, &narrow, &mut self.rows, &mut self.counts),
                false => experts.dispatch(&self.stream, &tokens, &routing, &mut self.rows, &mut self.counts),
            };
        }
        let (scales, len) = (self.scales.slice(..self.scales.len() - 1), self.row_scales.len() - 1);
        let rows = (&mut self.rows, &mut self.row_scales.slice_mut(..len));
        experts.dispatch_scaled(&self.stream, (&tokens, &scales), &narrow, rows, &mut self.counts)
    }

    fn combine(&mut self, experts: &mut Experts<'_>, rows: &CudaSlice<bf16>) -> phalanx::Result<()> {
        let weights = self.weights.slice(..self.weights.len() - 1);
        let len = self.output.len() - 1;
        experts.combine(&self.stream, rows, &weights, &mut self.output.slice_mut(..len))
    }

    /// The output. Nothing behind it was written to.
    fn output(&self, comm: &Comm) -> Result<Vec<bf16>, String> {
        let mut output = download(comm, &self.output)?;
        let last = output.pop().ok_or("one more")?;
        if last == bf16::from_f32(1.0) { Ok(output) } else { Err("it wrote behind its output".into()) }
    }
}

/// A dispatch, the experts on the host, and a combine, against the reference.
fn layer<T: Number + DeviceRepr>(
    comm: &Comm,
    experts: &mut Experts<'_>,
    router: Router,
    seed: u64,
) -> Result<(), String> {
    let (rank, ranks, layout) = (comm.rank(), comm.world_size(), *experts.layout());
    let what = |what: &str| format!("{what} of {layout:?}, {router:?} {seed}");
    let inputs = inputs::<T>(&layout, ranks, router, seed);
    let mut buffers = Buffers::new(stream(comm), experts, &inputs[rank])?;
    must("dispatch", buffers.dispatch(experts, seed.is_multiple_of(2)))?;
    let (counts, rows) = (download(comm, &buffers.counts)?, download(comm, &buffers.rows)?);
    let scales = download(comm, &buffers.row_scales)?;

    let mut results = vec![bf16::from_f32(f32::NAN); rows.len()];
    let of_each = ranks * layout.max_tokens;
    for (place, expert) in experts.local().enumerate() {
        let expected = rows_of(&layout, &inputs, expert);
        if counts[place] != expected.len() as i32 {
            return Err(format!(
                "{}: {} rows for {expert}, not {}",
                what("counts"),
                counts[place],
                expected.len()
            ));
        }
        for row in 0..of_each {
            let at = place * of_each + row;
            let values = at * layout.hidden..(at + 1) * layout.hidden;
            let its_scales = &scales[at * layout.scales..(at + 1) * layout.scales];
            let Some((from, token)) = expected.get(row) else {
                expect(what("what is not filled"), &rows[values], |_| T::from_pattern(0x35))?;
                expect(what("its scales"), its_scales, |_| 7.0)?;
                continue;
            };
            let (token, sent) = (*token, &inputs[*from]);
            expect(what("a row"), &rows[values.clone()], |i| sent.tokens[token * layout.hidden + i])?;
            expect(what("its scales"), its_scales, |i| sent.scales[token * layout.scales + i])?;
            for i in values {
                results[i] = expert_of_value(expert, rows[i]);
            }
        }
    }
    let results = stream(comm).clone_htod(&results).context(|| "results".into())?;
    must("combine", buffers.combine(experts, &results))?;
    let expected = output_of(&layout, &inputs[rank], expert_of_value);
    expect(what("the output"), &buffers.output(comm)?, |i| expected[i])
}

fn layout(comm: &Comm, each: usize, max_tokens: usize, top_k: usize, hidden: usize) -> ExpertLayout {
    let (experts, dtype) = (each * comm.world_size(), DType::Bf16);
    ExpertLayout { experts, max_tokens, top_k, hidden, dtype, scales: 0 }
}

fn make<'c>(comm: &'c Comm, layout: &ExpertLayout) -> Result<Experts<'c>, String> {
    must("experts", comm.nccl().ok_or("NCCL")?.experts(layout))
}

/// Each kind of routing, and lengths around those of steps.
fn routing(comm: Comm, _: &[String]) -> Outcome {
    for (each, max_tokens, top_k, hidden) in
        [(4, 5, 8, 120), (1, 1, 1, 1), (2, 33, 2, 8), (3, 4, 1, 1003), (4, 3, 3, 961)]
    {
        let mut experts = make(&comm, &layout(&comm, each, max_tokens, top_k, hidden))?;
        for (seed, router) in [Router::Random, Router::LastOnly, Router::EverySecondRank, Router::Random]
            .into_iter()
            .enumerate()
        {
            layer::<bf16>(&comm, &mut experts, router, seed as u64)?;
        }
        must("free", experts.free())?;
    }
    done()
}

/// 8-bit values, with a scale for every 128 of them, with one for the token, and with none.
fn scaled(comm: Comm, _: &[String]) -> Outcome {
    for (hidden, scales) in [(1003, 8), (256, 1), (96, 0)] {
        let layout = ExpertLayout { dtype: DType::F8E4M3, scales, ..layout(&comm, 2, 4, 3, hidden) };
        let mut experts = make(&comm, &layout)?;
        for seed in 0..3 {
            layer::<F8E4M3>(&comm, &mut experts, Router::Random, seed)?;
        }
    }
    done()
}

/// 1,000 calls, each with another routing, of which none waits for the one before.
fn repeated(comm: Comm, _: &[String]) -> Outcome {
    const AT_ONCE: u64 = 20;
    let layout = layout(&comm, 2, 3, 2, 40);
    let mut experts = make(&comm, &layout)?;
    for round in 0..1000 / AT_ONCE {
        let mut pending = Vec::new();
        for seed in round * AT_ONCE..(round + 1) * AT_ONCE {
            let inputs = inputs::<bf16>(&layout, comm.world_size(), Router::Random, seed);
            let mut buffers = Buffers::new(stream(&comm), &experts, &inputs[comm.rank()])?;
            must("dispatch", buffers.dispatch(&mut experts, false))?;
            if seed.is_multiple_of(3) {
                // The next dispatch follows at once.
                continue;
            }
            // These experts give back what they get.
            let rows = std::mem::replace(
                &mut buffers.rows,
                stream(&comm).clone_htod(&[bf16::ZERO]).context(|| "one".into())?,
            );
            must("combine", buffers.combine(&mut experts, &rows))?;
            pending.push((seed, inputs, buffers));
        }
        for (seed, inputs, buffers) in pending {
            let expected = output_of(&layout, &inputs[comm.rank()], |_, value| value);
            expect(format!("the output of call {seed}"), &buffers.output(&comm)?, |i| expected[i])?;
        }
    }
    done()
}

/// A stream of a context that tracks nothing, which can be captured.
fn capturing(comm: &Comm) -> Result<Arc<CudaStream>, String> {
    let own = CudaContext::new(stream(comm).context().ordinal()).context(|| "context".into())?;
    // SAFETY: every slice of this context is used on the one stream.
    unsafe { own.disable_event_tracking() };
    own.new_stream().context(|| "stream".into())
}

/// A captured layer, replayed with another routing each time, and with calls between.
fn graphs(comm: Comm, _: &[String]) -> Outcome {
    let layout = layout(&comm, 2, 4, 3, 200);
    let mut experts = make(&comm, &layout)?;
    let stream = capturing(&comm)?;
    // As many tokens in each replay.
    let full = |seed| inputs::<bf16>(&layout, comm.world_size(), Router::EverySecondRank, seed);
    let mut buffers = Buffers::new(&stream, &experts, &full(0)[comm.rank()])?;
    let unused = stream.clone_htod(&[bf16::ZERO]).context(|| "one".into())?;
    must("sync", comm.barrier())?;
    stream.synchronize().context(|| "synchronize".into())?;
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).context(|| "begin".into())?;
    let dispatched = buffers.dispatch(&mut experts, false);
    let rows = std::mem::replace(&mut buffers.rows, unused);
    let combined = buffers.combine(&mut experts, &rows);
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).context(|| "end".into())?.ok_or("a graph")?;
    must("dispatch", dispatched)?;
    must("combine", combined)?;
    for seed in 1..7 {
        let inputs = full(seed);
        let own = &inputs[comm.rank()];
        let put = |result: Result<(), _>| result.context(|| "copy".into());
        put(stream.memcpy_htod(&own.routing, &mut buffers.routing))?;
        put(stream.memcpy_htod(&own.tokens, &mut buffers.tokens))?;
        put(stream.memcpy_htod(&own.weights, &mut buffers.weights))?;
        graph.launch().context(|| "launch".into())?;
        let output = stream.clone_dtoh(&buffers.output).context(|| "download".into())?;
        let expected = output_of(&layout, own, |_, value| value);
        expect(format!("the output of replay {seed}"), &output[..expected.len()], |i| expected[i])?;
        if seed.is_multiple_of(2) {
            layer::<bf16>(&comm, &mut experts, Router::Random, seed)?;
        }
    }
    drop(graph);
    done()
}

/// Two at once, in turns and on streams of their own.
fn two(comm: Comm, _: &[String]) -> Outcome {
    let layouts = [layout(&comm, 2, 4, 3, 200), layout(&comm, 1, 9, 1, 77)];
    let [mut first, mut second] = [make(&comm, &layouts[0])?, make(&comm, &layouts[1])?];
    let streams = [crate::world::new_stream(&comm)?, crate::world::new_stream(&comm)?];
    for seed in 0..6 {
        let inputs = layouts.map(|layout| inputs::<bf16>(&layout, comm.world_size(), Router::Random, seed));
        let own = [&inputs[0][comm.rank()], &inputs[1][comm.rank()]];
        let mut of_first = Buffers::new(&streams[0], &first, own[0])?;
        let mut of_second = Buffers::new(&streams[1], &second, own[1])?;
        must("the first's dispatch", of_first.dispatch(&mut first, false))?;
        must("the second's dispatch", of_second.dispatch(&mut second, true))?;
        for (buffers, experts) in [(&mut of_first, &mut first), (&mut of_second, &mut second)] {
            let one = buffers.stream.clone_htod(&[bf16::ZERO]).context(|| "one".into())?;
            let rows = std::mem::replace(&mut buffers.rows, one);
            must("combine", buffers.combine(experts, &rows))?;
        }
        for (number, buffers) in [&of_first, &of_second].into_iter().enumerate() {
            let expected = output_of(&layouts[number], own[number], |_, value| value);
            expect(format!("{number}, call {seed}"), &buffers.output(&comm)?, |i| expected[i])?;
        }
    }
    done()
}

/// What cannot be is an error with the value and the limit, before anything is enqueued.
fn usage(comm: Comm, _: &[String]) -> Outcome {
    let good = layout(&comm, 2, 4, 3, 200);
    let nccl = comm.nccl().ok_or("NCCL")?;
    let refuses = |error: Option<Error>, text: &str| match error {
        Some(Error::Usage(error)) if error.to_string().contains(text) => Ok(()),
        other => Err(format!("{other:?} does not say {text:?}")),
    };
    for (wrong, text) in [
        (
            ExpertLayout { experts: 3, ..good },
            "experts=\"3\" is not valid: expected a multiple of the 2 ranks",
        ),
        (ExpertLayout { experts: 2000, ..good }, "expected 1 to 1024"),
        (ExpertLayout { max_tokens: 0, ..good }, "max_tokens=\"0\" is not valid: expected 1 to 65535"),
        (ExpertLayout { top_k: 33, ..good }, "top_k=\"33\" is not valid: expected 1 to 32"),
        (ExpertLayout { hidden: 0, ..good }, "hidden"),
        (ExpertLayout { scales: 201, ..good }, "at most hidden, 200"),
        (ExpertLayout { dtype: DType::F32, ..good }, "bf16, f8e4m3 or f8e5m2"),
    ] {
        refuses(nccl.experts(&wrong).err(), text)?;
    }
    let mut experts = make(&comm, &good)?;
    let s = stream(&comm).clone();
    let zeroes = |len: usize| s.alloc_zeros::<bf16>(len).context(|| "alloc".into());
    let (tokens, mut rows) = (zeroes(400)?, zeroes(experts.rows() * 200)?);
    let routing = s.alloc_zeros::<i32>(6).context(|| "alloc".into())?;
    let mut counts = s.alloc_zeros::<i32>(2).context(|| "alloc".into())?;
    let weights = s.alloc_zeros::<f32>(6).context(|| "alloc".into())?;
    let mut output = zeroes(400)?;
    refuses(experts.combine(&s, &rows, &weights, &mut output).err(), "a dispatch before each combine")?;
    let mut short = zeroes(200)?;
    refuses(
        experts.dispatch(&s, &tokens.slice(..399), &routing, &mut rows, &mut counts).err(),
        "the tokens buffer has 399 elements, it needs 200",
    )?;
    refuses(
        experts.dispatch(&s, &tokens, &routing.slice(..5), &mut rows, &mut counts).err(),
        "the routing buffer has 5 elements, it needs 6 (tokens × top_k)",
    )?;
    refuses(experts.dispatch(&s, &tokens, &weights, &mut rows, &mut counts).err(), "expected i32 or i64")?;
    refuses(
        experts.dispatch(&s, &tokens, &routing, &mut short, &mut counts).err(),
        "the rows buffer has 200",
    )?;
    refuses(
        experts.dispatch(&s, &rows.clone(), &routing, &mut rows, &mut counts).err(),
        "max_tokens=\"4\" is not valid: expected at least 16",
    )?;
    let on_host = vec![0i32; 6];
    refuses(experts.dispatch(&s, &tokens, &on_host, &mut rows, &mut counts).err(), "host memory")?;
    let scales = s.alloc_zeros::<f32>(2).context(|| "alloc".into())?;
    let mut row_scales = s.alloc_zeros::<f32>(2).context(|| "alloc".into())?;
    let to = (&mut rows, &mut row_scales);
    let scaled = experts.dispatch_scaled(&s, (&tokens, &scales), &routing, to, &mut counts);
    refuses(scaled.err(), "use dispatch")?;
    // Nothing was enqueued, so the ranks still go together.
    must("dispatch", experts.dispatch(&s, &tokens, &routing, &mut rows, &mut counts))?;
    refuses(
        experts.combine(&s, &rows, &weights, &mut short).err(),
        "the output buffer has 200 elements, it needs 400",
    )?;
    must("combine", experts.combine(&s, &rows, &weights, &mut output))?;
    refuses(experts.combine(&s, &rows, &weights, &mut output).err(), "a dispatch before each combine")?;
    must("sync", comm.sync())?;
    done()
}

/// The scratch comes back with `free`; without it, at the communicator's end.
fn memory(comm: Comm, _: &[String]) -> Outcome {
    let layout = layout(&comm, 2, 64, 4, 4096);
    // The first one loads kernels, and fills the pools of memory.
    let mut experts = make(&comm, &layout)?;
    layer::<bf16>(&comm, &mut experts, Router::Random, 0)?;
    must("free", experts.free())?;
    must("barrier", comm.barrier())?;
    let before = free_bytes(&comm)?;
    let mut experts = make(&comm, &layout)?;
    layer::<bf16>(&comm, &mut experts, Router::Random, 0)?;
    let (within, bytes) = (free_bytes(&comm)?, experts.scratch_bytes());
    assert!(before - within >= bytes, "{} of {bytes} bytes", before - within);
    must("free", experts.free())?;
    await_free(&comm, before)?;
    must("barrier", comm.barrier())?;

    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let mut experts = make(&part, &layout)?;
    layer::<bf16>(&part, &mut experts, Router::Random, 0)?;
    drop(experts);
    drop(part);
    await_free(&comm, before)?;
    must("barrier", comm.barrier())?;
    done()
}

/// Waits until so much is free again: the streams free the buffers when they come to that.
fn await_free(comm: &Comm, before: usize) -> Result<(), String> {
    let since = Instant::now();
    while free_bytes(comm)? < before {
        assert!(since.elapsed() < DEADLINE / 4, "{} bytes are left", before - free_bytes(comm)?);
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    Ok(())
}

/// One rank does not come to a dispatch: the others say which one, and the GPU works afterwards.
fn absent(comm: Comm, _: &[String]) -> Outcome {
    let (late, timeout) = (comm.world_size() - 1, std::time::Duration::from_secs(1));
    let gpu = comm.gpu().ok_or("a GPU")?;
    let layout = layout(&comm, 2, 4, 3, 200);
    let mut experts = make(&comm, &layout)?;
    layer::<bf16>(&comm, &mut experts, Router::LastOnly, 0)?;
    comm.set_timeout(timeout);
    let inputs = inputs::<bf16>(&layout, comm.world_size(), Router::LastOnly, 1);
    let mut buffers = Buffers::new(stream(&comm), &experts, &inputs[comm.rank()])?;
    let error = if comm.rank() == late {
        std::thread::sleep(timeout + SLACK / 2);
        comm.barrier().err()
    } else {
        buffers.dispatch(&mut experts, false).and_then(|()| comm.sync()).err()
    };
    failures::names(error, late, "expert_dispatch(bf16 × 200").map_err(|failed| format!("{failed:?}"))?;
    drop((buffers, experts));
    drop(comm);
    failures::still_works(gpu)?;
    done()
}

/// Ranks that ask for other layouts, or use another one's scratch, are told.
fn mismatch(comm: Comm, _: &[String]) -> Outcome {
    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    let layouts = [layout(&part, 2, 4, 3, 200), layout(&part, 2, 4, 3, 201)];
    let error = part.nccl().ok_or("NCCL")?.experts(&layouts[part.rank()]).err();
    let Some(Error::Mismatch(mismatch)) = error else { return Err(format!("{error:?}")) };
    assert!(mismatch.to_string().contains("experts(layout #"), "{mismatch}");
    let part = must("split", comm.split(Some(0), 0))?.ok_or("in it")?;
    part.set_timeout(std::time::Duration::from_secs(2));
    let mut both = [make(&part, &layouts[0])?, make(&part, &layouts[0])?];
    let inputs = inputs::<bf16>(&layouts[0], 2, Router::LastOnly, 1);
    let mut buffers = Buffers::new(stream(&part), &both[0], &inputs[part.rank()])?;
    let error = buffers.dispatch(&mut both[part.rank()], false).and_then(|()| part.sync()).err();
    let Some(Error::Mismatch(mismatch)) = error else { return Err(format!("{error:?}")) };
    assert!(mismatch.to_string().contains("expert_dispatch(bf16 × 200, experts"), "{mismatch}");
    done()
}

/// Where own kernels cannot run, the error says what to use.
fn refused(comm: Comm, _: &[String]) -> Outcome {
    let error = comm.nccl().ok_or("NCCL")?.experts(&layout(&comm, 2, 4, 3, 200)).err();
    match error {
        Some(Error::Unsupported(error)) if error.to_string().contains("all_to_all_v") => done(),
        other => Err(format!("{other:?}")),
    }
}

/// Layers without an end, until a rank is lost.
fn endless(comm: Comm, _: &[String]) -> Outcome {
    comm.set_timeout(TIMEOUT);
    let gpu = comm.gpu().ok_or("a GPU")?;
    let layout = layout(&comm, 2, 8, 3, 500);
    let mut experts = make(&comm, &layout)?;
    layer::<bf16>(&comm, &mut experts, Router::EverySecondRank, 0)?;
    let inputs = inputs::<bf16>(&layout, comm.world_size(), Router::EverySecondRank, 1);
    let mut buffers = Buffers::new(stream(&comm), &experts, &inputs[comm.rank()])?;
    let results =
        stream(&comm).clone_htod(&vec![bf16::ONE; buffers.rows.len()]).context(|| "results".into())?;
    phase("running");
    let mut step = || {
        buffers.dispatch(&mut experts, false)?;
        buffers.combine(&mut experts, &results)?;
        comm.sync()
    };
    let (error, waited) = loop {
        let since = Instant::now();
        if let Err(error) = step() {
            break (error, since.elapsed());
        }
    };
    drop((buffers, results, experts));
    drop(comm);
    failures::still_works(gpu)?;
    Ok(format!("{}\t{error}", waited.as_secs_f64()))
}

/// A rank's process is killed in a layer: the others name it before the deadline.
fn killed() -> Result<(), Failed> {
    let emulated = Emulated::new()?.own_kernels("auto").set("DEVICES", 3);
    let mut world = emulated.launch(launch("endless", "processes", 3)).start()?;
    for rank in 0..3 {
        world.await_phase(rank, "running")?;
    }
    world.inject(1, Fault::Kill)?;
    for ended in world.finish().into_iter().filter(|ended| ended.rank != 1) {
        let report = ended.outcome.map_err(|problem| format!("{problem}\n{}", ended.output))?;
        let (waited, error) = report.split_once('\t').ok_or("two fields")?;
        assert!(waited.parse::<f64>()? < TIMEOUT.as_secs_f64(), "{report}");
        assert!(error.contains("rank 1 is gone: its process ended"), "{report}");
    }
    Ok(())
}
