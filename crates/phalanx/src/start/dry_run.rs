//! The communicator of a dry run.

use super::{NewComm, own_name};
use crate::backend::dry_run::{DryComm, DryLog};
use crate::rendezvous::environment::timeout_from_environment;
use crate::types::error::{Result, UsageError};
use std::sync::Arc;

/// A rank whose peers do not exist, and the list of what it calls.
pub(crate) fn dry_rank(rank: usize, ranks: usize) -> Result<(NewComm, DryLog)> {
    if rank >= ranks {
        let expected = format!("a rank below {ranks}, the number of ranks");
        return Err(UsageError::Setting { name: "dry_run".into(), value: rank.to_string(), expected }.into());
    }
    let log = DryLog::default();
    let comm = DryComm::new(rank, (0..ranks).collect(), log.clone(), timeout_from_environment()?);
    Ok((NewComm::new(Arc::new(comm), own_name()), log))
}
