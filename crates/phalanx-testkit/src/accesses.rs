//! Accesses to symmetric memory, and a model of all parts that they change as well.

use crate::random::Random;
use phalanx::{Comm, Epoch, ReduceOp, SymmetricMemory};

/// What an access does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Writes consecutive elements.
    Put,
    /// Writes every n-th.
    PutStrided,
    /// Reads consecutive elements.
    Get,
    /// Reads every n-th.
    GetStrided,
    /// Adds to consecutive elements.
    Accumulate,
    /// Adds to one.
    FetchAndAdd,
    /// Writes one and gets the old.
    Swap,
    /// The same, if the old one is as the rank says, which it is for even values.
    CompareAndSwap,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 8] = [
        Kind::Put,
        Kind::PutStrided,
        Kind::Get,
        Kind::GetStrided,
        Kind::Accumulate,
        Kind::FetchAndAdd,
        Kind::Swap,
        Kind::CompareAndSwap,
    ];
}

/// An access by a rank to the part of another.
#[derive(Debug, Clone)]
pub struct Access {
    /// The rank that carries it out, modulo the number of ranks.
    pub by: usize,
    /// The rank whose part it is, modulo the number of ranks.
    pub target: usize,
    /// What it does.
    pub kind: Kind,
    /// The first element, modulo the part's length.
    pub at: usize,
    /// The most elements.
    pub len: usize,
    /// From an element to the next, in kinds with strides.
    pub stride: usize,
    /// The first value; the next ones count on.
    pub value: u64,
}

impl Access {
    /// One from a seed, by a given rank.
    pub fn random(by: usize, random: &mut Random) -> Access {
        Access {
            by,
            target: random.below(64),
            kind: Kind::ALL[random.below(Kind::ALL.len())],
            at: random.below(1 << 20),
            len: 1 + random.below(40),
            stride: 1 + random.below(4),
            value: random.next_u64(),
        }
    }

    /// The elements that it touches in a part of `len` elements.
    fn places(&self, len: usize) -> Vec<usize> {
        let (count, stride) = match self.kind {
            Kind::Put | Kind::Get | Kind::Accumulate => (self.len, 1),
            Kind::PutStrided | Kind::GetStrided => (self.len, self.stride),
            Kind::FetchAndAdd | Kind::Swap | Kind::CompareAndSwap => (1, 1),
        };
        (self.at % len..len).step_by(stride).take(count).collect()
    }

    fn values(&self, count: usize) -> Vec<u64> {
        (0..count as u64).map(|i| self.value.wrapping_add(i)).collect()
    }

    /// What the element becomes.
    fn after(&self, old: u64, value: u64) -> u64 {
        match self.kind {
            Kind::Put | Kind::PutStrided | Kind::Swap => value,
            Kind::Accumulate | Kind::FetchAndAdd => old.wrapping_add(value),
            Kind::CompareAndSwap if value.is_multiple_of(2) => value,
            Kind::Get | Kind::GetStrided | Kind::CompareAndSwap => old,
        }
    }

    /// Whether others may do the same to the same elements in the same epoch.
    fn is_shared(&self) -> bool {
        matches!(self.kind, Kind::Accumulate | Kind::FetchAndAdd)
    }

    /// Carries it out; what it found in the elements, if it is of a kind that looks.
    fn perform(
        &self,
        epoch: &Epoch<'_, u64>,
        target: usize,
        places: &[usize],
        old: u64,
    ) -> phalanx::Result<Option<Vec<u64>>> {
        let (at, values) = (places[0], self.values(places.len()));
        let mut found = vec![0; places.len()];
        match self.kind {
            Kind::Put => epoch.put(&values, target, at)?,
            Kind::PutStrided => epoch.put_strided(&values, 1, target, at, self.stride)?,
            Kind::Get => epoch.get(&mut found, target, at)?,
            Kind::GetStrided => epoch.get_strided(&mut found, 1, target, at, self.stride)?,
            Kind::Accumulate => epoch.accumulate(&values, target, at, ReduceOp::Sum)?,
            Kind::FetchAndAdd => {
                epoch.fetch_and_op(self.value, target, at, ReduceOp::Sum)?;
            }
            Kind::Swap => found[0] = epoch.swap(self.value, target, at)?,
            Kind::CompareAndSwap => {
                let expected = if self.value.is_multiple_of(2) { old } else { old ^ 1 };
                found[0] = epoch.compare_and_swap(expected, self.value, target, at)?;
            }
        }
        let looks = matches!(self.kind, Kind::Get | Kind::GetStrided | Kind::Swap | Kind::CompareAndSwap);
        Ok(looks.then_some(found))
    }
}

/// Carries out epochs of accesses on memory of `len` elements a rank, and compares each part and each answer with the model. An access to an
/// element that another of its epoch has touched is left out, unless both add.
///
/// # Errors
/// What is not as in the model, and errors of the communicator.
pub fn perform(comm: &Comm, len: usize, epochs: &[Vec<Access>]) -> Result<(), String> {
    let text = |error: phalanx::Error| error.to_string();
    let mut memory = comm.symmetric::<u64>(len).map_err(text)?;
    let mut model = vec![vec![0u64; len]; comm.world_size()];
    for (number, accesses) in epochs.iter().enumerate() {
        perform_epoch(comm, &mut memory, &mut model, accesses)
            .map_err(|problem| format!("epoch {number}: {problem}"))?;
        let (found, expected) = (memory.local(), &model[comm.rank()]);
        if found != expected {
            return Err(format!("after epoch {number}: {found:?}, expected {expected:?}"));
        }
    }
    memory.free().map_err(text)
}

fn perform_epoch(
    comm: &Comm,
    memory: &mut SymmetricMemory<'_, u64>,
    model: &mut [Vec<u64>],
    accesses: &[Access],
) -> Result<(), String> {
    let (ranks, len) = (model.len(), model[0].len());
    // Whether those that have touched an element share it.
    let mut touched: Vec<Vec<Option<bool>>> = vec![vec![None; len]; ranks];
    let epoch = memory.epoch().map_err(|error| error.to_string())?;
    for access in accesses {
        let (target, places) = (access.target % ranks, access.places(len));
        let is_free =
            |place: &usize| touched[target][*place].is_none_or(|is_shared| is_shared && access.is_shared());
        if !places.iter().all(is_free) {
            continue;
        }
        let before: Vec<u64> = places.iter().map(|place| model[target][*place]).collect();
        for (place, value) in places.iter().zip(access.values(places.len())) {
            touched[target][*place] = Some(access.is_shared());
            model[target][*place] = access.after(model[target][*place], value);
        }
        if access.by % ranks == comm.rank() {
            let found = access.perform(&epoch, target, &places, before[0]);
            let found = found.map_err(|error| format!("{access:?}: {error}"))?;
            if found.as_ref().is_some_and(|found| *found != before) {
                return Err(format!("{access:?}: {found:?}, expected {before:?}"));
            }
        }
    }
    epoch.end().map_err(|error| error.to_string())
}
