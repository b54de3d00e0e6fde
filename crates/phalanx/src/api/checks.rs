//! Checks of a collective's arguments, each of which answers the checked [`Call`].

use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::contract::{Blocks, Call, Operation, RankGrid, Shape};
use crate::types::dtype::{DType, ElementType};
use crate::types::error::{Error, Result, UsageError};
use crate::types::op::{CombineInOrder, RawReduction, Reduction, ReductionCode};
use crate::types::plain::MOST_COMBINED_BYTES;

/// Limit for the sum of a list of counts, so that its length in bytes fits `isize` for every element type.
const MOST_ELEMENTS: usize = isize::MAX as usize / 8;

/// The sum of the counts, checked against overflow. It includes blocks that this rank does not hold.
fn total(operation: &'static str, counts: &[usize]) -> Result<usize> {
    let sum = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
    sum.filter(|sum| *sum <= MOST_ELEMENTS).ok_or_else(|| {
        let largest = (0..counts.len()).max_by_key(|rank| counts[*rank]).unwrap_or(0);
        let value = format!(
            "the sum of {} counts; the largest is counts[{largest}] = {}",
            counts.len(),
            counts[largest]
        );
        UsageError::Overflow { operation, what: "the total count", value, limit: MOST_ELEMENTS.to_string() }
            .into()
    })
}

#[inline(always)]
pub(crate) fn same_len(
    operation: &'static str,
    buffer: &'static str,
    actual: usize,
    expected: usize,
    rule: &'static str,
) -> Result<()> {
    if actual == expected {
        Ok(())
    } else {
        Err(UsageError::Length { operation, buffer, actual, expected, rule }.into())
    }
}

impl Shape {
    #[inline(always)]
    pub fn check_rank(&self, operation: &'static str, role: &'static str, rank: usize) -> Result<()> {
        let world_size = self.world_size;
        if rank < world_size {
            Ok(())
        } else {
            Err(UsageError::Rank { operation, role, rank, world_size }.into())
        }
    }

    /// The length of a block, if `len` elements are one for each rank.
    #[inline(always)]
    fn share(&self, operation: &'static str, buffer: &'static str, len: usize) -> Result<usize> {
        let world_size = self.world_size;
        if len.is_multiple_of(world_size) {
            Ok(len / world_size)
        } else {
            Err(UsageError::Indivisible { operation, buffer, actual: len, world_size }.into())
        }
    }

    #[inline(always)]
    fn all_blocks(&self, operation: &'static str, block: usize) -> Result<usize> {
        block.checked_mul(self.world_size).ok_or_else(|| {
            let value = format!("{block} × {}", self.world_size);
            let limit = usize::MAX.to_string();
            UsageError::Overflow { operation, what: "the length of all blocks", value, limit }.into()
        })
    }

    pub fn check_grid(&self, grid: &RankGrid<'_>) -> Result<()> {
        let refuse = |name: &str, value: String, expected: String| {
            Err(UsageError::Setting { name: format!("split_grid: {name}"), value, expected }.into())
        };
        let product = grid.sizes.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        if product != Some(self.world_size) {
            let expected = format!("sizes with the number of ranks, {}, as their product", self.world_size);
            return refuse("sizes", format!("{:?}", grid.sizes), expected);
        }
        for (number, group) in grid.groups.iter().enumerate() {
            let is_there = |dimension: &usize| *dimension < grid.sizes.len();
            let mut sorted = group.to_vec();
            sorted.sort_unstable();
            if !group.iter().all(is_there) || sorted.windows(2).any(|pair| pair[0] == pair[1]) {
                let expected = format!("dimensions below {}, each once", grid.sizes.len());
                return refuse(&format!("groups[{number}]"), format!("{group:?}"), expected);
            }
        }
        Ok(())
    }

    fn check_counts(&self, operation: &'static str, list: &'static str, counts: &[usize]) -> Result<()> {
        if counts.len() == self.world_size {
            Ok(())
        } else {
            let (actual, world_size) = (counts.len(), self.world_size);
            Err(UsageError::Counts { operation, list, actual, world_size }.into())
        }
    }

