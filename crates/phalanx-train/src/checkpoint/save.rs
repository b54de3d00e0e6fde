//! Writing: a copy in memory first, the files in the background.

use super::bytes::{Bytes, dtype};
use super::exchange::agree;
use super::file::{Entry, checksums, header, sync_folder, write_whole};
use super::folder::{list, step_folder};
use super::manifest::{CHUNK, FORMAT, MANIFEST, Manifest, Piece, Runs, Shard, Tensor, shard_name};
use super::plan::{Held, Inventory, Plan};
use crate::device::{Device, Number};
use crate::{Error, Result};
use phalanx::{Comm, Source};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// What a rank saves: its blocks of tensors, and small values.
#[derive(Default)]
pub struct State<'a> {
    tensors: Vec<(Held, Read<'a>)>,
    values: BTreeMap<String, Value>,
    problem: Option<String>,
}

type Read<'a> = Box<dyn Fn() -> Result<Box<dyn Bytes>> + 'a>;

impl<'a> State<'a> {
    /// Nothing yet.
    pub fn new() -> State<'a> {
        State::default()
    }

    /// This rank's block of a tensor. `shape` is that of the whole tensor, `ranges` are the elements in row-major order that `view` has, one
    /// after the other. All ranks' blocks make up the whole tensor; ranks with the same block are replicas, of which one writes it.
    ///
    /// What is wrong with it is said by [`Saver::save`], on all ranks.
    pub fn tensor<D: Device, T: Number>(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        ranges: &[Range<usize>],
        device: &'a D,
        view: D::View<'a, T>,
    ) {
        let (name, block) = (name.into(), Runs::new(ranges));
        if view.len() != block.len() {
            self.problem.get_or_insert(format!(
                "tensor {name:?}: a view of {} elements for ranges of {}: give the elements of the ranges",
                view.len(),
                block.len()
            ));
        }
        let held = Held { name, dtype: dtype::<T>(), shape: shape.into(), block };
        self.tensors.push((held, Box::new(move || Ok(Box::new(device.download(&view)?)))));
    }

    /// A small value: a sampler's state, a learning rate, the state of a random generator as bytes. It may differ between ranks.
    pub fn value(&mut self, name: impl Into<String>, value: impl Into<Value>) {
        self.values.insert(name.into(), value.into());
    }

    fn inventory(&mut self, step: u64) -> Result<(Inventory, Vec<Read<'a>>)> {
        if let Some(problem) = self.problem.take() {
            return Err(Error::Usage(problem));
        }
        let (tensors, reads) = std::mem::take(&mut self.tensors).into_iter().unzip();
        Ok((Inventory { step, tensors, values: std::mem::take(&mut self.values) }, reads))
    }
}

impl fmt::Debug for State<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.tensors.iter().map(|(held, _)| &*held.name).collect();
        f.debug_struct("State").field("tensors", &names).field("values", &self.values).finish()
    }
}

/// How far a save is on this rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// This rank's file is about to be written.
    Begin {
        /// The file.
        file: PathBuf,
    },
    /// More of it has been written.
    Wrote {
        /// Bytes so far.
        bytes: u64,
    },
    /// It is complete and durable. The checkpoint is not: the other ranks' files and the manifest may be missing.
    Shard,
    /// The checkpoint is complete and durable.
    Complete,
}

type OnProgress = Arc<dyn Fn(&Progress) + Send + Sync>;

/// Writes checkpoints of all ranks of a communicator into one folder.
///
/// Dropped, it waits for a save that runs; [`finish`](Saver::finish) says how that ended.
pub struct Saver {
    /// `None` while a save runs, which has it.
    comm: Option<Comm>,
    running: Option<JoinHandle<(Comm, Result<()>)>>,
    folder: PathBuf,
    keep: usize,
    progress: Option<OnProgress>,
}

impl Saver {
    /// Collective: the saver has a communicator of its own, on which it never comes between the operations of `comm`. All ranks give the
    /// same folder of a file system that they share. It is made if it is missing.
    ///
    /// # Errors
    /// Errors of `comm`.
    pub fn new(comm: &Comm, folder: impl Into<PathBuf>) -> Result<Saver> {
        let own = comm.split(Some(0), comm.rank() as i64)?;
        Ok(Saver { comm: own, running: None, folder: folder.into(), keep: 0, progress: None })
    }

    /// Keeps the newest `n` complete checkpoints: after each save, older ones are removed, and incomplete older ones. 0 keeps all, which is
    /// the default. Rank 0's number counts.
    pub fn keep(mut self, n: usize) -> Saver {
        self.keep = n;
        self
    }

    /// How long a rank waits for a slower one's file. By default the deadline of the communicator that the saver was made of.
    pub fn timeout(self, timeout: Duration) -> Saver {
        if let Some(comm) = &self.comm {
            comm.set_timeout(timeout);
        }
        self
    }

