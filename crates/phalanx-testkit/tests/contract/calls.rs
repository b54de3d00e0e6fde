//! The table of calls in phalanx's front page (`src/calls.md`): which call takes which memory on which backend, tried on two
//! ranks of each, with emulated GPUs.
//!
//! `PHALANX_UPDATE=1 cargo test --workspace --test contract -- calls/` writes the table.

use crate::cuda::{self, Buffer};
use crate::world::all_equal;
use libtest_mimic::{Failed, Trial};
use phalanx::nccl::{CollectiveConfig, DeviceRequirements, MemoryStatistic, Nccl, Registration};
use phalanx::{
    ArrayPart, BackendKind, Bitwise, Comm, Error, Grid, Logical, Neighbors, ReduceOp, Result, TensorPart,
    UsageError,
};
use phalanx_testkit::emulated::Emulated;
use phalanx_testkit::hosts::Elsewhere;
use phalanx_testkit::mpi::Installation;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::program::Place;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Scenario, suite, ucx};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("calls", |comm, args| report(&comm, &args[0])),
    Scenario::rank("calls/of_nccl", |comm, args| report_of_nccl(&comm, &args[0])),
];

/// Set to write the table instead of comparing with it.
const UPDATE: &str = "PHALANX_UPDATE";

/// Releases of NCCL that came with functions, from the oldest that is supported.
const RELEASES: [&str; 8] = ["2.18.1", "2.19.3", "2.22.3", "2.27.3", "2.28.3", "2.29.2", "2.29.7", "2.31.0"];

/// The columns of backends, after the calls and what they do.
const BACKENDS: [&str; 6] = ["solo", "host", "ucx", "mpi", "nccl", "nvshmem"];

/// What a rank tries a call with.
struct Attempt<'a> {
    comm: &'a Comm,
    gpu: Option<&'a cuda::Gpu>,
    folder: &'a Path,
}

/// The memory that a call's type allows.
#[derive(Clone, Copy, PartialEq)]
enum Memory {
    Any,
    Host,
    Gpu,
    /// No buffers.
    None,
}

/// A row of the table.
struct Call {
    /// Methods of [`Comm`]; `_in_place` forms are not named.
    names: &'static [&'static str],
    /// What they do, with MPI's name.
    text: &'static str,
    memory: Memory,
    /// All work, or all are unsupported.
    attempts: &'static [fn(&Attempt) -> Result<()>],
}

const SUM: ReduceOp = ReduceOp::Sum;

