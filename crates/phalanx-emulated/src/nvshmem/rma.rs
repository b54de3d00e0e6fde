//! Puts, gets, signals, and the functions that complete them.

use super::completion::{awaited, complete, enqueue, queue};
use super::process::{Pe, exit, initialized, nvshmem, with_own_gpu};
use crate::base::handles::Handle;
use crate::base::lock::lock;
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::memory::Range;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// When an operation is performed.
#[derive(Clone, Copy)]
enum Time {
    Now,
    /// When quiet is called.
    Later,
    OnStream(Handle),
    /// When quiet is called after the stream has reached the operation.
    LaterOnStream(Handle),
}

/// A change of a signal variable, after the data of a put if there are any.
#[derive(Clone, Copy)]
struct Signal {
    /// The variable's offset in the heap.
    offset: u64,
    value: u64,
    add: bool,
}

/// `NVSHMEM_SIGNAL_SET`.
const SET: c_int = 9;
/// `NVSHMEM_SIGNAL_ADD`.
const ADD: c_int = 10;

fn signal_at(pe: &Pe, offset: u64, peer: usize) -> &AtomicU64 {
    // SAFETY: a word of the mapped heap, checked to be aligned, accessed by signals and copies only.
    unsafe { &*((pe.world.heap(peer) + offset) as *const AtomicU64) }
}

fn change(pe: &Pe, signal: Signal, peer: usize) {
    let variable = signal_at(pe, signal.offset, peer);
    if signal.add {
        variable.fetch_add(signal.value, Ordering::AcqRel);
    } else {
        variable.store(signal.value, Ordering::Release);
    }
}

/// The change of a signal that a call's arguments ask for.
fn signal_change(function: &'static str, pe: &Pe, variable: u64, value: u64, op: c_int) -> Signal {
    let offset = pe.symmetric(function, "the signal", variable, 8);
    if !offset.is_multiple_of(8) || !matches!(op, SET | ADD) {
        violation(function, format!("invalid signal: variable {variable:#x}, operation {op}"));
    }
    Signal { offset, value, add: op == ADD }
}

fn perform(function: &'static str, pe: &Arc<Pe>, time: Time, work: impl Fn() + Send + Sync + 'static) {
    match time {
        Time::Now => work(),
        Time::Later => lock(&pe.state).pending.push(Box::new(work)),
        Time::OnStream(stream) => enqueue(function, pe, stream, work),
        Time::LaterOnStream(stream) => {
            let (pe, work, reached) = (Arc::clone(pe), Arc::new(work), Arc::new(AtomicBool::new(false)));
            // A graph may be launched never.
            if queue(function, &pe, stream).capture().is_none() {
                lock(&pe.state).awaited.push(Arc::clone(&reached));
            }
            enqueue(function, &Arc::clone(&pe), stream, move || {
                let work = Arc::clone(&work);
                lock(&pe.state).pending.push(Box::new(move || work()));
                reached.store(true, Ordering::Release);
            });
        }
    }
}

fn copy(to: Range, from: Range) {
    if from.len > 0 {
        to.write(&from.read());
    }
}

fn put(
    function: &'static str,
    (dest, source, bytes, peer): (u64, u64, usize, c_int),
    time: Time,
    signal: Option<(u64, u64, c_int)>,
) {
    initialized(function, |pe| {
        let peer = pe.peer(function, peer);
        let from = pe.local(function, "the source", source, bytes);
        let offset = pe.symmetric(function, "the destination", dest, bytes);
        let to = pe.remote(function, "the destination", offset, bytes, peer);
        let signal = signal.map(|(variable, value, op)| signal_change(function, pe, variable, value, op));
        let own = Arc::clone(pe);
        perform(function, pe, time, move || {
            copy(to, from);
            if let Some(signal) = signal {
                change(&own, signal, peer);
            }
        });
    });
}

fn get(function: &'static str, (dest, source, bytes, peer): (u64, u64, usize, c_int), time: Time) {
    initialized(function, |pe| {
        let peer = pe.peer(function, peer);
        let to = pe.local(function, "the destination", dest, bytes);
        let offset = pe.symmetric(function, "the source", source, bytes);
        let from = pe.remote(function, "the source", offset, bytes, peer);
        perform(function, pe, time, move || copy(to, from));
    });
}

