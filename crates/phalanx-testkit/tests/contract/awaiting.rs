//! Requests as futures, and sets of them.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{Comm, Error, ReduceOp, Request};
use phalanx_testkit::Scenario;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("awaiting/messages", |comm, _| outcome(messages(&comm))),
    Scenario::rank("awaiting/collectives", |comm, _| outcome(collectives(&comm))),
    Scenario::rank("awaiting/waited_after_a_poll", |comm, _| outcome(waited_after_a_poll(&comm))),
    Scenario::rank("awaiting/dropped_after_a_poll", |comm, _| outcome(dropped_after_a_poll(&comm))),
    Scenario::rank("awaiting/any", |comm, _| outcome(any(&comm))),
    Scenario::rank("awaiting/some", |comm, _| outcome(some(&comm))),
    Scenario::rank("awaiting/all", |comm, _| outcome(all(&comm))),
];

/// Ranks that stay away, which the host sees before the deadline.
pub const FAILING: &[Scenario] = &[
    Scenario::rank("awaiting/a_rank_that_leaves", |comm, _| outcome(a_rank_that_leaves(comm))),
    Scenario::rank("awaiting/communicator_dropped_first", |comm, _| {
        outcome(communicator_dropped_first(comm))
    }),
    Scenario::rank("awaiting/deadline", |comm, _| outcome(deadline(&comm))),
];

pub fn trials() -> Vec<Trial> {
    let working = SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5]));
    working.chain(FAILING.iter().flat_map(|scenario| both(*scenario, &[2, 3]))).collect()
}

/// Wakes the thread that runs a future, and counts.
struct Runner {
    thread: Thread,
    wakes: AtomicUsize,
}

impl Wake for Runner {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
        self.thread.unpark();
    }
}

/// An executor: polls when it is woken, and only then. Answers with the number of polls.
fn run<F: Future>(future: F) -> (F::Output, usize) {
    let runner = Arc::new(Runner { thread: std::thread::current(), wakes: AtomicUsize::new(0) });
    let waker = Waker::from(runner.clone());
    let mut future = pin!(future);
    let mut polls = 0;
    loop {
        polls += 1;
        let wakes = runner.wakes.load(Ordering::Acquire);
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return (output, polls);
        }
        while runner.wakes.load(Ordering::Acquire) == wakes {
            std::thread::park();
        }
    }
}

/// Tasks can be sent to the threads of an executor.
fn may_be_sent<T: Send>(value: T) -> T {
    value
}

fn others(comm: &Comm) -> impl Iterator<Item = usize> + use<> {
    let rank = comm.rank();
    (0..comm.world_size()).filter(move |peer| *peer != rank)
}

/// Short and long messages that arrive late; each wakes once.
fn messages(comm: &Comm) -> Done {
    for len in [0, 3, 70_001] {
        for root in 0..comm.world_size() {
            if comm.rank() == root {
                std::thread::sleep(Duration::from_millis(5));
                for peer in others(comm) {
                    let (sent, _) = run(comm.start_send(vec![peer as u32; len], peer)?);
                    same("the buffer", sent?.len(), len)?;
                }
            } else {
                let (received, polls) = run(may_be_sent(comm.start_recv(vec![0u32; len], root)?));
                same("received", received? == vec![comm.rank() as u32; len], true)?;
                same(&format!("{polls} polls"), polls <= 2, true)?;
            }
        }
    }
    Ok(())
}

fn collectives(comm: &Comm) -> Done {
    let ranks = comm.world_size() as u32;
    let first = comm.start_all_reduce(vec![1u32; 1000], ReduceOp::Sum)?;
    let second = comm.start_broadcast(vec![comm.rank() as u32; 70_001], 0)?;
    if comm.rank() == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // In another order than they were started in, and in one task.
    let (done, polls) = run(async { (second.await, first.await) });
    same("the second", done.0? == vec![0; 70_001], true)?;
    same("the first", done.1?, vec![ranks; 1000])?;
    same(&format!("{polls} polls"), polls <= 3, true)?;
    Ok(())
}

/// Polls once with a waker that does nothing.
fn poll_once<B>(request: &mut Request<B>) -> Poll<phalanx::Result<B>> {
    pin!(request).poll(&mut Context::from_waker(Waker::noop()))
}

fn waited_after_a_poll(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut request = comm.start_recv(vec![0u8; 10], previous)?;
    same("nothing was sent", poll_once(&mut request).is_pending(), true)?;
    same("twice", poll_once(&mut request).is_pending(), true)?;
    comm.barrier()?;
    let sent = comm.start_send(vec![7u8; 10], next)?;
    same("received", request.wait()?, vec![7; 10])?;
    sent.wait()?;
    Ok(())
}

/// What a task has given up leaks its buffers, and the message still has its place.
fn dropped_after_a_poll(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if rank == ranks - 1 && ranks > 1 {
        let mut dropped = comm.start_recv(vec![0u8; 10], 0)?;
        same("nothing was sent", poll_once(&mut dropped).is_pending(), true)?;
        drop(dropped);
        comm.barrier()?;
        let mut next = [0u8; 10];
        comm.recv(&mut next, 0)?;
        same("the next message", next, [8; 10])?;
        return Ok(());
    }
    comm.barrier()?;
    if rank == 0 && ranks > 1 {
        comm.send(&[7u8; 10], ranks - 1)?;
        comm.send(&[8u8; 10], ranks - 1)?;
    }
    Ok(())
}

