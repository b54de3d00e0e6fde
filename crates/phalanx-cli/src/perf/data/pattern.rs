//! The numbers that ranks contribute, and their reductions.
//!
//! There are 256 combinations of contributions, the slots, so that the expected results fit in a small table.
//! A hash of an element's index picks its slot, so that data in the wrong place is wrong.

use super::value::{Exact, Numbers};
use crate::perf::reduction::RedOp;

/// Number of combinations of contributions.
pub const SLOTS: usize = 256;

/// A hash under which neighbouring numbers have nothing in common.
pub fn mix(number: u64) -> u64 {
    let number = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (number ^ number >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// The slot of the element with this index. The salt is the same on all ranks and differs between calls, so
/// that results of an earlier call are wrong.
pub fn slot(index: usize, salt: u64) -> usize {
    (mix(index as u64 ^ salt) >> 56) as usize
}

/// The number that a rank contributes to a reduction.
pub fn contribution(numbers: Numbers, op: RedOp, ranks: usize, rank: usize, slot: usize) -> i64 {
    let Numbers { exact, signed, float } = numbers;
    match op {
        // A mean may be a sum of rounded quotients. Where they cancel out, it is off by more than a few
        // steps.
        RedOp::Avg if float => summand(exact, signed, Signs::Alike, ranks, rank, slot),
        RedOp::Sum | RedOp::Avg => summand(exact, signed, Signs::Mixed, ranks, rank, slot),
        // Factors are at most 2.
        RedOp::MulSum => summand(exact / 2, signed, Signs::Mixed, ranks, rank, slot),
        RedOp::Prod => factor(signed, ranks, rank, slot),
        RedOp::Min | RedOp::Max => any_number(numbers, mix((rank * SLOTS + slot) as u64) as usize >> 8),
    }
}

/// The exact result of the reduction of all contributions.
pub fn reduced(numbers: Numbers, op: RedOp, ranks: usize, slot: usize) -> Exact {
    reduced_of_first(numbers, op, ranks, ranks, slot)
}

/// The exact result of the reduction of the first `combined` of the ranks' contributions.
pub fn reduced_of_first(numbers: Numbers, op: RedOp, ranks: usize, combined: usize, slot: usize) -> Exact {
    let all = (0..combined).map(|rank| contribution(numbers, op, ranks, rank, slot));
    Exact::Whole(match op {
        RedOp::Sum => all.sum(),
        RedOp::Prod => all.product(),
        RedOp::Min => all.min().unwrap_or(0),
        RedOp::Max => all.max().unwrap_or(0),
        RedOp::MulSum => all.enumerate().map(|(rank, number)| number * RedOp::factor(rank)).sum(),
        RedOp::Avg if numbers.float => return Exact::Fraction(all.sum::<i64>() as f64 / combined as f64),
        // Integers divide towards zero.
        RedOp::Avg => all.sum::<i64>() / combined as i64,
    })
}

/// A number that every type holds; a negative one, too, if the type has these.
pub fn any_number(numbers: Numbers, choice: usize) -> i64 {
    let largest = numbers.exact.min(100);
    match numbers.signed {
        true => choice as i64 % (2 * largest + 1) - largest,
        false => choice as i64 % (largest + 1),
    }
}

/// The signs of an element's summands, if the type has signs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Signs {
    Mixed,
    Alike,
}

/// Summands of which no partial sum, in any order, is above `limit`.
fn summand(limit: i64, signed: bool, signs: Signs, ranks: usize, rank: usize, slot: usize) -> i64 {
    let count = ranks as i64;
    if count * 15 <= limit {
        let number = (mix((rank * SLOTS + slot) as u64) >> 60) as i64;
        return match signs {
            _ if !signed => number,
            Signs::Mixed => number - 7,
            Signs::Alike if slot % 2 == 1 => -number,
            Signs::Alike => number,
        };
    }
    // The limit is too low for free choice: a total is divided among the ranks.
    let total = slot as i64 % (limit + 1);
    let extra = ((rank + slot) % ranks) < (total % count) as usize;
    let share = total / count + i64::from(extra);
    if signed && slot % 2 == 1 { -share } else { share }
}

/// Factors of which one is 3, at most five are 2, and the others are 1. The product is at most 96, with two
/// binary digits that are not 0: exact in every type.
fn factor(signed: bool, ranks: usize, rank: usize, slot: usize) -> i64 {
    let position = (rank + slot) % ranks;
    let twos = slot / 3 % 6;
    let magnitude = match position {
        0 => 3,
        _ if position <= twos => 2,
        _ => 1,
    };
    let negative = signed && mix((rank * SLOTS + slot) as u64) >> 63 == 1;
    if negative { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::data::{Value, with_value};
    use phalanx::DType;

    /// The reduction as a school child would do it: in f64 for floats, in 128 bits for integers.
    fn naive<T: Value>(op: RedOp, contributions: &[f64]) -> f64 {
        let ranks = contributions.len();
        let weighted = || contributions.iter().enumerate().map(|(r, x)| x * (1 + r % 2) as f64);
        match op {
            RedOp::Sum => contributions.iter().sum(),
            RedOp::Prod => contributions.iter().product(),
            RedOp::Min => contributions.iter().copied().fold(f64::INFINITY, f64::min),
            RedOp::Max => contributions.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            RedOp::MulSum => weighted().sum(),
            RedOp::Avg if T::FLOAT => contributions.iter().sum::<f64>() / ranks as f64,
            RedOp::Avg => {
                let sum: i128 = contributions.iter().map(|&x| x as i128).sum();
                (sum / ranks as i128) as f64
            }
        }
    }

    #[test]
    fn predictions_equal_a_naive_reduction() {
        for dtype in DType::ALL {
            for op in RedOp::ALL {
                for ranks in 1..=8 {
                    for slot in 0..SLOTS {
                        with_value!(dtype, T => {
                            let contributions: Vec<f64> = (0..ranks)
                                .map(|rank| T::from_i64(contribution(T::NUMBERS, op, ranks, rank, slot)).to_f64())
                                .collect();
                            let predicted = T::from_exact(reduced(T::NUMBERS, op, ranks, slot));
                            let expected = naive::<T>(op, &contributions);
                            let what = format!("{dtype} {op:?} {ranks} ranks slot {slot}");
                            assert_eq!(predicted, T::from_f64(expected), "{what}");
                            if op != RedOp::Avg {
                                assert_eq!(predicted.to_f64(), expected, "{what}: not exact");
                            }
                        });
                    }
                }
            }
        }
    }

    /// In whatever order and precision a backend reduces, nothing is ever rounded.
    #[test]
    fn partial_results_are_exact_in_the_type() {
        for dtype in DType::ALL {
            for op in [RedOp::Sum, RedOp::Prod, RedOp::MulSum, RedOp::Avg] {
                for ranks in [1, 2, 3, 8, 64, 300] {
                    for slot in 0..SLOTS {
                        with_value!(dtype, T => {
                            let numbers = (0..ranks).map(|rank| {
                                let number = contribution(T::NUMBERS, op, ranks, rank, slot) as i128;
                                if op == RedOp::MulSum { number * RedOp::factor(rank) as i128 } else { number }
                            });
                            let is_product = op == RedOp::Prod;
                            let mut so_far = i128::from(is_product);
                            // The worst order: everything of one sign first.
                            let mut numbers: Vec<i128> = numbers.collect();
                            numbers.sort();
                            for order in [numbers.clone(), numbers.into_iter().rev().collect()] {
                                so_far = i128::from(is_product);
                                for number in order {
                                    so_far = if is_product { so_far * number } else { so_far + number };
                                    let value = T::from_i64(so_far as i64);
                                    assert_eq!(value.to_f64(), so_far as f64, "{dtype} {op:?} {ranks} {slot}");
                                }
                            }
                            let _ = so_far;
                        });
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_contribute_different_numbers() {
        for dtype in DType::ALL {
            for op in RedOp::ALL {
                let differ = with_value!(dtype, T => (0..SLOTS)
                    .filter(|&slot| contribution(T::NUMBERS, op, 2, 0, slot) != contribution(T::NUMBERS, op, 2, 1, slot))
                    .count());
                assert!(differ >= SLOTS / 4, "{dtype} {op:?}: {differ}");
            }
        }
    }

    #[test]
    fn shifted_data_is_seen() {
        for shift in [1, 2, 16, 64, 255, 256, 4096, 65536] {
            let same = (0..10_000).filter(|&i| slot(i, 1) == slot(i + shift, 1)).count();
            assert!(same < 200, "shift {shift}: {same} of 10000 are the same");
        }
        let same = (0..10_000).filter(|&i| slot(i, 1) == slot(i, 2)).count();
        assert!(same < 200, "{same} of 10000 do not change with the salt");
    }
}