/// The arguments of a strided operation. Strides are in elements, the size of an element is in bytes.
struct Strided {
    dest: u64,
    source: u64,
    dest_stride: isize,
    source_stride: isize,
    count: usize,
    size: usize,
    peer: c_int,
}

fn strided(function: &'static str, is_put: bool, what: Strided, time: Time) {
    initialized(function, |pe| {
        let peer = reachable(function, pe, what.peer);
        if what.dest_stride < 1 || what.source_stride < 1 {
            exit(function, "cudaMemcpy2DAsync() failed");
        }
        let (near, far) = if is_put {
            ((what.source, what.source_stride), (what.dest, what.dest_stride))
        } else {
            ((what.dest, what.dest_stride), (what.source, what.source_stride))
        };
        for n in 0..what.count {
            let at = |(start, stride): (u64, isize)| start + (n * stride as usize * what.size) as u64;
            let near = pe.local(function, "the local buffer", at(near), what.size);
            let offset = pe.symmetric(function, "the remote buffer", at(far), what.size);
            let far = pe.remote(function, "the remote buffer", offset, what.size, peer);
            perform(function, pe, time, move || if is_put { copy(far, near) } else { copy(near, far) });
        }
    });
}

/// A PE that loads and stores can reach. As in the library, some operations end the process for other PEs.
fn reachable(function: &'static str, pe: &Pe, peer: c_int) -> usize {
    let peer = pe.peer(function, peer);
    if peer != pe.pe && !settings().peer_access {
        exit(function, "NOT IMPLEMENTED");
    }
    peer
}

fn put_one<const N: usize>(
    function: &'static str,
    dest: u64,
    value: [u8; N],
    peer: c_int,
    stream: Option<Handle>,
) {
    initialized(function, |pe| {
        let peer = pe.peer(function, peer);
        let offset = pe.symmetric(function, "the destination", dest, N);
        let to = pe.remote(function, "the destination", offset, N, peer);
        if stream.is_some_and(|stream| queue(function, pe, stream).capture().is_some()) {
            violation(
                function,
                "the captured operation would read its value from the stack of a call that has returned",
            );
        }
        let time = stream.map_or(Time::Now, Time::OnStream);
        perform(function, pe, time, move || to.write(&value));
    });
}

fn get_one<const N: usize>(function: &'static str, source: u64, peer: c_int) -> [u8; N] {
    initialized(function, |pe| {
        let peer = reachable(function, pe, peer);
        let offset = pe.symmetric(function, "the source", source, N);
        let from = pe.remote(function, "the source", offset, N, peer);
        from.read().try_into().expect("N bytes")
    })
}

/// Whether a comparison (`NVSHMEM_CMP_…`) of a variable with a value holds.
fn holds<T: PartialOrd>(variable: T, cmp: c_int, value: T) -> bool {
    match cmp {
        0 => variable == value,
        1 => variable != value,
        2 => variable > value,
        3 => variable <= value,
        4 => variable < value,
        _ => variable >= value,
    }
}

fn wait<T: PartialOrd + Copy + Send + Sync + 'static>(
    function: &'static str,
    variable: u64,
    cmp: c_int,
    value: T,
    stream: Handle,
) {
    if !(0..=5).contains(&cmp) {
        violation(function, format!("the comparison {cmp} is not valid"));
    }
    with_own_gpu(function, |pe| {
        pe.symmetric(function, "the variable", variable, size_of::<T>());
        enqueue(function, pe, stream, move || {
            // SAFETY: an element of the heap, which stays mapped; peers change it during the wait.
            while !holds(unsafe { (variable as *const T).read_volatile() }, cmp, value) {
                std::thread::sleep(Duration::from_micros(20));
            }
            std::sync::atomic::fence(Ordering::Acquire);
        });
    });
}

