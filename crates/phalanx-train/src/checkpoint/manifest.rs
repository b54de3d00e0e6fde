//! The manifest: which file has which elements of which tensor.

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ops::Range;

pub(super) const MANIFEST: &str = "manifest.json";

/// Bytes of a piece that one checksum covers: what a rank reads at least.
pub(super) const CHUNK: usize = 4 << 20;

/// The format that is written, and read.
pub(super) const FORMAT: u32 = 1;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub format: u32,
    pub step: u64,
    pub files: Vec<Shard>,
    pub tensors: BTreeMap<String, Tensor>,
    /// One value if all ranks had the same, else one for each rank.
    pub values: BTreeMap<String, Vec<Value>>,
}

/// The file of a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Shard {
    pub name: String,
    pub bytes: u64,
    /// Bytes of what is before the tensors, and their checksum.
    pub header: u64,
    pub header_checksum: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub pieces: Vec<Piece>,
}

/// Elements of a tensor that are together in one file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Piece {
    /// Index of the file, and where the piece begins in it.
    pub file: usize,
    pub offset: u64,
    pub block: Runs,
    /// CRC-32 of each [`CHUNK`] bytes.
    pub checksums: Vec<u32>,
}

/// Ranges of a flat tensor, in a form that is short for rows of a matrix: `[start, length, stride, count]`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Runs(Vec<[usize; 4]>);

impl Runs {
    pub fn new(ranges: &[Range<usize>]) -> Runs {
        let mut runs: Vec<[usize; 4]> = Vec::new();
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let len = range.len();
            if let Some([start, run_len, stride, count]) = runs.last_mut() {
                let distance = range.start.wrapping_sub(*start);
                if len == *run_len && range.start > *start && (*count == 1 || distance == *stride * *count) {
                    if *count == 1 {
                        *stride = distance;
                    }
                    *count += 1;
                    continue;
                }
            }
            runs.push([range.start, len, 0, 1]);
        }
        Runs(runs)
    }

    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.0.iter().flat_map(|[start, len, stride, count]| {
            (0..*count).map(move |at| start + at * stride..start + at * stride + len)
        })
    }

    /// Elements of all ranges.
    pub fn len(&self) -> usize {
        self.0.iter().map(|[_, len, _, count]| len * count).sum()
    }
}

/// The name of a rank's file.
pub(super) fn shard_name(rank: usize, ranks: usize) -> String {
    format!("shard-{rank:05}-of-{ranks:05}.safetensors")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init)]
    fn ranges_are_the_same_after_being_shortened() {
        for ranges in [
            vec![],
            vec![3..5],
            vec![0..2, 8..10, 16..18, 24..26],
            vec![0..2, 8..10, 17..19, 26..27, 30..31],
            vec![5..6, 1..2, 9..10],
        ] {
            let runs = Runs::new(&ranges);
            assert_eq!(runs.ranges().collect::<Vec<_>>(), ranges);
            assert_eq!(runs.len(), ranges.iter().map(|range| range.len()).sum::<usize>());
        }
        assert_eq!(Runs::new(&[0..2, 8..10, 16..18]).0, [[0, 2, 8, 3]]);
    }
}
