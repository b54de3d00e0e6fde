//! Messages and groups on GPU memory.

use crate::world::{Slice, both, done, download, expect, init_all, must, upload, value, values};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("ring", ring),
    Scenario::rank("one_way", one_way),
    Scenario::rank("groups", groups),
    Scenario::rank("started", started),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let mut trials: Vec<_> = SCENARIOS.iter().flat_map(|scenario| both(*scenario, 2, gpus, &[""])).collect();
    let several = Trial::test("one_thread_for_all_gpus", move || one_thread(gpus));
    trials.push(several.with_ignored_flag(gpus < 2));
    trials
}

/// Everybody sends to the right, in GPU and host memory.
fn ring(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for len in [0, 1, 4099, 70_001] {
        let send = upload(&comm, &values::<f32>(rank, len))?;
        let mut recv = upload(&comm, &vec![7.0f32; len])?;
        must("send_recv", comm.send_recv(&send, right, &mut recv, left))?;
        expect("send_recv", &download(&comm, &recv)?, |index| value(left, index) as f32)?;
        let mut host = vec![7.0f32; len];
        must("to host", comm.send_recv(&send, right, &mut host, left))?;
        expect("to host", &host, |index| value(left, index) as f32)?;
    }
    done()
}

/// Rank 0 sends to each other, which answers.
fn one_way(comm: Comm, _: &[String]) -> Outcome {
    let mut buffer = upload(&comm, &values::<i32>(comm.rank(), 1000))?;
    for peer in 1..comm.world_size() {
        if comm.rank() == 0 {
            must("send", comm.send(&buffer, peer))?;
            let mut back = upload(&comm, &vec![7i32; 1000])?;
            must("recv", comm.recv(&mut back, peer))?;
            expect("the answer", &download(&comm, &back)?, |index| value(0, index))?;
        } else if comm.rank() == peer {
            must("recv", comm.recv(&mut buffer, 0))?;
            must("send", comm.send(&buffer, 0))?;
        }
    }
    must("sync", comm.sync())?;
    let refused = comm.send(&buffer, comm.world_size()).unwrap_err();
    assert!(refused.to_string().contains("does not exist"), "{refused}");
    done()
}

/// Messages and collectives of two communicators in one group, in GPU and host memory.
fn groups(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let other = must("split", comm.split(Some(3), -(rank as i64)))?.ok_or("everybody is in it")?;
    let send = upload(&comm, &values::<f32>(rank, 5000))?;
    let mut blocks: Vec<Slice<f32>> =
        (0..ranks).map(|_| upload(&comm, &vec![7.0f32; 5000])).collect::<Result<_, _>>()?;
    let mut sum = upload(&comm, &vec![0.0f32; 5000])?;
    let mut on_host = vec![0.0f32; 5000];
    must(
        "group",
        phalanx::group(|g| {
            let mut messages = g.on(&comm);
            for (peer, block) in blocks.iter_mut().enumerate() {
                messages.recv(block, peer)?;
                messages.send(&send, peer)?;
            }
            g.on(&other).all_reduce(&send, &mut sum, ReduceOp::Sum)?;
            g.on(&other).all_reduce(&send, &mut on_host, ReduceOp::Max)
        }),
    )?;
    let all = |index: usize| (0..ranks).map(move |rank| value(rank, index));
    expect("host memory", &on_host, |index| all(index).max().unwrap_or(0) as f32)?;
    must("sync", other.sync())?;
    expect("the sum", &download(&comm, &sum)?, |index| all(index).sum::<i32>() as f32)?;
    for (peer, block) in blocks.iter().enumerate() {
        expect(format!("from {peer}"), &download(&comm, block)?, |index| value(peer, index) as f32)?;
    }
    // A closure that fails, or panics, has started nothing, and leaves no group open.
    let failed: phalanx::Result<()> = comm.group(|g| {
        g.all_reduce(&send, &mut sum, ReduceOp::Sum)?;
        g.send(&send, ranks)
    });
    assert!(failed.is_err());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        comm.group(|g| -> phalanx::Result<()> {
            g.all_reduce(&send, &mut sum, ReduceOp::Sum)?;
            std::panic::resume_unwind(Box::new("on purpose"))
        })
    }));
    assert!(panicked.is_err());
    must("afterwards", comm.all_reduce(&send, &mut sum, ReduceOp::Max))?;
    expect("afterwards", &download(&comm, &sum)?, |index| all(index).max().unwrap_or(0) as f32)?;
    done()
}

/// Requests on host memory.
fn started(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let request = must("start", comm.start_all_reduce(values::<f32>(rank, 3000), ReduceOp::Sum))?;
    let sum = must("wait", request.wait())?;
    expect("the sum", &sum, |index| (0..ranks).map(|rank| value(rank, index)).sum::<i32>() as f32)?;
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let sent = must("start_send", comm.start_send(values::<i32>(rank, 3000), right))?;
    let received = must("start_recv", comm.start_recv(vec![7; 3000], left))?;
    must("wait", sent.wait())?;
    expect("the message", &must("wait", received.wait())?, |index| value(left, index))?;
    done()
}

fn one_thread(gpus: usize) -> Result<(), Failed> {
    let devices: Vec<usize> = (0..gpus).collect();
    let comms = must("init_all", init_all(&devices))?;
    let send: Vec<_> =
        comms.iter().map(|comm| upload(comm, &values::<f32>(comm.rank(), 4099))).collect::<Result<_, _>>()?;
    let mut recv: Vec<_> =
        comms.iter().map(|comm| upload(comm, &vec![7.0f32; 4099])).collect::<Result<_, _>>()?;
    must(
        "group",
        phalanx::group(|g| {
            for ((comm, send), recv) in comms.iter().zip(&send).zip(&mut recv) {
                g.on(comm).all_reduce(send, recv, ReduceOp::Sum)?;
            }
            Ok(())
        }),
    )?;
    for (comm, recv) in comms.iter().zip(&recv) {
        let sum = |index: usize| (0..gpus).map(|rank| value(rank, index)).sum::<i32>() as f32;
        expect("the sum", &download(comm, recv)?, sum)?;
    }
    Ok(())
}
