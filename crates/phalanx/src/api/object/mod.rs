//! Objects: values of any type that serde knows, whose lengths the other ranks do not know.
//!
//! 1. Each rank serializes what it sends, before it communicates. A failure or a panic is kept.
//! 2. The ranks exchange headers of four numbers: a fingerprint of the call and its type, the length, the limit, and the length of a note.
//! 3. All ranks come to the same verdict. For an error, the ranks at fault tell their notes: a name, or why they could not serialize.
//! 4. The bytes travel.

mod collectives;
mod messages;

pub(super) use collectives::blocks;

use super::comm::Comm;
use crate::types::error::{Result, UsageError};
use crate::types::object_error::ObjectError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::any::type_name;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

/// Default of [`Comm::object_limit`].
pub(crate) const DEFAULT_OBJECT_LIMIT: usize = 1 << 30;
/// The most bytes of a note: longer names and reasons are cut.
const LONGEST_NOTE: usize = 4096;
/// A header's length of an object that could not be serialized.
const FAILED: u64 = u64::MAX;

/// What a rank says of its object before it sends it.
#[derive(Debug, Clone, Copy)]
struct Header {
    /// Equal for calls that fit together.
    fingerprint: u64,
    /// Length of the longest object in bytes, or [`FAILED`].
    longest: u64,
    /// This rank's limit for `longest`.
    limit: u64,
    /// Length of the note: the call with its type, or the reason for the failure.
    note: u64,
}

impl Header {
    const LEN: usize = 4;

    fn new(fingerprint: u64, packed: &Packed, limit: usize, note: &str) -> Header {
        let longest = match &packed.failure {
            None => packed.lengths.iter().copied().max().unwrap_or(0) as u64,
            Some(_) => FAILED,
        };
        Header { fingerprint, longest, limit: limit as u64, note: note.len() as u64 }
    }

    fn to_array(self) -> [u64; Header::LEN] {
        [self.fingerprint, self.longest, self.limit, self.note]
    }

    fn from_array([fingerprint, longest, limit, note]: [u64; Header::LEN]) -> Header {
        Header { fingerprint, longest, limit, note }
    }

    /// Length of the note, whatever the header says.
    fn note_len(self) -> usize {
        self.note.min(LONGEST_NOTE as u64) as usize
    }
}

/// Serialized objects, one after the other.
#[derive(Debug, Default)]
struct Packed {
    bytes: Vec<u8>,
    /// Length of each object.
    lengths: Vec<usize>,
    /// Why they could not be serialized.
    failure: Option<String>,
}

impl Packed {
    /// Serializes each object; `None` is an object of no bytes, which nobody unpacks.
    fn of<'t, T: Serialize + 't>(objects: impl IntoIterator<Item = Option<&'t T>>) -> Packed {
        let pack = || {
            let mut packed = Packed::default();
            for object in objects {
                let start = packed.bytes.len();
                if let Some(object) = object {
                    packed.bytes = postcard::to_extend(object, packed.bytes)?;
                }
                packed.lengths.push(packed.bytes.len() - start);
            }
            Ok(packed)
        };
        // The objects are dropped or given back as they are: what a panicking `serialize` leaves behind is its type's own.
        let failure = match catch_unwind(AssertUnwindSafe(pack)) {
            Ok(Ok(packed)) => return packed,
            Ok(Err(error)) => postcard::Error::to_string(&error),
            Err(panic) => format!("it panicked: {}", panic_text(&*panic)),
        };
        Packed { failure: Some(failure), ..Packed::default() }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)")
}

/// An object from its bytes, which are all its own.
fn unpack<T: DeserializeOwned>(operation: &'static str, rank: usize, bytes: &[u8]) -> Result<T> {
    let reason = match postcard::take_from_bytes(bytes) {
        Ok((object, [])) => return Ok(object),
        Ok((_, rest)) => format!("{} bytes are left over", rest.len()),
        Err(error) => error.to_string(),
    };
    let (type_name, bytes) = (type_name::<T>(), bytes.len());
    Err(ObjectError::Deserialize { operation, rank, type_name, bytes, reason }.into())
}

