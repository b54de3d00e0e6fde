//! Stands in for `mpi/` where the MPI backend is not built in.

use super::{NewComm, Settings};
use crate::rendezvous::environment::{Environment, Launcher};
use crate::types::error::{Error, Result, UnsupportedError};

pub(super) fn join_mpi(_: Option<&Launcher>, _: &Environment, _: &Settings) -> Result<NewComm> {
    if !cfg!(feature = "mpi") {
        return Err(UnsupportedError::left_out("the backend mpi", "mpi"));
    }
    Err(Error::from(UnsupportedError {
        what: "the backend mpi".into(),
        why: "it is written for 64-bit little-endian machines".into(),
        remedy: "use the host backend, with `phalanx launch`".into(),
    }))
}

pub(super) fn over_mpi(_: &Launcher, environment: &Environment, settings: &Settings) -> Result<NewComm> {
    join_mpi(None, environment, settings)
}