const CALLS: &[Call] = &[
    Call {
        names: &["all_reduce"],
        text: "a sum, or another reduction, for all ranks. `MPI_Allreduce`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.all_reduce(&t.one(), &mut t.one(), SUM),
            |t| t.comm.all_reduce_in_place(&mut t.one(), SUM),
        ],
    },
    Call {
        names: &["all_reduce_coalesced"],
        text: "the same of several buffers, with one latency",
        memory: Memory::Any,
        attempts: &[|t| t.comm.all_reduce_coalesced(&mut [t.one(), t.one()], SUM)],
    },
    Call {
        names: &["reduce"],
        text: "the same for one rank. `MPI_Reduce`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.reduce(&t.one(), &mut t.one(), SUM, 0),
            |t| t.comm.reduce_in_place(&mut t.one(), SUM, 0),
        ],
    },
    Call {
        names: &["reduce_scatter", "reduce_scatter_v"],
        text: "the same, of which each rank gets a block. `MPI_Reduce_scatter`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.reduce_scatter(&t.all(), &mut t.one(), SUM),
            |t| t.comm.reduce_scatter_in_place(&mut t.all(), SUM),
            |t| t.comm.reduce_scatter_v(&t.blocks(), &mut t.block(), &t.counts(), SUM),
            |t| t.comm.reduce_scatter_v_in_place(&mut t.blocks(), &t.counts(), SUM),
        ],
    },
    Call {
        names: &["scan", "exclusive_scan"],
        text: "the same of the ranks up to this one, or before it. `MPI_Scan`, `MPI_Exscan`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.scan(&t.one(), &mut t.one(), SUM),
            |t| t.comm.scan_in_place(&mut t.one(), SUM),
            |t| t.comm.exclusive_scan(&t.one(), &mut t.one(), SUM),
            |t| t.comm.exclusive_scan_in_place(&mut t.one(), SUM),
        ],
    },
    Call {
        names: &["all_reduce_with", "reduce_with", "reduce_scatter_with", "scan_with", "exclusive_scan_with"],
        text: "reductions by a closure, of any plain type. `MPI_Op_create`. So are [`Bitwise`], [`Logical`] and [`Locate`]",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.all_reduce_with(&t.one(), &mut t.one(), larger),
            |t| t.comm.all_reduce_in_place_with(&mut t.one(), larger),
            |t| t.comm.reduce_with(&t.one(), &mut t.one(), larger, 0),
            |t| t.comm.reduce_in_place_with(&mut t.one(), larger, 0),
            |t| t.comm.reduce_scatter_with(&t.all(), &mut t.one(), larger),
            |t| t.comm.reduce_scatter_in_place_with(&mut t.all(), larger),
            |t| t.comm.scan_with(&t.one(), &mut t.one(), larger),
            |t| t.comm.scan_in_place_with(&mut t.one(), larger),
            |t| t.comm.exclusive_scan_with(&t.one(), &mut t.one(), larger),
            |t| t.comm.exclusive_scan_in_place_with(&mut t.one(), larger),
            |t| t.comm.all_reduce_in_place(&mut t.one(), Bitwise::And),
            |t| t.comm.all_reduce_in_place(&mut t.one(), Logical::Or),
        ],
    },
    Call {
        names: &["broadcast"],
        text: "one rank's buffer for all. `MPI_Bcast`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.broadcast(&t.one(), &mut t.one(), 0),
            |t| t.comm.broadcast_in_place(&mut t.one(), 0),
        ],
    },
    Call {
        names: &["all_gather", "all_gather_v"],
        text: "all ranks' blocks for all. `MPI_Allgather`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.all_gather(&t.one(), &mut t.all()),
            |t| t.comm.all_gather_in_place(&mut t.all()),
            |t| t.comm.all_gather_v(&t.block(), &mut t.blocks(), &t.counts()),
            |t| t.comm.all_gather_v_in_place(&mut t.blocks(), &t.counts()),
        ],
    },
    Call {
        names: &["gather", "gather_v"],
        text: "all ranks' blocks for one. `MPI_Gather`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.gather(&t.one(), &mut t.all(), 0),
            |t| t.comm.gather_in_place(&mut t.all(), 0),
            |t| t.comm.gather_v(&t.block(), &mut t.blocks(), &t.counts(), 0),
            |t| t.comm.gather_v_in_place(&mut t.blocks(), &t.counts(), 0),
        ],
    },
    Call {
        names: &["scatter", "scatter_v"],
        text: "one rank's blocks, one for each rank. `MPI_Scatter`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.scatter(&t.all(), &mut t.one(), 0),
            |t| t.comm.scatter_in_place(&mut t.all(), 0),
            |t| t.comm.scatter_v(&t.blocks(), &t.counts(), &mut t.block(), 0),
            |t| t.comm.scatter_v_in_place(&mut t.blocks(), &t.counts(), 0),
        ],
    },
    Call {
        names: &["all_to_all", "all_to_all_v"],
        text: "a block from each rank to each. `MPI_Alltoall`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.all_to_all(&t.all(), &mut t.all()),
            |t| t.comm.all_to_all_in_place(&mut t.all()),
            |t| t.comm.all_to_all_v(&t.all(), &t.ones(), &mut t.all(), &t.ones()),
            |t| t.comm.all_to_all_v_in_place(&mut t.all(), &t.ones()),
        ],
    },
    Call {
        names: &["barrier"],
        text: "waits for all ranks. `MPI_Barrier`",
        memory: Memory::None,
        attempts: &[|t| t.comm.barrier()],
    },
    Call {
        names: &["send", "send_tagged"],
        text: "a message to another rank. `MPI_Send`",
        memory: Memory::Any,
        attempts: &[
            |t| t.sends(0, |buffer, to| t.comm.send(buffer, to)),
            |t| t.sends(5, |buffer, to| t.comm.send_tagged(buffer, to, 5)),
        ],
    },
    Call {
        names: &["recv", "recv_tagged"],
        text: "a message from a rank, with a tag by which it matches (on NCCL by the order alone). `MPI_Recv`",
        memory: Memory::Any,
        attempts: &[
            |t| t.receives(0, |buffer, from| t.comm.recv(buffer, from)),
            |t| {
                t.receives(5, |buffer, from| t.comm.recv_tagged(buffer, from, 5))?;
                let by_tag = t.matches_by_tag()?;
                assert_eq!(by_tag, t.comm.backend() != BackendKind::Nccl, "whether tags count");
                Ok(())
            },
        ],
    },
    Call {
        names: &["send_recv", "send_recv_tagged"],
        text: "both at once, also with oneself. `MPI_Sendrecv`",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.send_recv(&t.one(), t.peer(), &mut t.one(), t.peer()),
            |t| t.comm.send_recv_tagged(&t.one(), t.peer(), &mut t.one(), t.peer(), 5),
        ],
    },
    Call {
        names: &["recv_any", "recv_any_tagged"],
        text: "from whichever rank sends first. `MPI_ANY_SOURCE`",
        memory: Memory::Any,
        attempts: &[
            |t| t.receives(0, |buffer, _| t.comm.recv_any(buffer).map(drop)),
            |t| t.receives(0, |buffer, _| t.comm.recv_any_tagged(buffer, None).map(drop)),
        ],
    },
    Call {
        names: &["probe", "try_probe", "recv_vec", "recv_any_value"],
        text: "a message of unknown length or source. `MPI_Probe`, `MPI_Iprobe`",
        memory: Memory::Host,
        attempts: &[
            |t| {
                t.receives(0, |buffer, from| {
                    t.comm.probe(from, 0)?;
                    t.comm.try_probe(None, 0)?.expect("it has been seen");
                    t.comm.recv(buffer, from)
                })
            },
            |t| t.receives(0, |_, from| t.comm.recv_vec::<u32>(from, 0).map(drop)),
            |t| t.receives(0, |_, _| t.comm.recv_any_value::<u32>().map(drop)),
        ],
    },
    Call {
        names: &["send_value", "recv_value", "send_object", "recv_object"],
        text: "messages of a number or struct, and of what serde knows",
        memory: Memory::None,
        attempts: &[
            |t| match t.comm.rank() {
                0 => t.comm.send_value(1u32, t.peer()),
                _ => t.comm.recv_value::<u32>(0).map(drop),
            },
            |t| match t.comm.rank() {
                0 => t.comm.send_object(&1u32, t.peer()),
                _ => t.comm.recv_object::<u32>(0).map(drop),
            },
        ],
    },
    Call {
        names: &[
            "broadcast_object",
            "gather_object",
            "all_gather_object",
            "scatter_objects",
            "all_to_all_objects",
        ],
        text: "collectives of values that serde knows, of any length",
        memory: Memory::None,
        attempts: &[
            |t| t.comm.broadcast_object(Some("one".to_owned()), 0).map(drop),
            |t| t.comm.gather_object(&"one".to_owned(), 0).map(drop),
            |t| t.comm.all_gather_object(&"one".to_owned()).map(drop),
            |t| {
                let all = vec!["one".to_owned(); t.comm.world_size()];
                t.comm.scatter_objects((t.comm.rank() == 0).then_some(all), 0).map(drop)
            },
            |t| t.comm.all_to_all_objects(vec!["one".to_owned(); t.comm.world_size()]).map(drop),
        ],
    },
    Call {
        names: &[
            "all_reduce_value",
            "broadcast_value",
            "all_gather_value",
            "reduce_value",
            "gather_value",
            "scatter_values",
            "scan_value",
            "exclusive_scan_value",
            "send_recv_value",
        ],
        text: "the same calls for a single number or struct",
        memory: Memory::None,
        attempts: &[
            |t| t.comm.all_reduce_value(1u32, SUM).map(drop),
            |t| t.comm.broadcast_value(1u32, 0).map(drop),
            |t| t.comm.all_gather_value(1u32).map(drop),
            |t| t.comm.reduce_value(1u32, SUM, 0).map(drop),
            |t| t.comm.gather_value(1u32, 0).map(drop),
            |t| t.comm.scatter_values(&t.ones::<u32>(), 0).map(drop),
            |t| t.comm.scan_value(1u32, SUM).map(drop),
            |t| t.comm.exclusive_scan_value(1u32, SUM).map(drop),
            |t| t.comm.send_recv_value(1u32, t.peer(), t.peer()).map(drop),
        ],
    },
    Call {
        names: &["all_gather_vec", "gather_vec", "all_to_all_vec"],
        text: "lists of lengths that the ranks exchange themselves",
        memory: Memory::Host,
        attempts: &[
            |t| t.comm.all_gather_vec(&[1u32]).map(drop),
            |t| t.comm.gather_vec(&[1u32], 0).map(drop),
            |t| t.comm.all_to_all_vec(&t.ones::<u32>(), &t.ones()).map(drop),
        ],
    },
    Call {
        names: &[
            "neighbor_all_gather",
            "neighbor_all_gather_v",
            "neighbor_all_to_all",
            "neighbor_all_to_all_v",
        ],
        text: "blocks for the [`Neighbors`] of a graph or [`Grid`]. `MPI_Neighbor_allgather`, `MPI_Neighbor_alltoall`",
        memory: Memory::Host,
        attempts: &[
            |t| t.comm.neighbor_all_gather(&t.ring(), &[1u32], &mut [0]),
            |t| t.comm.neighbor_all_gather_v(&t.ring(), &[1u32], &mut [0], &[1]),
            |t| t.comm.neighbor_all_to_all(&t.ring(), &[1u32], &mut [0]),
            |t| t.comm.neighbor_all_to_all_v(&t.ring(), &[1u32], &[1], &mut [0], &[1]),
        ],
    },
    Call {
        names: &["exchange_halo", "start_exchange_halo"],
        text: "the edges of an array's parts, in any number of dimensions",
        memory: Memory::Any,
        attempts: &[
            |t| t.comm.exchange_halo(&t.grid()?, &mut t.buffer(4), &[4], &[1]),
            |t| t.comm.start_exchange_halo(&t.grid()?, &t.buffer(4), &[4], &[1])?.finish(&mut t.buffer(4)),
        ],
    },
    Call {
        names: &["symmetric"],
        text: "memory that others put to and get from, with atomics and signals. `MPI_Win_allocate`",
        memory: Memory::Host,
        attempts: &[|t| t.comm.symmetric::<u32>(4)?.free()],
    },
    Call {
        names: &["shared_by_host", "shared_by_host_in_parts"],
        text: "one copy for each host. `MPI_Win_allocate_shared`",
        memory: Memory::Host,
        attempts: &[
            |t| t.comm.shared_by_host(4, |_: &mut [u32]| Result::Ok(()))?.free(),
            |t| t.comm.shared_by_host_in_parts(4, |_, _: &mut [u32]| Result::Ok(()))?.free(),
        ],
    },
    Call {
        names: &["alloc_gpu", "register_gpu", "open_gpu"],
        text: "GPU memory that others put to and get from, by a descriptor",
        memory: Memory::Gpu,
        attempts: &[|t| {
            let window = t.comm.register_gpu(t.comm.alloc_gpu::<u32>(4)?)?;
            let all = t.comm.all_gather_object(window.descriptor())?;
            let remote = t.comm.open_gpu::<u32>(&all[t.peer()])?;
            remote.put(&t.one(), 0)?;
            remote.sync()
        }],
    },
    Call {
        names: &["alloc"],
        text: "host memory for the fastest operations. `MPI_Alloc_mem`",
        memory: Memory::None,
        attempts: &[|t| t.comm.alloc::<u32>(4).map(drop)],
    },
    Call {
        names: &["write_at_all", "read_at_all"],
        text: "a file of a distributed array. `MPI_File_write_at_all`, `MPI_File_read_at_all`",
        memory: Memory::Host,
        attempts: &[|t| {
            t.comm.write_at_all(t.folder.join("array"), &t.part(), &[1u32])?;
            t.comm.read_at_all(t.folder.join("array"), &t.part(), &mut [1u32])
        }],
    },
    Call {
        names: &["write_tensors_at_all", "read_tensor_at_all"],
        text: "a safetensors file of distributed tensors",
        memory: Memory::Host,
        attempts: &[|t| {
            let (part, shape, mut data) = (t.part(), [t.comm.world_size()], [1u32]);
            let tensor = TensorPart::new("one", &shape, &part, &data)?;
            t.comm.write_tensors_at_all(t.folder.join("tensors"), &[tensor])?;
            t.comm.read_tensor_at_all(t.folder.join("tensors"), "one", &part, &mut data)
        }],
    },
    Call {
        names: &[
            "split",
            "split_by",
            "split_by_host",
            "split_group",
            "split_grid",
            "split_sub_grid",
            "reorder_by_host",
            "duplicate",
        ],
        text: "communicators of parts of the ranks, or of all in another order. `MPI_Comm_split`, `MPI_Comm_dup`",
        memory: Memory::None,
        attempts: &[
            |t| t.comm.split(Some(0), 0).map(drop),
            |t| t.comm.split_by(&"all").map(drop),
            |t| t.comm.split_by_host().map(drop),
            |t| t.comm.split_group(&t.comm.rank_group()).map(drop),
            |t| t.comm.split_grid(&[t.comm.world_size()], &[&[0]]).map(drop),
            |t| t.comm.split_sub_grid(&t.grid()?, &[0]).map(drop),
            |t| t.comm.reorder_by_host(&t.grid()?).map(drop),
            |t| t.comm.duplicate().map(drop),
        ],
    },
    Call {
        names: &["split_members"],
        text: "a communicator that its members alone make. `MPI_Comm_create_group`",
        memory: Memory::None,
        attempts: &[|t| t.comm.split_members(&t.comm.rank_group()).map(drop)],
    },
    Call {
        names: &["split_by_gpu_link"],
        text: "of the ranks whose GPUs NVLink connects",
        memory: Memory::None,
        attempts: &[|t| t.comm.split_by_gpu_link().map(drop)],
    },
    Call {
        names: &["agree"],
        text: "a flag on which the remaining ranks agree. `MPIX_Comm_agree`",
        memory: Memory::None,
        attempts: &[|t| t.comm.agree(true).map(drop)],
    },
    Call {
        names: &["shrink"],
        text: "goes on without lost ranks. `MPIX_Comm_shrink`",
        memory: Memory::None,
        attempts: &[|t| t.comm.shrink().map(drop)],
    },
    Call {
        names: &["grow", "rebuild"],
        text: "takes in new processes; puts them in the place of lost ones",
        memory: Memory::None,
        attempts: &[|t| match t.comm.within(Duration::from_millis(300)).grow(1) {
            // It has waited for a process that the test does not start.
            Err(Error::Bootstrap(_)) => Ok(()),
            other => other.map(drop),
        }],
    },
    Call {
        names: &["group"],
        text: "operations that start together",
        memory: Memory::Any,
        attempts: &[|t| {
            let mut buffer = t.one();
            t.comm.group(|group| group.all_reduce_in_place(&mut buffer, SUM))
        }],
    },
];

