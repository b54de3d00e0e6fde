//! GPU memory that other ranks copy to and from: on the machine's GPUs if it has enough, else on emulated ones.

use crate::world::{BACKEND, DEADLINE, done, elements, expect, must, new_stream, stream, upload};
use libtest_mimic::Trial;
use phalanx::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, result};
use phalanx::{Comm, GpuBlock, GpuDescriptor, RemoteGpuWindow};
use phalanx_testkit::emulated::on_own_kernels;
use phalanx_testkit::processes::{Launch, ranks_per_gpu};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::suite::Condition;
use phalanx_testkit::{Number, Scenario};
use std::ffi::c_void;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("gpu_windows/copies", copies),
    Scenario::rank("gpu_windows/lists", lists),
    Scenario::rank("gpu_windows/many", many),
    Scenario::rank("gpu_windows/order", order),
    Scenario::rank("gpu_windows/streams", streams),
    Scenario::rank("gpu_windows/future", future),
    Scenario::rank("gpu_windows/own", own),
    Scenario::rank("gpu_windows/leaks", leaks),
];

/// A scenario and numbers of ranks.
const WORLDS: [(&str, &[usize]); 8] = [
    ("copies", &[2, 3, 4]),
    ("lists", &[2, 4]),
    ("many", &[2]),
    ("order", &[2]),
    ("streams", &[2]),
    ("future", &[2]),
    ("own", &[1, 2]),
    ("leaks", &[2]),
];

pub fn trials() -> Vec<Trial> {
    WORLDS.iter().flat_map(|(name, ranks)| both(name, ranks)).collect()
}

/// A scenario on threads and on processes.
pub fn both(name: &'static str, ranks: &[usize]) -> Vec<Trial> {
    let worlds = ranks.iter().flat_map(|ranks| [("threads", *ranks), ("processes", *ranks)]);
    let trial = |(kind, ranks): (&str, usize)| {
        let on_threads = kind == "threads";
        let trial = Trial::test(format!("gpu_windows/{name}/{kind}/{ranks}"), move || {
            let launch = launch(name, ranks);
            let launch = if on_threads { launch.on_threads() } else { launch };
            Ok(on_own_kernels("nccl", ranks, launch).map(drop)?)
        });
        trial.only_if(!on_threads || ranks_per_gpu() == 1, "only processes share a GPU")
    };
    worlds.map(trial).collect()
}

pub fn launch(name: &str, ranks: usize) -> Launch {
    let launch = Launch::new(&format!("gpu_windows/{name}"), ranks).deadline(DEADLINE);
    launch.env("PHALANX_BACKEND", BACKEND.name())
}

/// What a window holds, when the work before is complete.
pub fn held<T: Number + DeviceRepr>(comm: &Comm, window: &phalanx::GpuWindow<T>) -> Result<Vec<T>, String> {
    stream(comm).clone_dtoh(&window.view()).context(|| "download".into())
}

/// A window with these values.
pub fn window<T: Number + DeviceRepr>(comm: &Comm, values: &[T]) -> Result<phalanx::GpuWindow<T>, String> {
    let mut slice = must("alloc_gpu", comm.alloc_gpu::<T>(values.len()))?;
    stream(comm).memcpy_htod(values, &mut slice).context(|| "upload".into())?;
    must("register_gpu", comm.register_gpu(slice))
}

/// All ranks' windows, its own too, open on all ranks.
pub fn open_all<T: Number>(comm: &Comm, own: &GpuDescriptor) -> Result<Vec<RemoteGpuWindow<T>>, String> {
    let all = must("all_gather_object", comm.all_gather_object(own))?;
    let open = all.iter().map(|descriptor| must("open_gpu", comm.open_gpu(descriptor))).collect();
    must("barrier", comm.barrier())?;
    open
}

fn value<T: Number>(rank: usize, index: usize) -> T {
    T::from_small(((rank * 3 + index) % 7) as i32)
}

/// Every rank gets from all and puts to all, each to a part of its own, in elements of several types.
fn copies(comm: Comm, _: &[String]) -> Outcome {
    copies_of::<f32>(&comm, elements(1 << 20))?;
    copies_of::<u8>(&comm, 1023)?;
    copies_of::<f64>(&comm, 8)?;
    must("finalize", comm.finalize())?;
    done()
}