    /// Called as a save goes on, from the thread that writes.
    pub fn on_progress(mut self, f: impl Fn(&Progress) + Send + Sync + 'static) -> Saver {
        self.progress = Some(Arc::new(f));
        self
    }

    /// Copies the state, and writes the copy in the background. Collective. A save that still runs is waited for first.
    ///
    /// When it returns, the state may change. Only the blocks that this rank writes are copied. How the writing ended is the result of the next
    /// `save` or [`finish`](Saver::finish).
    ///
    /// # Errors
    /// The same on all ranks, none of which begins to write: the error of the save before; [`Error::Usage`] and [`Error::Rank`] if a
    /// block is not as it should be, or blocks of different ranks do not fit together; errors of the communicator.
    pub fn save(&mut self, step: u64, mut state: State<'_>) -> Result<()> {
        self.finish()?;
        let comm = self.comm.take().ok_or_else(|| {
            Error::usage("the thread that wrote the last checkpoint panicked: make a new saver on all ranks")
        })?;
        let (job, comm) = self.begin(comm, step, &mut state);
        let job = match job {
            Ok(job) => job,
            Err(error) => {
                self.comm = Some(comm);
                return Err(error);
            }
        };
        let thread = std::thread::Builder::new().name("checkpoint".into());
        let running = thread.spawn(move || {
            let result = job.run(&comm);
            (comm, result)
        });
        self.running =
            Some(running.map_err(|error| Error::file(&self.folder, "no thread to write it", error))?);
        Ok(())
    }

    /// Waits for a save that runs. Collective.
    ///
    /// # Errors
    /// On all ranks if one failed: [`Error::File`] on the rank that could not write, [`Error::Rank`] on the others; errors of the
    /// communicator if a rank was lost. The earlier checkpoints are untouched, and an incomplete one is never the latest.
    pub fn finish(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        match running.join() {
            Ok((comm, result)) => {
                self.comm = Some(comm);
                result
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    fn begin(&self, comm: Comm, step: u64, state: &mut State<'_>) -> (Result<Job>, Comm) {
        let mut job = || {
            let (inventory, reads) = match state.inventory(step) {
                Ok((inventory, reads)) => (Ok(inventory), reads),
                Err(error) => (Err(error), Vec::new()),
            };
            let inventories = agree(&comm, inventory)?;
            let plan = Plan::new(&inventories).map_err(Error::Mismatch)?;
            let rank = comm.rank();
            let held = &inventories[rank].tensors;
            let mut blocks = Vec::new();
            for (at, owned) in plan.owned.iter().enumerate().filter(|(_, owned)| owned.owner == rank) {
                let own = held.iter().position(|held| held.name == owned.name).map(|own| reads[own]());
                // A device that fails is heard of by the other ranks before anything is written.
                blocks.extend(own.map(|bytes| bytes.map(|bytes| (at, bytes))));
            }
            Ok(Job {
                folder: self.folder.clone(),
                step,
                rank,
                ranks: comm.world_size(),
                plan,
                blocks: blocks.into_iter().collect(),
                keep: self.keep,
                progress: self.progress.clone(),
            })
        };
        let job = job();
        (job, comm)
    }
}

impl fmt::Debug for Saver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Saver")
            .field("folder", &self.folder)
            .field("running", &self.running.is_some())
            .finish()
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            let _ = running.join();
        }
    }
}

/// One save of one rank.
struct Job {
    folder: PathBuf,
    step: u64,
    rank: usize,
    ranks: usize,
    plan: Plan,
    /// Copies of the blocks that this rank writes, by their index in the plan.
    blocks: Result<Vec<(usize, Box<dyn Bytes>)>>,
    keep: usize,
    progress: Option<OnProgress>,
}

/// A rank's file as it was written: where each block begins, and its checksums.
#[derive(Serialize, Deserialize)]
struct Written {
    shard: Shard,
    blocks: Vec<(usize, u64, Vec<u32>)>,
}

impl Job {
    fn run(mut self, comm: &Comm) -> Result<()> {
        let blocks = std::mem::replace(&mut self.blocks, Ok(Vec::new()));
        let folder = step_folder(&self.folder, self.step);
        let prepared = if self.rank == 0 { self.prepare(&folder) } else { Ok(()) };
        let blocks = match (prepared, blocks) {
            (Ok(()), Ok(blocks)) => {
                agree(comm, Ok(()))?;
                blocks
            }
            (Err(error), _) | (_, Err(error)) => return agree(comm, Err::<(), _>(error)).map(drop),
        };
        let written = self.write_shard(&folder, blocks);
        let written = agree(comm, written);
        let committed = match written {
            Ok(written) if self.rank == 0 => self.commit(&folder, written),
            Ok(_) => Ok(()),
            Err(error) => {
                // Nobody is writing any more, unless a rank was lost: then the folder shows how far it came.
                if self.rank == 0 && !matches!(error, Error::Comm(_)) {
                    let _ = std::fs::remove_dir_all(&folder);
                }
                return Err(error);
            }
        };
        agree(comm, committed)?;
        self.say(Progress::Complete);
        Ok(())
    }