/// Methods of [`Comm`] that move nothing: settings, questions, other views of it, and its end.
const OTHER: &[&str] = &[
    "abort",
    "backend",
    "beside_computing",
    "builder",
    "configured",
    "cuda_stream",
    "drop",
    "finalize",
    "fmt",
    "gpu",
    "hip_stream",
    "host_topology",
    "into_raw_communicator",
    "name",
    "nccl",
    "nvshmem",
    "object_limit",
    "on",
    "rank",
    "rank_group",
    "rccl",
    "set_name",
    "set_object_limit",
    "set_timeout",
    "share",
    "sync",
    "timeout",
    "within",
    "world_size",
    "write_flight_record",
];

/// Not in every build of the documentation, which cannot link them.
const OF_FEATURES: &[&str] = &[
    "alloc_gpu",
    "open_gpu",
    "read_tensor_at_all",
    "register_gpu",
    "split_by_gpu_link",
    "write_tensors_at_all",
];

fn larger(a: &u32, b: &u32) -> u32 {
    *a.max(b)
}

impl Attempt<'_> {
    fn buffer(&self, len: usize) -> Buffer<u32> {
        let content = vec![1; len];
        match self.gpu {
            None => Buffer::Host(content),
            Some(gpu) => gpu.put(self.comm, &content).expect("room in a GPU"),
        }
    }

    fn one(&self) -> Buffer<u32> {
        self.buffer(1)
    }

    fn all(&self) -> Buffer<u32> {
        self.buffer(self.comm.world_size())
    }

    fn ones<T: From<bool> + Clone>(&self) -> Vec<T> {
        vec![T::from(true); self.comm.world_size()]
    }

    /// Blocks of different lengths: one element more for each rank.
    fn counts(&self) -> Vec<usize> {
        (1..=self.comm.world_size()).collect()
    }

    fn block(&self) -> Buffer<u32> {
        self.buffer(self.comm.rank() + 1)
    }

    fn blocks(&self) -> Buffer<u32> {
        self.buffer(self.counts().iter().sum())
    }

    fn peer(&self) -> usize {
        (self.comm.rank() + 1) % self.comm.world_size()
    }

    fn ring(&self) -> Neighbors {
        Neighbors::new([self.peer()], [self.peer()])
    }

    fn grid(&self) -> Result<Grid> {
        Grid::new(&[self.comm.world_size()], &[true])
    }

    fn part(&self) -> ArrayPart {
        ArrayPart::block(self.comm.world_size(), self.comm.rank(), self.comm.world_size())
    }

    /// Whether the second message arrives at the first receive if that has its tag.
    fn matches_by_tag(&self) -> Result<bool> {
        let [first, second] = [7, 6].map(|tag| self.comm.start_recv_tagged(vec![0u32], self.peer(), tag));
        let sent = [6u32, 7].map(|tag| self.comm.start_send_tagged(vec![tag], self.peer(), tag));
        let received = [first?.wait()?, second?.wait()?];
        for request in sent {
            request?.wait()?;
        }
        Ok(received == [[7], [6]])
    }

    /// A message to the peer, which is received from one that did not send it, too.
    fn sends(&self, tag: u32, send: impl FnOnce(&Buffer<u32>, usize) -> Result<()>) -> Result<()> {
        let recv = self.comm.start_recv_tagged(vec![0u32], self.peer(), tag)?;
        let sent = send(&self.one(), self.peer());
        if sent.is_err() {
            self.comm.start_send_tagged(vec![1u32], self.peer(), tag)?.wait()?;
        }
        recv.wait()?;
        sent
    }

    /// A message from the peer, which is sent, and received in any case.
    fn receives(&self, tag: u32, recv: impl FnOnce(&mut Buffer<u32>, usize) -> Result<()>) -> Result<()> {
        let send = self.comm.start_send_tagged(vec![1u32], self.peer(), tag)?;
        let received = recv(&mut self.one(), self.peer());
        if received.is_err() {
            self.comm.recv_tagged(&mut [0u32], self.peer(), tag)?;
        }
        send.wait()?;
        received
    }
}

