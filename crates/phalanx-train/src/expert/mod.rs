//! Expert parallelism: the experts of a layer are spread over ranks, and each token travels to the experts that its router chose.
//!
//! ```
//! use phalanx_train::device::Host;
//! use phalanx_train::expert::Experts;
//!
//! // Two ranks with an expert each: expert 0 doubles a token, expert 1 negates it.
//! let outputs = phalanx::try_run(2, |comm| {
//!     let experts = Experts::new(&comm, 2)?;
//!     let tokens = [1.0f32, 2.0, 3.0, 4.0]; // two tokens of two numbers
//!     let chosen = [0, 1]; // the first token goes to expert 0, the second to expert 1
//!     let routing = experts.route(&comm, 1, &chosen, &[1.0f32, 0.5])?;
//!     let mut rows = routing.dispatch(&comm, &Host, 2, &&tokens[..])?;
//!     for expert in experts.local() {
//!         for x in &mut rows[routing.elements_of(expert, 2)] {
//!             *x *= if expert == 0 { 2.0 } else { -1.0 };
//!         }
//!     }
//!     Ok::<_, phalanx_train::Error>(routing.combine(&comm, &Host, 2, &&rows[..])?.output)
//! })?;
//! assert_eq!(outputs, [[2.0, 4.0, -1.5, -2.0]; 2]);
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! A step of a layer is: [`route`](Experts::route), [`dispatch`](Routing::dispatch), the experts' own computation,
//! [`combine`](Routing::combine); backwards [`combine_backward`](Routing::combine_backward), the experts' backward,
//! [`dispatch_backward`](Routing::dispatch_backward). All of them are collective: every rank calls them in every step, also one
//! without tokens, and one whose experts nobody chose.
//!
//! **Gradients of experts.** A rank's experts see the tokens of all ranks, so that their gradients are sums over the ranks.
//! Where the loss is a mean over each rank's own tokens, and other gradients are averaged over the ranks, multiply them by
//! [`gradient_factor`](Experts::gradient_factor); then the result is that of a run without expert parallelism.

#[cfg(feature = "cuda")]
mod gpu;
mod rows;
mod statistics;

pub use rows::{NO_ROW, Rows};
pub use statistics::Statistics;

use crate::device::Number;
use crate::{Error, Result};
use phalanx::Comm;
use std::ops::Range;

/// How experts are spread over the ranks of a communicator: in order, the first ranks have one more if they do not divide evenly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    count: usize,
    rank: usize,
    ranks: usize,
    capacity: Option<usize>,
}