macro_rules! elements {
    ($($width:literal: $ty:ty, $put:ident, $get:ident, $put_on_stream:ident, $get_on_stream:ident,
       $p:ident, $p_on_stream:ident, $g:ident;)*) => { nvshmem! { $(
        fn $put(dest: u64, source: u64, dest_stride: isize, source_stride: isize, count: usize, peer: c_int) {
            let what = Strided { dest, source, dest_stride, source_stride, count, size: $width, peer };
            strided(FUNCTION, true, what, Time::Now)
        }

        fn $get(dest: u64, source: u64, dest_stride: isize, source_stride: isize, count: usize, peer: c_int) {
            let what = Strided { dest, source, dest_stride, source_stride, count, size: $width, peer };
            strided(FUNCTION, false, what, Time::Now)
        }

        fn $put_on_stream(
            dest: u64, source: u64, dest_stride: isize, source_stride: isize, count: usize, peer: c_int, stream: Handle,
        ) {
            let what = Strided { dest, source, dest_stride, source_stride, count, size: $width, peer };
            strided(FUNCTION, true, what, Time::OnStream(stream))
        }

        fn $get_on_stream(
            dest: u64, source: u64, dest_stride: isize, source_stride: isize, count: usize, peer: c_int, stream: Handle,
        ) {
            let what = Strided { dest, source, dest_stride, source_stride, count, size: $width, peer };
            strided(FUNCTION, false, what, Time::OnStream(stream))
        }

        fn $p(dest: u64, value: $ty, peer: c_int) {
            put_one(FUNCTION, dest, value.to_ne_bytes(), peer, None)
        }

        fn $p_on_stream(dest: u64, value: $ty, peer: c_int, stream: Handle) {
            put_one(FUNCTION, dest, value.to_ne_bytes(), peer, Some(stream))
        }

        fn $g(source: u64, peer: c_int) -> $ty {
            <$ty>::from_ne_bytes(get_one(FUNCTION, source, peer))
        }
    )* } };
}

elements! {
    1: u8, nvshmem_iput8, nvshmem_iget8, nvshmemx_iput8_on_stream, nvshmemx_iget8_on_stream,
        nvshmem_uint8_p, nvshmemx_uint8_p_on_stream, nvshmem_uint8_g;
    2: u16, nvshmem_iput16, nvshmem_iget16, nvshmemx_iput16_on_stream, nvshmemx_iget16_on_stream,
        nvshmem_uint16_p, nvshmemx_uint16_p_on_stream, nvshmem_uint16_g;
    4: u32, nvshmem_iput32, nvshmem_iget32, nvshmemx_iput32_on_stream, nvshmemx_iget32_on_stream,
        nvshmem_uint32_p, nvshmemx_uint32_p_on_stream, nvshmem_uint32_g;
    8: u64, nvshmem_iput64, nvshmem_iget64, nvshmemx_iput64_on_stream, nvshmemx_iget64_on_stream,
        nvshmem_uint64_p, nvshmemx_uint64_p_on_stream, nvshmem_uint64_g;
}