/// Whether it is an answer to the call: the buffer is in other memory, or there is no other rank.
fn is_refusal(error: &UsageError) -> bool {
    matches!(error, UsageError::Memory { .. } | UsageError::SelfExchange { .. })
}

impl Call {
    /// What a call's cell says.
    fn cell(&self, comm: &Comm, gpu: &cuda::Gpu, folder: &Path) -> Outcome {
        let host = Attempt { comm, gpu: None, folder };
        let on_gpu = Attempt { comm, gpu: Some(gpu), folder };
        let kinds: &[(&str, &Attempt)] = match self.memory {
            Memory::Any => &[("host", &host), ("gpu", &on_gpu)],
            Memory::Host => &[("host", &host)],
            Memory::Gpu => &[("gpu", &on_gpu)],
            Memory::None => &[("yes", &host)],
        };
        let mut taken = Vec::new();
        for (kind, attempt) in kinds {
            let works = self.attempts.iter().enumerate().map(|(number, call)| match call(attempt) {
                Ok(()) => Ok(true),
                Err(Error::Unsupported(_)) => Ok(false),
                Err(Error::Usage(refused)) if is_refusal(&refused) => Ok(false),
                Err(error) => Err(format!("{}, attempt {number}, {kind}: {error}", self.names[0])),
            });
            let works = works.collect::<std::result::Result<Vec<_>, _>>()?;
            if works.contains(&!works[0]) {
                return Err(format!("{}, {kind}: of its forms only some work: {works:?}", self.names[0]));
            }
            if works[0] {
                taken.push(*kind);
            }
        }
        Ok(if taken.is_empty() { "–".into() } else { taken.join(", ") })
    }
}

