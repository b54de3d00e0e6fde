//! Which parameter is where in which bucket.

use super::{Divisor, Parameter, Reduction, Settings};
use phalanx::DType;
use std::ops::Range;

/// Where a parameter is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub bucket: usize,
    pub range: Range<usize>,
}

pub(super) struct Arranged {
    pub places: Vec<Place>,
    /// Members, length, and type of the gradients.
    pub buckets: Vec<(Vec<usize>, usize, DType)>,
}

/// Fills buckets in this order, for each type one at a time. Buckets are in the order in which they are full.
pub(super) fn arrange(parameters: &[Parameter], order: &[u32], settings: &Settings) -> Arranged {
    let mut places = vec![Place { bucket: 0, range: 0..0 }; parameters.len()];
    let mut buckets: Vec<(Vec<usize>, usize, DType)> = Vec::new();
    let mut open: Vec<(Vec<usize>, usize, DType)> = Vec::new();
    for member in order.iter().map(|member| *member as usize) {
        let Parameter { len, dtype, .. } = parameters[member];
        let size = settings.sum_type(dtype).size();
        let mut at = open.iter().position(|(_, _, other)| *other == dtype);
        if let Some(place) = at.filter(|place| (open[*place].1 + len) * size > settings.bucket_bytes) {
            buckets.push(open.remove(place));
            at = None;
        }
        let place = at.unwrap_or_else(|| {
            open.push((Vec::new(), 0, dtype));
            open.len() - 1
        });
        open[place].0.push(member);
        open[place].1 += len;
    }
    buckets.append(&mut open);
    for (bucket, (members, _, _)) in buckets.iter().enumerate() {
        let mut start = 0;
        for member in members {
            let range = start..start + parameters[*member].len;
            start = range.end;
            places[*member] = Place { bucket, range };
        }
    }
    Arranged { places, buckets }
}

/// A hash of what all ranks must have alike.
pub(super) fn fingerprint(parameters: &[Parameter], settings: &Settings) -> u64 {
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let number = |start: u64, number: usize| (number as u64).to_le_bytes().into_iter().fold(start, hash);
    let mut print = number(0xcbf2_9ce4_8422_2325, settings.bucket_bytes);
    print = hash(print, u8::from(settings.reduction == Reduction::Sum));
    print = hash(print, u8::from(settings.divisor == Divisor::InitialWorld));
    print = hash(print, u8::from(settings.sums_in_f32));
    for parameter in parameters {
        print = number(print, parameter.name.len());
        print = parameter.name.bytes().fold(print, hash);
        print = parameter.dtype.to_string().bytes().fold(number(print, parameter.len), hash);
    }
    print
}
