//! The typed front: every check of arguments, once.

pub(crate) mod builder;
mod checks;
mod collective;
pub(crate) mod comm;
pub(crate) mod group;
pub(crate) mod init;
mod membership;
pub(crate) mod p2p;
pub(crate) mod raw;
mod recorded;
pub(crate) mod request;
