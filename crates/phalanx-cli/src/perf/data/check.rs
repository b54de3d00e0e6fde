//! Fills buffers with the inputs of a call, and counts the wrong elements after it.
//!
//! Every element is compared. Before the call every expected element is made wrong, so that a call that does
//! nothing fails.

use super::flow::{Content, Segment, clip};
use super::pattern::{self, SLOTS, mix};
use super::value::{Exact, Value, elements, elements_mut, with_value};
use crate::perf::reduction::RedOp;
use phalanx::DType;

/// The contents of a rank's buffers, of whatever element type.
///
/// Each method works on a piece of a buffer, as bytes; `start` is the index of its first element. `call` is a
/// number that is the same on all ranks and different for every call.
pub trait Patterns {
    /// Writes the contents of the segments.
    fn fill(&self, piece: &mut [u8], start: usize, segments: &[Segment], call: u64);
    /// Writes something other than the contents of the segments, but the contents of untouched ones.
    fn spoil(&self, piece: &mut [u8], start: usize, segments: &[Segment], call: u64);
    /// The number of elements that differ from the segments.
    fn count_wrong(&self, piece: &[u8], start: usize, segments: &[Segment], call: u64) -> u64;
}

/// The patterns of a reduction, for one rank.
pub fn patterns(dtype: DType, op: RedOp, ranks: usize, rank: usize) -> Box<dyn Patterns> {
    with_value!(dtype, T => Box::new(Table::<T>::new(op, ranks, rank)))
}

impl<T: Value> Patterns for Table<T> {
    fn fill(&self, piece: &mut [u8], start: usize, segments: &[Segment], call: u64) {
        let piece = elements_mut::<T>(piece);
        self.fill(piece, &clip(segments, &(start..start + piece.len())), call);
    }

    fn spoil(&self, piece: &mut [u8], start: usize, segments: &[Segment], call: u64) {
        let piece = elements_mut::<T>(piece);
        self.spoil(piece, &clip(segments, &(start..start + piece.len())), call);
    }

    fn count_wrong(&self, piece: &[u8], start: usize, segments: &[Segment], call: u64) -> u64 {
        let piece = elements::<T>(piece);
        self.count_wrong(piece, &clip(segments, &(start..start + piece.len())), call)
    }
}

/// The values of a reduction for one rank, by slot.
struct Table<T> {
    contributions: Vec<T>,
    reduced: Vec<T>,
    scanned: Vec<T>,
    scanned_before: Vec<T>,
    messages: Vec<T>,
    /// Steps that a reduced value may be off.
    tolerance: u64,
}

impl<T: Value> Table<T> {
    fn new(op: RedOp, ranks: usize, rank: usize) -> Table<T> {
        let values = |of_slot: &dyn Fn(usize) -> Exact| -> Vec<T> {
            (0..SLOTS).map(|slot| T::from_exact(of_slot(slot))).collect()
        };
        let numbers = T::NUMBERS;
        Table {
            contributions: values(&|slot| {
                Exact::Whole(pattern::contribution(numbers, op, ranks, rank, slot))
            }),
            reduced: values(&|slot| pattern::reduced(numbers, op, ranks, slot)),
            scanned: values(&|slot| pattern::reduced_of_first(numbers, op, ranks, rank + 1, slot)),
            // Rank 0 has no such content.
            scanned_before: values(&|slot| pattern::reduced_of_first(numbers, op, ranks, rank.max(1), slot)),
            messages: values(&|slot| Exact::Whole(pattern::any_number(numbers, slot))),
            tolerance: if op == RedOp::Avg { mean_tolerance::<T>(ranks) } else { 0 },
        }
    }

    fn fill(&self, buffer: &mut [T], segments: &[Segment], call: u64) {
        self.write(buffer, segments, call, false);
    }

    fn spoil(&self, buffer: &mut [T], segments: &[Segment], call: u64) {
        self.write(buffer, segments, call, true);
    }

    /// Writes the contents of segments; `spoiled`: other values, where an operation should write.
    fn write(&self, buffer: &mut [T], segments: &[Segment], call: u64, spoiled: bool) {
        let (zero, one) = (T::from_i64(0), T::from_i64(1));
        for segment in segments {
            let (values, salt) = self.source(segment.content, call);
            let spoiled = spoiled && segment.content != Content::Untouched;
            for (element, index) in buffer[segment.range.clone()].iter_mut().zip(segment.first..) {
                *element = match values[pattern::slot(index, salt)] {
                    value if !spoiled => value,
                    value if value == zero => one,
                    _ => zero,
                };
            }
        }
    }

    fn count_wrong(&self, buffer: &[T], segments: &[Segment], call: u64) -> u64 {
        let wrong = segments.iter().map(|segment| {
            let (values, salt) = self.source(segment.content, call);
            use Content::{Reduced, Scanned, ScannedBefore};
            let is_reduced = matches!(segment.content, Reduced | Scanned | ScannedBefore);
            let tolerance = if is_reduced { self.tolerance } else { 0 };
            let elements = buffer[segment.range.clone()].iter().zip(segment.first..);
            let is_wrong = |&(value, index): &(&T, usize)| {
                let expected = values[pattern::slot(index, salt)];
                *value != expected && (tolerance == 0 || value.steps_to(expected) > tolerance)
            };
            elements.filter(is_wrong).count() as u64
        });
        wrong.sum()
    }

