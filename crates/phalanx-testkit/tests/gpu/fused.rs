//! All_reduces of rows with what follows them: the sum, the residual and the norm, in one kernel and in two.

use crate::world::{BACKEND, DEADLINE, done, download, must, stream, upload};
use libtest_mimic::Trial;
use phalanx::cudarc::driver::DeviceRepr;
use phalanx::nccl::{Graph, QuantizedElement, RowElement};
use phalanx::{Comm, Error, F8E4M3, bf16, f16};
use phalanx_testkit::emulated::on_own_kernels;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::random::Random;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("fused/rows", rows),
    Scenario::rank("fused/quantized", quantized),
    Scenario::rank("fused/graph", graph),
    Scenario::rank("fused/refused", refused),
    Scenario::rank("fused/mismatch", mismatch),
];

/// A scenario, with an algorithm, the kind of the ranks, and their number.
const WORLDS: [(&str, &str, &str, usize); 14] = [
    ("rows", "ll128", "threads", 2),
    ("rows", "auto", "processes", 2),
    ("rows", "nccl", "threads", 2),
    ("rows", "ll128", "processes", 3),
    ("rows", "two_hops_ll128", "threads", 4),
    ("rows", "ll128", "threads", 8),
    ("quantized", "ll128", "processes", 2),
    ("quantized", "nccl", "processes", 2),
    ("quantized", "ll", "threads", 4),
    ("graph", "auto", "threads", 2),
    ("graph", "nccl", "processes", 2),
    ("refused", "auto", "threads", 2),
    ("mismatch", "ll128", "processes", 2),
    ("mismatch", "nccl", "threads", 2),
];

pub fn trials() -> Vec<Trial> {
    let trial = |(scenario, algorithm, kind, ranks)| {
        Trial::test(format!("fused/{scenario}/{algorithm}/{kind}/{ranks}"), move || {
            let name = format!("fused/{scenario}");
            let scenario = SCENARIOS.iter().find(|one| one.name == name).expect("a scenario");
            let launch = Launch::new(scenario.name, ranks).deadline(DEADLINE);
            let launch = launch.env("PHALANX_BACKEND", BACKEND.name()).env("PHALANX_TIMEOUT", "10");
            let launch = if kind == "threads" { launch.on_threads() } else { launch };
            // NCCL itself sums the same rows for both calls: only these checks compare them.
            let checked = (scenario.name, algorithm) == ("fused/mismatch", "nccl");
            let launch = if checked { launch.env("PHALANX_CHECK", "1") } else { launch };
            Ok(on_own_kernels(algorithm, ranks, launch).map(drop)?)
        })
    };
    WORLDS.into_iter().map(trial).collect()
}

const EPSILON: f32 = 1e-5;

/// A type of rows.
trait Row: Number<Wide = f32> + RowElement + DeviceRepr {}
impl Row for bf16 {}
impl Row for f16 {}

/// The sum of a row's squares in the documented order: of each 240 elements by threads, which have four or eight, then of these sums.
fn sum_of_squares(row: &[f32]) -> f32 {
    fn of_warp(mut threads: [f32; 32]) -> f32 {
        for distance in [16, 8, 4, 2, 1] {
            threads = std::array::from_fn(|thread| threads[thread] + threads[thread ^ distance]);
        }
        threads[0]
    }
    let of_line = |line: &[f32]| {
        let mut threads = [0.0; 32];
        for (at, x) in line.iter().enumerate() {
            threads[at / 60 * 8 + at % 60 / 8] += x * x;
        }
        of_warp(threads)
    };
    let mut threads = [0.0; 32];
    row.chunks(240).map(of_line).enumerate().for_each(|(line, sum)| threads[line % 32] += sum);
    of_warp(threads)
}

/// One rank's input, all ranks' residual and weight, and what must come out.
struct Case<T> {
    input: Vec<T>,
    residual: Vec<T>,
    weight: Vec<T>,
    added: Vec<T>,
    /// The normalised rows before they are rounded.
    normed: Vec<f32>,
}

impl<T: Row> Case<T> {
    fn new(comm: &Comm, seed: u64, rows: usize, hidden: usize) -> Case<T> {
        // Finite ones: a NaN makes one of the whole row.
        let values = |seed: u64, len| -> Vec<T> {
            let mut random = Random::new(seed);
            (0..len).map(|_| T::narrow((random.below(2001) as f32 - 1000.0) / 128.0)).collect()
        };
        let len = rows * hidden;
        let inputs: Vec<_> = (0..comm.world_size() as u64).map(|rank| values(seed + rank, len)).collect();
        let (residual, weight) = (values(seed + 100, len), values(seed + 200, hidden));
        let sum =
            |at: usize| inputs.iter().skip(1).fold(inputs[0][at].widen(), |sum, one| sum + one[at].widen());
        let added: Vec<T> =
            (0..len).map(|at| T::narrow(T::narrow(sum(at)).widen() + residual[at].widen())).collect();
        let normed = added.chunks(hidden).flat_map(|row| {
            let row: Vec<f32> = row.iter().map(|x| x.widen()).collect();
            let scale = 1.0 / (sum_of_squares(&row) / hidden as f32 + EPSILON).sqrt();
            let weight = &weight;
            row.into_iter().zip(weight).map(move |(x, weight)| x * scale * weight.widen()).collect::<Vec<_>>()
        });
        let normed = normed.collect();
        Case { input: inputs[comm.rank()].clone(), residual, weight, added, normed }
    }
}