    // --- whole buffers --------------------------------------------------------------------------------

    #[inline(always)]
    pub fn all_reduce(&self, send: usize, recv: usize) -> Result<Call<'static>> {
        same_len("all_reduce", "recv", recv, send, "as many as the send buffer")?;
        Ok(self.whole(Operation::AllReduce, send))
    }

    #[inline(always)]
    pub fn scan(&self, operation: Operation, send: usize, recv: usize) -> Result<Call<'static>> {
        same_len(operation.name(), "recv", recv, send, "as many as the send buffer")?;
        Ok(self.whole(operation, send))
    }

    #[inline(always)]
    pub fn broadcast(&self, send: usize, recv: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank("broadcast", "root", root)?;
        if root == self.rank {
            same_len("broadcast", "send", send, recv, "as many as the recv buffer, at the root")?;
        }
        Ok(self.whole(Operation::Broadcast, recv).rooted(root))
    }

    #[inline(always)]
    pub fn reduce(&self, send: usize, recv: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank("reduce", "root", root)?;
        if root == self.rank {
            same_len("reduce", "recv", recv, send, "as many as the send buffer, at the root")?;
        }
        Ok(self.whole(Operation::Reduce, send).rooted(root))
    }

    /// An operation on buffers of one block each.
    #[inline(always)]
    pub fn whole(&self, operation: Operation, len: usize) -> Call<'static> {
        let blocks = Blocks::Equal(len);
        Call { blocks, recv_blocks: blocks, ..Call::empty(operation) }
    }

    #[inline(always)]
    pub fn whole_in_place(&self, operation: Operation, len: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank(operation.name(), "root", root)?;
        Ok(self.whole(operation, len).rooted(root))
    }

    // --- equal blocks ---------------------------------------------------------------------------------

    #[inline(always)]
    pub fn all_gather(&self, send: usize, recv: usize) -> Result<Call<'static>> {
        let expected = self.all_blocks("all_gather", send)?;
        same_len("all_gather", "recv", recv, expected, "ranks × the send buffer")?;
        Ok(self.whole(Operation::AllGather, send))
    }

    #[inline(always)]
    pub fn gather(&self, send: usize, recv: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank("gather", "root", root)?;
        if root == self.rank {
            let expected = self.all_blocks("gather", send)?;
            same_len("gather", "recv", recv, expected, "ranks × the send buffer, at the root")?;
        }
        Ok(self.whole(Operation::Gather, send).rooted(root))
    }

    #[inline(always)]
    pub fn reduce_scatter(&self, send: usize, recv: usize) -> Result<Call<'static>> {
        let expected = self.all_blocks("reduce_scatter", recv)?;
        same_len("reduce_scatter", "send", send, expected, "ranks × the recv buffer")?;
        Ok(self.whole(Operation::ReduceScatter, recv))
    }

    #[inline(always)]
    pub fn scatter(&self, send: usize, recv: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank("scatter", "root", root)?;
        if root == self.rank {
            let expected = self.all_blocks("scatter", recv)?;
            same_len("scatter", "send", send, expected, "ranks × the recv buffer, at the root")?;
        }
        Ok(self.whole(Operation::Scatter, recv).rooted(root))
    }

    #[inline(always)]
    pub fn all_to_all(&self, send: usize, recv: usize) -> Result<Call<'static>> {
        let block = self.share("all_to_all", "send", send)?;
        same_len("all_to_all", "recv", recv, send, "as many as the send buffer")?;
        Ok(self.whole(Operation::AllToAll, block))
    }

    /// One buffer of `len` elements, which holds all ranks' blocks.
    #[inline(always)]
    pub fn blocks_in_place(&self, operation: Operation, len: usize, root: usize) -> Result<Call<'static>> {
        self.check_rank(operation.name(), "root", root)?;
        let block = self.share(operation.name(), "in-place", len)?;
        Ok(self.whole(operation, block).rooted(root))
    }

    // --- blocks of different lengths ------------------------------------------------------------------

    pub fn all_gather_v<'a>(&self, send: usize, recv: usize, counts: &'a [usize]) -> Result<Call<'a>> {
        let operation = "all_gather_v";
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "send", send, counts[self.rank], "counts[rank]")?;
        same_len(operation, "recv", recv, total(operation, counts)?, "the sum of the counts")?;
        Ok(each(Operation::AllGatherV, counts))
    }

    pub fn gather_v<'a>(
        &self,
        send: usize,
        recv: usize,
        counts: &'a [usize],
        root: usize,
    ) -> Result<Call<'a>> {
        let operation = "gather_v";
        self.check_rank(operation, "root", root)?;
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "send", send, counts[self.rank], "counts[rank]")?;
        let all = total(operation, counts)?;
        if root == self.rank {
            same_len(operation, "recv", recv, all, "the sum of the counts, at the root")?;
        }
        Ok(each(Operation::GatherV, counts).rooted(root))
    }

    pub fn scatter_v<'a>(
        &self,
        send: usize,
        recv: usize,
        counts: &'a [usize],
        root: usize,
    ) -> Result<Call<'a>> {
        let operation = "scatter_v";
        self.check_rank(operation, "root", root)?;
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "recv", recv, counts[self.rank], "counts[rank]")?;
        let all = total(operation, counts)?;
        if root == self.rank {
            same_len(operation, "send", send, all, "the sum of the counts, at the root")?;
        }
        Ok(each(Operation::ScatterV, counts).rooted(root))
    }

    pub fn reduce_scatter_v<'a>(&self, send: usize, recv: usize, counts: &'a [usize]) -> Result<Call<'a>> {
        let operation = "reduce_scatter_v";
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "recv", recv, counts[self.rank], "counts[rank]")?;
        same_len(operation, "send", send, total(operation, counts)?, "the sum of the counts")?;
        Ok(each(Operation::ReduceScatterV, counts))
    }

    pub fn all_to_all_v<'a>(
        &self,
        send: usize,
        send_counts: &'a [usize],
        recv: usize,
        recv_counts: &'a [usize],
    ) -> Result<Call<'a>> {
        let operation = "all_to_all_v";
        self.check_counts(operation, "send counts", send_counts)?;
        self.check_counts(operation, "recv counts", recv_counts)?;
        same_len(operation, "send", send, total(operation, send_counts)?, "the sum of the send counts")?;
        same_len(operation, "recv", recv, total(operation, recv_counts)?, "the sum of the recv counts")?;
        let (own_sent, own_received) = (send_counts[self.rank], recv_counts[self.rank]);
        same_len(
            operation,
            "own block of the recv",
            own_received,
            own_sent,
            "send_counts[rank], what this rank gives itself",
        )?;
        Ok(Call { recv_blocks: Blocks::Each(recv_counts), ..each(Operation::AllToAllV, send_counts) })
    }

    /// The sent half of an all_to_all_v whose received counts are not known yet.
    pub fn all_to_all_vec(&self, send: usize, counts: &[usize]) -> Result<()> {
        let operation = "all_to_all_vec";
        self.check_counts(operation, "counts", counts)?;
        same_len(operation, "send", send, total(operation, counts)?, "the sum of the counts")
    }

    /// One buffer of `len` elements, which holds all ranks' blocks.
    pub fn blocks_in_place_v<'a>(
        &self,
        operation: Operation,
        len: usize,
        counts: &'a [usize],
        root: usize,
    ) -> Result<Call<'a>> {
        let name = operation.name();
        self.check_rank(name, "root", root)?;
        self.check_counts(name, "counts", counts)?;
        same_len(name, "in-place", len, total(name, counts)?, "the sum of the counts")?;
        Ok(each(operation, counts).rooted(root))
    }
}

