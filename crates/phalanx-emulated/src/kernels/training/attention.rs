//! Merging attention over different keys (`attention.cu`).

use super::Task;
use super::memory::Parameters;
use super::number::{Number, of_type};
use crate::base::call::Code;

fn merge<T: Number, A: Number>(given: &Parameters) -> Result<Task, Code> {
    let [rows, size]: [usize; 2] = [given.value(0)?, given.value(1)?];
    let (more, more_sums) = (given.buffer::<T>(2, rows * size)?, given.buffer::<f64>(3, rows)?);
    let (output, sums) = (given.buffer::<A>(4, rows * size)?, given.buffer::<f64>(5, rows)?);
    Ok(Box::new(move || {
        let (more, more_sums) = (more.read(), more_sums.read());
        let (mut merged, mut merged_sums) = (output.read(), sums.read());
        for row in 0..rows {
            let (before, after) = (merged_sums[row], more_sums[row]);
            let greatest = before.max(after);
            if greatest == f64::NEG_INFINITY {
                continue;
            }
            let (before, after) = ((before - greatest).exp(), (after - greatest).exp());
            for at in row * size..(row + 1) * size {
                let sum = before * merged[at].wide() + after * more[at].wide();
                merged[at] = A::down(sum / (before + after));
            }
            merged_sums[row] = greatest + (before + after).ln();
        }
        output.write(&merged);
        sums.write(&merged_sums);
    }))
}

fn of_pair<T: Number>(to: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    of_type!(to, A => merge::<T, A>(given))
}

pub fn task(name: &str, given: &Parameters) -> Option<Result<Task, Code>> {
    let (from, to) = name.strip_prefix("merge_")?.split_once('_')?;
    of_type!(from, T => of_pair::<T>(to, given))?
}
