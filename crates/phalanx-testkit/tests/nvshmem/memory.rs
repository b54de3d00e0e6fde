//! Symmetric memory: allocation, slices, views, peers' addresses, registered buffers.

use crate::world::{barrier, context, done, expect, free, must, read, refused, upload, value, values, write};
use phalanx::cudarc::driver::{DevicePtr, sys};
use phalanx::nvshmem::Context;
use phalanx::{Comm, Error, UsageError};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("memory/allocation", allocation),
    Scenario::rank("memory/behind_a_team", behind_a_team),
    Scenario::rank("memory/slices", slices),
    Scenario::rank("memory/peers", peers),
    Scenario::rank("memory/registered", registered),
    Scenario::rank("memory/refused", refusals),
    Scenario::rank("memory/dropped", dropped),
];

fn allocation(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    for len in [0, 1, 3, 1000, 1 << 20] {
        let zeroed = must("alloc", context.alloc::<f64>(len))?;
        let plain = must("alloc_uninit", context.alloc_uninit::<f64>(len))?;
        assert_eq!((zeroed.len(), plain.len(), zeroed.is_empty()), (len, len, len == 0));
        expect("zeroed", &read(&zeroed)?, |_| 0.0)?;
        free([zeroed, plain])?;
    }
    for alignment in [8, 256, 4096, 1 << 16] {
        let aligned = must("alloc_aligned", context.alloc_aligned::<u16>(1001, alignment))?;
        assert_eq!(aligned.device_ptr() % alignment as u64, 0, "aligned to {alignment}");
        must("free", aligned.free())?;
    }
    must("finalize", context.finalize())?;
    done()
}

/// The library has a barrier of all PEs in each of these calls, before which their operations on streams have
/// to be over.
fn behind_a_team(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (world, stream) = (context.world(), context.stream());
    let mine = upload(&context, &values::<i32>(me, 1))?;
    let mut all = must("alloc", context.alloc::<i32>(pes))?;
    for _ in 0..10 {
        must("fcollect", world.fcollect(&mut all, &mine, stream))?;
        let memory = must("alloc_uninit", context.alloc_uninit::<u8>(100))?;
        must("barrier_on_stream", world.barrier_on_stream(stream))?;
        let aligned = must("alloc_aligned", context.alloc_aligned::<u8>(100, 256))?;
        must("sync_on_stream", world.sync_on_stream(stream))?;
        free([memory, aligned])?;
    }
    expect("gathered", &read(&all)?, |pe| value(pe, 0))?;
    free([mine, all])?;
    must("finalize", context.finalize())?;
    done()
}

/// Parts of memory are named by the same part of one's own.
fn slices(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let mut memory = upload(&context, &values::<i32>(me, 100))?;
    let inbox = must("alloc", context.alloc::<i32>(100))?;
    let right = (me + 1) % pes;
    barrier(&context)?;
    must("put", context.put(&inbox.slice(10..20), &memory.slice(50..60), right))?;
    barrier(&context)?;
    let left = (me + pes - 1) % pes;
    let expected = |index: usize| if (10..20).contains(&index) { value(left, index + 40) } else { 0 };
    expect("what the left PE put", &read(&inbox)?, expected)?;
    let mut part = memory.slice_mut(..=4);
    assert_eq!((part.view_mut().len(), part.view_mut().slice(1..3).len()), (5, 2));
    must("get", context.get(&mut part, &inbox.slice(15..20), me))?;
    let expected = |index: usize| if index < 5 { value(left, index + 55) } else { value(me, index) };
    expect("what was got", &read(&memory)?, expected)?;
    let beyond =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| format!("{:?}", inbox.slice(90..101))));
    assert!(beyond.is_err(), "beyond the end");
    barrier(&context)?;
    free([memory, inbox])?;
    must("finalize", context.finalize())?;
    done()
}