/// Writes this rank's cells into a file of the folder. (A launch of thread ranks has no reports.)
fn report(comm: &Comm, folder: &str) -> Outcome {
    let (gpu, folder) = (cuda::gpu(comm.gpu().unwrap_or(comm.rank()))?, Path::new(folder));
    let cells = CALLS.iter().map(|call| call.cell(comm, &gpu, folder));
    let cells = cells.collect::<std::result::Result<Vec<_>, _>>()?.join("\n");
    std::fs::write(cells_of(folder, comm.rank()), cells).context(|| "the cells".into())?;
    Ok(String::new())
}

fn cells_of(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("cells-{rank}"))
}

/// Runs so many ranks, which all report the same cells.
fn cells(
    emulated: &Emulated,
    ranks: usize,
    run: impl FnOnce(&str) -> std::result::Result<(), String>,
) -> std::result::Result<Vec<String>, Failed> {
    let folder = tempfile::tempdir_in(emulated.folder())?;
    run(&folder.path().to_string_lossy())?;
    let reports = (0..ranks).map(|rank| std::fs::read_to_string(cells_of(folder.path(), rank)));
    let reports = reports.collect::<std::result::Result<Vec<_>, _>>()?;
    all_equal(&reports)?;
    Ok(reports[0].lines().map(str::to_owned).collect())
}

