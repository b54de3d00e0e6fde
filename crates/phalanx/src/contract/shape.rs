//! A rank's place in its communicator.

/// What the checks need to know of a communicator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub rank: usize,
    pub world_size: usize,
}
