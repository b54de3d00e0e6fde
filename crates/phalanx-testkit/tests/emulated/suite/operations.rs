//! Operations: what an enqueued operation reads and writes, and when; groups; one-sided communication.

use super::child::succeeds;
use super::nccl::{Awaited, INVALID_ARGUMENT, expect, nccl, ok};
use super::world::{Rank, at, begun, threads, unique_id};
use cudarc::driver::CudaContext;
use libtest_mimic::Trial;
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::sync::Barrier;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::process("operations/output", output),
    Scenario::process("operations/scalar", scalar),
    Scenario::process("operations/group_error", group_error),
    Scenario::process("operations/empty", empty),
    Scenario::process("operations/messages", messages),
    Scenario::process("operations/rendezvous", rendezvous),
    Scenario::process("operations/two_communicators", two_communicators),
    Scenario::process("operations/one_sided", one_sided),
    Scenario::process("operations/registered", registered),
    Scenario::process("operations/null_handles", null_handles),
    Scenario::process("operations/arguments", arguments),
    Scenario::process("operations/large", large),
];

pub fn trials() -> Vec<Trial> {
    let names = [
        "operations/output",
        "operations/scalar",
        "operations/group_error",
        "operations/empty",
        "operations/messages",
        "operations/rendezvous",
        "operations/two_communicators",
        "operations/one_sided",
        "operations/registered",
        "operations/arguments",
        "operations/large",
    ];
    let mut trials: Vec<Trial> = names.into_iter().map(|name| succeeds(name, &[], name, &[])).collect();
    let null = &[("REGISTER", "null"), ("WINDOWS", "null")];
    trials.push(succeeds("operations/null_handles", null, "operations/null_handles", &[]));
    trials
}

/// NCCL's number of `float`.
const F32: i32 = 7;

fn output(_: &[String]) -> Outcome {
    let id = unique_id();
    let seen = Barrier::new(2);
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, true)?;
        let (send, receive) = (rank.upload(&[1f32; 8]), rank.upload(&[5f32; 8]));
        rank.stream.synchronize().context(|| "synchronize".into())?;
        if number == 1 {
            seen.wait();
        }
        ok("all_reduce", nccl().all_reduce(at(&send), at(&receive), 8, F32, 0, rank.comm, rank.queue()))?;
        if number == 0 {
            // Neither the old nor the new values.
            begun(&rank, &receive)?;
            seen.wait();
        }
        assert_eq!(rank.download(&receive), [2.0; 8]);
        rank.end()
    })?;
    Ok(String::new())
}

fn scalar(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, true)?;
        let (mut on_host, mut on_device) = (0, 0);
        let mut value = [3f32];
        let factor = rank.upload(&[4f32]);
        ok("host", nccl().pre_mul_sum(&mut on_host, value.as_ptr() as u64, F32, 1, rank.comm))?;
        // It was read during the call.
        value[0] = 1000.0;
        ok("device", nccl().pre_mul_sum(&mut on_device, at(&factor), F32, 0, rank.comm))?;
        let mut factor = factor;
        for (op, expected) in [(on_host, 6f32), (on_device, 10.0)] {
            let slice = rank.upload(&[1f32; 3]);
            // Written in stream order after the operator was made, and read when the operation runs.
            rank.stream.memcpy_htod(&[5f32], &mut factor).context(|| "write".into())?;
            ok("all_reduce", nccl().all_reduce(at(&slice), at(&slice), 3, F32, op, rank.comm, rank.queue()))?;
            ok("destroy", nccl().destroy_op(op, rank.comm))?;
            assert_eq!(rank.download(&slice), [expected; 3]);
        }
        assert!(value[0] > 1.0);
        rank.end()
    })?;
    Ok(String::new())
}

fn group_error(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, true)?;
        let slice = rank.upload(&[1f32; 3]);
        let call = |dtype| nccl().all_reduce(at(&slice), at(&slice), 3, dtype, 0, rank.comm, rank.queue());
        ok("group start", nccl().group_start())?;
        ok("all_reduce", call(F32))?;
        expect("a type that is none", call(99), INVALID_ARGUMENT)?;
        ok("all_reduce", call(F32))?;
        expect("group end", nccl().group_end(), INVALID_ARGUMENT)?;
        assert_eq!(rank.download(&slice), [1.0; 3], "an error drops the whole group");
        expect("group end without start", nccl().group_end(), 5)?;
        ok("all_reduce", call(F32))?;
        assert_eq!(rank.download(&slice), [2.0; 3]);
        rank.end()
    })?;
    Ok(String::new())
}

fn empty(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, true)?;
        // Dropped locally: it does not even wait for the other rank, so it is no barrier.
        if number == 0 {
            ok("all_reduce", nccl().all_reduce(0, 0, 0, F32, 0, rank.comm, rank.queue()))?;
            rank.stream.synchronize().context(|| "synchronize".into())?;
        }
        // Messages are not dropped.
        let (comm, queue) = (rank.comm, rank.queue());
        let code = if number == 0 {
            nccl().send(0, 0, F32, 1, comm, queue)
        } else {
            nccl().recv(0, 0, F32, 0, comm, queue)
        };
        ok("an empty message", code)?;
        rank.stream.synchronize().context(|| "synchronize".into())?;
        rank.end()
    })?;
    Ok(String::new())
}

