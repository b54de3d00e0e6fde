//! Parts of tensors, and cross-entropy (`tensor.cu`).

use super::Task;
use super::memory::{Buffer, Parameters, sum_of_columns};
use super::number::{Number, of_type};
use crate::base::call::Code;

/// No target.
const NONE: u32 = u32::MAX;

fn copy_rows<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let [count, len]: [usize; 2] = [given.value(0)?, given.value(1)?];
    let [from_row, to_row]: [usize; 2] = [given.value(3)?, given.value(5)?];
    // From the start of the first row to the end of the last.
    let extent = |row: usize| if count == 0 { 0 } else { (count - 1) * row + len };
    let (from, to) = (given.buffer::<T>(2, extent(from_row))?, given.buffer::<T>(4, extent(to_row))?);
    Ok(Box::new(move || {
        let from = from.read();
        to.change(|to| {
            for row in 0..count {
                to[row * to_row..][..len].copy_from_slice(&from[row * from_row..][..len]);
            }
        });
    }))
}

/// The rows of logits, which may be empty.
fn row<T>(logits: &[T], columns: usize, row: usize) -> &[T] {
    &logits[row * columns..][..columns]
}

/// Rows, columns, and the logits.
fn logits<T: Number>(given: &Parameters) -> Result<(usize, usize, Buffer<T>), Code> {
    let (rows, columns) = (given.value(0)?, given.value(1)?);
    Ok((rows, columns, given.buffer(2, rows * columns)?))
}

fn greatest<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (rows, columns, logits) = logits::<T>(given)?;
    let to = given.buffer::<f64>(3, rows)?;
    Ok(Box::new(move || {
        let logits = logits.read();
        let greatest =
            |at| row(&logits, columns, at).iter().map(|z| z.wide()).fold(f64::NEG_INFINITY, f64::max);
        to.write(&(0..rows).map(greatest).collect::<Vec<f64>>());
    }))
}

fn sums<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (rows, columns, logits) = logits::<T>(given)?;
    let (greatest, targets) = (given.buffer::<f64>(3, rows)?, given.buffer::<u32>(4, rows)?);
    let to = given.buffer::<f64>(5, 3 * rows)?;
    Ok(Box::new(move || {
        let (logits, greatest, targets) = (logits.read(), greatest.read(), targets.read());
        let sums = (0..rows).flat_map(|at| {
            let row = row(&logits, columns, at);
            let shifted = || row.iter().map(|z| z.wide() - greatest[at]);
            let target = targets[at];
            let of_target = if target == NONE { 0.0 } else { row[target as usize].wide() - greatest[at] };
            [sum_of_columns(shifted().map(f64::exp)), of_target, sum_of_columns(shifted())]
        });
        to.write(&sums.collect::<Vec<f64>>());
    }))
}

fn gradient<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (rows, columns, logits) = logits::<T>(given)?;
    let (greatest, sums) = (given.buffer::<f64>(3, rows)?, given.buffer::<f64>(4, 3 * rows)?);
    let (targets, factors) = (given.buffer::<u32>(5, rows)?, given.buffer::<f64>(8, rows)?);
    let [uniform, peak]: [f64; 2] = [given.value(6)?, given.value(7)?];
    Ok(Box::new(move || {
        let (greatest, sums, targets, factors) =
            (greatest.read(), sums.read(), targets.read(), factors.read());
        logits.change(|logits| {
            for (at, z) in logits.iter_mut().enumerate() {
                let (row, column) = (at / columns, at % columns);
                let softmax = (z.wide() - greatest[row]).exp() / sums[3 * row];
                let peak = if targets[row] as usize == column { peak } else { 0.0 };
                *z = T::down(factors[row] * (softmax - uniform - peak));
            }
        });
    }))
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    match name.rsplit_once('_')? {
        ("copy_rows", dtype) => of_type!(dtype, T => copy_rows::<T>(given)),
        ("greatest", dtype) => of_type!(dtype, T => greatest::<T>(given)),
        ("sums", dtype) => of_type!(dtype, T => sums::<T>(given)),
        ("gradient", dtype) => of_type!(dtype, T => gradient::<T>(given)),
        _ => None,
    }
}
