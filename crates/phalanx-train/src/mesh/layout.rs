//! Which part of a parameter a rank holds.

use super::{Axis, Mesh, MeshShape};
use crate::{Error, Result};
use std::ops::Range;

/// What becomes of a parameter along one axis of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank along the axis has the same.
    Replicated,
    /// The ranks have consecutive parts of this dimension: see [`Layout`] for lengths that do not divide.
    Split(usize),
    /// Every rank has a summand; the value is their sum. Not a state in which parameters are kept.
    Partial,
    /// This dimension consists of `heads` equal pieces that stay whole. With more ranks than heads, neighbours hold the same head: with two
    /// heads on four ranks, rank r holds head r / 2.
    Heads {
        /// The dimension of the tensor.
        dim: usize,
        /// Pieces that it consists of.
        heads: usize,
    },
    /// Every rank along the axis has a parameter of its own under this name: a pipeline stage, an expert.
    Own,
}

/// Shape of a whole parameter, and its placement along each axis.
///
/// An axis that is not listed is [`Replicated`](Placement::Replicated), except [`Axis::Pipeline`], along which each stage has parameters of
/// its [`Own`](Placement::Own): a weight that two stages share says `Replicated`. Experts that differ along [`Axis::Expert`] under one name
/// say `Own`.
///
/// **Lengths that do not divide.** n elements on p ranks: the first n mod p ranks have one more than the others. 7 on 3 ranks are
/// 3, 2, 2; 2 on 3 ranks are 1, 1, 0. (This is not the rule of torch's `chunk`, which gives 3, 3, 1.) If two axes split the same
/// dimension, the one that is listed first splits the whole, and the next its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Sizes of the whole parameter, outermost dimension first; elements are in row-major order.
    pub shape: Vec<usize>,
    /// Placements; each axis once.
    pub placements: Vec<(Axis, Placement)>,
}

/// The part of a parameter that a rank holds, stored in row-major order without gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// For each dimension, which indices of the whole parameter.
    pub ranges: Vec<Range<usize>>,
    /// The number of this copy, from 0.
    pub copy: usize,
    /// Ranks that hold this very block.
    pub copies: usize,
}

impl Block {
    /// Sizes of the block.
    pub fn shape(&self) -> Vec<usize> {
        self.ranges.iter().map(Range::len).collect()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(Range::len).product()
    }

    /// Whether it has no elements: there were fewer than ranks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a sum over all ranks, or a file, takes the elements from this rank: it has copy 0.
    pub fn is_counted(&self) -> bool {
        self.copy == 0
    }

    /// For each element of the block, in order, its index in the whole parameter of this shape (row-major).
    pub fn indices<'a>(&'a self, shape: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        (0..self.len()).map(move |element| self.index(shape, element))
    }

    /// The index in the whole parameter of an element of the block.
    fn index(&self, shape: &[usize], mut element: usize) -> usize {
        let (mut index, mut stride) = (0, 1);
        for (range, whole) in self.ranges.iter().zip(shape).rev() {
            index += (range.start + element % range.len()) * stride;
            element /= range.len();
            stride *= whole;
        }
        index
    }

    /// The indices in the whole parameter of a range of the block's elements, as ranges one after the other.
    pub(crate) fn runs(&self, shape: &[usize], elements: Range<usize>) -> Vec<Range<usize>> {
        // So many elements of the block always lie together: whole trailing dimensions, and a part of the one before.
        let whole = self.ranges.iter().zip(shape).rev().take_while(|(range, whole)| range.len() == **whole);
        let dims = (whole.count() + 1).min(shape.len());
        let run: usize = self.ranges[shape.len() - dims..].iter().map(Range::len).product();
        let (mut runs, mut at) = (Vec::<Range<usize>>::new(), elements.start);
        while at < elements.end {
            let end = ((at / run + 1) * run).min(elements.end);
            let start = self.index(shape, at);
            match runs.last_mut() {
                Some(last) if last.end == start => last.end += end - at,
                _ => runs.push(start..start + end - at),
            }
            at = end;
        }
        runs
    }
}