fn copies_of<T: Number + DeviceRepr>(comm: &Comm, part: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let len = part * ranks;
    let values: Vec<T> = (0..len).map(|index| value(rank, index)).collect();
    let window = window(comm, &values)?;
    let open = open_all::<T>(comm, window.descriptor())?;
    let mut got = upload(comm, &vec![T::from_small(0); len])?;
    for (other, remote) in open.iter().enumerate() {
        assert_eq!((remote.rank(), remote.len()), (other, len));
        must("get", remote.get(&mut got, 0))?;
        must("sync", remote.sync())?;
        assert!(must("is_complete", remote.is_complete())?);
        let got = stream(comm).clone_dtoh(&got).context(|| "download".into())?;
        expect(format_args!("got from rank {other}"), &got, |index| value(other, index))?;
    }
    // Nobody writes before all have read.
    must("barrier", comm.barrier())?;
    let mine: Vec<T> = (0..part).map(|index| value(10 + rank, index)).collect();
    let mine = upload(comm, &mine)?;
    for remote in &open {
        must("put", remote.put(&mine, rank * part))?;
        must("signal", remote.signal())?;
    }
    for other in (0..ranks).rev() {
        must("wait_signals", window.wait_signals(other, 1))?;
        let held = held(comm, &window)?;
        let written = &held[other * part..][..part];
        expect(format_args!("put by rank {other}"), written, |index| value(10 + other, index))?;
    }
    must("sync", comm.sync())?;
    drop(open);
    let slice = must("release", window.release())?;
    assert_eq!(slice.len(), len);
    Ok(())
}

/// Blocks of a list arrive in their places, both ways, and elements between them stay.
fn lists(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (blocks, len) = (200, 64);
    let values: Vec<i32> = (0..blocks * len * 2).map(|index| (rank << 20 | index) as i32).collect();
    let window = window(&comm, &values)?;
    let open = open_all::<i32>(&comm, window.descriptor())?;
    let next = &open[(rank + 1) % ranks];
    // Every second block of the window, the last first; of different lengths.
    let list: Vec<GpuBlock> = (0..blocks)
        .map(|block| GpuBlock {
            local: block * len,
            remote: (blocks - 1 - block) * 2 * len,
            len: block % (len + 1),
        })
        .collect();
    let mut got = upload(&comm, &vec![-1i32; blocks * len])?;
    must("get_list", next.get_list(&mut got, &list))?;
    must("get_list", next.get_list(&mut got, &[]))?;
    must("sync", comm.sync())?;
    let held_before = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
    expect("got", &held_before, |index| {
        let (block, at) = (index / len, index % len);
        let place = (blocks - 1 - block) * 2 * len + at;
        if at < block % (len + 1) { ((rank + 1) % ranks) as i32 * (1 << 20) + place as i32 } else { -1 }
    })?;
    must("barrier", comm.barrier())?;
    let mine = upload(&comm, &(0..blocks * len).map(|index| -2 - index as i32).collect::<Vec<_>>())?;
    must("put_list", next.put_list(&mine, &list))?;
    must("signal", next.signal())?;
    must("wait_signals", window.wait_signals((rank + ranks - 1) % ranks, 1))?;
    expect("put", &held(&comm, &window)?, |index| {
        let (place, at) = (index / len, index % len);
        let block = blocks.wrapping_sub(1).wrapping_sub(place / 2);
        let is_put = place % 2 == 0 && at < block % (len + 1);
        if is_put { -2 - (block * len + at) as i32 } else { (rank << 20 | index) as i32 }
    })?;
    must("sync", comm.sync())?;
    drop(open);
    must("release", window.release())?;
    done()
}

/// More blocks than one launch takes, of bytes at odd places.
fn many(comm: Comm, _: &[String]) -> Outcome {
    let (blocks, len) = (5000, 7);
    let value = |rank: usize, index: usize| ((rank + index * 3) % 251) as u8;
    let values: Vec<u8> = (0..blocks * len).map(|index| value(comm.rank(), index)).collect();
    let window = window(&comm, &values)?;
    let open = open_all::<u8>(&comm, window.descriptor())?;
    let reversed = |block: usize| (blocks - 1 - block) * len;
    let list: Vec<GpuBlock> =
        (0..blocks).map(|block| GpuBlock { local: block * len, remote: reversed(block), len }).collect();
    let mut got = upload(&comm, &vec![0u8; blocks * len])?;
    for (other, remote) in open.iter().enumerate() {
        must("get_list", remote.get_list(&mut got, &list))?;
        must("sync", remote.sync())?;
        let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
        expect("got", &got, |index| value(other, reversed(index / len) + index % len))?;
    }
    must("barrier", comm.barrier())?;
    drop(open);
    must("release", window.release())?;
    done()
}

