//! Messages and groups on GPU memory.

use crate::world::{
    Slice, both, done, download, expect, init_all, launch, must, new_stream, upload, value, values,
};
use libtest_mimic::{Failed, Trial};
use phalanx::{Comm, Error, ReduceOp};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::suite::Condition;
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("ring", ring),
    Scenario::rank("one_way", one_way),
    Scenario::rank("groups", groups),
    Scenario::rank("in_other_orders", in_other_orders),
    Scenario::rank("started", started),
    Scenario::rank("beside_collectives", beside_collectives),
];

pub fn trials(gpus: usize) -> Vec<Trial> {
    let mut trials: Vec<_> = SCENARIOS.iter().flat_map(|scenario| both(*scenario, 2, gpus, &[""])).collect();
    let several = [
        Trial::test("one_thread_for_all_gpus", move || one_thread(gpus)),
        Trial::test("one_thread_waits_for_itself", move || waits_for_itself(gpus)),
        Trial::test("processes/checked_messages", move || checked(gpus)),
    ];
    trials.extend(several.map(|trial| trial.only_if(gpus >= 2, "it takes two GPUs")));
    trials
}

/// Right programs are right in checked mode.
fn checked(gpus: usize) -> Result<(), Failed> {
    let first = launch(SCENARIOS[0], gpus, "").env("PHALANX_CHECK", "1");
    let all = SCENARIOS[1..].iter().fold(first, |launch, scenario| launch.then(scenario.name).arg(""));
    Ok(all.reports().map(drop)?)
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
        // On to the next: what it was sent comes from two ranks to the left.
        must("in place", comm.send_recv_in_place(&mut host, right, left))?;
        expect("in place", &host, |index| value((left + ranks - 1) % ranks, index) as f32)?;
        let refused = comm.send_recv_in_place(&mut recv, right, left).unwrap_err();
        assert!(
            matches!(refused, Error::Unsupported(_)) && refused.to_string().contains("send_recv "),
            "{refused}"
        );
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

/// Messages of several communicators in one group, which the ranks make in different orders.
fn in_other_orders(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let split = |_| must("split", comm.split(Some(0), rank as i64))?.ok_or("everybody is in it".into());
    let comms: Vec<Comm> = (0..3).map(split).collect::<Result<_, String>>()?;
    // Streams of their own: the library starts communicators in the order of the calls.
    let streams = comms.iter().map(new_stream).collect::<Result<Vec<_>, _>>()?;
    let on = |(comm, stream)| must("on", Comm::on(comm, stream));
    let comms: Vec<_> = comms.iter().zip(&streams).map(on).collect::<Result<_, _>>()?;
    for len in [0, 3000, 3001] {
        let send: Vec<_> = (0..3).map(|index| values::<i32>(rank + index, len)).collect();
        let mut recv = vec![vec![7i32; len]; 3];
        must(
            "group",
            phalanx::group(|g| {
                let mut all: Vec<_> = comms.iter().zip(&send).zip(&mut recv).collect();
                all.rotate_left(rank % 3);
                all.into_iter().try_for_each(|((comm, send), recv)| {
                    g.on(comm).send(send, right)?;
                    g.on(comm).recv(recv, left)
                })
            }),
        )?;
        for (index, recv) in recv.iter().enumerate() {
            expect(format!("on {index}"), recv, |at| value(left + index, at))?;
        }
    }
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

/// A message that the thread of a started collective carries out is complete when that has done so, whoever
/// waits for it; one that is posted behind the collective comes behind it.
fn beside_collectives(comm: Comm, _: &[String]) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<i32>();
    let received = match rank {
        0 => {
            // The others' threads are at their receives by then.
            std::thread::sleep(Duration::from_millis(300));
            let own = values::<i32>(0, 3000);
            (1..ranks).try_for_each(|peer| must("send", comm.send(&own, peer)))?;
            None
        }
        _ => Some(must("start_recv", comm.start_recv(vec![7i32; 3000], 0))?),
    };
    let started = must("start", comm.start_all_reduce(values::<i32>(rank, 3000), ReduceOp::Sum))?;
    if let Some(received) = received {
        std::thread::sleep(Duration::from_millis(50));
        expect("the message", &must("wait", received.wait())?, |index| value(0, index))?;
    }
    let (right, left) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut recv = vec![7i32; 3000];
    must("send_recv", comm.send_recv(&values::<i32>(rank, 3000), right, &mut recv, left))?;
    expect("the message behind it", &recv, |index| value(left, index))?;
    expect("the sum", &must("wait", started.wait())?, sum)?;
    done()
}

fn one_thread(gpus: usize) -> Result<(), Failed> {
    let comms = must("init_all", init_all(0..gpus))?;
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

/// What one thread that drives all ranks would wait for in vain is refused at once, and harms nothing: groups
/// work before and afterwards, and everything does in threads of their own.
fn waits_for_itself(gpus: usize) -> Result<(), Failed> {
    let mut comms = must("init_all", init_all(0..gpus))?;
    let mut buffers: Vec<_> =
        comms.iter().map(|comm| upload(comm, &[1.0f32; 100])).collect::<Result<_, _>>()?;
    for comm in &comms {
        comm.set_timeout(Duration::from_secs(5));
    }
    let all_reduce = |comms: &[Comm], buffers: &mut [Slice<f32>]| {
        phalanx::group(|group| {
            let mut both = comms.iter().zip(buffers);
            both.try_for_each(|(comm, buffer)| group.on(comm).all_reduce_in_place(buffer, ReduceOp::Max))
        })
    };
    must("group", all_reduce(&comms, &mut buffers))?;
    let since = Instant::now();
    let first = &comms[0];
    for (operation, remedy, refused) in [
        ("barrier", "thread of its own", first.barrier()),
        ("split", "thread of its own", first.split(Some(0), 0).map(drop)),
        ("shrink", "thread of its own", first.shrink().map(drop)),
        ("all_reduce", "phalanx::group", first.all_reduce_in_place(&mut buffers[0], ReduceOp::Max)),
        ("all_reduce", "phalanx::group", first.all_reduce_in_place(&mut [1.0f32][..], ReduceOp::Max)),
        ("send", "phalanx::group", first.send(&buffers[0], 1)),
        ("recv", "phalanx::group", first.recv(&mut buffers[0], 1)),
    ] {
        let error = refused.expect_err(operation);
        assert!(matches!(error, Error::Unsupported(_)), "{operation}: {error}");
        let text = error.to_string();
        assert!([operation, "init_all", remedy].iter().all(|part| text.contains(part)), "{text}");
    }
    assert!(since.elapsed() < Duration::from_secs(2), "after {:?}", since.elapsed());
    must("group", all_reduce(&comms, &mut buffers))?;
    comms = std::thread::scope(|scope| {
        let rank = |comm: Comm| {
            scope.spawn(move || {
                let mut buffer = upload(&comm, &[1.0f32; 100])?;
                must("all_reduce", comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
                expect("the sum", &download(&comm, &buffer)?, |_| gpus as f32)?;
                let part = must("split", comm.split(Some(0), 0))?.ok_or("a part")?;
                must("barrier of the part", part.barrier())?;
                must("barrier", comm.barrier()).map(|()| comm)
            })
        };
        let threads: Vec<_> = comms.into_iter().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>, String>>()
    })?;
    must("group", all_reduce(&comms, &mut buffers))?;
    // cudarc frees what was made on a default stream on that of whichever GPU is current, and not behind the
    // operation on its own.
    for comm in &comms {
        must("sync", comm.sync())?;
    }
    let refused = comms.remove(0).finalize().expect_err("finalize");
    assert!(refused.to_string().contains("finalize"), "{refused}");
    Ok(())
}
