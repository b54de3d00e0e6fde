//! Schedules: in which order each rank does the parts of its work.

use super::timeline::{Costs, Timeline};
use crate::{Error, Result};

/// What a rank does next: a part of the work on one micro-batch, in one of the chunks of the model that the rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Action {
    /// What is done.
    pub kind: Kind,
    /// The micro-batch.
    pub micro: usize,
    /// The chunk, of those on this rank. 0 unless the schedule is interleaved.
    pub chunk: usize,
}

/// Kind of an [`Action`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Forward.
    Forward,
    /// The whole backward: gradients of the input and of the weights.
    Backward,
    /// The gradient of the input alone, for which the stage before waits.
    BackwardInput,
    /// The gradients of the weights, for which nobody waits.
    BackwardWeights,
}

/// The actions of each rank, in order.
///
/// The model is cut into *stages*: stage `chunk * ranks + rank` is a chunk of a rank. A micro-batch goes through all stages forwards, and
/// through all of them backwards. A schedule is known to end: it is played through when it is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    ranks: usize,
    chunks: usize,
    micros: usize,
    actions: Vec<Vec<Action>>,
}

fn action(kind: Kind, micro: usize, chunk: usize) -> Action {
    Action { kind, micro, chunk }
}

impl Schedule {
    /// GPipe (Huang et al. 2019): all micro-batches forwards, then all backwards. A rank keeps the activations of all micro-batches.
    ///
    /// # Errors
    /// [`Error::Usage`] for no ranks or no micro-batches.
    pub fn gpipe(ranks: usize, micros: usize) -> Result<Schedule> {
        let forward = (0..micros).map(|micro| action(Kind::Forward, micro, 0));
        let backward = (0..micros).map(|micro| action(Kind::Backward, micro, 0));
        let actions: Vec<_> = forward.chain(backward).collect();
        Schedule::of(ranks, 1, micros, vec![actions; ranks])
    }

    /// 1F1B (Narayanan et al. 2019): once the pipeline is full, a backward after each forward. Rank r keeps the activations of `ranks` - r
    /// micro-batches at most.
    ///
    /// # Errors
    /// [`Error::Usage`] for no ranks or no micro-batches.
    pub fn one_forward_one_backward(ranks: usize, micros: usize) -> Result<Schedule> {
        let of_rank = |rank: usize| {
            let ahead = (ranks - rank - 1).min(micros);
            alternating(ahead, micros, |at| action(Kind::Forward, at, 0), |at| action(Kind::Backward, at, 0))
        };
        let actions = (0..ranks).map(of_rank).collect();
        Schedule::of(ranks, 1, micros, actions)
    }

    /// Interleaved 1F1B (Narayanan et al. 2021): each rank has several chunks of the model, which makes the bubble as many times
    /// shorter, for as many times the messages.
    ///
    /// # Errors
    /// [`Error::Usage`] if there are no ranks, chunks or micro-batches, or if the ranks do not divide the micro-batches.
    pub fn interleaved(ranks: usize, chunks: usize, micros: usize) -> Result<Schedule> {
        if ranks > 0 && !micros.is_multiple_of(ranks) {
            return Err(Error::usage(format!(
                "{micros} micro-batches in an interleaved schedule of {ranks} ranks: take a multiple of {ranks}, such as {}",
                micros.next_multiple_of(ranks)
            )));
        }
        let total = micros * chunks;
        // The micro-batches go through a chunk in groups of as many as there are ranks.
        let nth = |at: usize| (at / (ranks * chunks) * ranks + at % ranks, at / ranks % chunks);
        let forward = |at: usize| action(Kind::Forward, nth(at).0, nth(at).1);
        let backward = |at: usize| action(Kind::Backward, nth(at).0, chunks - 1 - nth(at).1);
        let of_rank = |rank: usize| {
            let ahead =
                if chunks == 1 { ranks - rank - 1 } else { 2 * (ranks - rank - 1) + (chunks - 1) * ranks };
            alternating(ahead.min(total), total, forward, backward)
        };
        let actions = (0..ranks).map(of_rank).collect();
        Schedule::of(ranks, chunks, micros, actions)
    }

    /// Zero bubble (Qi et al. 2023, ZB-H1): 1F1B, in which the gradients of weights are computed when a rank would wait. Each rank
    /// keeps the activations of `ranks` micro-batches at most, as the first rank of 1F1B does.
    ///
    /// # Errors
    /// [`Error::Usage`] for no ranks or no micro-batches.
    pub fn zero_bubble(ranks: usize, micros: usize) -> Result<Schedule> {
        let mut schedule = Schedule::one_forward_one_backward(ranks, micros)?;
        for action in schedule.actions.iter_mut().flatten() {
            if action.kind == Kind::Backward {
                action.kind = Kind::BackwardInput;
            }
        }
        let actions = super::timeline::fill_with_weights(&schedule);
        Schedule::of(ranks, 1, micros, actions)
    }

