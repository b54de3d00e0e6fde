//! How the ranks of a job find each other: launchers' variables, unique ids, the store, and which host and
//! GPUs each has.

pub(crate) mod environment;
pub(crate) mod gpus;
pub mod store;
pub(crate) mod unique_id;