pub fn trials() -> Vec<Trial> {
    let newest = || Ok::<_, Failed>(Emulated::new()?);
    let no_ucx = ucx::missing().or_else(|| Elsewhere::enter().err());
    let mut trials = vec![
        Trial::test("calls/all_are_listed", all_are_listed),
        Trial::test("calls/solo", move || {
            compare("solo", &launched(&newest()?, 1, |launch| launch.env("PHALANX_BACKEND", "solo"))?)
        }),
        Trial::test("calls/host", move || compare("host", &threads_and_processes(&newest()?, "host")?)),
        match no_ucx {
            None => Trial::test("calls/ucx", move || {
                compare(
                    "ucx",
                    &launched(&newest()?, 2, |launch| launch.on_hosts(2).env("PHALANX_BACKEND", "ucx"))?,
                )
            }),
            Some(reason) => suite::ignored("calls/ucx", reason),
        },
        Trial::test("calls/nccl_newest", move || {
            compare("nccl", &threads_and_processes(&newest()?, "nccl")?)
        }),
        Trial::test("calls/nccl_oldest", || {
            compare("nccl", &threads_and_processes(&Emulated::nccl(RELEASES[0])?, "nccl")?)
        }),
        Trial::test("calls/nccl_since", since),
        Trial::test("calls/nvshmem", move || {
            compare("nvshmem", &launched(&newest()?, 2, |launch| launch.env("PHALANX_BACKEND", "nvshmem"))?)
        }),
    ];
    for (name, found) in Installation::all() {
        let name = format!("calls/{name}");
        trials.push(match found {
            Ok(installation) => Trial::test(name, move || on_mpi(&installation)),
            Err(reason) => suite::ignored(name, reason),
        });
    }
    trials
}

