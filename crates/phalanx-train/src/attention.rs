//! Ring attention: a long sequence is split over ranks, and keys and values go round (Liu et al. 2023).
//!
//! The attention itself is the program's ([`Kernel`]), of one block of queries with one block of keys. This module exchanges the blocks while the
//! kernel computes, and merges the results by their log-sum-exp.
//!
//! **Who has what.** With a causal mask, later tokens see more keys. The sequence is therefore cut into 2 p chunks for p ranks, and rank r has
//! chunks r and 2 p - 1 - r ([`Ring::tokens`]): all ranks then have the same work. Chunks may differ by one token.
//!
//! Queries, keys and values are `[tokens, heads, size]`, a rank's first chunk before its second; log-sum-exps are `[tokens, heads]`.

#[cfg(feature = "cuda")]
mod gpu;

use crate::device::{Device, Host, Number};
use crate::mesh::layout::part;
use crate::pipeline::{Channel, Messages};
use crate::{Error, Result};
use phalanx::{Comm, Source};
use std::ops::Range;

/// Which keys a query sees, in a block of as many queries as keys, or of other tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All keys of the block.
    Full,
    /// Query i sees the keys 0 to i.
    Causal,
}

/// What a kernel gets: one block of queries and one of keys.
#[derive(Debug)]
pub struct Block<V> {
    /// `[queries, heads, size]`.
    pub queries: V,
    /// `[keys, heads, size]`.
    pub keys: V,
    /// `[keys, heads, size]`.
    pub values: V,
    /// Which keys are seen.
    pub mask: Mask,
}

/// Attention of one block of queries with one block of keys. Neither is empty.
pub trait Kernel<D: Device, T: Number> {
    /// The output, `[queries, heads, size]`, as if there were no other keys, and the logarithm of the sum of the exponentials of the
    /// scores, `[queries, heads]`.
    ///
    /// # Errors
    /// An error ends the exchange on this rank, and by the deadline on the others.
    fn forward(&mut self, block: Block<D::View<'_, T>>) -> Result<(D::Buffer<T>, D::Buffer<f64>)>;

    /// Gradients of queries, keys and values, from the output and log-sum-exp over *all* keys and the gradient of the output.
    ///
    /// # Errors
    /// As [`forward`](Kernel::forward).
    fn backward(
        &mut self,
        block: Block<D::View<'_, T>>,
        output: D::View<'_, T>,
        sums: D::View<'_, f64>,
        gradient: D::View<'_, T>,
    ) -> Result<[D::Buffer<T>; 3]>;
}

/// Merging of results over different keys.
pub trait Merge: Device {
    /// Makes `output` and `sums` those over the keys of both results. Rows are of `size` numbers; -∞ in `sums` stands for no keys so far.
    ///
    /// # Errors
    /// If the device refuses the work.
    fn merge<T: Number, A: Number>(
        &self,
        size: usize,
        more: (&Self::View<'_, T>, &Self::View<'_, f64>),
        output: &mut Self::ViewMut<'_, A>,
        sums: &mut Self::ViewMut<'_, f64>,
    ) -> Result<()>;
}

impl Merge for Host {
    fn merge<T: Number, A: Number>(
        &self,
        size: usize,
        (more, more_sums): (&&[T], &&[f64]),
        output: &mut &mut [A],
        sums: &mut &mut [f64],
    ) -> Result<()> {
        assert_eq!(
            (more.len(), sums.len() * size, sums.len()),
            (output.len(), output.len(), more_sums.len())
        );
        let rows = output.chunks_exact_mut(size).zip(more.chunks_exact(size));
        for ((output, more), (sum, more_sum)) in rows.zip(sums.iter_mut().zip(*more_sums)) {
            let greatest = sum.max(*more_sum);
            if greatest == f64::NEG_INFINITY {
                continue;
            }
            let (old, new) = ((*sum - greatest).exp(), (more_sum - greatest).exp());
            for (output, more) in output.iter_mut().zip(more) {
                *output = A::from_f64((old * output.to_f64() + new * more.to_f64()) / (old + new));
            }
            *sum = greatest + (old + new).ln();
        }
        Ok(())
    }
}

/// A sequence on a ring of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    tokens: usize,
    heads: usize,
    size: usize,
    is_causal: bool,
    rank: usize,
    ranks: usize,
}

/// What the backward needs of the forward.
#[derive(Debug)]
pub struct Attention<B, S> {
    /// `[tokens, heads, size]` of this rank.
    pub output: B,
    /// Log-sum-exp over all keys, `[tokens, heads]`.
    pub sums: S,
}

/// A chunk of a rank: which one of the sequence, and its elements and rows among the rank's.
struct Chunk {
    number: usize,
    elements: Range<usize>,
    rows: Range<usize>,
}

impl Ring {
    /// A sequence of `tokens` on the ranks of `comm`. No rank is asked.
    ///
    /// # Errors
    /// [`Error::Usage`] for heads or sizes of 0.
    pub fn new(comm: &Comm, tokens: usize, heads: usize, size: usize, is_causal: bool) -> Result<Ring> {
        if heads == 0 || size == 0 {
            return Err(Error::usage(format!("{heads} heads of {size} numbers: 1 at least of both")));
        }
        Ok(Ring { tokens, heads, size, is_causal, rank: comm.rank(), ranks: comm.world_size() })
    }

