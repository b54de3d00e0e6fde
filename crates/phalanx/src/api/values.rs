//! Collectives and messages of one value, and collectives of lists whose lengths the other ranks do not know.

use super::comm::Comm;
use crate::buffer::Uninit;
use crate::types::dtype::Plain;
use crate::types::error::{Error, Result};
use crate::types::op::Reduction;
use std::io;
use std::mem::MaybeUninit;

/// Elements from all ranks, in rank order.
#[derive(Debug, Clone, PartialEq)]
pub struct RankBlocks<T> {
    /// All ranks' blocks, one after the other.
    pub elements: Vec<T>,
    /// The length of each rank's block.
    pub counts: Vec<usize>,
}

impl<T> RankBlocks<T> {
    /// The blocks, one for each rank.
    pub fn iter(&self) -> impl Iterator<Item = &[T]> {
        let mut rest = &self.elements[..];
        self.counts.iter().map(move |count| {
            let (block, others) = rest.split_at(*count);
            rest = others;
            block
        })
    }

    /// The block of a rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn block(&self, rank: usize) -> &[T] {
        let start: usize = self.counts[..rank].iter().sum();
        &self.elements[start..][..self.counts[rank]]
    }
}

/// # Single values
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use phalanx::ReduceOp;
///
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let rank = comm.rank() as u64;
///     assert_eq!(comm.all_reduce_value(rank, ReduceOp::Max)?, 2);
///     assert_eq!(comm.broadcast_value(10 * rank, 1)?, 10);
///     assert_eq!(comm.all_gather_value(rank)?, [0, 1, 2]);
///     assert_eq!(comm.scan_value(rank, ReduceOp::Sum)?, [0, 1, 3][comm.rank()]);
///     // The results of a root are `None` elsewhere.
///     assert_eq!(comm.gather_value(rank, 0)?, (comm.rank() == 0).then(|| vec![0, 1, 2]));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl Comm {
    /// [`all_reduce`](Comm::all_reduce) of one value: combines all ranks' values, for every rank. `MPI_Allreduce`.
    pub fn all_reduce_value<T: Plain>(&self, value: T, op: impl Into<Reduction<T>>) -> Result<T> {
        let mut value = [value];
        self.all_reduce_in_place(&mut value, op)?;
        Ok(value[0])
    }

    /// [`broadcast`](Comm::broadcast) of one value: the root's. What others pass is ignored. `MPI_Bcast`.
    pub fn broadcast_value<T: Plain>(&self, value: T, root: usize) -> Result<T> {
        let mut value = [value];
        self.broadcast_in_place(&mut value, root)?;
        Ok(value[0])
    }

    /// [`all_gather`](Comm::all_gather) of one value: all ranks' values, in rank order. `MPI_Allgather`.
    pub fn all_gather_value<T: Plain>(&self, value: T) -> Result<Vec<T>> {
        let mut values = vec![value; self.world_size()];
        self.all_gather(&[value], &mut values)?;
        Ok(values)
    }

    /// [`reduce`](Comm::reduce) of one value: combines all ranks' values, for the root. Other ranks get `None`. `MPI_Reduce`.
    pub fn reduce_value<T: Plain>(
        &self,
        value: T,
        op: impl Into<Reduction<T>>,
        root: usize,
    ) -> Result<Option<T>> {
        let mut value = [value];
        self.reduce_in_place(&mut value, op, root)?;
        Ok((self.rank() == root).then_some(value[0]))
    }

    /// [`gather`](Comm::gather) of one value: all ranks' values in rank order, for the root. Other ranks get `None`. `MPI_Gather`.
    pub fn gather_value<T: Plain>(&self, value: T, root: usize) -> Result<Option<Vec<T>>> {
        let is_root = self.rank() == root;
        let mut values = if is_root { vec![value; self.world_size()] } else { Vec::new() };
        self.gather(&[value], &mut values, root)?;
        Ok(is_root.then_some(values))
    }

    /// [`scatter`](Comm::scatter) of one value for each rank: rank `r` gets the root's `values[r]`. What others pass is ignored, such as
    /// `&[]`. `MPI_Scatter`.
    pub fn scatter_values<T: Plain>(&self, values: &[T], root: usize) -> Result<T> {
        one(|place| self.scatter(values, place, root))
    }

    /// [`scan`](Comm::scan) of one value: combines the values of the ranks up to this one. `MPI_Scan`.
    pub fn scan_value<T: Plain>(&self, value: T, op: impl Into<Reduction<T>>) -> Result<T> {
        let mut value = [value];
        self.scan_in_place(&mut value, op)?;
        Ok(value[0])
    }

    /// [`exclusive_scan`](Comm::exclusive_scan) of one value: combines the values of the ranks before this one. Rank 0 gets `None`.
    /// `MPI_Exscan`.
    pub fn exclusive_scan_value<T: Plain>(&self, value: T, op: impl Into<Reduction<T>>) -> Result<Option<T>> {
        let mut value = [value];
        self.exclusive_scan_in_place(&mut value, op)?;
        Ok((self.rank() > 0).then_some(value[0]))
    }

    /// [`send`](Comm::send) of one value. `MPI_Send`.
    pub fn send_value<T: Plain>(&self, value: T, peer: usize) -> Result<()> {
        self.send(&[value], peer)
    }

    /// [`recv`](Comm::recv) of one value. `MPI_Recv`.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
    ///     if comm.rank() == 0 {
    ///         return comm.send_value(1.5, 1);
    ///     }
    ///     assert_eq!(comm.recv_value::<f64>(0)?, 1.5);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn recv_value<T: Plain>(&self, peer: usize) -> Result<T> {
        one(|place| self.recv(place, peer))
    }

    /// [`recv_any`](Comm::recv_any) of one value: the value, and the rank that sent it. `MPI_Recv` from `MPI_ANY_SOURCE`.
    pub fn recv_any_value<T: Plain>(&self) -> Result<(T, usize)> {
        let mut source = 0;
        let value = one(|place| self.recv_any(place).map(|rank| source = rank))?;
        Ok((value, source))
    }

    /// [`send_recv`](Comm::send_recv) of one value: sends it to `dest`, and answers the one from `source`. `MPI_Sendrecv_replace`.
    pub fn send_recv_value<T: Plain>(&self, value: T, dest: usize, source: usize) -> Result<T> {
        one(|place| self.send_recv(&[value], dest, place, source))
    }
}

