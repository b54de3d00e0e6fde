//! Two linear layers whose weights are split over the ranks: the first by its outputs (columns), so that each rank has a
//! block of the result, which all_gather makes whole; the second by its inputs (rows), so that each rank has a summand of
//! the result, which all_reduce adds. Both are compared with one GPU that has all weights.
//!
//! ```text
//! cargo run --release -p phalanx --example tensor_parallel -- 2
//! phalanx launch -n 2 -- target/release/examples/tensor_parallel
//! ```

#[path = "shared/blas.rs"]
mod blas;
#[path = "shared/gpu.rs"]
mod gpu;

use blas::{Blas, Matrix};
use gpu::Result;
use phalanx::{Comm, ReduceOp};
use std::process::ExitCode;

const SAMPLES: usize = 256;
const INPUTS: usize = 1024;
const HIDDEN: usize = 2048;
const OUTPUTS: usize = 512;

fn main() -> ExitCode {
    gpu::on_ranks("tensor_parallel", one_rank)
}

/// Small whole numbers: their sums are exact in any order, so the results are equal to the last bit.
fn input(sample: usize, feature: usize) -> f32 {
    ((sample + 3 * feature) % 5) as f32 - 2.0
}

fn first_weight(input: usize, unit: usize) -> f32 {
    ((2 * input + unit) % 3) as f32 - 1.0
}

fn second_weight(unit: usize, output: usize) -> f32 {
    ((unit + output) % 3) as f32 - 1.0
}

fn one_rank(comm: Comm) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if !HIDDEN.is_multiple_of(ranks) {
        return Err(format!("{HIDDEN} hidden units cannot be split into {ranks} equal parts").into());
    }
    let units = HIDDEN / ranks;
    let first_unit = rank * units;
    let stream = comm.cuda_stream()?;
    let blas = Blas::new(stream)?;
    let inputs = Matrix::new(stream, (SAMPLES, INPUTS), input)?;

    // This rank's columns of the first layer's weights, and rows of the second's.
    let first = Matrix::new(stream, (INPUTS, units), |row, column| first_weight(row, first_unit + column))?;
    let second =
        Matrix::new(stream, (units, OUTPUTS), |row, column| second_weight(first_unit + row, column))?;

    let mut block = Matrix::zeros(stream, (SAMPLES, units))?;
    blas.multiply(&inputs, &first, &mut block)?;
    let mut hidden = Matrix::zeros(stream, (SAMPLES, HIDDEN))?;
    comm.all_gather(&block.elements, &mut hidden.elements)?;

    let mut outputs = Matrix::zeros(stream, (SAMPLES, OUTPUTS))?;
    blas.multiply(&block, &second, &mut outputs)?;
    comm.all_reduce_in_place(&mut outputs.elements, ReduceOp::Sum)?;
    comm.sync()?;

    // All on this GPU.
    let first = Matrix::new(stream, (INPUTS, HIDDEN), first_weight)?;
    let second = Matrix::new(stream, (HIDDEN, OUTPUTS), second_weight)?;
    let mut whole_hidden = Matrix::zeros(stream, (SAMPLES, HIDDEN))?;
    let mut whole_outputs = Matrix::zeros(stream, (SAMPLES, OUTPUTS))?;
    blas.multiply(&inputs, &first, &mut whole_hidden)?;
    blas.multiply(&whole_hidden, &second, &mut whole_outputs)?;
    for (layer, split, whole) in [("column", &hidden, &whole_hidden), ("row", &outputs, &whole_outputs)] {
        let (split, whole) = (stream.clone_dtoh(&split.elements)?, stream.clone_dtoh(&whole.elements)?);
        if let Some(index) = split.iter().zip(&whole).position(|(split, whole)| split != whole) {
            let (split, whole) = (split[index], whole[index]);
            return Err(format!("{layer} layer, element {index}: {split} split, {whole} on one GPU").into());
        }
        if split.iter().all(|element| *element == 0.0) {
            return Err(format!("{layer} layer: all elements are 0").into());
        }
    }
    if rank == 0 {
        println!(
            "{ranks} ranks: the column layer ({INPUTS} × {HIDDEN}) and the row layer ({HIDDEN} × {OUTPUTS}) are equal \
             to one GPU's"
        );
    }
    Ok(())
}
