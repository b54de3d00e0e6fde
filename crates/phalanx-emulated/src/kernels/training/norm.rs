//! Sums of squares, and checksums (`norm.cu`).

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

/// A number's bits and its place, mixed.
fn mix(word: u64, at: u64) -> u64 {
    let x = word.wrapping_add((at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn checksum<T: Number>(given: &Parameters) -> Result<Task, Code> {
    let (from, to) = (given.buffer::<T>(0, given.value(2)?)?, given.buffer::<u64>(1, 1)?);
    Ok(Box::new(move || {
        let words = from.read().into_iter().map(|x| {
            let mut word = [0; 8];
            x.write(&mut word[..T::SIZE]);
            u64::from_le_bytes(word)
        });
        let sum = words.zip(0..).fold(to.read()[0], |sum, (word, at)| sum.wrapping_add(mix(word, at)));
        to.write(&[sum]);
    }))
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    if name == "add_sums" {
        return Some(add_sums(given));
    }
    match name.split_once('_')? {
        ("squares", dtype) => of_type!(dtype, T => squares::<T>(given)),
        ("checksum", dtype) => of_type!(dtype, T => checksum::<T>(given)),
        _ => None,
    }
}