impl Experts {
    /// `count` experts on the ranks of `comm`. No rank is asked.
    ///
    /// # Errors
    /// [`Error::Usage`] for fewer experts than ranks.
    pub fn new(comm: &Comm, count: usize) -> Result<Experts> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        if count < ranks {
            return Err(Error::usage(format!(
                "{count} experts for {ranks} ranks: each rank needs one at least; use a group of {count} ranks or fewer"
            )));
        }
        Ok(Experts { count, rank, ranks, capacity: None })
    }

    /// Limits how many tokens each rank sends to an expert. The tokens' first choices come before all second choices, and
    /// earlier tokens before later ones; a choice beyond the limit is dropped: it adds nothing to the token's output.
    ///
    /// # Errors
    /// [`Error::Usage`] for a capacity of 0.
    pub fn with_capacity(mut self, tokens: usize) -> Result<Experts> {
        if tokens == 0 {
            return Err(Error::usage(
                "a capacity of 0 tokens: it must be 1 at least; leave it out for no limit",
            ));
        }
        self.capacity = Some(tokens);
        Ok(self)
    }

    /// Number of experts, of all ranks together.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The experts of this rank.
    pub fn local(&self) -> Range<usize> {
        self.of(self.rank)
    }

    /// The experts of a rank.
    pub fn of(&self, rank: usize) -> Range<usize> {
        let start = |rank: usize| rank * (self.count / self.ranks) + rank.min(self.count % self.ranks);
        start(rank)..start(rank + 1)
    }

    /// What gradients of experts' parameters are multiplied by, if the loss is a mean over each rank's tokens: 1 / ranks.
    pub fn gradient_factor(&self) -> f64 {
        1.0 / self.ranks as f64
    }

    /// Tells all ranks how many tokens come to their experts. Collective.
    ///
    /// `chosen` has the `top` experts of each token, a token after the other, and `weights` what their outputs are multiplied by.
    /// Both may be empty.
    ///
    /// # Errors
    /// [`Error::Usage`] on every rank, if one of them has lists of unlike lengths, or an expert that does not exist. Errors of `comm`.
    pub fn route<W: Number>(
        &self,
        comm: &Comm,
        top: usize,
        chosen: &[u32],
        weights: &[W],
    ) -> Result<Routing> {
        let problem = self.problem_with(comm, top, chosen, weights.len());
        let lists = if problem.is_some() { &[] } else { chosen };
        let kept = self.within_capacity(top.max(1), lists);

        // The choices, by expert and then by token: what goes to a rank lies together.
        let mut order: Vec<u32> = (0..lists.len() as u32).filter(|choice| kept[*choice as usize]).collect();
        order.sort_by_key(|choice| lists[*choice as usize]);
        let mut counts = vec![0u64; self.count];
        for choice in &order {
            counts[lists[*choice as usize] as usize] += 1;
        }

        // A rank that cannot take part says so in place of its counts: the others would wait for its tokens.
        if problem.is_some() {
            counts.fill(REFUSED);
        }
        let experts = |rank: usize| self.of(rank).len();
        let sent: Vec<usize> = (0..self.ranks).map(experts).collect();
        let local = experts(self.rank);
        let mut incoming = vec![0u64; local * self.ranks];
        comm.all_to_all_v(&counts, &sent, &mut incoming, &vec![local; self.ranks])?;
        if let Some(problem) = problem {
            return Err(Error::Usage(problem));
        }
        if let Some(at) = incoming.iter().position(|count| *count == REFUSED) {
            return Err(Error::Usage(format!(
                "rank {} cannot route its tokens: see its own error",
                at / local
            )));
        }
        let weights = weights.iter().map(|weight| weight.to_f64()).collect();
        Ok(Routing::new(self.clone(), top, lists.len(), order, weights, &counts, &incoming))
    }

    fn problem_with(&self, comm: &Comm, top: usize, chosen: &[u32], weights: usize) -> Option<String> {
        let count = self.count;
        if (comm.rank(), comm.world_size()) != (self.rank, self.ranks) {
            return Some(format!(
                "rank {} of {} with a communicator in which it is rank {} of {}: use the one that the experts were made with",
                self.rank,
                self.ranks,
                comm.rank(),
                comm.world_size()
            ));
        }
        if top == 0 || top > count {
            return Some(format!("{top} experts for each token: 1 to {count} are possible"));
        }
        if !chosen.len().is_multiple_of(top) || chosen.len() != weights {
            return Some(format!(
                "{} chosen experts and {weights} weights, with {top} for each token: as many of both, a multiple of {top}",
                chosen.len()
            ));
        }
        let wrong = chosen.iter().position(|expert| *expert as usize >= count)?;
        let (token, expert) = (wrong / top, chosen[wrong]);
        Some(format!("token {token} goes to expert {expert}: the experts are 0 to {}", count - 1))
    }

    /// Which choices are within the capacity of their experts.
    fn within_capacity(&self, top: usize, chosen: &[u32]) -> Vec<bool> {
        let Some(capacity) = self.capacity else {
            return vec![true; chosen.len()];
        };
        let mut taken = vec![0; self.count];
        let mut kept = vec![false; chosen.len()];
        for place in 0..top {
            for choice in (place..chosen.len()).step_by(top) {
                let taken = &mut taken[chosen[choice] as usize];
                kept[choice] = *taken < capacity;
                *taken += 1;
            }
        }
        kept
    }
}

/// In place of a count: the rank cannot take part.
const REFUSED: u64 = u64::MAX;

/// Where the tokens of a step go, and where they come from.
#[derive(Debug, Clone)]
pub struct Routing {
    experts: Experts,
    top: usize,
    tokens: usize,
    /// The token of each row that is sent, in the order of sending.
    sent_tokens: Vec<u32>,
    /// The weight of each row that is sent.
    sent_weights: Vec<f64>,
    /// Of each choice the row that is sent for it; [`NO_ROW`] if it was dropped.
    sent_rows: Vec<u32>,
    weights: Vec<f64>,
    /// Rows to each rank, and from each rank.
    outgoing: Vec<usize>,
    incoming: Vec<usize>,
    /// Rows that each local expert gets.
    ranges: Vec<Range<usize>>,
    /// By expert, the place of a row among those received, which are by rank; and the inverse.
    by_expert: Vec<u32>,
    by_rank: Vec<u32>,
    /// Rows that this rank sends to each expert.
    counts: Vec<u64>,
}

