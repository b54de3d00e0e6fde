//! The calls, and how each is tried.

use super::attempt::Attempt;
use crate::cuda;
use phalanx::{BackendKind, Bitwise, Comm, Error, Logical, ReduceOp, TensorPart, UsageError};
use phalanx_testkit::scenario::Outcome;
use std::path::Path;
use std::time::Duration;

/// The memory that a call's type allows.
#[derive(Clone, Copy, PartialEq)]
pub enum Memory {
    Any,
    Host,
    Gpu,
    /// No buffers.
    None,
}

/// A row of the table.
pub struct Call {
    /// Methods of [`Comm`]; `_in_place` forms are not named.
    pub names: &'static [&'static str],
    /// What they do, with MPI's name.
    pub text: &'static str,
    pub memory: Memory,
    /// All work, or all are unsupported.
    pub attempts: &'static [fn(&Attempt) -> phalanx::Result<()>],
}

/// Whether it is an answer to the call: the buffer is in other memory, or there is no other rank.
fn is_refusal(error: &UsageError) -> bool {
    matches!(error, UsageError::Memory { .. } | UsageError::SelfExchange { .. })
}

impl Call {
    /// What a call's cell says.
    pub fn cell(&self, comm: &Comm, gpu: &cuda::Gpu, folder: &Path) -> Outcome {
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
            let works = self.attempts.iter().enumerate().map(|(number, call)| {
                match call(attempt).and_then(|()| comm.sync()) {
                    Ok(()) => Ok(true),
                    Err(Error::Unsupported(_)) => Ok(false),
                    Err(Error::Usage(refused)) if is_refusal(&refused) => Ok(false),
                    Err(error) => Err(format!("{}, attempt {number}, {kind}: {error}", self.names[0])),
                }
            });
            let works = works.collect::<Result<Vec<_>, _>>()?;
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

pub const SUM: ReduceOp = ReduceOp::Sum;

pub const CALLS: &[Call] = &[
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
            |t| t.comm.shared_by_host(4, |_: &mut [u32]| phalanx::Result::Ok(()))?.free(),
            |t| t.comm.shared_by_host_in_parts(4, |_, _: &mut [u32]| phalanx::Result::Ok(()))?.free(),
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
            remote.sync()?;
            // The peer has opened this rank's window before it goes.
            t.comm.barrier()
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
        attempts: &[|t| {
            t.comm.barrier()?;
            match t.comm.within(Duration::from_millis(500)).grow(1) {
                // It has waited for a process that the test does not start.
                Err(Error::Bootstrap(_)) => Ok(()),
                other => other.map(drop),
            }
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

fn larger(a: &u32, b: &u32) -> u32 {
    *a.max(b)
}
