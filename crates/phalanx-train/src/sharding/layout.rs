//! How the parameters of a group lie in one flat buffer, and which part of it each rank has.

use crate::mesh::{Axis, Block, Layout, MeshShape, Placement, Plan};
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
    /// Of which whole parameter it is a block, if it is known.
    place: Option<(Layout, Block)>,
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
            Parameter {
                name: name.as_ref().into(),
                shape: shape.as_ref().into(),
                range: start..flat,
                place: None,
            }
        });
        let parameters = placed.collect();
        FlatLayout::checked(parameters, ranks, flat.div_ceil(ranks.max(1)))
    }

    /// Of each parameter the block that `rank` of a mesh has by a plan, one after the other, divided among the ranks along [`Axis::Shard`].
    /// `parameters` are names and *whole* shapes.
    ///
    /// Norms then count, and checkpoints find, each element by its place in the whole parameter: such a checkpoint can be read on any other
    /// mesh.
    ///
    /// # Errors
    /// [`Error::Usage`] if a name comes twice, the plan splits a parameter along [`Axis::Shard`] or leaves summands, or as for
    /// [`Layout::block`].
    pub fn placed<N: AsRef<str>, S: AsRef<[usize]>>(
        plan: &Plan,
        mesh: &MeshShape,
        rank: usize,
        parameters: &[(N, S)],
    ) -> Result<FlatLayout> {
        let (mut local, mut places) = (Vec::new(), Vec::new());
        for (name, shape) in parameters {
            let layout = plan.layout(name.as_ref(), shape.as_ref())?;
            let is_partial = layout.placements.iter().any(|(_, placement)| *placement == Placement::Partial);
            if is_partial || layout.placement(Axis::Shard) != Placement::Replicated {
                return Err(Error::usage(format!(
                    "the plan places {:?} as {:?}: groups are divided along Shard themselves, and have no summands",
                    name.as_ref(),
                    layout.placements
                )));
            }
            let block = layout.block(mesh, rank)?;
            local.push((name.as_ref(), block.shape()));
            places.push((layout, block));
        }
        let mut flat = FlatLayout::new(&local, mesh.size(Axis::Shard))?;
        for (parameter, place) in flat.parameters.iter_mut().zip(places) {
            parameter.place = Some(place);
        }
        Ok(flat)
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
                place: None,
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

    /// The whole shape of a parameter, and which elements of it a piece has.
    pub(crate) fn in_whole(&self, name: &str, piece: &Piece<'_>) -> (Vec<usize>, Vec<Range<usize>>) {
        let parameter = self.parameters.iter().find(|parameter| parameter.name == name);
        match parameter.and_then(|parameter| parameter.place.as_ref()) {
            Some((layout, block)) => (layout.shape.clone(), block.runs(&layout.shape, piece.range.clone())),
            None => (piece.shape.to_vec(), vec![piece.range.clone()]),
        }
    }

    /// Whether a sum over all ranks of a mesh takes a parameter's pieces from this rank. One of which no place is known is the same along all
    /// axes but Shard and Pipeline.
    pub(crate) fn is_counted(&self, name: &str, mesh: &MeshShape, rank: usize) -> Result<bool> {
        let parameter = self.parameters.iter().find(|parameter| parameter.name == name);
        let place = parameter.and_then(|parameter| parameter.place.as_ref());
        let layout = place.map_or_else(|| Layout::replicated(&[]), |(layout, _)| layout.clone());
        let layout = Layout {
            placements: layout.placements.into_iter().filter(|(axis, _)| *axis != Axis::Shard).collect(),
            ..layout
        };
        Ok(layout.with(Axis::Shard, Placement::Own).block(mesh, rank)?.is_counted())
    }

    /// The name of a parameter of which this rank has a part only, whatever the sharding.
    pub(super) fn split_parameter(&self) -> Option<&str> {
        let is_split = |parameter: &&Parameter| {
            parameter.place.as_ref().is_some_and(|(layout, block)| block.len() != layout.len())
        };
        self.parameters.iter().find(is_split).map(|parameter| &*parameter.name)
    }
}