/// Output of a layer, and what its backward needs.
#[derive(Debug)]
pub struct Combined<B> {
    /// `[tokens, width]`: the weighted sum of what the experts made of each token.
    pub output: B,
    /// What the experts returned, for [`combine_backward`](Routing::combine_backward).
    pub returned: B,
}

impl Routing {
    fn new(
        experts: Experts,
        top: usize,
        choices: usize,
        order: Vec<u32>,
        weights: Vec<f64>,
        counts: &[u64],
        incoming: &[u64],
    ) -> Routing {
        let mut sent_rows = vec![NO_ROW; choices];
        for (row, choice) in order.iter().enumerate() {
            sent_rows[*choice as usize] = row as u32;
        }
        let of_rank = |rank: usize| counts[experts.of(rank)].iter().sum::<u64>() as usize;
        let outgoing = (0..experts.ranks).map(of_rank).collect();
        let local = experts.local().len();
        let received =
            incoming.chunks_exact(local).map(|counts| counts.iter().sum::<u64>() as usize).collect();

        // Received rows lie by rank and then by expert.
        let mut starts = Vec::with_capacity(incoming.len());
        let mut rows = 0;
        for count in incoming {
            starts.push(rows);
            rows += *count as u32;
        }
        let (mut ranges, mut by_expert) = (Vec::with_capacity(local), Vec::with_capacity(rows as usize));
        for expert in 0..local {
            let start = by_expert.len();
            for rank in 0..experts.ranks {
                let at = rank * local + expert;
                by_expert.extend(starts[at]..starts[at] + incoming[at] as u32);
            }
            ranges.push(start..by_expert.len());
        }
        let mut by_rank = vec![0; by_expert.len()];
        for (place, row) in by_expert.iter().enumerate() {
            by_rank[*row as usize] = place as u32;
        }
        Routing {
            top,
            tokens: choices / top,
            sent_tokens: order.iter().map(|choice| choice / top as u32).collect(),
            sent_weights: order.iter().map(|choice| weights[*choice as usize]).collect(),
            sent_rows,
            weights,
            outgoing,
            incoming: received,
            ranges,
            by_expert,
            by_rank,
            counts: counts.to_vec(),
            experts,
        }
    }

    /// Number of rows that this rank's experts get.
    pub fn rows(&self) -> usize {
        self.by_expert.len()
    }

    /// The rows of one of this rank's experts. Rows are ordered by the rank that they come from, and there by token.
    ///
    /// # Panics
    /// If the expert is another rank's.
    pub fn rows_of(&self, expert: usize) -> Range<usize> {
        let local = self.experts.local();
        assert!(local.contains(&expert), "expert {expert} is not on this rank, which has {local:?}");
        self.ranges[expert - local.start].clone()
    }

    /// The same as a range of elements, for rows of `width`.
    ///
    /// # Panics
    /// If the expert is another rank's.
    pub fn elements_of(&self, expert: usize, width: usize) -> Range<usize> {
        let rows = self.rows_of(expert);
        rows.start * width..rows.end * width
    }

    /// Choices of this rank's tokens that were beyond the capacity.
    pub fn dropped(&self) -> usize {
        self.sent_rows.len() - self.sent_tokens.len()
    }