    /// The tokens of a rank: its two chunks.
    pub fn tokens(&self, rank: usize) -> [Range<usize>; 2] {
        self.numbers(rank).map(|number| part(&(0..self.tokens), 2 * self.ranks, number))
    }

    /// Pairs of a query and a key that it sees, on a rank.
    pub fn pairs(&self, rank: usize) -> usize {
        let seen = |token: usize| if self.is_causal { token + 1 } else { self.tokens };
        self.tokens(rank).into_iter().flatten().map(seen).sum()
    }

    fn numbers(&self, rank: usize) -> [usize; 2] {
        [rank, 2 * self.ranks - 1 - rank]
    }

    fn len(&self, rank: usize) -> usize {
        let tokens: usize = self.tokens(rank).iter().map(ExactSizeIterator::len).sum();
        tokens * self.heads * self.size
    }

    fn chunks(&self, rank: usize) -> [Chunk; 2] {
        let (numbers, tokens) = (self.numbers(rank), self.tokens(rank));
        let first = tokens[0].len() * self.heads;
        let all = first + tokens[1].len() * self.heads;
        let chunk = |at: usize, rows: Range<usize>| Chunk {
            number: numbers[at],
            elements: rows.start * self.size..rows.end * self.size,
            rows,
        };
        [chunk(0, 0..first), chunk(1, first..all)]
    }

    /// How queries of a chunk see keys of another.
    fn mask(&self, queries: &Chunk, keys: &Chunk) -> Option<Mask> {
        if queries.rows.is_empty() || keys.rows.is_empty() || self.is_causal && keys.number > queries.number {
            return None;
        }
        Some(if self.is_causal && keys.number == queries.number { Mask::Causal } else { Mask::Full })
    }

    fn check(&self, what: &str, len: usize) -> Result<()> {
        let expected = self.len(self.rank);
        if len == expected {
            return Ok(());
        }
        Err(Error::usage(format!(
            "{len} numbers of {what} for the tokens {:?} of rank {}: {expected} are needed",
            self.tokens(self.rank),
            self.rank
        )))
    }

    /// Attention of this rank's queries with all keys. Collective. Results are merged in numbers of type `A`: f32 at least for bf16 and f16.
    ///
    /// # Errors
    /// [`Error::Usage`] if lengths do not fit. Errors of the kernel, of `comm` and of the device.
    pub fn forward<D: Messages + Merge, T: Number, A: Number>(
        &self,
        comm: &Comm,
        device: &D,
        kernel: &mut impl Kernel<D, T>,
        [queries, keys, values]: [&D::Buffer<T>; 3],
    ) -> Result<Attention<D::Buffer<T>, D::Buffer<f64>>> {
        for (what, buffer) in [("queries", queries), ("keys", keys), ("values", values)] {
            self.check(what, buffer.len())?;
        }
        let len = queries.len();
        let rows = len / self.size;
        let (mut merged, mut sums) = (device.zeros::<A>(len)?, device.zeros::<f64>(rows)?);
        device.fill(&mut device.view_mut(&mut sums, 0..rows), f64::NEG_INFINITY)?;
        let own = self.chunks(self.rank);
        let mut visiting = [copy(device, keys)?, copy(device, values)?];
        for step in 0..self.ranks {
            let home = (self.rank + self.ranks - step) % self.ranks;
            let sending = self.pass_on(comm, device, step, &visiting)?;
            for queries_of in &own {
                for keys_of in &self.chunks(home) {
                    let Some(mask) = self.mask(queries_of, keys_of) else { continue };
                    let block = Block {
                        queries: device.view(queries, queries_of.elements.clone()),
                        keys: device.view(&visiting[0], keys_of.elements.clone()),
                        values: device.view(&visiting[1], keys_of.elements.clone()),
                        mask,
                    };
                    let (output, more) = kernel.forward(block)?;
                    let (elements, rows) = (queries_of.elements.clone(), queries_of.rows.clone());
                    let more = (&device.view(&output, 0..elements.len()), &device.view(&more, 0..rows.len()));
                    let mut to = device.view_mut(&mut merged, elements);
                    device.merge(self.size, more, &mut to, &mut device.view_mut(&mut sums, rows))?;
                }
            }
            visiting = self.receive(comm, device, step, visiting, sending)?;
        }
        let mut output = device.alloc(len)?;
        device.convert(&device.view(&merged, 0..len), &mut device.view_mut(&mut output, 0..len))?;
        Ok(Attention { output, sums })
    }