/// What only NCCL has, and the release from which on it works. Before, the error is typed.
type OfNccl = (&'static [&'static str], &'static str, fn(&Comm, &Nccl<'_>) -> Result<bool>);

const OF_NCCL: &[OfNccl] = &[
    (&["alloc"], "GPU memory in the best form that the library has", |_, nccl| {
        nccl.alloc::<u32>(4).map(|_| true)
    }),
    (&["alloc_as"], "a symmetric window (`Registration::Symmetric`)", |_, nccl| {
        let buffer = nccl.alloc_as::<u32>(4, Registration::Symmetric)?;
        Ok(buffer.registration() == Registration::Symmetric)
    }),
    (&["estimate"], "the time of a collective", |_, nccl| {
        let mut buffer = nccl.alloc::<u32>(4)?;
        nccl.estimate(|group| group.all_reduce_in_place(&mut buffer, SUM)).map(|_| true)
    }),
    (&["device_comm", "team"], "for your own kernels", |_, nccl| {
        nccl.device_comm(&DeviceRequirements::default()).map(|_| true)
    }),
    (&["put_signal", "signal", "wait_signals"], "between symmetric windows", |comm, nccl| {
        let [source, target] = [nccl.alloc::<u32>(4)?, nccl.alloc::<u32>(4)?];
        let peer = 1 - comm.rank();
        nccl.put_signal(&source, 0..4, peer, &target, 0)?;
        nccl.wait_signals(&[(peer, 1)])?;
        comm.sync()?;
        comm.barrier()?;
        Ok(true)
    }),
    (&["properties"], "what the communicator can", |_, nccl| nccl.properties().map(|_| true)),
    (&["memory", "suspend", "resume"], "gives GPU memory back for a while", |_, nccl| {
        nccl.memory(MemoryStatistic::Total)?;
        nccl.suspend()?;
        nccl.resume()?;
        Ok(true)
    }),
    (&["configured"], "settings of single collectives", |_, nccl| {
        nccl.configured(&CollectiveConfig::default()).map(|_| true)
    }),
];

/// Writes which calls of NCCL's work, as [`report`] does.
fn report_of_nccl(comm: &Comm, folder: &str) -> Outcome {
    let nccl = comm.nccl().ok_or("no NCCL")?;
    let works = OF_NCCL.iter().map(|(names, _, call)| match call(comm, &nccl) {
        Ok(works) => Ok(if works { "works" } else { "older" }),
        Err(Error::MissingFunction(_) | Error::Unsupported(_)) => Ok("older"),
        Err(error) => Err(format!("{}: {error}", names[0])),
    });
    let works = works.collect::<std::result::Result<Vec<_>, _>>()?.join("\n");
    std::fs::write(cells_of(Path::new(folder), comm.rank()), works).context(|| "the answers".into())?;
    Ok(String::new())
}

/// Tries NCCL's own calls on every release that came with functions.
fn since() -> std::result::Result<(), Failed> {
    let works_on = |release: &&str| {
        let emulated = Emulated::nccl(release)?;
        let launch = |folder: &str| emulated.launch(Launch::new("calls/of_nccl", 2).arg(folder));
        cells(&emulated, 2, |folder| launch(folder).env("PHALANX_BACKEND", "nccl").reports().map(drop))
    };
    let works = RELEASES.iter().map(works_on).collect::<std::result::Result<Vec<_>, Failed>>()?;
    let row = |(number, (names, text, _)): (usize, &OfNccl)| {
        let without = works.iter().rposition(|works| works[number] == "older");
        let since = RELEASES.get(without.map_or(0, |last| last + 1)).expect("the newest release has all");
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        vec![names.join(", "), (*text).to_owned(), since.trim_end_matches(".0").to_owned()]
    };
    compare_table(&["of NCCL alone", "what it does", "since NCCL"], |_| {
        OF_NCCL.iter().enumerate().map(row).collect()
    })
}

fn launched(
    emulated: &Emulated,
    ranks: usize,
    set: impl FnOnce(Launch) -> Launch,
) -> std::result::Result<Vec<String>, Failed> {
    cells(emulated, ranks, |folder| {
        let launch = emulated.launch(Launch::new("calls", ranks).arg(folder));
        set(launch).reports().map(drop)
    })
}