    /// Sends the tokens to their experts: `[tokens, width]` → `[rows, width]`, by expert. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] if `tokens` has not `width` numbers for each token. Errors of `comm` and of the device.
    pub fn dispatch<D: Rows, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        width: usize,
        tokens: &D::View<'_, T>,
    ) -> Result<D::Buffer<T>> {
        check("tokens", phalanx::Source::len(tokens), self.tokens, width)?;
        self.send_out(comm, device, width, None, tokens)
    }

    /// Brings what the experts made of the tokens back, and adds it up by the weights: `[rows, width]` → `[tokens, width]`. Collective.
    ///
    /// # Errors
    /// [`Error::Usage`] if `outputs` has not `width` numbers for each row. Errors of `comm` and of the device.
    pub fn combine<D: Rows, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        width: usize,
        outputs: &D::View<'_, T>,
    ) -> Result<Combined<D::Buffer<T>>> {
        let returned = self.send_back(comm, device, width, outputs)?;
        let output = self.sum(device, width, Some(&self.weights), &returned)?;
        Ok(Combined { output, returned })
    }

    /// Backward of [`combine`](Routing::combine): from the gradient of the output, `[tokens, width]`, the gradient of each row at its expert,
    /// `[rows, width]`, and that of each weight (0 where the choice was dropped). Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Routing::dispatch).
    pub fn combine_backward<D: Rows, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        width: usize,
        gradient: &D::View<'_, T>,
        returned: &D::Buffer<T>,
    ) -> Result<(D::Buffer<T>, Vec<f64>)> {
        check("gradients of tokens", phalanx::Source::len(gradient), self.tokens, width)?;
        let at_experts = self.send_out(comm, device, width, Some(&self.sent_weights), gradient)?;
        let tokens: Vec<u32> = (0..self.sent_rows.len()).map(|choice| (choice / self.top) as u32).collect();
        let all = device.view(returned, 0..self.sent_tokens.len() * width);
        let of_weights = device.dot_rows(width, &self.sent_rows, &all, &tokens, gradient)?;
        Ok((at_experts, of_weights))
    }

    /// Backward of [`dispatch`](Routing::dispatch): `[rows, width]` → `[tokens, width]`. Collective.
    ///
    /// # Errors
    /// As [`combine`](Routing::combine).
    pub fn dispatch_backward<D: Rows, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        width: usize,
        gradient: &D::View<'_, T>,
    ) -> Result<D::Buffer<T>> {
        let returned = self.send_back(comm, device, width, gradient)?;
        self.sum(device, width, None, &returned)
    }

    /// How evenly the tokens of all ranks are spread over the experts. Collective.
    ///
    /// # Errors
    /// Errors of `comm`.
    pub fn statistics(&self, comm: &Comm) -> Result<Statistics> {
        Statistics::collect(comm, &self.counts, self.dropped() as u64)
    }

    fn send_out<D: Rows, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        width: usize,
        factors: Option<&[f64]>,
        tokens: &D::View<'_, T>,
    ) -> Result<D::Buffer<T>> {
        let (sent, rows) = (self.sent_tokens.len(), self.rows());
        let mut send = device.alloc(sent * width)?;
        device.gather_rows(
            width,
            &self.sent_tokens,
            factors,
            tokens,
            &mut device.view_mut(&mut send, 0..sent * width),
        )?;
        let mut received = device.alloc::<T>(rows * width)?;
        comm.all_to_all_v(
            &send,
            &times(&self.outgoing, width),
            &mut received,
            &times(&self.incoming, width),
        )?;
        let mut ordered = device.alloc(rows * width)?;
        let received = device.view(&received, 0..rows * width);
        device.gather_rows(
            width,
            &self.by_expert,
            None,
            &received,
            &mut device.view_mut(&mut ordered, 0..rows * width),
        )?;
        Ok(ordered)
    }

    fn send_back<D: Rows, T: Number>(
        &self,
        comm: &Comm,
        device: &D,
        width: usize,
        outputs: &D::View<'_, T>,
    ) -> Result<D::Buffer<T>> {
        let (sent, rows) = (self.sent_tokens.len(), self.rows());
        check("rows of experts", phalanx::Source::len(outputs), rows, width)?;
        let mut send = device.alloc(rows * width)?;
        device.gather_rows(
            width,
            &self.by_rank,
            None,
            outputs,
            &mut device.view_mut(&mut send, 0..rows * width),
        )?;
        let mut returned = device.alloc::<T>(sent * width)?;
        comm.all_to_all_v(
            &send,
            &times(&self.incoming, width),
            &mut returned,
            &times(&self.outgoing, width),
        )?;
        Ok(returned)
    }

    fn sum<D: Rows, T: Number>(
        &self,
        device: &D,
        width: usize,
        factors: Option<&[f64]>,
        returned: &D::Buffer<T>,
    ) -> Result<D::Buffer<T>> {
        let mut output = device.alloc(self.tokens * width)?;
        let returned = device.view(returned, 0..self.sent_tokens.len() * width);
        let mut to = device.view_mut(&mut output, 0..self.tokens * width);
        device.sum_rows(width, self.top, &self.sent_rows, factors, &returned, &mut to)?;
        drop(to);
        Ok(output)
    }
}

fn times(rows: &[usize], width: usize) -> Vec<usize> {
    rows.iter().map(|rows| rows * width).collect()
}

fn check(what: &str, len: usize, rows: usize, width: usize) -> Result<()> {
    if width > 0 && len == rows * width {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{len} numbers for {rows} {what} of {width}: {} are needed, and a width of 1 at least",
        rows * width
    )))
}