fn messages(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(3, |number| {
        let rank = Rank::begin(id, number, 3, true)?;
        for round in 0..10u64 {
            let send = rank.upload(&[number as u64 * 100 + round, round]);
            let receive: Vec<_> = (0..3).map(|_| rank.upload(&[0u64; 2])).collect();
            ok("group start", nccl().group_start())?;
            // Everybody to everybody, in orders that differ; to oneself, too.
            for step in 0..3 {
                let peer = (number + step) % 3;
                ok("send", nccl().send(at(&send), 2, 5, peer as i32, rank.comm, rank.queue()))?;
                ok("recv", nccl().recv(at(&receive[peer]), 2, 5, peer as i32, rank.comm, rank.queue()))?;
            }
            ok("group end", nccl().group_end())?;
            for (peer, slice) in receive.iter().enumerate() {
                assert_eq!(rank.download(slice), [peer as u64 * 100 + round, round]);
            }
        }
        rank.end()
    })?;
    Ok(String::new())
}

fn rendezvous(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        let (send, receive) = (rank.upload(&[1f32]), rank.upload(&[0f32]));
        rank.stream.synchronize().context(|| "synchronize".into())?;
        // The first messages connect the ranks.
        let peer = 1 - number as i32;
        ok("group start", nccl().group_start())?;
        ok("send", nccl().send(at(&send), 1, F32, peer, rank.comm, rank.queue()))?;
        ok("recv", nccl().recv(at(&receive), 1, F32, peer, rank.comm, rank.queue()))?;
        let code = nccl().group_end();
        rank.done("group end", code)?;
        // Both send first, without a group: nobody gets to the receive.
        rank.done("send", nccl().send(at(&send), 1, F32, peer, rank.comm, rank.queue()))?;
        rank.done("recv", nccl().recv(at(&receive), 1, F32, peer, rank.comm, rank.queue()))?;
        let event = rank.stream.record_event(None).context(|| "event".into())?;
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(event.try_is_complete(), Ok(false), "both wait for each other");
        ok("abort", nccl().abort(rank.comm))?;
        rank.stream.synchronize().context(|| "synchronize".into())
    })?;
    Ok(String::new())
}

fn two_communicators(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(2, |number| {
        let rank = Rank::begin(id, number, 2, false)?;
        let child = split(&rank)?;
        let (a, b) = (rank.upload(&[1f32]), rank.upload(&[1f32]));
        rank.stream.synchronize().context(|| "synchronize".into())?;
        ok("group start", nccl().group_start())?;
        ok("all_reduce", nccl().all_reduce(at(&a), at(&a), 1, F32, 0, rank.comm, rank.queue()))?;
        if number == 0 {
            // The other rank does not call this one.
            ok("all_reduce", nccl().all_reduce(at(&b), at(&b), 1, F32, 0, child, rank.queue()))?;
        }
        let code = nccl().group_end();
        rank.done("group end", code)?;
        if number == 0 {
            ok("settled", nccl().settle(child))?;
        }
        std::thread::sleep(Duration::from_millis(50));
        // One after the other, by one thread: the first must not wait for the second.
        ok("abort", nccl().abort(child))?;
        ok("abort", nccl().abort(rank.comm))?;
        rank.stream.synchronize().context(|| "synchronize".into())
    })?;
    Ok(String::new())
}

fn split(rank: &Rank) -> Result<u64, String> {
    let cell = Box::leak(Box::new(0));
    rank.done("split", nccl().split(rank.comm, 0, 0, cell, std::ptr::null()))?;
    // SAFETY: written by another thread, before the parent's state changed.
    Ok(unsafe { std::ptr::read_volatile(cell) })
}

