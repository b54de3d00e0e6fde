//! Saves a matrix and a vector that are spread over the ranks to one safetensors file, and reads them with any other number of ranks.
//!
//! ```text
//! cargo run --release -p phalanx --features safetensors --example array_checkpoint -- 4 save state.safetensors     4 ranks as threads
//! cargo run --release -p phalanx --features safetensors --example array_checkpoint -- 3 load state.safetensors
//! ```

#[path = "shared/ranks.rs"]
mod ranks;

use phalanx::{ArrayPart, Comm, ReduceOp, TensorPart};
use ranks::Result;
use std::process::ExitCode;

const ROWS: usize = 500;
const COLUMNS: usize = 60;

fn main() -> ExitCode {
    ranks::on_ranks("array_checkpoint", |comm, arguments| match arguments {
        [what, path] if what == "save" => save(comm, path),
        [what, path] if what == "load" => load(comm, path),
        _ => Err("give a number of ranks, save or load, and a file".into()),
    })
}

/// An element of the matrix.
fn element(index: usize) -> f64 {
    (index as f64).sqrt()
}

/// Each rank has every n-th block of four rows, and a block of the vector.
fn save(comm: Comm, path: &str) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let of_matrix = ArrayPart::block_cyclic(ROWS * COLUMNS, 4 * COLUMNS, rank, ranks);
    let matrix: Vec<f64> = of_matrix.iter().flatten().map(element).collect();
    let of_vector = ArrayPart::block(ROWS, rank, ranks);
    let vector: Vec<u32> = of_vector.iter().flatten().map(|row| row as u32).collect();
    comm.write_tensors_at_all(
        path,
        &[
            TensorPart::new("matrix", &[ROWS, COLUMNS], &of_matrix, &matrix)?,
            TensorPart::new("vector", &[ROWS], &of_vector, &vector)?,
        ],
    )?;
    if rank == 0 {
        println!("{ranks} ranks have saved {ROWS} × {COLUMNS} elements to {path}");
    }
    comm.finalize()?;
    Ok(())
}

/// Each rank has a block of rows, whatever number of ranks has saved them.
fn load(comm: Comm, path: &str) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let rows = ArrayPart::block(ROWS, rank, ranks);
    let of_matrix = rows.iter().map(|rows| rows.start * COLUMNS..rows.end * COLUMNS);
    let of_matrix = ArrayPart::ranges(ROWS * COLUMNS, of_matrix)?;
    let (mut matrix, mut vector) = (vec![0.0f64; of_matrix.len()], vec![0u32; rows.len()]);
    comm.read_tensor_at_all(path, "matrix", &of_matrix, &mut matrix)?;
    comm.read_tensor_at_all(path, "vector", &rows, &mut vector)?;
    let mut indices = of_matrix.iter().flatten();
    let is_right = matrix.iter().all(|value| indices.next().is_some_and(|index| *value == element(index)))
        && vector.iter().zip(rows.iter().flatten()).all(|(value, row)| *value == row as u32);
    if !is_right {
        return Err(format!("rank {rank} has read other elements than were saved").into());
    }
    let sum = comm.all_reduce_value(matrix.len() as u64, ReduceOp::Sum)?;
    if rank == 0 {
        println!("{ranks} ranks have read {sum} elements, as they were saved");
    }
    comm.finalize()?;
    Ok(())
}
