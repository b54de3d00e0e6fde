//! [`Slab`]: a box of an array, packed and unpacked.

#[cfg(feature = "_gpu")]
use crate::gpu::pitched::{MAX_PITCH, PitchedRows};
#[cfg(feature = "_gpu")]
use crate::types::error::Result;
use std::ops::Range;

/// A box of a row-major array.
pub(super) struct Slab<'a> {
    pub shape: &'a [usize],
    pub ranges: Vec<Range<usize>>,
}

impl Slab<'_> {
    /// The box `filled`, but with this range of one dimension.
    pub fn new<'a>(
        shape: &'a [usize],
        filled: &[Range<usize>],
        dimension: usize,
        range: Range<usize>,
    ) -> Slab<'a> {
        let mut ranges = filled.to_vec();
        ranges[dimension] = range;
        Slab { shape, ranges }
    }

    /// The number of its cells.
    pub fn cells(&self) -> usize {
        self.ranges.iter().map(Range::len).product()
    }

    /// Calls `f` with the place of each contiguous run of cells, in order.
    fn for_each_run(&self, mut f: impl FnMut(Range<usize>)) {
        self.runs_from(0, 0, &mut f);
    }

    fn runs_from(&self, dimension: usize, start: usize, f: &mut impl FnMut(Range<usize>)) {
        let range = self.ranges[dimension].clone();
        let start = start * self.shape[dimension];
        if dimension + 1 == self.shape.len() {
            return f(start + range.start..start + range.end);
        }
        range.for_each(|place| self.runs_from(dimension + 1, start + place, f));
    }

    /// Its cells, one after the other.
    pub fn pack<T: Copy>(&self, array: &[T]) -> Vec<T> {
        let mut cells = Vec::with_capacity(self.cells());
        self.for_each_run(|run| cells.extend_from_slice(&array[run]));
        cells
    }

    /// Copies cells that lie one after the other to their places.
    pub fn unpack<T: Copy>(&self, mut cells: &[T], array: &mut [T]) {
        self.for_each_run(|run| {
            let (run_cells, rest) = cells.split_at(run.len());
            array[run].copy_from_slice(run_cells);
            cells = rest;
        });
    }

    /// Calls `f` with the strided copies that have all cells of this size, in order: the byte at which each begins in the array, and the
    /// byte at which it begins in packed memory. One copy for an array of up to three dimensions.
    #[cfg(feature = "_gpu")]
    pub fn for_each_copy(
        &self,
        size: usize,
        mut f: impl FnMut(PitchedRows, usize, usize) -> Result<()>,
    ) -> Result<()> {
        if self.cells() == 0 {
            return Ok(());
        }
        let (start, bytes, loops) = self.loops(size);
        let (rows, pitch) =
            loops.first().copied().filter(|(_, pitch)| *pitch <= MAX_PITCH).unwrap_or((1, bytes));
        let inner = usize::from(rows > 1);
        let (planes, distance) = match loops.get(inner) {
            Some(planes) if inner == 1 => *planes,
            _ => (1, pitch * rows),
        };
        let rows = PitchedRows { bytes, pitch, rows, height: distance / pitch, planes };
        let outer = &loops[(inner + usize::from(planes > 1)).min(loops.len())..];
        let mut packed = 0;
        // From the outermost dimension on.
        let mut places = vec![0; outer.len()];
        loop {
            let place: usize = places.iter().zip(outer).map(|(place, (_, distance))| place * distance).sum();
            f(rows, start + place, packed)?;
            packed += rows.total();
            // The innermost of them counts first.
            let Some(next) = (0..outer.len()).find(|dimension| places[*dimension] + 1 < outer[*dimension].0)
            else {
                return Ok(());
            };
            places[..next].fill(0);
            places[next] += 1;
        }
    }

    /// The byte at which it begins, the bytes of a contiguous run, and how the runs repeat, the innermost loop first: how often, and at
    /// which distance in bytes. Dimensions that follow each other without a gap are one loop.
    #[cfg(feature = "_gpu")]
    fn loops(&self, size: usize) -> (usize, usize, Vec<(usize, usize)>) {
        let (mut start, mut run, mut distance) = (0, size, size);
        let mut loops: Vec<(usize, usize)> = Vec::new();
        for (range, size) in self.ranges.iter().zip(self.shape).rev() {
            start += range.start * distance;
            match loops.last_mut() {
                _ if range.len() == 1 => {}
                None if run == distance => run *= range.len(),
                Some((times, inner)) if *times * *inner == distance => *times *= range.len(),
                _ => loops.push((range.len(), distance)),
            }
            distance *= size;
        }
        (start, run, loops)
    }
}

#[cfg(all(test, feature = "_gpu"))]
mod tests {
    use super::*;

    /// What the copies say, carried out on the host.
    fn by_copies(slab: &Slab<'_>, array: &[u16]) -> (Vec<u16>, usize) {
        let (mut packed, mut copies) = (Vec::new(), 0);
        slab.for_each_copy(2, |rows, start, at| {
            assert_eq!(at, 2 * packed.len());
            assert!(rows.pitch >= rows.bytes && rows.height >= rows.rows, "{rows:?}");
            for plane in 0..rows.planes {
                for row in 0..rows.rows {
                    let begin = (start + (plane * rows.height + row) * rows.pitch) / 2;
                    packed.extend_from_slice(&array[begin..begin + rows.bytes / 2]);
                }
            }
            copies += 1;
            Ok(())
        })
        .unwrap();
        (packed, copies)
    }

    #[test]
    fn strided_copies_have_the_cells_of_the_box_in_order() {
        let shape = [3, 2, 4, 3, 2];
        let array: Vec<u16> = (0..shape.iter().product::<usize>() as u16).collect();
        for dimensions in 1..=shape.len() {
            let shape = &shape[..dimensions];
            // Every combination of a part at the start, a part at the end, one place and all places.
            for kinds in 0..4usize.pow(dimensions as u32) {
                let ranges = shape.iter().enumerate().map(|(d, size)| match kinds >> (2 * d) & 3 {
                    0 => 0..*size - 1,
                    1 => 1..*size,
                    2 => 1..2,
                    _ => 0..*size,
                });
                let slab = Slab { shape, ranges: ranges.collect() };
                let (packed, copies) = by_copies(&slab, &array);
                assert_eq!(packed, slab.pack(&array), "{:?} of {shape:?}", slab.ranges);
                assert!(dimensions > 3 || copies == 1, "{copies} copies of {:?} of {shape:?}", slab.ranges);
            }
        }
    }

    #[test]
    fn rows_beyond_the_largest_pitch_are_copied_one_by_one() {
        let shape = [3, MAX_PITCH, 2];
        let slab = Slab { shape: &shape, ranges: vec![0..3, 5..6, 0..2] };
        let mut copies = Vec::new();
        slab.for_each_copy(4, |rows, start, at| {
            copies.push((rows.total(), rows.rows * rows.planes, start, at));
            Ok(())
        })
        .unwrap();
        let plane = 8 * MAX_PITCH;
        assert_eq!(copies, [(8, 1, 40, 0), (8, 1, plane + 40, 8), (8, 1, 2 * plane + 40, 16)]);
    }

    #[test]
    fn an_empty_box_has_no_copies() {
        let slab = Slab { shape: &[3, 0], ranges: vec![0..1, 0..0] };
        slab.for_each_copy(4, |_, _, _| unreachable!("there are no cells")).unwrap();
    }
}