/// FNV-1a: the same on every rank.
fn fingerprint(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The text, no longer than a note may be.
fn cut(mut text: String) -> String {
    let longest = text.len().min(LONGEST_NOTE);
    let end = (0..=longest).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.truncate(end);
    text
}

/// # Objects
///
/// Values of any type that serde knows, in the format of [postcard](https://docs.rs/postcard). The other ranks need not know their lengths.
/// All forms work on every backend, through host memory. They are for settings, names and small results: numbers travel much faster in
/// buffers.
///
/// - Every rank calls the same method with the same type, in the order of its other collectives. Types are compared by their name.
/// - An object of more bytes than the [limit](Comm::object_limit) is refused on every rank, before any memory is allocated for it.
/// - If a `Serialize` fails or panics on one rank, all ranks get an error that names it.
/// - postcard does not describe its data: types that ask what comes next (`serde_json::Value`, `#[serde(untagged)]`) arrive as an error.
///
/// The [`ObjectError`] of a collective is the same on all ranks, and the communicator works on.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use std::collections::BTreeMap;
///
/// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
///     let settings = (comm.rank() == 0).then(|| BTreeMap::from([("steps".to_string(), 100)]));
///     let settings = comm.broadcast_object(settings, 0)?;
///     assert_eq!(settings["steps"], 100);
///     let names = comm.all_gather_object(&format!("rank {}", comm.rank()))?;
///     assert_eq!(names, ["rank 0", "rank 1", "rank 2"]);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
impl Comm {
    /// The most bytes that a serialized object may have; default 1 GiB. A gathering rank may need as much for each rank.
    pub fn object_limit(&self) -> usize {
        self.object_limit.load(Ordering::Relaxed)
    }

    /// Changes [`object_limit`](Comm::object_limit) for this rank's calls from now on. In a collective the smallest limit of all ranks
    /// counts, in a message the smaller one of both ends. New communicators, also those made of this one, have the default.
    pub fn set_object_limit(&self, bytes: usize) {
        self.object_limit.store(bytes, Ordering::Relaxed);
    }

    /// Exchanges the headers of a collective. All ranks return the same: the length of each rank's longest object, or an error.
    fn agree_on_objects<T>(
        &self,
        operation: &'static str,
        root: usize,
        packed: &Packed,
    ) -> Result<Vec<usize>> {
        let call = cut(format!("{operation}::<{}>(root {root})", type_name::<T>()));
        let fingerprint = fingerprint(&call);
        let note = packed.failure.clone().map_or(call, cut);
        let own = Header::new(fingerprint, packed, self.object_limit(), &note).to_array();
        let mut headers = vec![0; Header::LEN * self.world_size()];
        self.all_gather(&own, &mut headers)?;
        let headers: Vec<Header> =
            headers.as_chunks().0.iter().map(|header| Header::from_array(*header)).collect();

        let rank_with = |is_wrong: &dyn Fn(&Header) -> bool| headers.iter().position(is_wrong);
        if let Some(rank) = rank_with(&|header| header.longest == FAILED) {
            let reason = self.note_of(rank, &headers, &note)?;
            return Err(ObjectError::Serialize { operation, rank, reason }.into());
        }
        if let Some(rank) = rank_with(&|header| header.fingerprint != headers[0].fingerprint) {
            let ours = self.note_of(0, &headers, &note)?;
            let theirs = self.note_of(rank, &headers, &note)?;
            return Err(ObjectError::Mismatch { rank, theirs, other_rank: 0, ours }.into());
        }
        let limit = headers.iter().map(|header| header.limit).min().unwrap_or(0);
        if let Some(rank) = rank_with(&|header| header.longest > limit) {
            let bytes = headers[rank].longest;
            return Err(ObjectError::TooLong { operation, rank, bytes, limit }.into());
        }
        Ok(headers.iter().map(|header| header.longest as usize).collect())
    }

    /// A rank's note, on every rank.
    fn note_of(&self, rank: usize, headers: &[Header], own: &str) -> Result<String> {
        let mut note = if rank == self.rank() { own.into() } else { vec![0; headers[rank].note_len()] };
        self.broadcast_in_place(&mut note, rank)?;
        Ok(String::from_utf8_lossy(&note).into_owned())
    }

    /// An error if a list does not have one object for each rank.
    fn check_objects(&self, operation: &'static str, objects: usize) -> Result<()> {
        let world_size = self.world_size();
        if objects == world_size {
            return Ok(());
        }
        Err(UsageError::Counts { operation, list: "objects", actual: objects, world_size }.into())
    }
}

/// The root's argument, which other ranks need not have.
fn at_root<T>(operation: &'static str, argument: Option<T>, root: usize) -> Result<T> {
    argument.ok_or_else(|| {
        let expected = format!("Some at the root, rank {root}");
        UsageError::Setting {
            name: format!("{operation}: the root's object"),
            value: "None".into(),
            expected,
        }
        .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_come_back_from_their_bytes_and_nothing_else_does() {
        let packed = Packed::of([Some(&"one".to_owned()), None, Some(&String::new())]);
        assert_eq!((packed.lengths, packed.failure), (vec![4, 0, 1], None));
        assert_eq!(unpack::<String>("test", 3, &packed.bytes[..4]).unwrap(), "one");
        let error = unpack::<String>("test", 3, &packed.bytes).unwrap_err().to_string();
        assert!(error.contains("5 bytes from rank 3") && error.contains("1 bytes are left over"), "{error}");
        assert!(unpack::<String>("test", 3, &packed.bytes[..2]).is_err());
    }

    #[test]
    fn a_note_is_cut_between_characters() {
        let text = cut("ä".repeat(LONGEST_NOTE));
        assert_eq!(text, "ä".repeat(LONGEST_NOTE / 2));
        assert_eq!(cut(format!("x{text}")).len(), LONGEST_NOTE - 1);
    }
}
