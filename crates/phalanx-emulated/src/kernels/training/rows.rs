//! Rows of a matrix, of which a list says which (`rows.cu`).

use super::Task;
use super::memory::{Buffer, Parameters, sum_of_columns};
use super::number::{Number, Real, of_type};
use crate::base::call::Code;

/// No row.
const NONE: u32 = u32::MAX;

/// Factors, if their address is not 0.
fn factors(given: &Parameters, index: usize, len: usize) -> Result<Option<Buffer<f64>>, Code> {
    let address: u64 = given.value(index)?;
    if address == 0 { Ok(None) } else { given.buffer(index, len).map(Some) }
}

/// A row of a matrix: how long the matrix is, only the program knows.
fn row<T: Number>(matrix: Buffer<T>, width: usize, row: u32) -> Vec<T> {
    matrix.part(row as usize * width, width).read()
}

fn gather_rows<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let [count, width]: [usize; 2] = [given.value(0)?, given.value(1)?];
    let (rows, factors) = (given.buffer::<u32>(2, count)?, factors(given, 3, count)?);
    let (from, to) = (given.buffer::<T>(4, 0)?, given.buffer::<T>(5, count * width)?);
    Ok(Box::new(move || {
        let factors = factors.map(|factors| factors.read());
        let gathered = rows.read().into_iter().enumerate().flat_map(|(at, from_row)| {
            let row = row(from, width, from_row);
            match &factors {
                Some(factors) => row.into_iter().map(|x| T::down(factors[at] * x.wide())).collect(),
                None => row,
            }
        });
        to.write(&gathered.collect::<Vec<T>>());
    }))
}

fn sum_rows<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let [count, width, of_each]: [usize; 3] = [given.value(0)?, given.value(1)?, given.value(2)?];
    let (rows, factors) = (given.buffer::<u32>(3, count * of_each)?, factors(given, 4, count * of_each)?);
    let (from, to) = (given.buffer::<T>(5, 0)?, given.buffer::<T>(6, count * width)?);
    Ok(Box::new(move || {
        let (rows, factors) = (rows.read(), factors.map(|factors| factors.read()));
        let sums = (0..count).flat_map(|at| {
            let mut sum = vec![T::Real::of(0.0); width];
            for part in (at * of_each..(at + 1) * of_each).filter(|part| rows[*part] != NONE) {
                let factor = T::Real::of(factors.as_ref().map_or(1.0, |factors| factors[part]));
                let row = row(from, width, rows[part]);
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum = *sum + factor * x.up());
            }
            sum.into_iter().map(|sum| T::down(sum.wide()))
        });
        to.write(&sums.collect::<Vec<T>>());
    }))
}

fn dot_rows<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let [count, width]: [usize; 2] = [given.value(0)?, given.value(1)?];
    let (a_rows, b_rows) = (given.buffer::<u32>(2, count)?, given.buffer::<u32>(4, count)?);
    let (a, b) = (given.buffer::<T>(3, 0)?, given.buffer::<T>(5, 0)?);
    let to = given.buffer::<f64>(6, count)?;
    Ok(Box::new(move || {
        let dots = a_rows.read().into_iter().zip(b_rows.read()).map(|(a_row, b_row)| {
            if a_row == NONE || b_row == NONE {
                return 0.0;
            }
            let columns = row(a, width, a_row).into_iter().zip(row(b, width, b_row));
            sum_of_columns(columns.map(|(a, b)| a.wide() * b.wide()))
        });
        to.write(&dots.collect::<Vec<f64>>());
    }))
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    match name.rsplit_once('_')? {
        ("gather_rows", dtype) => of_type!(dtype, T => gather_rows::<T>(given)),
        ("sum_rows", dtype) => of_type!(dtype, T => sum_rows::<T>(given)),
        ("dot_rows", dtype) => of_type!(dtype, T => dot_rows::<T>(given)),
        _ => None,
    }
}
