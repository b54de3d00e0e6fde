//! Small things that all ranks hear of each other.

use crate::{Error, Result};
use phalanx::Comm;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Every rank's value, in rank order, on every rank. If a rank has an error, all ranks get one: that rank its own, the others
/// [`Error::Rank`].
pub(crate) fn agree<T: Serialize + DeserializeOwned>(comm: &Comm, own: Result<T>) -> Result<Vec<T>> {
    let sent = own.as_ref().map_err(Error::with_causes);
    let sent = serde_json::to_vec(&sent).map_err(|error| Error::usage(error.to_string()))?;
    let received = gather(comm, &sent)?;
    let own = own.map(drop);
    let parsed = received.iter().enumerate().map(|(rank, bytes)| {
        let parsed: std::result::Result<T, String> = serde_json::from_slice(bytes)
            .map_err(|error| Error::Rank { rank, what: format!("sent what cannot be read: {error}") })?;
        parsed.map_err(|what| Error::Rank { rank, what })
    });
    let parsed = parsed.collect::<Result<Vec<T>>>();
    own.and(parsed)
}

fn gather(comm: &Comm, own: &[u8]) -> phalanx::Result<Vec<Vec<u8>>> {
    let mut lengths = vec![0; comm.world_size()];
    comm.all_gather(&[own.len() as u64], &mut lengths)?;
    let lengths: Vec<usize> = lengths.into_iter().map(|len| len as usize).collect();
    let mut all = vec![0; lengths.iter().sum()];
    comm.all_gather_v(own, &mut all, &lengths)?;
    let mut rest = &all[..];
    let split = lengths.into_iter().map(|len| {
        let (first, others) = rest.split_at(len);
        rest = others;
        first.to_vec()
    });
    Ok(split.collect())
}