/// Part `index` of `parts` of a range: the first ones have one more where it does not divide.
pub fn part(range: &Range<usize>, parts: usize, index: usize) -> Range<usize> {
    let (each, more) = (range.len() / parts, range.len() % parts);
    let start = range.start + index * each + index.min(more);
    start..start + each + usize::from(index < more)
}

/// Ranks along an axis that hold the same head: one, or several where there are fewer heads than ranks.
///
/// # Errors
/// [`Error::Usage`] if neither number divides the other; it lists the numbers of ranks that fit.
pub fn copies_of_heads(axis: Axis, ranks: usize, heads: usize) -> Result<usize> {
    if heads > 0 && heads.is_multiple_of(ranks) {
        return Ok(1);
    }
    if heads > 0 && ranks.is_multiple_of(heads) {
        return Ok(ranks / heads);
    }
    let fits: Vec<usize> = (1..=2 * ranks.max(heads))
        .filter(|n| heads > 0 && (heads.is_multiple_of(*n) || n.is_multiple_of(heads)))
        .collect();
    Err(Error::usage(format!(
        "{heads} heads do not fit {ranks} ranks along {axis:?}: neither number divides the other; possible numbers of ranks: {fits:?}"
    )))
}

impl Layout {
    /// A parameter that is replicated along all axes (but for [pipelines](Layout)).
    pub fn replicated(shape: &[usize]) -> Layout {
        Layout { shape: shape.to_vec(), placements: Vec::new() }
    }

    /// The same with a placement along one more axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, placement: Placement) -> Layout {
        self.placements.push((axis, placement));
        self
    }

    /// The placement along an axis.
    pub fn placement(&self, axis: Axis) -> Placement {
        let listed = self.placements.iter().find(|(other, _)| *other == axis);
        let default = if axis == Axis::Pipeline { Placement::Own } else { Placement::Replicated };
        listed.map_or(default, |(_, placement)| *placement)
    }

    /// Number of elements of the whole parameter.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block that this rank holds.
    ///
    /// # Errors
    /// [`Error::Usage`] for a dimension that there is not, an axis that is listed twice, or heads that do not fit (the text lists the numbers
    /// of ranks that do).
    pub fn local(&self, mesh: &Mesh) -> Result<Block> {
        self.block(mesh.shape(), mesh.rank())
    }

    /// The block that a rank of a mesh of this shape holds. Errors as for [`local`](Layout::local).
    pub fn block(&self, mesh: &MeshShape, rank: usize) -> Result<Block> {
        let mut ranges: Vec<Range<usize>> = self.shape.iter().map(|len| 0..*len).collect();
        for (place, (axis, placement)) in self.placements.iter().enumerate() {
            if self.placements[..place].iter().any(|(other, _)| other == axis) {
                return Err(Error::usage(format!("a layout places axis {axis:?} twice; once is enough")));
            }
            let (Placement::Split(dim) | Placement::Heads { dim, .. }) = *placement else { continue };
            let Some(range) = ranges.get_mut(dim) else {
                return Err(Error::usage(format!(
                    "axis {axis:?} splits dimension {dim} of a parameter with {} dimensions, {:?}",
                    self.shape.len(),
                    self.shape
                )));
            };
            let (size, coordinate) = (mesh.size(*axis), mesh.coordinate(*axis, rank));
            *range = match *placement {
                Placement::Heads { heads, .. } => {
                    let copies = copies_of_heads(*axis, size, heads)?;
                    if !range.len().is_multiple_of(heads) {
                        return Err(Error::usage(format!(
                            "dimension {dim} of {:?} has {} indices here, which is no multiple of {heads} heads",
                            self.shape,
                            range.len()
                        )));
                    }
                    part(range, size / copies, coordinate / copies)
                }
                _ => part(range, size, coordinate),
            };
        }
        let (mut copy, mut copies) = (0, 1);
        for (axis, size) in mesh.dims() {
            let same = match self.placement(*axis) {
                Placement::Replicated => *size,
                Placement::Heads { heads, .. } => copies_of_heads(*axis, *size, heads)?,
                Placement::Split(_) | Placement::Partial | Placement::Own => 1,
            };
            copy = copy * same + mesh.coordinate(*axis, rank) % same;
            copies *= same;
        }
        Ok(Block { ranges, copy, copies })
    }
}
