//! Puts and gets: every form, every type, sizes from nothing to megabytes.

use crate::world::{barrier, context, done, expect, free, must, read, refused, upload, value, values, write};
use phalanx::cudarc::driver::DeviceRepr;
use phalanx::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use phalanx::nvshmem::{Compare, Context, SignalOp};
use phalanx::{Comm, DType};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, with_number};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("one_sided/puts", puts),
    Scenario::rank("one_sided/gets", gets),
    Scenario::rank("one_sided/strided", strided),
    Scenario::rank("one_sided/elements", elements),
    Scenario::rank("one_sided/streams", streams),
    Scenario::rank("one_sided/large", large),
    Scenario::rank("one_sided/beside_a_stream", beside),
    Scenario::rank("one_sided/captured", captured),
    Scenario::rank("one_sided/refused", refusals),
];

const SIZES: [usize; 5] = [0, 1, 17, 4099, 70_001];

/// What blocks waits for its own buffers and not for the context's stream, which waits for the other PE here,
/// as does CUDA's default stream.
fn beside(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (left, right) = ((me + pes - 1) % pes, (me + 1) % pes);
    let (source, inbox) =
        (upload(&context, &values::<i32>(me, 99))?, must("alloc", context.alloc::<i32>(99))?);
    let mut back = must("alloc", context.alloc::<i32>(99))?;
    let words = must("alloc", context.alloc::<u64>(2))?;
    let (go, set) = (must("signal", words.signal(0))?, must("signal", words.signal(1))?);
    let counter = must("alloc", context.alloc::<u32>(1))?;
    // The driver may load a kernel only when the GPU has nothing to do.
    must("atomic_fetch_add", context.atomic_fetch_add(&counter, 0, 1, right))?;
    barrier(&context)?;
    for stream in [context.stream(), &context.cuda_context().default_stream()] {
        must("wait", context.signal_wait_until_on_stream(&go, Compare::Ge, 1, stream))?;
    }
    must("put", context.put(&inbox, &source, right))?;
    must("put_nbi", context.put_nbi(&inbox, &source, right))?;
    must("p", context.p(&inbox, 5, 55, right))?;
    must("quiet", context.quiet())?;
    must("fence", context.fence())?;
    must("get", context.get(&mut back, &source, right))?;
    must("iget", context.iget(&mut back, 1, &source, 1, 3, left))?;
    assert_eq!(must("g", context.g(&source, 7, right))?, value(right, 7));
    must("put_signal", context.put_signal(&inbox, &source, &set, 1, SignalOp::Set, right))?;
    assert_eq!(must("signal_wait_until", context.signal_wait_until(&set, Compare::Eq, 1))?, 1);
    assert_eq!(must("signal_fetch", context.signal_fetch(&go))?, 0);
    assert_eq!(must("atomic_fetch_add", context.atomic_fetch_add(&counter, 0, 1, right))?, 1);
    // All PEs have come here before the streams went on.
    must("barrier", comm.barrier())?;
    let other = must("stream", context.cuda_context().new_stream().map_err(Into::into))?;
    must("signal_op", context.signal_op_on_stream(&go, 1, SignalOp::Set, right, &other))?;
    expect("put", &read(&inbox)?, |index| value(left, index))?;
    expect("got", &read(&back)?, |index| value(if index < 3 { left } else { right }, index))?;
    must("sync", context.sync(&context.cuda_context().default_stream()))?;
    barrier(&context)?;
    free([source, inbox, back])?;
    must("free", counter.free())?;
    must("free", words.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// A value that is put by its address on the stack cannot be part of a graph.
fn captured(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let memory = must("alloc", context.alloc::<i32>(2))?;
    let stream = context.stream();
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).context(|| "capture".into())?;
    let refusal = context.p_on_stream(&memory, 0, 5, context.my_pe(), stream);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    stream.end_capture(flags).context(|| "end of the capture".into())?;
    refused("p_on_stream", refusal, &["captured", "symmetric memory"])?;
    must("p_on_stream", context.p_on_stream(&memory, 0, 5, context.my_pe(), stream))?;
    must("sync", context.sync(stream))?;
    expect("outside of the capture", &read(&memory)?, |index| if index == 0 { 5 } else { 0 })?;
    must("free", memory.free())?;
    must("finalize", context.finalize())?;
    done()
}

fn puts(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    for dtype in DType::ALL {
        with_number!(dtype, T => put_all::<T>(&context, dtype))?;
    }
    must("finalize", context.finalize())?;
    done()
}

fn put_all<T: Number + DeviceRepr>(context: &Context, dtype: DType) -> Result<(), String> {
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (left, right) = ((me + pes - 1) % pes, (me + 1) % pes);
    let stream = context.stream();
    for len in SIZES {
        let mut source = upload(context, &values::<T>(me, len))?;
        let inbox = upload(context, &values::<T>(7, len))?;
        for (round, form) in ["put", "put_nbi", "put_on_stream", "put_nbi_on_stream"].into_iter().enumerate()
        {
            write(&mut source, &values::<T>(me + round, len))?;
            barrier(context)?;
            match form {
                "put" => must(form, context.put(&inbox, &source, right))?,
                "put_nbi" => {
                    must(form, context.put_nbi(&inbox, &source, right))?;
                    must("quiet", context.quiet())?;
                }
                "put_on_stream" => must(form, context.put_on_stream(&inbox, &source, right, stream))?,
                _ => {
                    must(form, context.put_nbi_on_stream(&inbox, &source, right, stream))?;
                    must("quiet_on_stream", context.quiet_on_stream(stream))?;
                }
            }
            barrier(context)?;
            let expected = |index: usize| T::from_small(value(left + round, index));
            expect(format!("{form} of {len} {dtype}"), &read(&inbox)?, expected)?;
        }
        free([source, inbox])?;
    }
    Ok(())
}

fn gets(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    for dtype in DType::ALL {
        with_number!(dtype, T => get_all::<T>(&context, dtype))?;
    }
    must("finalize", context.finalize())?;
    done()
}

fn get_all<T: Number + DeviceRepr>(context: &Context, dtype: DType) -> Result<(), String> {
    let (me, pes) = (context.my_pe(), context.n_pes());
    let right = (me + 1) % pes;
    let stream = context.stream();
    for len in SIZES {
        let source = upload(context, &values::<T>(me, len))?;
        barrier(context)?;
        for form in ["get", "get_nbi", "get_on_stream", "get_nbi_on_stream"] {
            let mut dest = upload(context, &values::<T>(7, len))?;
            match form {
                "get" => must(form, context.get(&mut dest, &source, right))?,
                "get_nbi" => {
                    must(form, context.get_nbi(&mut dest, &source, right))?;
                    must("quiet", context.quiet())?;
                }
                "get_on_stream" => must(form, context.get_on_stream(&mut dest, &source, right, stream))?,
                _ => {
                    must(form, context.get_nbi_on_stream(&mut dest, &source, right, stream))?;
                    must("quiet_on_stream", context.quiet_on_stream(stream))?;
                }
            }
            let expected = |index: usize| T::from_small(value(right, index));
            expect(format!("{form} of {len} {dtype}"), &read(&dest)?, expected)?;
            must("free", dest.free())?;
        }
        must("free", source.free())?;
    }
    Ok(())
}

fn strided(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    for dtype in DType::ALL {
        with_number!(dtype, T => stride_all::<T>(&context, dtype))?;
    }
    must("finalize", context.finalize())?;
    done()
}

fn stride_all<T: Number + DeviceRepr>(context: &Context, dtype: DType) -> Result<(), String> {
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (left, right) = ((me + pes - 1) % pes, (me + 1) % pes);
    let stream = context.stream();
    let source = upload(context, &values::<T>(me, 300))?;
    for (dest_stride, source_stride, count) in
        [(1, 1, 300), (3, 1, 100), (1, 2, 150), (2, 3, 100), (5, 299, 2), (1, 1, 0)]
    {
        for on_stream in [false, true] {
            let mut dest = must("alloc", context.alloc::<T>(300))?;
            barrier(context)?;
            if on_stream {
                let put =
                    context.iput_on_stream(&dest, dest_stride, &source, source_stride, count, right, stream);
                must("iput_on_stream", put)?;
            } else {
                must("iput", context.iput(&dest, dest_stride, &source, source_stride, count, right))?;
            }
            barrier(context)?;
            let taken = |pe: usize, index: usize| {
                let number = index / dest_stride;
                let hit = index.is_multiple_of(dest_stride) && number < count;
                T::from_small(if hit { value(pe, number * source_stride) } else { 0 })
            };
            let what = format!("{dtype}, every {dest_stride} from every {source_stride}, {count}");
            expect(format!("iput of {what}"), &read(&dest)?, |index| taken(left, index))?;
            write(&mut dest, &values::<T>(0, 300).iter().map(|_| T::from_small(0)).collect::<Vec<_>>())?;
            barrier(context)?;
            if on_stream {
                let get = context.iget_on_stream(
                    &mut dest,
                    dest_stride,
                    &source,
                    source_stride,
                    count,
                    right,
                    stream,
                );
                must("iget_on_stream", get)?;
            } else {
                must("iget", context.iget(&mut dest, dest_stride, &source, source_stride, count, right))?;
            }
            expect(format!("iget of {what}"), &read(&dest)?, |index| taken(right, index))?;
            barrier(context)?;
            must("free", dest.free())?;
        }
    }
    must("free", source.free())
}

fn elements(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    for dtype in DType::ALL {
        with_number!(dtype, T => each_element::<T>(&context, dtype))?;
    }
    must("finalize", context.finalize())?;
    done()
}

fn each_element<T: Number + DeviceRepr>(context: &Context, dtype: DType) -> Result<(), String> {
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (left, right) = ((me + pes - 1) % pes, (me + 1) % pes);
    let memory = must("alloc", context.alloc::<T>(9))?;
    for index in 0..8 {
        let value = T::from_small(value(me, index) + 1);
        if index % 2 == 0 {
            must("p", context.p(&memory, index, value, right))?;
        } else {
            must("p_on_stream", context.p_on_stream(&memory, index, value, right, context.stream()))?;
        }
    }
    barrier(context)?;
    let put = |pe: usize, index: usize| T::from_small(if index < 8 { value(pe, index) + 1 } else { 0 });
    expect(format!("p of {dtype}"), &read(&memory)?, |index| put(left, index))?;
    let got: Result<Vec<T>, String> =
        (0..9).map(|index| must("g", context.g(&memory.slice(index..), 0, right))).collect();
    expect(format!("g of {dtype}"), &got?, |index| put(me, index))?;
    barrier(context)?;
    must("free", memory.free())
}

/// Work of a stream, in its order and that of cudarc's copies on other streams; many puts overlap.
fn streams(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (left, right) = ((me + pes - 1) % pes, (me + 1) % pes);
    let streams: Vec<_> = (0..3)
        .map(|_| context.cuda_context().new_stream().context(|| "stream".into()))
        .collect::<Result<_, String>>()?;
    let len = 10_000;
    let mut source = must("alloc", context.alloc::<u32>(len))?;
    let inbox = must("alloc", context.alloc::<u32>(len * streams.len()))?;
    barrier(&context)?;
    for (number, stream) in streams.iter().enumerate() {
        // Written on one stream, put on another, and written again on the first: each waits for the other.
        let values: Vec<u32> = (0..len).map(|index| (me * 1000 + number * 100_000 + index) as u32).collect();
        context.stream().memcpy_htod(&values, &mut source.view_mut()).context(|| "upload".into())?;
        let part = inbox.slice(number * len..(number + 1) * len);
        must("put_on_stream", context.put_on_stream(&part, &source, right, stream))?;
        must("fence_on_stream", context.fence_on_stream(stream))?;
    }
    for stream in &streams {
        must("sync", context.sync(stream))?;
    }
    must("fence", context.fence())?;
    barrier(&context)?;
    let expected = |index: usize| (left * 1000 + index / len * 100_000 + index % len) as u32;
    expect("what came over three streams", &read(&inbox)?, expected)?;
    barrier(&context)?;
    free([source, inbox])?;
    must("finalize", context.finalize())?;
    done()
}

/// 64 MiB, to every PE.
fn large(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let len = 8 << 20;
    let source = upload(&context, &(0..len as u64).map(|index| index * 31 + me as u64).collect::<Vec<_>>())?;
    let inbox = must("alloc", context.alloc_uninit::<u64>(len))?;
    for step in 0..pes {
        must("put", context.put(&inbox, &source, (me + step) % pes))?;
        barrier(&context)?;
        let from = (me + pes - step) % pes;
        expect(format!("from PE {from}"), &read(&inbox)?, |index| index as u64 * 31 + from as u64)?;
        barrier(&context)?;
    }
    free([source, inbox])?;
    must("finalize", context.finalize())?;
    done()
}

/// Whatever is wrong is said before anything is started, and the context works on.
fn refusals(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (mut long, short) =
        (must("alloc", context.alloc::<f32>(10))?, must("alloc", context.alloc::<f32>(9))?);
    let stream = context.stream();
    refused("put, PE", context.put(&short, &short, pes), &["put", "PE", "does not exist"])?;
    refused("put, length", context.put(&long, &short, me), &["10 elements", "9"])?;
    refused("put_nbi", context.put_nbi(&short, &long, me), &["put_nbi", "9 elements"])?;
    refused("put_on_stream", context.put_on_stream(&short, &long, me, stream), &["put_on_stream"])?;
    refused("get, length", context.get(&mut long, &short, me), &["get", "10 elements"])?;
    refused("get, PE", context.get(&mut long.slice_mut(..9), &short, pes + 5), &["does not exist"])?;
    refused("p, index", context.p(&short, 9, 1.0, me), &["p:", "9 elements"])?;
    refused("g, PE", context.g(&short, 0, pes), &["does not exist"])?;
    refused("iput, stride", context.iput(&long, 0, &short, 1, 2, me), &["dest_stride"])?;
    refused("iput, pitch", context.iput(&long, 1 << 30, &short, 1, 2, me), &["dest_stride"])?;
    refused("iput, length", context.iput(&long, 3, &short, 1, 5, me), &["dest", "13"])?;
    refused("iget, length", context.iget(&mut long, 1, &short, 4, 4, me), &["source", "13"])?;
    barrier(&context)?;
    must("put", context.put(&long.slice(1..), &short, (me + 1) % pes))?;
    barrier(&context)?;
    free([long, short])?;
    must("finalize", context.finalize())?;
    done()
}