/// Rank 0 takes messages as they come: the last rank sends first.
fn any(comm: &Comm) -> Done {
    let (rank, last) = (comm.rank(), comm.world_size() - 1);
    if rank != 0 {
        if rank != last {
            comm.recv(&mut [0u8], rank + 1)?;
        }
        comm.send(&vec![rank as u32; 5000], 0)?;
        if rank > 1 {
            // Once rank 0 has the message.
            comm.recv(&mut [0u8], 0)?;
            comm.send(&[1u8], rank - 1)?;
        }
        return Ok(());
    }
    // At the place of each peer, its request; at this rank's, none.
    let mut requests = vec![None];
    for peer in others(comm) {
        requests.push(Some(comm.start_recv(vec![0u32; 5000], peer)?));
    }
    for expected in (1..=last).rev() {
        let (peer, received) = Request::wait_any(&mut requests).ok_or("no request is left")?;
        same("the place of the next to come", peer, expected)?;
        same("the next to come", received? == vec![expected as u32; 5000], true)?;
        same("others stay", requests.iter().flatten().count(), expected - 1)?;
        if expected > 1 {
            comm.send(&[1u8], expected)?;
        }
    }
    same("none is left", Request::wait_any(&mut requests).is_none(), true)?;
    same("none of none", Request::<()>::wait_any(&mut []).is_none(), true)?;
    Ok(())
}

fn some(comm: &Comm) -> Done {
    let ranks = comm.world_size();
    let mut requests: Vec<_> = (0..ranks).map(|_| None).collect();
    for peer in others(comm) {
        requests[peer] = Some(comm.start_recv(vec![0u32; 3], peer)?);
    }
    same("nothing was sent", Request::test_some(&mut requests).len(), 0)?;
    same("all of none", Request::test_all(requests.iter_mut().flatten()), ranks == 1)?;
    comm.barrier()?;
    let sends = others(comm).map(|peer| comm.start_send(vec![comm.rank() as u32; 3], peer));
    let sends = sends.collect::<phalanx::Result<Vec<_>>>()?;
    let mut seen: Vec<usize> = Vec::new();
    while requests.iter().any(Option::is_some) {
        let done = Request::wait_some(&mut requests);
        same("some", done.is_empty(), false)?;
        same("in order", done.iter().is_sorted_by_key(|(place, _)| *place), true)?;
        for (peer, received) in done {
            same("from this peer", received?, vec![peer as u32; 3])?;
            same("taken out", requests[peer].is_none(), true)?;
            seen.push(peer);
        }
    }
    seen.sort_unstable();
    same("from all", seen, others(comm).collect::<Vec<_>>())?;
    same("none is left", Request::wait_some(&mut requests).len(), 0)?;
    same("sent", Request::wait_all(sends)?, vec![vec![comm.rank() as u32; 3]; ranks - 1])?;
    Ok(())
}

fn all(comm: &Comm) -> Done {
    let ranks = comm.world_size() as u64;
    let sums = (0..5u64).map(|number| comm.start_all_reduce(vec![number; 100], ReduceOp::Sum));
    let sums = sums.collect::<phalanx::Result<Vec<_>>>()?;
    let mut sums = sums;
    while !Request::test_all(&mut sums) {
        std::thread::yield_now();
    }
    for (number, sum) in (0..).zip(Request::wait_all(sums)?) {
        same("a sum", sum, vec![number * ranks; 100])?;
    }
    Ok(())
}

/// A rank that leaves is named long before the deadline, also to those that only poll.
fn a_rank_that_leaves(comm: Comm) -> Done {
    comm.barrier()?;
    let last = comm.world_size() - 1;
    if comm.rank() == last {
        std::thread::sleep(Duration::from_millis(20));
        return Ok(());
    }
    let since = Instant::now();
    let result = if comm.rank() == 0 {
        run(comm.start_recv(vec![0u8; 10], last)?).0
    } else {
        let requests = [comm.start_recv(vec![0u8; 10], last)?, comm.start_recv(vec![0u8; 10], 0)?];
        Request::wait_any(&mut requests.map(Some)).ok_or("no request")?.1
    };
    let Err(Error::Peer(error)) = result else { return Err(format!("not lost: {result:?}").into()) };
    same("the rank", error.rank, last)?;
    same("soon", since.elapsed() < Duration::from_secs(10), true)?;
    Ok(())
}

/// Nobody is left to wake the task of a request whose communicator is gone: it still ends.
fn communicator_dropped_first(comm: Comm) -> Done {
    comm.barrier()?;
    if comm.rank() != 0 {
        std::thread::sleep(Duration::from_millis(20));
        return Ok(());
    }
    let request = comm.start_recv(vec![0u8; 10], 1)?;
    let task = std::thread::spawn(move || run(request).0);
    std::thread::sleep(Duration::from_millis(5));
    drop(comm);
    let result = task.join().map_err(|_| "the task panicked")?;
    same(&format!("{result:?}"), matches!(result, Err(Error::Peer(_))), true)?;
    Ok(())
}

fn deadline(comm: &Comm) -> Done {
    comm.barrier()?;
    if comm.rank() == 0 {
        let (since, limit) = (Instant::now(), Duration::from_millis(200));
        let (result, _) = run(comm.within(limit).start_recv(vec![0u8; 10], 1)?);
        let Err(Error::Timeout(error)) = result else { return Err(format!("no timeout: {result:?}").into()) };
        same("in time", (limit..limit * 20).contains(&since.elapsed()), true)?;
        same("missing", error.missing.iter().map(|missing| missing.rank).collect::<Vec<_>>(), [1])?;
        same(&error.to_string(), error.waited >= limit && error.operation.starts_with("recv"), true)?;
    } else {
        // The failure of rank 0 is everybody's.
        let result = comm.recv(&mut [0u8; 10], 0);
        same(&format!("{result:?}"), matches!(result, Err(Error::Timeout(_))), true)?;
    }
    Ok(())
}