fn same<T: Number>(what: impl std::fmt::Display, got: &[T], expected: &[T]) -> Result<(), String> {
    crate::world::expect(what, got, |index| expected[index])
}

/// Rows from one step to two for each warp, fewer and more than there are blocks, against the reference's bits.
fn rows(comm: Comm, _: &[String]) -> Outcome {
    for (seed, (rows, hidden)) in (0..).map(|n| 1000 * n).zip([
        (1, 8),
        (3, 1024),
        (2, 4096),
        (150, 48),
        (1, 8648),
        (60, 9000),
        (2, 16_384),
    ]) {
        one_size::<bf16>(&comm, seed, rows, hidden)?;
        if rows < 10 {
            one_size::<f16>(&comm, seed, rows, hidden)?;
        }
    }
    done()
}

fn one_size<T: Row>(comm: &Comm, seed: u64, rows: usize, hidden: usize) -> Result<(), String> {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let case = Case::<T>::new(comm, seed, rows, hidden);
    let (input, weight) = (upload(comm, &case.input)?, upload(comm, &case.weight)?);
    let (mut residual, mut output) = (upload(comm, &case.residual)?, upload(comm, &case.input)?);
    must("norm", nccl.all_reduce_rms_norm(&input, &mut residual, &weight, EPSILON, &mut output))?;
    let what = |what: &str| format!("{what} of {rows} rows of {hidden} {}", T::DTYPE);
    same(what("residual"), &download(comm, &residual)?, &case.added)?;
    let expected: Vec<T> = case.normed.iter().map(|x| T::narrow(*x)).collect();
    same(what("output"), &download(comm, &output)?, &expected)
}

/// Rows of 8 bits with their scales.
fn quantized(comm: Comm, _: &[String]) -> Outcome {
    for (seed, (rows, hidden)) in (0..).map(|n| 1000 * n).zip([(3, 64), (130, 1000), (2, 9000)]) {
        let whole = |x: f32| x.round_ties_even().clamp(-127.0, 127.0) as i8;
        one_quantized::<i8>(&comm, seed, rows, hidden, 127.0, whole)?;
        one_quantized::<F8E4M3>(&comm, seed, rows, hidden, 448.0, F8E4M3::from_f32)?;
    }
    done()
}

fn one_quantized<Q: Number + QuantizedElement + DeviceRepr>(
    comm: &Comm,
    seed: u64,
    rows: usize,
    hidden: usize,
    largest: f32,
    round: impl Fn(f32) -> Q,
) -> Result<(), String> {
    let case = Case::<bf16>::new(comm, seed, rows, hidden);
    let run = |input: &[bf16], residual: &[bf16]| -> Result<(Vec<Q>, Vec<f32>), String> {
        let (nccl, rows) = (comm.nccl().ok_or("NCCL")?, input.len() / hidden);
        let (input, weight) = (upload(comm, input)?, upload(comm, &case.weight)?);
        let mut residual = upload(comm, residual)?;
        let mut output = upload(comm, &vec![Q::from_small(1); rows * hidden])?;
        let mut scales = upload(comm, &vec![0f32; rows])?;
        let normed = nccl.all_reduce_rms_norm_quantized(
            &input,
            &mut residual,
            &weight,
            EPSILON,
            &mut output,
            &mut scales,
        );
        must("norm", normed)?;
        Ok((download(comm, &output)?, download(comm, &scales)?))
    };
    let zeroes = vec![bf16::ZERO; hidden];
    let (output, scales) = run(&zeroes, &zeroes)?;
    assert!(output.iter().all(|value| *value == Q::from_small(0)), "{output:?}");
    same("their scale", &scales, &[1.0])?;
    let (output, scales) = run(&case.input, &case.residual)?;
    for (row, normed) in case.normed.chunks(hidden).enumerate() {
        let most = normed.iter().fold(0f32, |most, x| most.max(x.abs()));
        same(format!("scale of row {row}"), &scales[row..row + 1], &[most / largest])?;
        let expected: Vec<Q> = normed.iter().map(|x| round(x * (1.0 / scales[row]))).collect();
        same(format!("row {row} of {hidden} {}", Q::DTYPE), &output[row * hidden..][..hidden], &expected)?;
    }
    Ok(())
}