    fn say(&self, progress: Progress) {
        if let Some(f) = &self.progress {
            f(&progress);
        }
    }

    /// An empty folder, durable in the one above.
    fn prepare(&self, folder: &Path) -> Result<()> {
        if folder.join(MANIFEST).exists() {
            return Err(Error::usage(format!(
                "step {} is saved already in {}: remove that folder to save it again",
                self.step,
                folder.display()
            )));
        }
        let make = || {
            if folder.exists() {
                std::fs::remove_dir_all(folder)?;
            }
            std::fs::create_dir_all(folder)?;
            sync_folder(&self.folder)
        };
        make().map_err(|error| {
            Error::file(folder, "cannot be made; check that its folder may be written to", error)
        })
    }

    fn write_shard(&self, folder: &Path, mut blocks: Vec<(usize, Box<dyn Bytes>)>) -> Result<Written> {
        let name = shard_name(self.rank, self.ranks);
        let path = folder.join(&name);
        self.say(Progress::Begin { file: path.clone() });
        // Larger elements first: each begins at a multiple of its size.
        let kind = |at: usize| self.plan.tensors[&self.plan.owned[at].name].0;
        blocks.sort_by_key(|(at, _)| (std::cmp::Reverse(kind(*at)), *at));
        let entries: Vec<Entry> = blocks
            .iter()
            .map(|(at, _)| {
                let owned = &self.plan.owned[*at];
                (owned.name.clone(), kind(*at), vec![owned.block.len()])
            })
            .collect();
        let (header, starts) = header(&path, &entries)?;
        let mut bytes = 0;
        write_whole(&path, |file| {
            let pieces = blocks.iter().flat_map(|(_, block)| block.bytes().chunks(CHUNK));
            for chunk in std::iter::once(&header[..]).chain(pieces) {
                file.write_all(chunk)?;
                bytes += chunk.len() as u64;
                self.say(Progress::Wrote { bytes });
            }
            Ok(())
        })?;
        self.say(Progress::Shard);
        let shard =
            Shard { name, bytes, header: header.len() as u64, header_checksum: crc32fast::hash(&header) };
        let blocks = blocks.iter().zip(starts).map(|((at, block), start)| (*at, start, checksums(&**block)));
        Ok(Written { shard, blocks: blocks.collect() })
    }

    /// Rank 0: writes the manifest, which makes the checkpoint complete, and removes old ones.
    fn commit(&self, folder: &Path, written: Vec<Written>) -> Result<()> {
        let tensors = self.plan.tensors.iter().map(|(name, (dtype, shape))| {
            (name.clone(), Tensor { dtype: *dtype, shape: shape.clone(), pieces: Vec::new() })
        });
        let mut manifest = Manifest {
            format: FORMAT,
            step: self.step,
            files: Vec::new(),
            tensors: tensors.collect(),
            values: self.plan.values.clone(),
        };
        for (file, Written { shard, blocks }) in written.into_iter().enumerate() {
            let path = folder.join(&shard.name);
            let seen = std::fs::metadata(&path).map_err(|error| {
                let what = format!(
                    "rank {file} wrote it, and rank 0 cannot see it; give a folder that all hosts share"
                );
                Error::file(&path, &what, error)
            })?;
            if seen.len() != shard.bytes {
                let what =
                    format!("rank 0 sees {} bytes of the {} that rank {file} wrote", seen.len(), shard.bytes);
                return Err(Error::Checkpoint { path, what });
            }
            manifest.files.push(shard);
            for (at, offset, checksums) in blocks {
                let owned = &self.plan.owned[at];
                if let Some(tensor) = manifest.tensors.get_mut(&owned.name) {
                    tensor.pieces.push(Piece { file, offset, block: owned.block.clone(), checksums });
                }
            }
        }
        write_whole(&folder.join(MANIFEST), |file| Ok(serde_json::to_writer(file, &manifest)?))?;
        self.remove_old()
    }

    fn remove_old(&self) -> Result<()> {
        if self.keep == 0 {
            return Ok(());
        }
        let mut kept = 0;
        for found in list(&self.folder)?.into_iter().rev().filter(|found| found.step <= self.step) {
            if found.is_complete() && kept < self.keep {
                kept += 1;
                continue;
            }
            // Without its manifest first, so that it is never half of a complete one.
            let remove = || {
                match std::fs::remove_file(found.folder.join(MANIFEST)) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
                std::fs::remove_dir_all(&found.folder)
            };
            remove().map_err(|error| {
                Error::file(
                    &found.folder,
                    "an old checkpoint cannot be removed; the new one is complete",
                    error,
                )
            })?;
        }
        Ok(())
    }
}
