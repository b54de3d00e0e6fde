//! Files of distributed arrays: [`Comm::write_at_all`], [`Comm::read_at_all`].
//!
//! | file | what it has |
//! |---|---|
//! | `part.rs` | which elements a rank has |
//! | `replace.rs` | a new file that takes the place of an old one |
//! | `open.rs` | a file that all ranks have open, by the system's calls or the backend's |
//! | `aggregate.rs` | short pieces, gathered before they are written |
//! | `rounds.rs` | places in the file's order, cut into calls of a backend |
//! | `tensors.rs` | safetensors files |

mod aggregate;
mod open;
pub(crate) mod part;
mod replace;
mod rounds;
#[cfg(feature = "safetensors")]
pub(crate) mod tensors;

use super::checks::same_len;
use super::comm::Comm;
use crate::contract::FileAccess;
use crate::types::dtype::Plain;
use crate::types::error::{Result, UsageError};
use crate::types::op::ReduceOp;
use open::OpenFile;
use part::ArrayPart;
use replace::{NewFile, agree};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

/// Files of arrays that are distributed over the ranks, read and written together.
///
/// Plain files, on a file system that all ranks' hosts share: the backend MPI reads and writes them by MPI-IO (but where a path has a colon), the
/// others by the operating system's calls. Elements are written as they are in memory.
impl Comm {
    /// Writes a distributed array to a file: its elements in order, and nothing else. `MPI_File_write_at_all`.
    ///
    /// The file is replaced at once: it is written under another name (`….part`), made durable and renamed. Short pieces are gathered by
    /// the first rank of each host, which writes them together. Collective; `part` says which elements this rank has in `data`. Together the
    /// ranks have each element once; where several have it, one of the values is written.
    ///
    /// # Errors
    /// [`UsageError::Length`](crate::UsageError::Length) if `data` has another length than the part;
    /// [`UsageError::Setting`](crate::UsageError::Setting), on all ranks, if their parts are of arrays of different lengths, or are not the whole.
    /// [`SystemError`](crate::SystemError), on all ranks, for what the system refuses one of them: then the old file is still there.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// # use phalanx::ArrayPart;
    /// # let path = std::env::temp_dir().join(format!("phalanx-array-{}", std::process::id()));
    /// // Three ranks write 10 elements, of which each has a block.
    /// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
    ///     let part = ArrayPart::block(10, comm.rank(), comm.world_size());
    ///     let data: Vec<u32> = part.iter().flatten().map(|index| index as u32).collect();
    ///     comm.write_at_all(&path, &part, &data)
    /// })?;
    /// // Two ranks read them, in blocks of two that alternate.
    /// phalanx::try_run(2, |comm| -> phalanx::Result<()> {
    ///     let part = ArrayPart::block_cyclic(10, 2, comm.rank(), comm.world_size());
    ///     let mut data = vec![0u32; part.len()];
    ///     comm.read_at_all(&path, &part, &mut data)?;
    ///     assert!(data.iter().zip(part.iter().flatten()).all(|(element, index)| *element == index as u32));
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_file(&path).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias = "MPI_File_write_at_all")]
    pub fn write_at_all<T: Plain>(&self, path: impl AsRef<Path>, part: &ArrayPart, data: &[T]) -> Result<()> {
        let path = path.as_ref();
        same_len("write_at_all", "data", data.len(), part.len(), "the elements of the part")?;
        self.check_parts("write_at_all", part, size_of::<T>())?;
        let whole = (part.whole_len() * size_of::<T>()) as u64;
        let mut new = NewFile::create(self, path, whole)?;
        let written = new.file.write(places(0, part, size_of::<T>()), 0..whole, bytes_of(data))?;
        new.finish(written)
    }

    /// Reads a part of a distributed array from a file of [`write_at_all`](Comm::write_at_all), by whatever number of ranks it was written.
    /// `MPI_File_read_at_all`.
    ///
    /// Collective; the parts may have elements in common, and need not be the whole.
    ///
    /// # Errors
    /// As for `write_at_all`; a file that is not as long as the whole array is one of [`SystemError`](crate::SystemError).
    #[doc(alias = "MPI_File_read_at_all")]
    pub fn read_at_all<T: Plain>(
        &self,
        path: impl AsRef<Path>,
        part: &ArrayPart,
        data: &mut [T],
    ) -> Result<()> {
        let path = path.as_ref();
        same_len("read_at_all", "data", data.len(), part.len(), "the elements of the part")?;
        let whole = part.whole_len().saturating_mul(size_of::<T>()) as u64;
        let opened = File::open(path).and_then(|file| {
            let len = file.metadata()?.len();
            if len != whole {
                let text =
                    format!("it has {len} bytes, and an array of {} elements has {whole}", part.whole_len());
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            Ok(file)
        });
        self.read_part(path, opened, 0, part, data)
    }

    /// Reads a part of an array that begins at `start` of a file. Collective.
    fn read_part<T: Plain>(
        &self,
        path: &Path,
        opened: io::Result<File>,
        start: u64,
        part: &ArrayPart,
        data: &mut [T],
    ) -> Result<()> {
        let mut file = OpenFile::new(self, path, (path, FileAccess::Read), opened)?;
        let read = file.read(places(start, part, size_of::<T>()), bytes_of_mut(data))?;
        let closed = file.close();
        agree(self, path, read.and(closed))
    }

    /// An error, on all ranks, unless their parts are of one array, and have as many elements as it.
    fn check_parts(&self, operation: &'static str, part: &ArrayPart, size: usize) -> Result<()> {
        let [whole, own] = [part.whole_len() as u64, part.len() as u64];
        let wholes = self.all_gather_value(whole)?;
        let together = self.all_reduce_value(own, ReduceOp::Sum)?;
        let refused = |value: String, expected: String| {
            let name = format!("{operation}: part");
            Err(UsageError::Setting { name, value, expected }.into())
        };
        if let Some(rank) = wholes.iter().position(|other| *other != wholes[0]) {
            let value = format!("of an array of {} elements on rank {rank}", wholes[rank]);
            return refused(value, format!("{}, as on rank 0", wholes[0]));
        }
        if together != whole {
            let value = format!("{together} elements on all ranks together");
            return refused(value, format!("the {whole} elements of the array, each on one rank"));
        }
        if whole.checked_mul(size as u64).is_none_or(|bytes| bytes > i64::MAX as u64) {
            let (what, value) = ("the length in bytes", format!("{whole} × {size}"));
            return Err(UsageError::Overflow { operation, what, value, limit: i64::MAX.to_string() }.into());
        }
        Ok(())
    }
}

/// Where a part's ranges are in a file whose array begins at `start`, of elements of `size` bytes.
fn places(start: u64, part: &ArrayPart, size: usize) -> impl Iterator<Item = Range<u64>> + Clone + '_ {
    let offset = move |index: usize| start + (index * size) as u64;
    part.iter().map(move |range| offset(range.start)..offset(range.end))
}

fn bytes_of<T: Plain>(data: &[T]) -> &[u8] {
    // SAFETY: plain data has no padding, so all bytes are initialised.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

fn bytes_of_mut<T: Plain>(data: &mut [T]) -> &mut [u8] {
    // SAFETY: plain data has no padding, and is valid whatever its bytes are.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}