/// Replayed, with other values each time and calls between the replays.
fn graph(comm: Comm, _: &[String]) -> Outcome {
    let (rows, hidden) = (5, 2048);
    let nccl = comm.nccl().ok_or("NCCL")?;
    let case = Case::<bf16>::new(&comm, 7, rows, hidden);
    let buffers = (
        upload(&comm, &case.input)?,
        upload(&comm, &case.residual)?,
        upload(&comm, &case.weight)?,
        upload(&comm, &case.input)?,
    );
    let captured = Graph::capture(&comm, buffers, |group, (input, residual, weight, output)| {
        group.all_reduce_rms_norm(input, residual, weight, EPSILON, output)
    });
    let mut graph = must("capture", captured)?;
    for seed in [7, 1007, 2007, 3007] {
        let case = Case::<bf16>::new(&comm, seed, rows, hidden);
        let (input, residual, weight, _) = graph.buffers_mut();
        for (slice, values) in [(input, &case.input), (residual, &case.residual), (weight, &case.weight)] {
            stream(&comm).memcpy_htod(values, slice).context(|| "upload".into())?;
        }
        must("launch", graph.launch())?;
        if seed % 2000 == 7 {
            let (mut residual, mut output) = (upload(&comm, &case.residual)?, upload(&comm, &case.input)?);
            let (input, weight) = (upload(&comm, &case.input)?, upload(&comm, &case.weight)?);
            must("between", nccl.all_reduce_rms_norm(&input, &mut residual, &weight, EPSILON, &mut output))?;
        }
        let (_, residual, _, output) = graph.buffers();
        same(format!("residual {seed}"), &download(&comm, residual)?, &case.added)?;
        let expected: Vec<bf16> = case.normed.iter().map(|x| bf16::from_f32(*x)).collect();
        same(format!("output {seed}"), &download(&comm, output)?, &expected)?;
    }
    done()
}

/// Lengths that do not fit are refused before anything is enqueued.
fn refused(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let (input, weight) = (upload(&comm, &[bf16::ONE; 64])?, upload(&comm, &[bf16::ONE; 16])?);
    let (mut residual, mut output) = (upload(&comm, &[bf16::ONE; 64])?, upload(&comm, &[bf16::ONE; 64])?);
    let (mut few, odd) = (upload(&comm, &[bf16::ONE; 48])?, upload(&comm, &[bf16::ONE; 12])?);
    let text = |result: phalanx::Result<()>| match result {
        Err(Error::Usage(error)) => Ok(error.to_string()),
        other => Err(format!("not refused: {other:?}")),
    };
    let error = text(nccl.all_reduce_rms_norm(&input, &mut few, &weight, EPSILON, &mut output))?;
    assert!(error.contains("residual buffer has 48 elements, it needs 64"), "{error}");
    let error = text(nccl.all_reduce_rms_norm(&input, &mut residual, &odd, EPSILON, &mut output))?;
    assert!(
        error.contains("weight's length=\"12\"") && error.contains("a multiple of 8 up to 16384"),
        "{error}"
    );
    let mut bytes = upload(&comm, &[0i8; 64])?;
    let mut scales = upload(&comm, &[0f32; 3])?;
    let error = text(nccl.all_reduce_rms_norm_quantized(
        &input,
        &mut residual,
        &weight,
        EPSILON,
        &mut bytes,
        &mut scales,
    ))?;
    assert!(error.contains("scales buffer has 3 elements, it needs 4"), "{error}");
    // The communicator works.
    must("norm", nccl.all_reduce_rms_norm(&input, &mut residual, &weight, EPSILON, &mut output))?;
    must("sync", comm.sync())?;
    done()
}

/// A rank that only sums ends the call on every rank, with both operations' names.
fn mismatch(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let (input, weight) = (upload(&comm, &[bf16::ONE; 64])?, upload(&comm, &[bf16::ONE; 16])?);
    let (mut residual, mut output) = (upload(&comm, &[bf16::ONE; 64])?, upload(&comm, &[bf16::ONE; 64])?);
    let called = match comm.rank() {
        0 => nccl.all_reduce_rms_norm(&input, &mut residual, &weight, EPSILON, &mut output),
        _ => comm.all_reduce(&input, &mut output, phalanx::ReduceOp::Sum),
    };
    // Both have exchanged the same rows, so one of them may notice with its next call.
    let error = match called.and_then(|()| comm.sync()).and_then(|()| comm.barrier()) {
        Err(error) => error.to_string(),
        Ok(()) => return Err("it went through".into()),
    };
    assert!(error.contains("all_reduce_rms_norm(") && error.contains("all_reduce("), "{error}");
    done()
}
