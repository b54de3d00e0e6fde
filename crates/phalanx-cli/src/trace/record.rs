//! A flight record as it is in a file. Every value is checked: files may be damaged, or no records at all.

use serde::Deserialize;

/// The format's name in the library's files.
const FORMAT: &str = "phalanx flight record";
/// The version this program reads.
const VERSION: u32 = 1;

/// Bytes of the longest file that is read. The library's files have less than 1 MiB.
pub const MAX_BYTES: usize = 64 << 20;
/// The most ranks of a communicator.
const MAX_RANKS: usize = 1 << 20;
/// The most operations: the library keeps 1024.
const MAX_RECORDS: usize = 1 << 14;
/// The latest time: 2^62 nanoseconds are 146 years.
const MAX_TIME: u64 = 1 << 62;

/// One rank's record of one communicator.
#[derive(Debug, Clone, Deserialize)]
pub struct FlightRecord {
    format: String,
    version: u32,
    pub communicator: String,
    pub backend: String,
    pub rank: usize,
    pub world_size: usize,
    pub host: String,
    /// Equal on ranks that share a monotonic clock.
    pub boot: String,
    pub process: u32,
    pub program: String,
    /// When the file was written: on the monotonic clock, as all other times, and on the wall clock.
    pub written_ns: u64,
    pub written_unix_ns: u64,
    /// Operations of the communicator so far, and how many of these are no longer in the record.
    pub made: u64,
    pub lost: u64,
    pub reason: String,
    pub error: Option<Failure>,
    pub records: Vec<Operation>,
}

/// Why the communicator failed.
#[derive(Debug, Clone, Deserialize)]
pub struct Failure {
    pub kind: String,
    pub ranks: Vec<usize>,
    pub operation: String,
    pub sequence: u64,
    pub text: String,
}

/// One operation.
#[derive(Debug, Clone, Deserialize)]
pub struct Operation {
    pub operation: String,
    pub sequence: u64,
    pub state: State,
    pub dtype: Option<String>,
    pub count: Option<u64>,
    pub reduction: Option<String>,
    pub root: Option<usize>,
    pub peer: Option<usize>,
    pub tag: Option<u64>,
    pub enqueued_ns: u64,
    /// 0 if it has not started.
    pub started_ns: u64,
    pub ended_ns: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Enqueued,
    Started,
    Completed,
    Failed,
}

impl FlightRecord {
    /// Keeps the last operations only.
    pub fn forget_all_but(&mut self, kept: usize) {
        let surplus = self.records.len().saturating_sub(kept);
        self.records.drain(..surplus);
        self.records.shrink_to_fit();
        self.lost += surplus as u64;
    }
}

impl Operation {
    pub fn is_message(&self) -> bool {
        self.peer.is_some()
    }

    /// Whether no rank ends it before all have begun it.
    pub fn waits_for_all(&self) -> bool {
        ["all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier"]
            .iter()
            .any(|name| self.operation.starts_with(name))
    }

    /// Whether it waits to start or has not ended.
    pub fn is_under_way(&self) -> bool {
        matches!(self.state, State::Enqueued | State::Started)
    }

    /// The call, in the form of the library's errors.
    pub fn describe(&self) -> String {
        let mut text = self.operation.clone();
        let Some(dtype) = &self.dtype else { return text };
        text += &format!("({dtype} × {}", self.count.unwrap_or(0));
        if let Some(reduction) = &self.reduction {
            text += &format!(", {reduction}");
        }
        match (self.root, self.peer) {
            (Some(root), _) => text += &format!(", root {root}"),
            (_, Some(peer)) if self.operation == "send" => text += &format!(", to rank {peer}"),
            (_, Some(peer)) => text += &format!(", from rank {peer}"),
            _ => {}
        }
        text + ")"
    }

    /// The part of the call that must be the same on all ranks. The counts of an all_to_all_v need not be.
    pub fn signature(&self) -> String {
        match self.operation.as_str() {
            "all_to_all_v" => self.operation.clone(),
            _ => self.describe(),
        }
    }
}

/// Decodes a file. The error says what is wrong with it; no bytes cause a panic.
pub fn decode(bytes: &[u8]) -> Result<FlightRecord, String> {
    if bytes.len() > MAX_BYTES {
        return Err(format!("{} bytes are too many for a flight record", bytes.len()));
    }
    let record: FlightRecord =
        serde_json::from_slice(bytes).map_err(|error| format!("not a flight record: {error}"))?;
    if record.format != FORMAT {
        return Err(format!("not a flight record: its format is {:?}", record.format));
    }
    if record.version != VERSION {
        return Err(format!(
            "a flight record of version {}, and this program reads {VERSION}: use the program of the same release",
            record.version
        ));
    }
    if record.world_size > MAX_RANKS || record.rank >= record.world_size {
        return Err(format!("rank {} of {} ranks is not possible", record.rank, record.world_size));
    }
    if record.records.len() > MAX_RECORDS {
        return Err(format!("{} operations are too many", record.records.len()));
    }
    let outside = |rank: &usize| *rank >= record.world_size;
    let named = record.error.iter().flat_map(|error| &error.ranks);
    let roots = record.records.iter().flat_map(|operation| operation.root.iter().chain(&operation.peer));
    if let Some(rank) = named.chain(roots).find(|rank| outside(rank)) {
        return Err(format!("rank {rank} is named and there are {} ranks", record.world_size));
    }
    let times = record.records.iter().flat_map(|o| [o.enqueued_ns, o.started_ns, o.ended_ns]);
    if times.chain([record.written_ns, record.written_unix_ns]).any(|time| time > MAX_TIME) {
        return Err("a time is beyond all bounds".into());
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = include_str!("../../tests/trace/timeout/job_x-rank0-100.json");

    #[test]
    fn a_good_file_is_read() {
        let record = decode(GOOD.as_bytes()).unwrap();
        assert_eq!((record.rank, record.world_size), (0, 3));
        assert_eq!(record.records.last().unwrap().describe(), "all_reduce(f32 × 1000, sum)");
    }

    #[test]
    fn any_part_of_a_file_is_an_error_and_no_panic() {
        for len in 0..GOOD.len() {
            if let Some(part) = GOOD.get(..len) {
                let whole = decode(part.as_bytes()).is_ok();
                assert!(!whole || part.trim_end() == GOOD.trim_end(), "the first {len} bytes");
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let cases = [
            ("\"rank\":0,", "\"rank\":3,", "rank 3 of 3"),
            ("\"ranks\":[1]", "\"ranks\":[7]", "rank 7"),
            ("\"version\":1", "\"version\":2", "version 2"),
            ("phalanx flight record", "a poem", "a poem"),
            ("\"world_size\":3", "\"world_size\":99999999999", "not possible"),
            ("\"state\":\"failed\"", "\"state\":\"sleepy\"", "sleepy"),
            ("\"written_ns\":", "\"written_ns\":999999999", "bounds"),
        ];
        for (from, to, says) in cases {
            let bad = GOOD.replace(from, to);
            assert_ne!(bad, GOOD, "{from} is in the file");
            let error = decode(bad.as_bytes()).map(drop).unwrap_err();
            assert!(error.contains(says), "{to}: {error}");
        }
        let deep = "[".repeat(100_000);
        assert!(decode(deep.as_bytes()).is_err());
    }
}