/// # Lists of unknown lengths
///
/// v-variants that exchange the counts first, in a collective of one number for each rank (`all_to_all_vec`: for each pair).
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     // Rank 0 has nothing, rank 1 one number, rank 2 two.
///     let all = comm.all_gather_vec(&vec![comm.rank() as u32; comm.rank()])?;
///     assert_eq!((all.elements, all.counts), (vec![1, 2, 2], vec![0, 1, 2]));
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl Comm {
    /// Concatenates all ranks' lists in rank order, for every rank. `MPI_Allgather` of the lengths, and `MPI_Allgatherv`.
    pub fn all_gather_vec<T: Plain>(&self, send: &[T]) -> Result<RankBlocks<T>> {
        let counts = self.all_counts(send.len())?;
        let elements = received(sum(&counts), |all| self.all_gather_v(send, all, &counts))?;
        Ok(RankBlocks { elements, counts })
    }

    /// Concatenates all ranks' lists in rank order at the root. Other ranks get `None`. `MPI_Gather` of the lengths, and `MPI_Gatherv`.
    pub fn gather_vec<T: Plain>(&self, send: &[T], root: usize) -> Result<Option<RankBlocks<T>>> {
        self.shape().check_rank("gather_vec", "root", root)?;
        let counts = self.all_counts(send.len())?;
        if self.rank() != root {
            self.gather_v(send, &mut [] as &mut [T], &counts, root)?;
            return Ok(None);
        }
        let elements = received(sum(&counts), |all| self.gather_v(send, all, &counts, root))?;
        Ok(Some(RankBlocks { elements, counts }))
    }

    /// Exchanges blocks of different lengths between all ranks: block `j` of rank `i` becomes block `i` of rank `j`'s result.
    ///
    /// `counts[j]` elements of `send` go to rank `j`; `send.len()` is their sum. `MPI_Alltoall` of the lengths, and `MPI_Alltoallv`.
    pub fn all_to_all_vec<T: Plain>(&self, send: &[T], counts: &[usize]) -> Result<RankBlocks<T>> {
        self.shape().all_to_all_vec(send.len(), counts)?;
        let mut theirs: Vec<u64> = counts.iter().map(|count| *count as u64).collect();
        self.all_to_all_in_place(&mut theirs)?;
        let theirs = as_counts(&theirs);
        let elements = received(sum(&theirs), |all| self.all_to_all_v(send, counts, all, &theirs))?;
        Ok(RankBlocks { elements, counts: theirs })
    }

    fn all_counts(&self, own: usize) -> Result<Vec<usize>> {
        Ok(as_counts(&self.all_gather_value(own as u64)?))
    }
}

fn as_counts(lengths: &[u64]) -> Vec<usize> {
    lengths.iter().map(|length| *length as usize).collect()
}

/// One element, which the operation writes.
fn one<T: Plain>(operation: impl FnOnce(&mut Uninit<'_, T>) -> Result<()>) -> Result<T> {
    let mut element = [MaybeUninit::uninit()];
    operation(&mut Uninit(&mut element))?;
    let [element] = element;
    // SAFETY: the operation succeeded, and this rank receives every element of its buffer (`Output`'s contract).
    Ok(unsafe { element.assume_init() })
}

/// The sum, or a length for which there is no memory.
fn sum(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// A vector of `len` elements, all of which the operation writes.
pub(super) fn received<T: Plain>(
    len: usize,
    operation: impl FnOnce(&mut Uninit<'_, T>) -> Result<()>,
) -> Result<Vec<T>> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(len).map_err(|_| {
        let remedy = "exchange shorter lists; if yours are short, a rank made another call of one number for each rank";
        Error::system("allocating the received elements", io::ErrorKind::OutOfMemory.into(), remedy)
    })?;
    operation(&mut Uninit(&mut elements.spare_capacity_mut()[..len]))?;
    // SAFETY: the operation succeeded, and this rank receives every element of its buffer (`Output`'s contract).
    unsafe { elements.set_len(len) };
    Ok(elements)
}