    /// Gradients of this rank's queries, keys and values. Collective. Those of keys and values go round with them and are added up in numbers of
    /// type `A`.
    ///
    /// # Errors
    /// As [`forward`](Ring::forward).
    pub fn backward<D: Messages + Merge, T: Number, A: Number>(
        &self,
        comm: &Comm,
        device: &D,
        kernel: &mut impl Kernel<D, T>,
        [queries, keys, values]: [&D::Buffer<T>; 3],
        attention: &Attention<D::Buffer<T>, D::Buffer<f64>>,
        gradient: &D::Buffer<T>,
    ) -> Result<[D::Buffer<T>; 3]> {
        for (what, buffer) in
            [("queries", queries), ("keys", keys), ("values", values), ("the gradient", gradient)]
        {
            self.check(what, buffer.len())?;
        }
        let len = queries.len();
        let own = self.chunks(self.rank);
        let mut of_queries = device.zeros::<A>(len)?;
        let mut visiting = [copy(device, keys)?, copy(device, values)?];
        let mut of_visiting = [device.zeros::<A>(len)?, device.zeros::<A>(len)?];
        for step in 0..self.ranks {
            let home = (self.rank + self.ranks - step) % self.ranks;
            let sending = self.pass_on(comm, device, step, &visiting)?;
            for queries_of in &own {
                for keys_of in &self.chunks(home) {
                    let Some(mask) = self.mask(queries_of, keys_of) else { continue };
                    let (at, keys_at) = (queries_of.elements.clone(), keys_of.elements.clone());
                    let block = Block {
                        queries: device.view(queries, at.clone()),
                        keys: device.view(&visiting[0], keys_at.clone()),
                        values: device.view(&visiting[1], keys_at.clone()),
                        mask,
                    };
                    let output = device.view(&attention.output, at.clone());
                    let sums = device.view(&attention.sums, queries_of.rows.clone());
                    let gradients =
                        kernel.backward(block, output, sums, device.view(gradient, at.clone()))?;
                    let [of_keys, of_values] = &mut of_visiting;
                    let targets = [(&mut of_queries, at), (of_keys, keys_at.clone()), (of_values, keys_at)];
                    for (from, (to, range)) in gradients.iter().zip(targets) {
                        let from = device.view(from, 0..range.len());
                        device.add(1.0, &from, &mut device.view_mut(to, range))?;
                    }
                }
            }
            visiting = self.receive(comm, device, step, visiting, sending)?;
            // The gradients follow, and are at home after the last step.
            let sending = self.send(comm, device, &of_visiting, Channel::Backward)?;
            of_visiting = self.take(
                comm,
                device,
                (home + self.ranks - 1) % self.ranks,
                of_visiting,
                sending,
                Channel::Backward,
            )?;
        }
        let mut gradients = [device.alloc(len)?, device.alloc(len)?, device.alloc(len)?];
        let [of_keys, of_values] = of_visiting;
        for (from, to) in [of_queries, of_keys, of_values].iter().zip(&mut gradients) {
            device.convert(&device.view(from, 0..len), &mut device.view_mut(to, 0..len))?;
        }
        Ok(gradients)
    }

    /// Sends keys and values to the next rank, but for the last step, in which they would come home.
    fn pass_on<D: Messages, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        step: usize,
        visiting: &[D::Buffer<T>; 2],
    ) -> Result<Vec<D::Sending<T>>> {
        if step + 1 == self.ranks {
            Ok(Vec::new())
        } else {
            self.send(comm, device, visiting, Channel::Forward)
        }
    }

    fn receive<D: Messages, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        step: usize,
        visiting: [D::Buffer<T>; 2],
        sending: Vec<D::Sending<T>>,
    ) -> Result<[D::Buffer<T>; 2]> {
        if step + 1 == self.ranks {
            return Ok(visiting);
        }
        let home = (self.rank + 2 * self.ranks - step - 1) % self.ranks;
        self.take(comm, device, home, visiting, sending, Channel::Forward)
    }

    fn send<D: Messages, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        buffers: &[D::Buffer<T>; 2],
        channel: Channel,
    ) -> Result<Vec<D::Sending<T>>> {
        if self.ranks == 1 {
            return Ok(Vec::new());
        }
        let next = (self.rank + 1) % self.ranks;
        let send = |buffer| device.start_send(comm, copy(device, buffer)?, next, channel);
        buffers.iter().map(send).collect()
    }

    /// Receives what the rank before had: the two buffers of the rank `home`.
    fn take<D: Messages, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        home: usize,
        own: [D::Buffer<T>; 2],
        sending: Vec<D::Sending<T>>,
        channel: Channel,
    ) -> Result<[D::Buffer<T>; 2]> {
        if self.ranks == 1 {
            return Ok(own);
        }
        let before = (self.rank + self.ranks - 1) % self.ranks;
        let mut taken = [device.alloc(self.len(home))?, device.alloc(self.len(home))?];
        for buffer in &mut taken {
            device.receive(comm, buffer, before, channel)?;
        }
        sending.into_iter().try_for_each(|sending| device.finish(sending))?;
        Ok(taken)
    }
}

fn copy<D: Device, T: Number>(device: &D, buffer: &D::Buffer<T>) -> Result<D::Buffer<T>> {
    let len = buffer.len();
    let mut copy = device.alloc(len)?;
    device.convert(&device.view(buffer, 0..len), &mut device.view_mut(&mut copy, 0..len))?;
    Ok(copy)
}