#[inline(always)]
fn each(operation: Operation, counts: &[usize]) -> Call<'_> {
    let blocks = Blocks::Each(counts);
    Call { blocks, recv_blocks: blocks, ..Call::empty(operation) }
}

impl<'a> Call<'a> {
    #[inline(always)]
    fn rooted(self, root: usize) -> Call<'a> {
        Call { root, ..self }
    }

    #[inline(always)]
    pub(crate) fn reducing<T>(self, reduction: impl Into<Reduction<T>>) -> Call<'a>
    where
        T: ElementType,
    {
        let Reduction { raw, combine, .. } = reduction.into();
        Call { reduction: raw, custom: combine.map(|combine| combine as _), ..self }
    }

    /// Adds a closure that reduces.
    pub(crate) fn combining(self, custom: &'a dyn CombineInOrder) -> Call<'a> {
        let reduction = RawReduction { code: ReductionCode::Custom, factor: 0 };
        Call { reduction, custom: Some(custom), ..self }
    }

    /// Adds the lengths of the parts that travel together, for the comparison of calls: a hash, in the place of the root.
    pub(crate) fn of_parts(self, lens: &[usize]) -> Call<'a> {
        let hash = lens.iter().fold(0x811c_9dc5, |hash: u32, len| {
            (hash ^ *len as u32).wrapping_mul(0x0100_0193).rotate_left(9)
        });
        self.rooted(hash as usize)
    }

    /// Adds the elements' type, which both buffers have.
    #[inline(always)]
    pub(crate) fn of_types(self, send: DType, recv: DType) -> Result<Call<'a>> {
        same_type(self.operation.name(), send, recv)?;
        self.of_type(send)
    }

    /// Adds the elements' type.
    ///
    /// # Errors
    /// [`UsageError::Setting`] for a reduction of plain data without a closure, which only buffers of [`AnyElement`](crate::AnyElement) can
    /// have, and of elements that are too long for a closure.
    #[inline(always)]
    pub(crate) fn of_type(self, dtype: DType) -> Result<Call<'a>> {
        if self.operation.reduces() && !dtype.is_number() {
            if self.custom.is_none() {
                return Err(not_a_number(self.operation, dtype));
            }
            if dtype.size() > MOST_COMBINED_BYTES {
                return Err(too_long_to_combine(self.operation, dtype));
            }
        }
        Ok(Call { dtype, ..self })
    }

    /// Adds the buffers.
    #[inline(always)]
    pub(crate) fn between(self, send: &Loan<'_>, recv: &Loan<'_>, stream: &Stream) -> Call<'a> {
        Call { stream: stream.raw(), ..self }.with_buffers(send.span(), recv.span())
    }

    /// Adds the one buffer of an in-place call: the smaller of send and recv is `rank`'s block in the larger.
    #[inline(always)]
    pub(crate) fn inside(self, buffer: &Loan<'_>, stream: &Stream, rank: usize) -> Call<'a> {
        use Operation::*;
        let whole = buffer.span();
        let own = || whole.at(self.blocks.offset(rank) * self.dtype.size());
        let (send, recv) = match self.operation {
            AllGather | Gather | AllGatherV | GatherV => (own(), whole),
            ReduceScatter | Scatter | ReduceScatterV | ScatterV => (whole, own()),
            _ => (whole, whole),
        };
        Call { stream: stream.raw(), ..self }.with_buffers(send, recv)
    }
}

#[cold]
fn too_long_to_combine(operation: Operation, dtype: DType) -> Error {
    let name = format!("the elements in {} by a closure, {dtype}", operation.name());
    let (value, limit) = (format!("{} bytes", dtype.size()), MOST_COMBINED_BYTES);
    let expected = format!("at most {limit} bytes: combine their parts as elements, or gather and combine");
    UsageError::Setting { name, value, expected }.into()
}

#[cold]
fn not_a_number(operation: Operation, dtype: DType) -> Error {
    let name = format!("the elements' type in {}", operation.name());
    let expected = "a number, since a reduction combines them".into();
    UsageError::Setting { name, value: dtype.name().into(), expected }.into()
}

/// An error for buffers of two types, which only buffers of [`AnyElement`](crate::AnyElement) can have.
#[inline(always)]
pub(crate) fn same_type(operation: &'static str, send: DType, recv: DType) -> Result<()> {
    if send == recv { Ok(()) } else { Err(UsageError::Types { operation, send, recv }.into()) }
}