    /// The values of a content, and the salt of its slots.
    fn source(&self, content: Content, call: u64) -> (&[T], u64) {
        match content {
            Content::Contribution => (&self.contributions, mix(call)),
            Content::Reduced => (&self.reduced, mix(call)),
            Content::Scanned => (&self.scanned, mix(call)),
            Content::ScannedBefore => (&self.scanned_before, mix(call)),
            Content::Message { from, to } => {
                let route = (from as u64) << 32 | to as u64;
                (&self.messages, mix(call) ^ mix(route + 1))
            }
            Content::Untouched => (&self.messages, mix(!call)),
        }
    }
}

/// Steps that a mean may be off. NCCL multiplies by 1/ranks before it adds up: unless that is a power of two,
/// every product and partial sum may be rounded.
fn mean_tolerance<T: Value>(ranks: usize) -> u64 {
    match T::MEAN_TOLERANCE {
        exact if !T::FLOAT || ranks.is_power_of_two() => exact,
        0 => 1,
        steps => steps.max(ranks as u64 / 2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(len: usize, content: Content) -> [Segment; 1] {
        [Segment { range: 0..len, first: 0, content }]
    }

    #[test]
    fn what_was_filled_is_right_and_what_was_spoiled_is_wrong() {
        for dtype in DType::ALL {
            for op in RedOp::ALL {
                with_value!(dtype, T => {
                    let patterns = Table::<T>::new(op, 3, 1);
                    let mut buffer = vec![T::from_i64(0); 1000];
                    for content in [Content::Reduced, Content::Message { from: 2, to: 0 }] {
                        let segments = segment(1000, content);
                        patterns.fill(&mut buffer, &segments, 7);
                        assert_eq!(patterns.count_wrong(&buffer, &segments, 7), 0);
                        assert!(patterns.count_wrong(&buffer, &segments, 8) > 100, "{dtype} {op:?}: stale");
                        patterns.spoil(&mut buffer, &segments, 7);
                        let wrong = patterns.count_wrong(&buffer, &segments, 7);
                        assert_eq!(wrong, 1000, "{dtype} {op:?} {content:?}");
                    }
                });
            }
        }
    }

    #[test]
    fn one_wrong_element_is_one() {
        let patterns = Table::<i32>::new(RedOp::Sum, 2, 0);
        let segments = segment(1000, Content::Reduced);
        let mut buffer = vec![0; 1000];
        patterns.fill(&mut buffer, &segments, 1);
        buffer[999] += 1;
        assert_eq!(patterns.count_wrong(&buffer, &segments, 1), 1);
    }

    #[test]
    fn a_mean_may_be_two_steps_off() {
        let patterns = Table::<f32>::new(RedOp::Avg, 3, 0);
        let segments = segment(300, Content::Reduced);
        let mut buffer = vec![0.0; 300];
        patterns.fill(&mut buffer, &segments, 1);
        let index = buffer.iter().position(|&mean| mean > 0.5).unwrap();
        buffer[index] = f32::from_bits(buffer[index].to_bits() + 2);
        assert_eq!(patterns.count_wrong(&buffer, &segments, 1), 0);
        buffer[index] = f32::from_bits(buffer[index].to_bits() + 1);
        assert_eq!(patterns.count_wrong(&buffer, &segments, 1), 1);
        buffer[index] = f32::NAN;
        assert_eq!(patterns.count_wrong(&buffer, &segments, 1), 1);
    }

    /// As NCCL computes it, in one order of the ranks and in the other.
    #[test]
    fn a_mean_of_rounded_quotients_is_right() {
        fn check<T: Value>(ranks: usize, round: impl Fn(f64) -> T, value: impl Fn(T) -> f64) {
            let all: Vec<Table<T>> = (0..ranks).map(|rank| Table::new(RedOp::Avg, ranks, rank)).collect();
            let share = value(round(1.0 / ranks as f64));
            let add = |sum: T, rank: usize, index: usize| {
                let mut input = vec![round(0.0); 1000];
                all[rank].fill(&mut input, &segment(1000, Content::Contribution), 1);
                round(value(sum) + value(round(value(input[index]) * share)))
            };
            let up = (0..300).map(|index| (0..ranks).fold(round(0.0), |sum, rank| add(sum, rank, index)));
            let down =
                (0..300).map(|index| (0..ranks).rev().fold(round(0.0), |sum, rank| add(sum, rank, index)));
            for means in [up.collect::<Vec<T>>(), down.collect()] {
                assert_eq!(all[0].count_wrong(&means, &segment(300, Content::Reduced), 1), 0, "{ranks}");
            }
        }
        for ranks in [2, 3, 4, 5, 6, 7, 8] {
            check::<f32>(ranks, |x| x as f32, f64::from);
            check::<phalanx::f16>(ranks, phalanx::f16::from_f64, f64::from);
            check::<phalanx::F8E4M3>(ranks, phalanx::F8E4M3::from_f64, |x| x.to_f64());
        }
    }

    #[test]
    fn messages_of_different_routes_differ() {
        let patterns = Table::<u64>::new(RedOp::Sum, 4, 0);
        let mut buffer = vec![0; 1000];
        patterns.fill(&mut buffer, &segment(1000, Content::Message { from: 1, to: 2 }), 1);
        for (from, to) in [(2, 1), (1, 1), (1, 3), (0, 2)] {
            let other = segment(1000, Content::Message { from, to });
            assert!(patterns.count_wrong(&buffer, &other, 1) > 900, "{from} to {to}");
        }
    }
}
