//! Contexts: how they begin and end.

use crate::world::{barrier, context, done, expect, gpu_of, must, read, refused, upload, values};
use phalanx::nvshmem::{self, Context, UniqueId};
use phalanx::{Comm, Error};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("lifecycle/rounds", rounds),
    Scenario::rank("lifecycle/by_bytes", by_bytes),
    Scenario::rank("lifecycle/one_at_a_time", one_at_a_time),
    Scenario::rank("lifecycle/questions", questions),
    Scenario::rank("lifecycle/outlives_its_communicator", outlives),
];

/// Three rounds of beginning, using and ending.
fn rounds(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for round in 0..3 {
        let context = context(&comm)?;
        assert_eq!((context.my_pe(), context.n_pes()), (rank, ranks));
        let memory = upload(&context, &values::<f32>(rank + round, 1000))?;
        let peer = (rank + 1) % ranks;
        let mut copy = must("alloc", context.alloc::<f32>(1000))?;
        barrier(&context)?;
        must("get", context.get(&mut copy, &memory, peer))?;
        let of_peer = values::<f32>(peer + round, 1000);
        expect(format!("round {round}"), &read(&copy)?, |index| of_peer[index])?;
        must("free", memory.free())?;
        must("free", copy.free())?;
        must("finalize", context.finalize())?;
    }
    done()
}

/// The bytes of an id, carried by the caller.
fn by_bytes(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut bytes = [0u8; UniqueId::BYTES];
    if rank == 0 {
        bytes = must("UniqueId::new", UniqueId::new())?.to_bytes();
    }
    must("broadcast", comm.broadcast_in_place(&mut bytes, 0))?;
    refused("no id", UniqueId::from_bytes(&[0; 128]), &["unique id", "128 bytes"])?;
    let id = must("from_bytes", UniqueId::from_bytes(&bytes))?;
    refused("beyond", Context::init_with_id(id, ranks, ranks), &["PE", "does not exist"])?;
    // The GPU is the one with the number that the launcher gives each rank.
    let context = must("init_with_id", Context::init_with_id(id, rank, ranks))?;
    assert_eq!(context.cuda_context().ordinal(), gpu_of(rank));
    let memory = upload(&context, &values::<u8>(rank, 77))?;
    barrier(&context)?;
    let peer = (rank + 1) % ranks;
    let got = must("g", context.g(&memory, 5, peer))?;
    assert_eq!(got, values::<u8>(peer, 77)[5]);
    barrier(&context)?;
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}

fn one_at_a_time(comm: Comm, _: &[String]) -> Outcome {
    let beyond = Context::builder().gpu(1000).init(&comm);
    refused("a GPU that is not there", beyond, &["GPU 1000"])?;
    let first = context(&comm)?;
    refused("a second context", Context::init(&comm), &["one PE", "finalize"])?;
    let memory = upload(&first, &[1.0f32])?;
    must("free", memory.free())?;
    must("finalize", first.finalize())?;
    must("finalize", context(&comm)?.finalize())?;
    // One that is dropped cannot be followed by another.
    drop(context(&comm)?);
    refused("after a dropped one", Context::init(&comm), &["finalize"])?;
    done()
}

fn questions(comm: Comm, _: &[String]) -> Outcome {
    let version = must("version", nvshmem::version())?;
    assert_eq!(version.split('.').count(), 3, "{version}");
    let (major, _) = must("openshmem_version", nvshmem::openshmem_version())?;
    assert_eq!(major, 1);
    assert!(must("path", nvshmem::path())?.file_name().is_some());
    let context = context(&comm)?;
    assert_eq!(context.version(), version);
    assert!(format!("{context:?}").contains("my_pe"));
    assert_eq!(context.timeout(), comm.timeout());
    must("finalize", context.finalize())?;
    done()
}

/// The PEs' own communicator does not end with the one that it was made from.
fn outlives(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    drop(comm);
    let memory = upload(&context, &[context.my_pe() as u32; 9])?;
    barrier(&context)?;
    let peer = (context.my_pe() + 1) % context.n_pes();
    assert_eq!(must("g", context.g(&memory, 8, peer))?, peer as u32);
    barrier(&context)?;
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// PEs that find themselves by the environment: each is one alone, until its process ends.
pub fn environment(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for _ in 0..2 {
        let context = must("init_from_environment", Context::init_from_environment())?;
        assert_eq!(
            (context.my_pe(), context.n_pes(), context.cuda_context().ordinal()),
            (0, 1, gpu_of(rank))
        );
        let memory = upload(&context, &values::<i32>(rank, 10))?;
        let inbox = must("alloc", context.alloc::<i32>(10))?;
        must("put", context.put(&inbox, &memory, 0))?;
        barrier(&context)?;
        expect("put to oneself", &read(&inbox)?, |index| values::<i32>(rank, 10)[index])?;
        must("free", memory.free())?;
        must("free", inbox.free())?;
        must("finalize", context.finalize())?;
        // The library does not look at an id any more.
        let of = format!("PE {rank} of {ranks}");
        let error = refused("by the communicator", Context::init(&comm), &[&of, "NVSHMEM_BOOTSTRAP"])?;
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
    }
    done()
}

/// A plugin that is not there: an error before the library is entered, so that a context can still be had.
pub fn no_plugin(comm: Comm, _: &[String]) -> Outcome {
    let words = ["plugin for PMIx", "nvshmem_bootstrap_pmix.so.3", "NVSHMEM_BOOTSTRAP_PMIX_PLUGIN"];
    let error = refused("no plugin", Context::init_from_environment(), &words)?;
    assert!(matches!(error, Error::LibraryNotFound(_)), "{error}");
    let context = context(&comm)?;
    must("finalize", context.finalize())?;
    Ok(error.to_string())
}

/// PE 1 alone has no plugin for ids: no PE enters the library.
pub fn no_plugin_of_one(comm: Comm, _: &[String]) -> Outcome {
    let words = if comm.rank() == 1 { "NVSHMEM_BOOTSTRAP_UID_PLUGIN" } else { "PE 1 could not begin" };
    let error = refused("no plugin", Context::init(&comm), &[words])?;
    must("barrier", comm.barrier())?;
    Ok(error.to_string())
}

/// The process manager, as far as there is one, is told of the end, and this process ends.
pub fn global_exit(_: &[String]) -> Outcome {
    let context = must("init_from_environment", Context::init_from_environment())?;
    must("global_exit", context.global_exit(7))?;
    Err("the process goes on".into())
}

/// Several PEs on a GPU: the library would end the process in the first barrier.
pub fn sharing(comm: Comm, _: &[String]) -> Outcome {
    // The library does not forget it: no later context of the process would work.
    for builder in [Context::builder().gpu(0), Context::builder().gpu(0), Context::builder()] {
        let error =
            refused("one GPU for all", builder.init(&comm), &["several PEs on GPU 0", "new process"])?;
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
    }
    done()
}

/// Ranks that are threads of a process cannot be PEs, and none of them waits for ever.
pub fn threads() -> Result<(), String> {
    let results = Comm::builder()
        .backend(phalanx::BackendKind::Host)
        .run(2, |comm| Context::init(&comm).map(drop))
        .map_err(|error| error.to_string())?;
    for result in results {
        match result {
            Err(Error::Unsupported(error)) if error.why.contains("one process") => {}
            other => return Err(format!("{other:?}")),
        }
    }
    Ok(())
}