    /// A schedule of one's own: the actions of each rank.
    ///
    /// # Errors
    /// [`Error::Usage`] if an action is missing, comes twice or makes no sense, or if ranks would wait for each other for ever; it names the
    /// rank and the action.
    pub fn of(ranks: usize, chunks: usize, micros: usize, actions: Vec<Vec<Action>>) -> Result<Schedule> {
        if ranks == 0 || chunks == 0 || micros == 0 || actions.len() != ranks {
            return Err(Error::usage(format!(
                "{micros} micro-batches, {chunks} chunks on each of {ranks} ranks, and actions of {}: one of each at least, and actions of every rank",
                actions.len()
            )));
        }
        let schedule = Schedule { ranks, chunks, micros, actions };
        for rank in 0..ranks {
            schedule.check(rank)?;
        }
        Timeline::play(&schedule, Costs::default())?;
        Ok(schedule)
    }

    /// Each micro-batch goes through each chunk once, forwards and backwards.
    fn check(&self, rank: usize) -> Result<()> {
        let place = |action: &Action| action.chunk * self.micros + action.micro;
        let mut done = vec![Vec::new(); self.chunks * self.micros];
        for action in &self.actions[rank] {
            if action.chunk >= self.chunks || action.micro >= self.micros {
                return Err(Error::usage(format!("rank {rank}: there is no {action}")));
            }
            done[place(action)].push(action.kind);
        }
        use Kind::{Backward, BackwardInput, BackwardWeights, Forward};
        let is_right = |kinds: &Vec<Kind>| {
            *kinds == [Forward, Backward] || *kinds == [Forward, BackwardInput, BackwardWeights]
        };
        match done.iter().position(|kinds| !is_right(kinds)) {
            None => Ok(()),
            Some(at) => Err(Error::usage(format!(
                "rank {rank}: micro-batch {} in chunk {} has {:?}, not a forward and a backward after it",
                at % self.micros,
                at / self.micros,
                done[at]
            ))),
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Chunks of the model on each rank.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Number of micro-batches.
    pub fn micro_batches(&self) -> usize {
        self.micros
    }

    /// Number of stages: chunks of all ranks.
    pub fn stages(&self) -> usize {
        self.ranks * self.chunks
    }

    /// The stage that a chunk of a rank is.
    pub fn stage(&self, rank: usize, chunk: usize) -> usize {
        chunk * self.ranks + rank
    }

    /// What a rank does, in order.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.actions[rank]
    }

    /// Most micro-batches, counted once for each chunk, whose activations a rank keeps at one time: between their forward and the end of their
    /// backward.
    pub fn peak_activations(&self, rank: usize) -> usize {
        let (mut kept, mut peak) = (0usize, 0);
        for action in &self.actions[rank] {
            match action.kind {
                Kind::Forward => kept += 1,
                Kind::Backward | Kind::BackwardWeights => kept -= 1,
                Kind::BackwardInput => {}
            }
            peak = peak.max(kept);
        }
        peak
    }

    /// Times of all actions, if they take as long as this says and messages take no time.
    pub fn timeline(&self, costs: Costs) -> Timeline {
        Timeline::play(self, costs).expect("a schedule was played through when it was made")
    }
}

/// So many forwards ahead, then a forward and a backward in turn, then the rest of the backwards.
fn alternating(
    ahead: usize,
    total: usize,
    forward: impl Fn(usize) -> Action,
    backward: impl Fn(usize) -> Action,
) -> Vec<Action> {
    let steady = (ahead..total).flat_map(|at| [forward(at), backward(at - ahead)]);
    (0..ahead).map(&forward).chain(steady).chain((total - ahead..total).map(&backward)).collect()
}

impl std::fmt::Display for Action {
    /// Its letter and micro-batch, `F3`, and the chunk if it is not the first, `F3.1`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let letter = match self.kind {
            Kind::Forward => 'F',
            Kind::Backward => 'B',
            Kind::BackwardInput => 'I',
            Kind::BackwardWeights => 'W',
        };
        write!(f, "{letter}{}", self.micro)?;
        if self.chunk > 0 { write!(f, ".{}", self.chunk) } else { Ok(()) }
    }
}
