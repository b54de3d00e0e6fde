//! The control plane: what ranks exchange beside the data, whichever backend moves it. Liveness, announcements of calls, diagnosis,
//! failure, shrink.

pub(crate) mod control_channel;
pub(crate) mod diagnosis;
pub(crate) mod endpoint;
pub(crate) mod failure;
pub(crate) mod flags;
mod heap;
pub(crate) mod host_channel;
pub(crate) mod host_window;
pub(crate) mod join;
pub(crate) mod layout;
pub(crate) mod liveness;
pub(crate) mod outer;
pub(crate) mod prefetch;
pub(crate) mod record;
pub(crate) mod relay;
pub(crate) mod segment;
pub(crate) mod shrink;
pub(crate) mod split;
pub(crate) mod tunables;
pub(crate) mod world;
