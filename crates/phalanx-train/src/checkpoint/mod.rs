//! Checkpoints: saved by any number of ranks, read by any other.
//!
//! ```
//! use phalanx_train::checkpoint::{Checkpoint, Saver, State};
//! use phalanx_train::device::Host;
//! # let folder = std::env::temp_dir().join(format!("phalanx-checkpoint-{}", std::process::id()));
//!
//! // Two ranks save a weight of 4 elements, of which each has a half.
//! phalanx::try_run(2, |comm| -> phalanx_train::Result<()> {
//!     let half = [comm.rank() as f32; 2];
//!     let mut saver = Saver::new(&comm, &folder)?.keep(3);
//!     let mut state = State::new();
//!     let begin = 2 * comm.rank();
//!     state.tensor::<_, f32>("weight", &[2, 2], &[begin..begin + 2], &Host, &half[..]);
//!     state.value("epoch", 7);
//!     saver.save(100, state)?; // a copy; the files are written while training goes on
//!     saver.finish()
//! })?;
//!
//! // One rank reads what it needs.
//! let checkpoint = Checkpoint::latest(&folder)?.expect("one was saved");
//! assert_eq!(checkpoint.step(), 100);
//! assert_eq!(checkpoint.read::<f32>("weight", &[1..3])?, [0.0, 1.0]);
//! assert_eq!(checkpoint.value("epoch", 0).and_then(|epoch| epoch.as_u64()), Some(7));
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok::<(), phalanx_train::Error>(())
//! ```
//!
//! A folder has a folder for each step, and in it a file of each rank and the manifest:
//!
//! ```text
//! checkpoints/step-000000100/shard-00000-of-00002.safetensors
//!                            shard-00001-of-00002.safetensors
//!                            manifest.json
//! ```
//!
//! - Each rank writes the blocks that it owns. Blocks that several ranks have are written once; which of them writes is chosen so that all
//!   have about as much to write. The files are ordinary safetensors files with flat tensors; [`Checkpoint::consolidate`]
//!   makes one file with the tensors in their shapes.
//! - Every file is written under another name, made durable and renamed; the manifest last. A checkpoint without a manifest is incomplete:
//!   [`Checkpoint::latest`] passes over it, and [`Checkpoint::open`] says what it lacks.
//! - The manifest has a checksum (CRC-32) of each 4 MiB, which every read compares. It finds accidents, not forgery.
//! - The writing threads have a communicator of their own. A rank that is lost, a full disk, a folder that may not be written to: all ranks get
//!   an error, from the next [`Saver::save`] or [`Saver::finish`].
//! - The folder is on a file system that all ranks' hosts share.
//!
//! On a GPU, [`Saver::save`] waits for the work that is enqueued on the device's stream before it.

pub(crate) mod bytes;
pub(crate) mod exchange;
mod file;
mod folder;
mod group;
mod manifest;
mod plan;
mod read;
mod save;

pub use folder::{Found, list};
pub use read::Checkpoint;
pub use save::{Progress, Saver, State};