/// A host function that waits in a stream until it is told to go on.
unsafe extern "C" fn wait_for_word(word: *mut c_void) {
    // SAFETY: the receiver of `hold`, given once.
    let word = unsafe { Box::from_raw(word.cast::<Receiver<()>>()) };
    let _ = word.recv_timeout(Duration::from_secs(30));
}

/// Makes a stream wait until the answer is dropped.
pub fn hold(stream: &CudaStream) -> Result<Sender<()>, String> {
    let (sender, receiver) = channel();
    let word = Box::into_raw(Box::new(receiver)).cast();
    stream.context().bind_to_thread().context(|| "context".into())?;
    // SAFETY: a live stream; the function takes the box, and calls nothing of CUDA.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), wait_for_word, word) }
        .context(|| "launch_host_function".into())?;
    Ok(sender)
}

/// A put comes after what the stream does before it, and the signal after the put; a buffer's users on other streams are waited for.
fn order(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &[0i32; 1000])?;
    let open = open_all::<i32>(&comm, window.descriptor())?;
    if comm.rank() == 0 {
        let mut mine = upload(&comm, &[1i32; 1000])?;
        // The values come late, on another stream.
        let other = new_stream(&comm)?;
        let held = hold(&other)?;
        other.memcpy_htod(&[7i32; 1000], &mut mine).context(|| "upload".into())?;
        must("put", open[1].put(&mine, 0))?;
        must("signal", open[1].signal())?;
        std::thread::sleep(Duration::from_millis(50));
        assert!(!must("is_complete", open[1].is_complete())?, "the put waits for the values");
        drop(held);
        must("sync", open[1].sync())?;
        assert!(must("is_complete", open[1].is_complete())?);
    } else {
        must("wait_signals", window.wait_signals(0, 1))?;
        expect("put", &self::held(&comm, &window)?, |_| 7)?;
    }
    must("barrier", comm.barrier())?;
    drop(open);
    must("release", window.release())?;
    done()
}

/// A view's stream is the copies' stream, which the communicator's `sync` waits for, and the end of the window.
fn streams(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &[5i32; 1000])?;
    let all = must("all_gather_object", comm.all_gather_object(window.descriptor()))?;
    let other = new_stream(&comm)?;
    let peer = &all[1 - comm.rank()];
    let remote = must("open_gpu", must("on", comm.on(&other))?.open_gpu::<i32>(peer))?;
    let mut got: CudaSlice<i32> = upload(&comm, &[0i32; 1000])?;
    let copy_late = |got: &mut CudaSlice<i32>| -> Result<JoinHandle<()>, String> {
        let held = hold(&other)?;
        must("get", remote.get(got, 0))?;
        assert!(!must("is_complete", remote.is_complete())?, "it is not on the stream");
        Ok(std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(held);
        }))
    };
    let release = copy_late(&mut got)?;
    must("sync", comm.sync())?;
    assert!(must("is_complete", remote.is_complete())?, "sync has not waited");
    release.join().map_err(|_| "a panic")?;
    let (release, since) = (copy_late(&mut got)?, Instant::now());
    drop(remote);
    assert!(since.elapsed() > Duration::from_millis(40), "the end of a window has not waited for its copies");
    release.join().map_err(|_| "a panic")?;
    must("barrier", comm.barrier())?;
    let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
    expect("got", &got, |_| 5)?;
    must("release", window.release())?;
    done()
}

