//! What a rank sends, found by a dry run.

use super::bytes;
use crate::Result;
use phalanx::{Comm, DryCall};
use serde::Serialize;
use std::fmt;

/// The communication of one rank, in the order of the calls. Text by `Display`, JSON by serde.
///
/// ```
/// use phalanx_train::mesh::{Axis, Mesh};
/// use phalanx_train::report::Traffic;
///
/// let (_, traffic) = Traffic::of_rank(3, 64, |comm| {
///     let mesh = Mesh::new(&comm, &[(Axis::Data, 8), (Axis::Tensor, 8)])?;
///     let mut activations = vec![0.0f32; 4096];
///     mesh.comm(Axis::Tensor).all_reduce_in_place(&mut activations, phalanx::ReduceOp::Sum)?;
///     Ok(())
/// })?;
/// assert_eq!(traffic.bytes("all_reduce"), 16384);
/// println!("{traffic}");
/// # Ok::<(), phalanx_train::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// The rank that was played.
    pub rank: usize,
    /// The number of ranks, of which the others did not exist.
    pub ranks: usize,
    /// Operations; equal ones that follow one another are one line.
    pub lines: Vec<TrafficLine>,
}

/// Equal operations that followed one another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrafficLine {
    /// The operation's name.
    pub operation: String,
    /// How often it was called.
    pub times: usize,
    /// Type of the elements, if there are any.
    pub dtype: Option<String>,
    /// Bytes of this rank's input, each time.
    pub send_bytes: u64,
    /// Bytes of this rank's output, each time.
    pub recv_bytes: u64,
    /// The ranks of the communicator.
    pub members: Vec<usize>,
    /// The other end of a message.
    pub peer: Option<usize>,
    #[serde(skip)]
    text: String,
}

impl Traffic {
    /// Runs `train` as rank `rank` of `ranks`, without the others: see [`phalanx::dry_run`]. It is the program's own code, a step of it say.
    /// Its buffers are allocated.
    ///
    /// # Errors
    /// Errors of `train`; [`Error::Comm`](crate::Error::Comm) if there is no such rank, and for functions that depend on other ranks' decisions.
    pub fn of_rank<R>(
        rank: usize,
        ranks: usize,
        train: impl FnOnce(Comm) -> Result<R>,
    ) -> Result<(R, Traffic)> {
        let (result, calls) = phalanx::dry_run(rank, ranks, train)?;
        let same = |a: &DryCall, b: &DryCall| a == b;
        let lines = calls.chunk_by(same).map(|calls| TrafficLine {
            operation: calls[0].operation.into(),
            times: calls.len(),
            dtype: calls[0].dtype.map(|dtype| dtype.to_string()),
            send_bytes: calls[0].send_bytes as u64,
            recv_bytes: calls[0].recv_bytes as u64,
            members: calls[0].members.to_vec(),
            peer: calls[0].peer,
            text: calls[0].to_string(),
        });
        Ok((result?, Traffic { rank, ranks, lines: lines.collect() }))
    }

    /// Bytes of all operations of a name, each counted by the larger of its input and output.
    pub fn bytes(&self, operation: &str) -> u64 {
        let lines = self.lines.iter().filter(|line| line.operation == operation);
        lines.map(|line| line.times as u64 * line.send_bytes.max(line.recv_bytes)).sum()
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rank {} of {}", self.rank, self.ranks)?;
        for line in &self.lines {
            writeln!(f, "{:>6} × {}", line.times, line.text)?;
        }
        let mut names: Vec<&str> = self.lines.iter().map(|line| line.operation.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let totals = names.into_iter().map(|name| (name, self.bytes(name))).filter(|(_, total)| *total > 0);
        let totals: Vec<String> = totals.map(|(name, total)| format!("{name} {}", bytes(total))).collect();
        write!(f, "together: {}", if totals.is_empty() { "no data".into() } else { totals.join(", ") })
    }
}
