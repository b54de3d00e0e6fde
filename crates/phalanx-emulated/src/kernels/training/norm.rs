//! Sums of squares (`norm.cu`).

use super::Task;
use super::memory::{Parameters, THREADS, block_sum, sum_of_columns};
use super::number::{Number, of_type};
use crate::base::call::Code;

fn squares<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (len, blocks) = (given.value::<usize>(2)?, given.blocks);
    let (from, partial) = (given.buffer::<T>(0, len)?, given.buffer::<f64>(1, blocks)?);
    Ok(Box::new(move || {
        let mut sums = vec![vec![0.0; THREADS]; blocks];
        for (i, four) in from.read().chunks(4).enumerate() {
            let sum = &mut sums[i / THREADS % blocks][i % THREADS];
            four.iter().for_each(|x| *sum += x.wide() * x.wide());
        }
        partial.write(&sums.into_iter().map(block_sum).collect::<Vec<f64>>());
    }))
}

fn add_sums(given: &Parameters) -> Result<Task, Code> {
    let (partial, to) = (given.buffer::<f64>(0, given.value(2)?)?, given.buffer::<f64>(1, 1)?);
    Ok(Box::new(move || {
        to.write(&[to.read()[0] + sum_of_columns(partial.read().into_iter())]);
    }))
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    if name == "add_sums" {
        return Some(add_sums(given));
    }
    let dtype = name.strip_prefix("squares_")?;
    of_type!(dtype, T => squares::<T>(given))
}