/// Woken by the future, and counted.
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// The completion as a future: pending while the copies wait, woken once they are complete, ready at once afterwards.
fn future(comm: Comm, _: &[String]) -> Outcome {
    let window = window(&comm, &[5i32; 1000])?;
    let open = open_all::<i32>(&comm, window.descriptor())?;
    let remote = &open[1 - comm.rank()];
    let mut got = upload(&comm, &[0i32; 1000])?;
    let woken = Arc::new(Woken(AtomicUsize::new(0)));
    let (waker, since) = (Waker::from(woken.clone()), Instant::now());
    let mut context = Context::from_waker(&waker);
    let held = hold(stream(&comm))?;
    must("get", remote.get(&mut got, 0))?;
    let mut completion = pin!(remote.completion());
    for _ in 0..3 {
        assert!(completion.as_mut().poll(&mut context).is_pending(), "the copies wait");
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(woken.0.load(Ordering::Acquire), 0, "nothing is complete");
    // Also while another thread waits.
    assert!(!must("is_complete", remote.is_complete())?, "nothing is complete");
    drop(held);
    while woken.0.load(Ordering::Acquire) == 0 {
        assert!(since.elapsed() < Duration::from_secs(20), "nobody wakes the task");
        std::thread::sleep(Duration::from_millis(1));
    }
    let Poll::Ready(result) = completion.as_mut().poll(&mut context) else {
        return Err("woken too early".into());
    };
    must("completion", result)?;
    let got = stream(&comm).clone_dtoh(&got).context(|| "download".into())?;
    expect("got", &got, |_| 5)?;
    let Poll::Ready(result) = pin!(remote.completion()).poll(&mut context) else {
        return Err("not ready".into());
    };
    must("completion", result)?;
    must("barrier", comm.barrier())?;
    drop(open);
    must("release", window.release())?;
    done()
}

/// A rank opens its own window like another's; it closes that before it releases the window.
fn own(comm: Comm, _: &[String]) -> Outcome {
    let rank = comm.rank();
    let window = window(&comm, &[5i32; 100])?;
    let remote = must("open_gpu", comm.open_gpu::<i32>(window.descriptor()))?;
    must("put", remote.put(&upload(&comm, &[rank as i32; 50])?, 50))?;
    must("signal", remote.signal())?;
    must("wait_signals", window.wait_signals(rank, 1))?;
    expect("held", &held(&comm, &window)?, |index| if index < 50 { 5 } else { rank as i32 })?;
    let refused = window.release().expect_err("it is open").to_string();
    assert!(refused.contains("RemoteGpuWindow to be dropped"), "{refused}");
    drop(remote);
    must("finalize", comm.finalize())?;
    done()
}

/// Open files and shared mappings of this process.
fn held_files() -> Result<usize, String> {
    let files = std::fs::read_dir("/proc/self/fd").context(|| "fd".into())?.count();
    let maps = std::fs::read_to_string("/proc/self/maps").context(|| "maps".into())?;
    Ok(files + maps.lines().filter(|line| line.contains("memfd:")).count())
}

/// Windows come and go, and all they took is given back.
fn leaks(comm: Comm, _: &[String]) -> Outcome {
    let len = elements(1 << 24);
    let round = |number: usize| -> Result<(), String> {
        let slice = must("alloc_gpu", comm.alloc_gpu::<f32>(len))?;
        let window = must("register_gpu", comm.register_gpu(slice))?;
        let open = open_all::<f32>(&comm, window.descriptor())?;
        let mut got = upload(&comm, &[0.0f32; 100])?;
        must("get", open[1 - comm.rank()].get(&mut got, number))?;
        // Nobody releases what another one is about to read.
        must("barrier", comm.barrier())?;
        drop(open);
        // By dropping it, and by releasing it.
        if number.is_multiple_of(2) {
            must("release", window.release()).map(drop)?
        } else {
            drop(window)
        }
        must("barrier", comm.barrier())
    };
    let free = || {
        stream(&comm).synchronize().context(|| "synchronize".into())?;
        stream(&comm).context().mem_get_info().map(|(free, _)| free).context(|| "memory".into())
    };
    // What is made once for all is there.
    (0..2).try_for_each(round)?;
    let (before, held) = (free()?, held_files()?);
    must("barrier", comm.barrier())?;
    (2..22).try_for_each(round)?;
    let after = free()?;
    assert!(after + 2 * 4 * len > before, "{before} bytes were free, {after} are left");
    let since = Instant::now();
    while held_files()? > held {
        assert!(since.elapsed() < Duration::from_secs(5), "{held} files at first, now {}", held_files()?);
        std::thread::sleep(Duration::from_millis(10));
    }
    must("barrier", comm.barrier())?;
    done()
}