nvshmem! {
    fn nvshmem_putmem(dest: u64, source: u64, bytes: usize, peer: c_int) {
        put(FUNCTION, (dest, source, bytes, peer), Time::Now, None)
    }

    fn nvshmem_putmem_nbi(dest: u64, source: u64, bytes: usize, peer: c_int) {
        put(FUNCTION, (dest, source, bytes, peer), Time::Later, None)
    }

    fn nvshmemx_putmem_on_stream(dest: u64, source: u64, bytes: usize, peer: c_int, stream: Handle) {
        put(FUNCTION, (dest, source, bytes, peer), Time::OnStream(stream), None)
    }

    fn nvshmemx_putmem_nbi_on_stream(dest: u64, source: u64, bytes: usize, peer: c_int, stream: Handle) {
        put(FUNCTION, (dest, source, bytes, peer), Time::LaterOnStream(stream), None)
    }

    fn nvshmem_getmem(dest: u64, source: u64, bytes: usize, peer: c_int) {
        get(FUNCTION, (dest, source, bytes, peer), Time::Now)
    }

    fn nvshmem_getmem_nbi(dest: u64, source: u64, bytes: usize, peer: c_int) {
        get(FUNCTION, (dest, source, bytes, peer), Time::Later)
    }

    fn nvshmemx_getmem_on_stream(dest: u64, source: u64, bytes: usize, peer: c_int, stream: Handle) {
        get(FUNCTION, (dest, source, bytes, peer), Time::OnStream(stream))
    }

    fn nvshmemx_getmem_nbi_on_stream(dest: u64, source: u64, bytes: usize, peer: c_int, stream: Handle) {
        get(FUNCTION, (dest, source, bytes, peer), Time::LaterOnStream(stream))
    }

    fn nvshmemx_putmem_signal_on_stream(
        dest: u64, source: u64, bytes: usize, signal: u64, value: u64, op: c_int, peer: c_int, stream: Handle,
    ) {
        put(FUNCTION, (dest, source, bytes, peer), Time::OnStream(stream), Some((signal, value, op)))
    }

    fn nvshmemx_putmem_signal_nbi_on_stream(
        dest: u64, source: u64, bytes: usize, signal: u64, value: u64, op: c_int, peer: c_int, stream: Handle,
    ) {
        put(FUNCTION, (dest, source, bytes, peer), Time::LaterOnStream(stream), Some((signal, value, op)))
    }

    fn nvshmemx_signal_op_on_stream(signal: u64, value: u64, op: c_int, peer: c_int, stream: Handle) {
        initialized(FUNCTION, |pe| {
            let peer = pe.peer(FUNCTION, peer);
            let signal = signal_change(FUNCTION, pe, signal, value, op);
            let own = Arc::clone(pe);
            enqueue(FUNCTION, pe, stream, move || change(&own, signal, peer));
        })
    }

    fn nvshmem_signal_fetch(signal: u64) -> u64 {
        initialized(FUNCTION, |pe| {
            let offset = pe.symmetric(FUNCTION, "the signal", signal, 8);
            // A synchronous copy, on the default stream.
            pe.context.legacy().marks().iter().for_each(|mark| mark.wait());
            signal_at(pe, offset, pe.pe).load(Ordering::Acquire)
        })
    }

    fn nvshmemx_signal_wait_until_on_stream(signal: u64, cmp: c_int, value: u64, stream: Handle) {
        wait(FUNCTION, signal, cmp, value, stream)
    }

    fn nvshmemx_short_wait_until_on_stream(variable: u64, cmp: c_int, value: i16, stream: Handle) {
        wait(FUNCTION, variable, cmp, value, stream)
    }

    fn nvshmemx_ushort_wait_until_on_stream(variable: u64, cmp: c_int, value: u16, stream: Handle) {
        wait(FUNCTION, variable, cmp, value, stream)
    }

    fn nvshmemx_int32_wait_until_on_stream(variable: u64, cmp: c_int, value: i32, stream: Handle) {
        wait(FUNCTION, variable, cmp, value, stream)
    }

    fn nvshmemx_uint32_wait_until_on_stream(variable: u64, cmp: c_int, value: u32, stream: Handle) {
        wait(FUNCTION, variable, cmp, value, stream)
    }

    fn nvshmemx_int64_wait_until_on_stream(variable: u64, cmp: c_int, value: i64, stream: Handle) {
        wait(FUNCTION, variable, cmp, value, stream)
    }

    fn nvshmemx_uint64_wait_until_on_stream(variable: u64, cmp: c_int, value: u64, stream: Handle) {
        wait(FUNCTION, variable, cmp, value, stream)
    }

    fn nvshmem_quiet() {
        initialized(FUNCTION, |pe| complete(pe, &awaited(pe)))
    }

    fn nvshmem_fence() {
        // Operations overtake each other only by waiting for quiet, and fence does not promise to complete
        // those.
        initialized(FUNCTION, |_| ())
    }

    fn nvshmemx_quiet_on_stream(stream: Handle) {
        initialized(FUNCTION, |pe| {
            let (own, awaited) = (Arc::clone(pe), awaited(pe));
            enqueue(FUNCTION, pe, stream, move || complete(&own, &awaited));
        })
    }
}