fn one_sided(_: &[String]) -> Outcome {
    let id = unique_id();
    threads(3, |number| {
        let rank = Rank::begin(id, number, 3, true)?;
        let (comm, queue) = (rank.comm, rank.queue());
        let mut address = 0;
        ok("memory", nccl().mem_alloc(&mut address, 4 * 8))?;
        let mut window = 0;
        ok("window", nccl().window(comm, address, 4 * 8, &mut window, 1))?;
        assert_ne!(window, 0);
        // Everybody writes its number to its place in everybody's window.
        let own = address + 3 * 8;
        // SAFETY: the memory has as many bytes.
        unsafe {
            cudarc::driver::result::memcpy_htod_async(own, &[number as u64 + 7], rank.stream.cu_stream())
        }
        .context(|| "copy".into())?;
        for peer in 0..3 {
            ok("put", nccl().put_signal(own, 1, 5, peer, window, number * 8, 0, 0, 0, comm, queue))?;
        }
        let outside = rank.upload(&[0u64]);
        assert_eq!(nccl().put_signal(at(&outside), 1, 5, 0, window, 0, 0, 0, 0, comm, queue), 4);
        assert_eq!(nccl().put_signal(own, 1, 5, 0, window, 0, 1, 0, 0, comm, queue), 4);
        let awaited: Vec<_> = (0..3).map(|peer| Awaited { number: 1, peer, signal: 0, context: 0 }).collect();
        ok("wait", nccl().wait_signal(3, awaited.as_ptr(), comm, queue))?;
        let mut seen = [0u64; 3];
        // SAFETY: the memory has as many bytes.
        unsafe { cudarc::driver::result::memcpy_dtoh_async(&mut seen, address, rank.stream.cu_stream()) }
            .context(|| "copy".into())?;
        rank.stream.synchronize().context(|| "synchronize".into())?;
        assert_eq!(seen, [7, 8, 9]);
        ok("signal", nccl().signal((number as i32 + 1) % 3, 0, 0, 0, comm, queue))?;
        let awaited = Awaited { number: 1, peer: (number as i32 + 2) % 3, signal: 0, context: 0 };
        ok("wait", nccl().wait_signal(1, &awaited, comm, queue))?;
        rank.stream.synchronize().context(|| "synchronize".into())?;
        ok("window", nccl().close_window(comm, window))?;
        ok("memory", nccl().mem_free(address))?;
        rank.end()
    })?;
    Ok(String::new())
}

fn registered(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    let mut address = 0;
    ok("memory", nccl().mem_alloc(&mut address, 10_000))?;
    assert_eq!(address % 4096, 0);
    let (mut first, mut second) = (0, 0);
    ok("register", nccl().register(rank.comm, address, 10_000, &mut first))?;
    ok("register", nccl().register(rank.comm, address, 10_000, &mut second))?;
    assert_eq!(first, second, "the same memory has one handle");
    ok("deregister", nccl().deregister(rank.comm, first))?;
    ok("deregister", nccl().deregister(rank.comm, first))?;
    ok("memory", nccl().mem_free(address))?;
    // What NCCL did not allocate is no window, and that is no error.
    let slice = rank.upload(&vec![0u8; 4096]);
    let mut window = 7;
    let code = nccl().window(rank.comm, at(&slice), 4096, &mut window, 0);
    assert!(at(&slice) % 4096 != 0 || (code, window) == (0, 0));
    rank.end()?;
    Ok(String::new())
}

fn null_handles(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    let mut address = 0;
    ok("memory", nccl().mem_alloc(&mut address, 4096))?;
    let (mut handle, mut window) = (7, 7);
    ok("register", nccl().register(rank.comm, address, 4096, &mut handle))?;
    ok("window", nccl().window(rank.comm, address, 4096, &mut window, 1))?;
    assert_eq!((handle, window), (0, 0));
    ok("memory", nccl().mem_free(address))?;
    rank.end()?;
    Ok(String::new())
}

fn arguments(_: &[String]) -> Outcome {
    let rank = Rank::begin(unique_id(), 0, 1, true)?;
    let _other = CudaContext::new(1).context(|| "context".into())?;
    let slice = rank.upload(&[0f32; 4]);
    let (comm, queue, address) = (rank.comm, rank.queue(), at(&slice));
    expect("no buffer", nccl().all_reduce(0, address, 4, F32, 0, comm, queue), INVALID_ARGUMENT)?;
    expect("no communicator", nccl().all_reduce(address, address, 4, F32, 0, 0, queue), INVALID_ARGUMENT)?;
    expect("no operator", nccl().all_reduce(address, address, 4, F32, 77, comm, queue), INVALID_ARGUMENT)?;
    expect("no root", nccl().broadcast(address, address, 4, F32, 1, comm, queue), INVALID_ARGUMENT)?;
    expect("no peer", nccl().send(address, 4, F32, -1, comm, queue), INVALID_ARGUMENT)?;
    let mut op = 0;
    ok("operator", nccl().pre_mul_sum(&mut op, [1f32].as_ptr() as u64, F32, 1, comm))?;
    expect("another type", nccl().all_reduce(address, address, 2, 8, op, comm, queue), INVALID_ARGUMENT)?;
    rank.end()?;
    Ok(String::new())
}

fn large(_: &[String]) -> Outcome {
    let id = unique_id();
    const LEN: usize = 1 << 20;
    threads(3, |number| {
        let rank = Rank::begin(id, number, 3, true)?;
        let values: Vec<u32> = (0..LEN as u32).map(|n| n.wrapping_mul(number as u32 + 1)).collect();
        let slice = rank.upload(&values);
        ok("all_reduce", nccl().all_reduce(at(&slice), at(&slice), LEN, 3, 0, rank.comm, rank.queue()))?;
        let expected: Vec<u32> = (0..LEN as u32).map(|n| n.wrapping_mul(6)).collect();
        assert!(rank.download(&slice) == expected);
        rank.end()
    })?;
    Ok(String::new())
}
