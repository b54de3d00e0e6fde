//! How the parameters of a group lie in one flat buffer, and which part of it each rank has.

use crate::optimizer::Piece;
use crate::{Error, Result};
use std::ops::Range;

/// Elements that a rank's part is a multiple of, so that parts begin at whole cache lines.
const ALIGNMENT: usize = 64;

/// A parameter in the flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Parameter {
    name: String,
    shape: Vec<usize>,
    /// Where it is in the flat buffer.
    range: Range<usize>,
}

/// Parameters in one flat buffer, which is divided evenly among ranks: rank r has part r. Padding is 0 and belongs to no parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatLayout {
    parameters: Vec<Parameter>,
    ranks: usize,
    part: usize,
}

impl FlatLayout {
    /// Parameters one after the other, cut wherever a part ends. `parameters` are names and shapes.
    ///
    /// # Errors
    /// [`Error::Usage`] if a name comes twice.
    pub fn new<N: AsRef<str>, S: AsRef<[usize]>>(parameters: &[(N, S)], ranks: usize) -> Result<FlatLayout> {
        let mut flat = 0;
        let placed = parameters.iter().map(|(name, shape)| {
            let start = flat;
            flat += shape.as_ref().iter().product::<usize>();
            Parameter { name: name.as_ref().into(), shape: shape.as_ref().into(), range: start..flat }
        });
        let parameters = placed.collect();
        FlatLayout::checked(parameters, ranks, flat.div_ceil(ranks.max(1)))
    }

    /// Whole parameters on each rank: the longest first, each to the rank that has least. For optimizers that need whole matrices.
    ///
    /// # Errors
    /// [`Error::Usage`] if a name comes twice.
    pub fn whole<N: AsRef<str>, S: AsRef<[usize]>>(
        parameters: &[(N, S)],
        ranks: usize,
    ) -> Result<FlatLayout> {
        let len = |at: usize| parameters[at].1.as_ref().iter().product::<usize>();
        let mut order: Vec<usize> = (0..parameters.len()).collect();
        order.sort_by_key(|at| std::cmp::Reverse(len(*at)));
        let mut filled = vec![0; ranks.max(1)];
        let mut places = vec![(0, 0); parameters.len()];
        for at in order {
            let rank = (0..filled.len()).min_by_key(|rank| filled[*rank]).unwrap_or(0);
            places[at] = (rank, filled[rank]);
            filled[rank] += len(at);
        }
        let most = filled.iter().copied().max().unwrap_or(0);
        let part = most.next_multiple_of(ALIGNMENT);
        let placed = parameters.iter().zip(places).enumerate().map(|(at, ((name, shape), (rank, start)))| {
            let start = rank * part + start;
            Parameter {
                name: name.as_ref().into(),
                shape: shape.as_ref().into(),
                range: start..start + len(at),
            }
        });
        let parameters = placed.collect();
        FlatLayout::checked(parameters, ranks, most)
    }

    fn checked(parameters: Vec<Parameter>, ranks: usize, part: usize) -> Result<FlatLayout> {
        let mut names: Vec<&str> = parameters.iter().map(|parameter| &*parameter.name).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::usage(format!(
                "two parameters are called {:?}: give each a name of its own",
                twice[0]
            )));
        }
        Ok(FlatLayout { parameters, ranks, part: part.next_multiple_of(ALIGNMENT) })
    }

    /// Elements of the flat buffer, with padding.
    pub fn len(&self) -> usize {
        self.ranks * self.part
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.part == 0
    }

    /// Elements of each rank's part, with padding.
    pub fn part_len(&self) -> usize {
        self.part
    }

    /// A rank's part of the flat buffer.
    pub fn part(&self, rank: usize) -> Range<usize> {
        rank * self.part..(rank + 1) * self.part
    }

    /// Names, shapes and places in the flat buffer of all parameters.
    pub fn parameters(&self) -> impl Iterator<Item = (&str, &[usize], Range<usize>)> {
        self.parameters.iter().map(|p| (&*p.name, &*p.shape, p.range.clone()))
    }

    /// Where a parameter is in the flat buffer.
    pub fn range(&self, name: &str) -> Option<Range<usize>> {
        self.parameters.iter().find(|p| p.name == name).map(|p| p.range.clone())
    }

    /// What a rank has of each parameter: the name, the piece of the parameter, and where it is in the rank's part.
    pub fn pieces(&self, rank: usize) -> impl Iterator<Item = (&str, Piece<'_>, Range<usize>)> {
        let part = self.part(rank);
        self.parameters.iter().filter_map(move |parameter| {
            let (whole, shape) = (&parameter.range, &parameter.shape);
            let (start, end) = (whole.start.max(part.start), whole.end.min(part.end));
            let piece =
                Piece { shape, range: start.wrapping_sub(whole.start)..end.wrapping_sub(whole.start) };
            (start < end).then(|| (&*parameter.name, piece, start - part.start..end - part.start))
        })
    }
}