/// The cells of process ranks, which say so where threads have others.
fn threads_and_processes(emulated: &Emulated, backend: &str) -> std::result::Result<Vec<String>, Failed> {
    let processes = launched(emulated, 2, |launch| launch.env("PHALANX_BACKEND", backend))?;
    let threads = launched(emulated, 2, |launch| launch.on_threads().env("PHALANX_BACKEND", backend))?;
    let merged = processes.into_iter().zip(threads).zip(CALLS).map(|((processes, threads), call)| {
        match (&*processes, &*threads) {
            (processes, threads) if processes == threads => Ok(threads.to_owned()),
            ("yes", "–") => Ok("processes".to_owned()),
            _ => Err(format!("{}: {threads} on threads, {processes} on processes", call.names[0]).into()),
        }
    });
    merged.collect()
}

fn on_mpi(installation: &Installation) -> std::result::Result<(), Failed> {
    let emulated = Emulated::new()?;
    let cells = cells(&emulated, 2, |folder| {
        let job = installation.job(2).scenario("calls", &[folder]);
        let job = emulated.environment().iter().fold(job, |job, (name, value)| job.env(name, value));
        job.env("PHALANX_BACKEND", "mpi").env("PHALANX_MPI_CUDA", "1").succeed().map(drop)
    })?;
    compare("mpi", &cells)
}

/// Of the package.
fn file_of_phalanx(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../phalanx").join(name)
}

/// The first two columns: links to the calls, and what they do.
fn begins(call: &Call) -> [String; 2] {
    let link = |name: &&str| match OF_FEATURES.contains(name) {
        true => format!("`{name}`"),
        false => format!("[`{name}`](Comm::{name})"),
    };
    [call.names.iter().map(link).collect::<Vec<_>>().join(", "), call.text.to_owned()]
}

/// Compares a backend's column of the table, or writes it.
fn compare(backend: &str, cells: &[String]) -> std::result::Result<(), Failed> {
    let column = 2 + BACKENDS.iter().position(|name| *name == backend).expect("a backend of the table");
    compare_table(&[&["call", "what it does"], &BACKENDS[..]].concat(), |old| {
        let row = |(call, cell): (&Call, &String)| {
            let begins = begins(call);
            let found = old.iter().find(|row| row[0] == begins[0]);
            let of_others = |column| found.and_then(|row| row.get(column)).map_or("?", |cell| *cell);
            let of_backends =
                (2..2 + BACKENDS.len()).map(|at| if at == column { cell } else { of_others(at) });
            begins.iter().map(|text| &**text).chain(of_backends).map(str::to_owned).collect()
        };
        CALLS.iter().zip(cells).map(row).collect()
    })
}

/// Compares a table with its rows, which are made from those that it has, or writes it.
fn compare_table(
    header: &[&str],
    rows: impl FnOnce(&[Vec<&str>]) -> Vec<Vec<String>>,
) -> std::result::Result<(), Failed> {
    static FILE: Mutex<()> = Mutex::new(());
    let _alone = FILE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = file_of_phalanx("src/calls.md");
    let text = std::fs::read_to_string(&path)?;
    let begin = text.find(&format!("| {} |", header[0])).ok_or("calls.md lacks a table")?;
    let (before, table) = text.split_at(begin);
    let (table, after) = table.split_at(table.find("\n\n").map_or(table.len(), |end| end + 1));
    let old: Vec<Vec<&str>> =
        table.lines().map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect();
    let rows = rows(&old).into_iter().map(|row| format!("| {} |\n", row.join(" | ")));
    let new =
        format!("| {} |\n|{}\n", header.join(" | "), "---|".repeat(header.len())) + &rows.collect::<String>();
    if std::env::var_os(UPDATE).is_some_and(|value| value == "1") {
        return Ok(std::fs::write(&path, format!("{before}{new}{after}"))?);
    }
    if new == table {
        return Ok(());
    }
    let differs: Vec<&str> = new.lines().filter(|line| !table.lines().any(|old| old == *line)).collect();
    Err(format!("{} is not as {UPDATE}=1 writes it:\n{}", path.display(), differs.join("\n")).into())
}

/// Every method of [`Comm`] is in a row, or in [`OTHER`]. Forms that are started, prepared or in place count as their plain form.
fn all_are_listed() -> std::result::Result<(), Failed> {
    let public = std::fs::read_to_string(file_of_phalanx("public-api.txt"))?;
    let names = public.lines().filter_map(|line| line.strip_prefix("pub fn phalanx::Comm::"));
    let names = names.filter_map(|line| line.split(['(', '<']).next());
    let plain = names.map(|name| {
        let name = name.strip_prefix("start_").or_else(|| name.strip_prefix("prepare_")).unwrap_or(name);
        name.replace("_in_place", "")
    });
    let listed: BTreeSet<&str> = CALLS.iter().flat_map(|call| call.names).chain(OTHER).copied().collect();
    let missing: BTreeSet<String> = plain.filter(|name| !listed.contains(&**name)).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("in no row of the table: {missing:?}").into()) }
}