/// Another PE's part, loaded directly.
fn peers(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let memory = upload(&context, &values::<f32>(me, 500))?;
    barrier(&context)?;
    let mut reached = 0;
    for pe in 0..pes {
        let Some(peer) = must("peer", memory.peer(pe))? else { continue };
        reached += 1;
        assert_eq!((peer.len(), peer.slice(100..).len(), peer.slice(..0).is_empty()), (500, 400, true));
        assert_eq!(peer.slice(100..200).slice(5..).device_ptr(), peer.device_ptr() + 105 * 4);
        let beyond = std::panic::catch_unwind(|| peer.slice(400..501));
        assert!(beyond.is_err(), "beyond the end");
        let mut got = vec![0f32; 500];
        // SAFETY: symmetric memory of as many elements, mapped here.
        unsafe {
            phalanx::cudarc::driver::result::memcpy_dtoh_async(
                &mut got,
                peer.device_ptr(),
                context.stream().cu_stream(),
            )
        }
        .context(|| "load".into())?;
        must("sync", context.sync(context.stream()))?;
        expect(format!("PE {pe}'s part"), &got, |index| value(pe, index) as f32)?;
    }
    assert!(reached >= 1, "this PE's own part, at least");
    assert_eq!(must("peer", memory.peer(me))?.map(|peer| peer.device_ptr()), Some(memory.device_ptr()));
    refused("no such PE", memory.peer(pes), &["PE", "does not exist"])?;
    // Multicast is there or not, and that is no error.
    let multicast = must("multicast", context.world().multicast(&memory))?;
    assert!(multicast.is_none_or(|multicast| multicast.len() == 500 && multicast.slice(9..).len() == 491));
    barrier(&context)?;
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// cudarc's own memory as source and destination, and back.
fn registered(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let stream = context.stream().clone();
    let (left, right) = ((me + pes - 1) % pes, (me + 1) % pes);
    let inbox = must("alloc", context.alloc::<i64>(300))?;
    let slice = stream.clone_htod(&values::<i64>(me, 300)).context(|| "upload".into())?;
    let mut local = must("register", context.register(slice))?;
    must("put", context.put(&inbox, &local, right))?;
    barrier(&context)?;
    expect("put from registered memory", &read(&inbox)?, |index| i64::from(value(left, index)))?;
    // Beside the library it is cudarc's.
    stream.memset_zeros(&mut local.view_mut()).context(|| "memset".into())?;
    let zeroes = stream.clone_dtoh(&local.view()).context(|| "download".into())?;
    must("sync", context.sync(&stream))?;
    expect("registered memory", &zeroes, |_| 0)?;
    must("get", context.get(&mut local, &inbox, right))?;
    must("put_nbi", context.put_nbi(&inbox, &local, right))?;
    // Waits for what was not blocking.
    let slice = must("into_inner", local.into_inner())?;
    let got = stream.clone_dtoh(&slice).context(|| "download".into())?;
    expect("got into registered memory", &got, |index| i64::from(value(me, index)))?;
    // Memory that does not come from cuMemCreate cannot be mapped a second time; asking the library would end
    // it all.
    let address = slice.device_ptr(&stream).0;
    // SAFETY: GPU memory of so many elements.
    let mapped = unsafe { context.register_symmetric::<i64>(address, 300) };
    let error = refused("register_symmetric", mapped, &["cuMemCreate"])?;
    assert!(matches!(error, Error::Unsupported(_)), "{error}");
    // Again, and this time it is dropped.
    drop(must("register", context.register(slice))?);
    barrier(&context)?;
    must("free", inbox.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// Memory of the caller's that is made symmetric, by the steps of the heap that are set.
pub fn mapped(comm: Comm, args: &[String]) -> Outcome {
    const BYTES: usize = 4 << 20;
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (left, right) = ((me + pes - 1) % pes, (me + 1) % pes);
    let device = context.cuda_context().ordinal() as i32;
    let (len, is_whole) = (BYTES / 4, args[0] == "whole");
    let start = Virtual::new(BYTES, device, 1)?;
    // SAFETY: mapped memory of so many elements.
    let registered = unsafe { context.register_symmetric::<i32>(start.address, len) };
    if !is_whole {
        let error = refused("half a step", registered, &["NVSHMEM_CUMEM_GRANULARITY"])?;
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
        must("finalize", context.finalize())?;
        return done();
    }
    let mut memory = must("register_symmetric", registered)?;
    write(&mut memory, &values::<i32>(me, len))?;
    let inbox = must("alloc", context.alloc::<i32>(len))?;
    barrier(&context)?;
    must("put", context.put(&inbox, &memory, right))?;
    must("put", context.put(&memory.slice(..100), &inbox.slice(..100), me))?;
    assert_eq!(must("g", context.g(&memory, len - 1, left))?, value(left, len - 1));
    barrier(&context)?;
    expect("put from mapped memory", &read(&inbox)?, |index| value(left, index))?;
    barrier(&context)?;
    must("free", memory.free())?;
    must("free", inbox.free())?;
    // Only what can be exported as the heap can.
    let other = Virtual::new(BYTES, device, 0)?;
    // SAFETY: as above.
    let registered = unsafe { context.register_symmetric::<i32>(other.address, len) };
    refused("not exportable", registered, &["another way than the heap"])?;
    must("finalize", context.finalize())?;
    done()
}

/// Memory from `cuMemCreate`, mapped; it stays.
struct Virtual {
    address: u64,
}

impl Virtual {
    fn new(bytes: usize, device: i32, handle_types: u32) -> Result<Virtual, String> {
        let properties: [u32; 8] = [1, handle_types, 1, device as u32, 0, 0, 0, 0];
        let access: [u32; 3] = [1, device as u32, 3];
        let (mut handle, mut address) = (0, 0);
        // SAFETY: the structures of these functions, word by word, and out-pointers on the stack.
        let results = unsafe {
            [
                sys::cuMemCreate(&raw mut handle, bytes, properties.as_ptr().cast(), 0),
                sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0),
                sys::cuMemMap(address, bytes, 0, handle, 0),
                sys::cuMemSetAccess(address, bytes, access.as_ptr().cast(), 1),
            ]
        };
        if results.iter().all(|result| *result == sys::CUresult::CUDA_SUCCESS) {
            Ok(Virtual { address })
        } else {
            Err(format!("{results:?}"))
        }
    }
}

fn refusals(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    refused("too long", context.alloc::<u64>(usize::MAX / 4), &["overflows"])?;
    for alignment in [0, 4, 48, 1 << 32, 1 << 63] {
        let error = refused("alignment", context.alloc_aligned::<u8>(10, alignment), &["power of two"])?;
        assert!(
            matches!(&error, Error::Usage(usage) if matches!(**usage, UsageError::Setting { .. })),
            "{error}"
        );
    }
    // Nothing was started: the context works.
    let memory = must("alloc", context.alloc::<u8>(10))?;
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// Memory that is dropped stays until the end, and harms nobody.
fn dropped(comm: Comm, _: &[String]) -> Outcome {
    let context: Context = context(&comm)?;
    if context.my_pe() == 0 {
        // A PE that unwinds alone must not wait for the others.
        drop(must("alloc", context.alloc::<f32>(100))?);
    } else {
        must("alloc", context.alloc::<f32>(100)).map(std::mem::forget)?;
    }
    let memory = upload(&context, &values::<f32>(context.my_pe(), 100))?;
    barrier(&context)?;
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}
