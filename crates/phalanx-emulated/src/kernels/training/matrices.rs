//! What matrices need beside products (`matrices.cu`).

use super::Task;
use super::memory::{Parameters, sum_of_columns};
use super::number::{Number, Real, of_type};
use crate::base::call::Code;

fn add_to_rows<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let [rows, columns]: [usize; 2] = [given.value(0)?, given.value(1)?];
    let (bias, to) = (given.buffer::<T>(2, columns)?, given.buffer::<T>(3, rows * columns)?);
    Ok(Box::new(move || {
        let bias = bias.read();
        to.change(|to| {
            for (at, x) in to.iter_mut().enumerate() {
                *x = T::down(x.wide() + bias[at % columns].wide());
            }
        });
    }))
}

fn sum_of_rows<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let [rows, columns]: [usize; 2] = [given.value(0)?, given.value(1)?];
    let (from, to) = (given.buffer::<T>(2, rows * columns)?, given.buffer::<T>(3, columns)?);
    Ok(Box::new(move || {
        let from = from.read();
        to.change(|to| {
            for (column, to) in to.iter_mut().enumerate() {
                let numbers = from.iter().skip(column).step_by(columns);
                let sum = numbers.fold(to.up::<T::Real>(), |sum, x| sum + x.up());
                *to = T::down(sum.wide());
            }
        });
    }))
}

fn divide_by_norm<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (squares, epsilon) = (given.buffer::<f64>(0, 1)?, T::Real::of(given.value(1)?));
    let data = given.buffer::<T>(2, given.value(3)?)?;
    Ok(Box::new(move || {
        let norm = T::Real::of(squares.read()[0].sqrt()) + epsilon;
        data.change(|data| data.iter_mut().for_each(|x| *x = T::down((x.up::<T::Real>() / norm).wide())));
    }))
}

fn orthonormalize<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let [rows, rank]: [usize; 2] = [given.value(0)?, given.value(1)?];
    let (thin, work) = (given.buffer::<T>(2, rows * rank)?, given.buffer::<f64>(3, rows * rank)?);
    Ok(Box::new(move || {
        let mut columns: Vec<f64> = thin.read().into_iter().map(T::wide).collect();
        let dot = |columns: &[f64], a: usize, b: usize| {
            sum_of_columns(columns.chunks_exact(rank).map(|row| row[a] * row[b]))
        };
        for k in 0..rank {
            let before = dot(&columns, k, k).sqrt();
            for other in 0..k {
                let part = dot(&columns, other, k);
                columns.chunks_exact_mut(rank).for_each(|row| row[k] -= part * row[other]);
            }
            let norm = dot(&columns, k, k).sqrt();
            let factor = if norm > before * 1e-6 { 1.0 / norm } else { 0.0 };
            columns.chunks_exact_mut(rank).for_each(|row| row[k] *= factor);
        }
        thin.write(&columns.iter().map(|x| T::down(*x)).collect::<Vec<T>>());
        work.write(&columns);
    }))
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    match name.rsplit_once('_')? {
        ("add_to_rows", dtype) => of_type!(dtype, T => add_to_rows::<T>(given)),
        ("sum_of_rows", dtype) => of_type!(dtype, T => sum_of_rows::<T>(given)),
        ("divide_by_norm", dtype) => of_type!(dtype, T => divide_by_norm::<T>(given)),
        ("orthonormalize", dtype) => of_type!(dtype, T => orthonormalize::<T>(given)),
        _ => None,
    }
}
