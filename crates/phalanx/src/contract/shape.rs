//! A rank's place in its communicator.

/// A rank and the number of ranks: the input of the argument checks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub rank: usize,
    pub world_size: usize,
}
