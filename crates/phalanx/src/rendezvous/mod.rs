//! Rendezvous: how the ranks of a job find each other, by launchers' variables, unique ids and the store, and
//! how they share out the GPUs.

pub(crate) mod environment;
pub(crate) mod gpus;
pub(crate) mod munge;
pub mod store;
pub(crate) mod unique_id;
