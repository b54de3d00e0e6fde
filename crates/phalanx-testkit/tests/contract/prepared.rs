//! Prepared collectives and messages: each run delivers what the plain call does, whichever of the two another rank uses.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{Comm, Error, PreMulSum, Prepared, ReduceOp, UsageError};
use phalanx_testkit::Scenario;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("prepared/collectives", |comm, _| outcome(collectives(&comm))),
    Scenario::rank("prepared/buffers", |comm, _| outcome(buffers(&comm))),
    Scenario::rank("prepared/messages", |comm, _| outcome(messages(&comm))),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[1, 2, 3, 5])).collect()
}

/// Elements: none, in a line, in several chunks.
const LENGTHS: [usize; 3] = [0, 3, 20_001];

fn values(rank: usize, run: usize, len: usize) -> Vec<i64> {
    (0..len).map(|i| (i * 3 + rank * 1000 + run * 7) as i64).collect()
}

/// In each run, some ranks make the plain call.
fn is_plain(comm: &Comm, run: usize) -> bool {
    (comm.rank() + run).is_multiple_of(3)
}

/// Runs a collective of one buffer and compares it with the plain call.
fn one(
    comm: &Comm,
    what: &str,
    mut prepared: Prepared<'_, Vec<i64>>,
    plain: impl Fn(&mut Vec<i64>) -> phalanx::Result<()>,
) -> Done {
    let len = prepared.buffers.len();
    for run in 0..4 {
        let mut expected = values(comm.rank(), run, len);
        plain(&mut expected)?;
        let mut again = values(comm.rank(), run, len);
        if is_plain(comm, run) {
            plain(&mut again)?;
        } else {
            prepared.buffers.copy_from_slice(&again);
            prepared.run()?;
            again.copy_from_slice(&prepared.buffers);
        }
        same(&format!("{what} of {len} elements, run {run}"), again == expected, true)?;
    }
    Ok(())
}

/// The same of two buffers.
fn two(
    comm: &Comm,
    what: &str,
    mut prepared: Prepared<'_, (Vec<i64>, Vec<i64>)>,
    plain: impl Fn(&[i64], &mut Vec<i64>) -> phalanx::Result<()>,
) -> Done {
    let (sent, received) = (prepared.buffers.0.len(), prepared.buffers.1.len());
    for run in 0..4 {
        let send = values(comm.rank(), run, sent);
        let (mut expected, mut again) = (vec![-1; received], vec![-1; received]);
        plain(&send, &mut expected)?;
        if is_plain(comm, run) {
            plain(&send, &mut again)?;
        } else {
            prepared.buffers.0.copy_from_slice(&send);
            prepared.buffers.1.fill(-1);
            prepared.run()?;
            again.copy_from_slice(&prepared.buffers.1);
        }
        same(&format!("{what} of {sent} elements, run {run}"), again == expected, true)?;
    }
    Ok(())
}

fn collectives(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = ranks / 2;
    for len in LENGTHS {
        let whole = || vec![0; len];
        let pair = |sent: usize, received: usize| (vec![0; sent], vec![0; received]);
        one(comm, "all_reduce", comm.prepare_all_reduce(whole(), ReduceOp::Sum)?, |buf| {
            comm.all_reduce_in_place(buf, ReduceOp::Sum)
        })?;
        let scaled = PreMulSum(rank as i64 + 1);
        one(comm, "reduce", comm.prepare_reduce(whole(), scaled, root)?, |buf| {
            comm.reduce_in_place(buf, scaled, root)
        })?;
        one(comm, "broadcast", comm.prepare_broadcast(whole(), root)?, |buf| {
            comm.broadcast_in_place(buf, root)
        })?;
        one(comm, "scan", comm.prepare_scan(whole(), ReduceOp::Max)?, |buf| {
            comm.scan_in_place(buf, ReduceOp::Max)
        })?;
        one(comm, "exclusive_scan", comm.prepare_exclusive_scan(whole(), ReduceOp::Sum)?, |buf| {
            comm.exclusive_scan_in_place(buf, ReduceOp::Sum)
        })?;

        let all = len * ranks;
        let (send, recv) = pair(len, all);
        two(comm, "all_gather", comm.prepare_all_gather(send, recv)?, |send, recv| {
            comm.all_gather(send, recv)
        })?;
        let (send, recv) = pair(all, len);
        two(
            comm,
            "reduce_scatter",
            comm.prepare_reduce_scatter(send, recv, ReduceOp::Min)?,
            |send, recv| comm.reduce_scatter(send, recv, ReduceOp::Min),
        )?;
        let (send, recv) = pair(all, all);
        two(comm, "all_to_all", comm.prepare_all_to_all(send, recv)?, |send, recv| {
            comm.all_to_all(send, recv)
        })?;
        let (send, recv) = pair(len, all);
        two(comm, "gather", comm.prepare_gather(send, recv, root)?, |send, recv| {
            comm.gather(send, recv, root)
        })?;
        let (send, recv) = pair(all, len);
        two(comm, "scatter", comm.prepare_scatter(send, recv, root)?, |send, recv| {
            comm.scatter(send, recv, root)
        })?;

        let counts: Vec<usize> = (0..ranks).map(|rank| len.saturating_sub(rank)).collect();
        let (own, all) = (counts[rank], counts.iter().sum());
        let (send, recv) = pair(own, all);
        two(comm, "all_gather_v", comm.prepare_all_gather_v(send, recv, &counts[..])?, |send, recv| {
            comm.all_gather_v(send, recv, &counts)
        })?;
        let (send, recv) = pair(all, own);
        let prepared = comm.prepare_reduce_scatter_v(send, recv, &counts[..], ReduceOp::Sum)?;
        two(comm, "reduce_scatter_v", prepared, |send, recv| {
            comm.reduce_scatter_v(send, recv, &counts, ReduceOp::Sum)
        })?;
        let (send, recv) = pair(own, all);
        two(comm, "gather_v", comm.prepare_gather_v(send, recv, &counts[..], root)?, |send, recv| {
            comm.gather_v(send, recv, &counts, root)
        })?;
        let (send, recv) = pair(all, own);
        two(comm, "scatter_v", comm.prepare_scatter_v(send, &counts[..], recv, root)?, |send, recv| {
            comm.scatter_v(send, &counts, recv, root)
        })?;
        let (from_all, to_all) = (vec![own; ranks], counts.clone());
        let (send, recv) = pair(all, own * ranks);
        let prepared = comm.prepare_all_to_all_v(send, &to_all[..], recv, &from_all[..])?;
        two(comm, "all_to_all_v", prepared, |send, recv| comm.all_to_all_v(send, &to_all, recv, &from_all))?;
    }
    Ok(())
}

/// Around a ring, one way and both ways at once; some ranks make the plain call.
fn messages(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for len in LENGTHS {
        let mut ring = comm.prepare_send_recv(vec![0; len], next, vec![-1; len], previous)?;
        for run in 0..4 {
            ring.buffers.0.copy_from_slice(&values(rank, run, len));
            ring.buffers.1.fill(-1);
            if is_plain(comm, run) {
                let (send, recv) = &mut ring.buffers;
                comm.send_recv(send, next, recv, previous)?;
            } else {
                ring.run()?;
            }
            same(&format!("{len} around, run {run}"), ring.buffers.1 == values(previous, run, len), true)?;
        }
        // Pairs: even ranks send to the next.
        let tag = 5;
        if rank % 2 == 0 && rank + 1 < ranks {
            let mut send = comm.prepare_send_tagged(vec![0; len], rank + 1, tag)?;
            for run in 0..4 {
                send.buffers.copy_from_slice(&values(rank, run, len));
                send.run()?;
            }
        } else if rank % 2 == 1 {
            let mut recv = comm.prepare_recv_tagged(vec![-1; len], rank - 1, tag)?;
            for run in 0..4 {
                match is_plain(comm, run) {
                    true => comm.recv_tagged(&mut recv.buffers, rank - 1, tag)?,
                    false => recv.run()?,
                }
                same(
                    &format!("{len} to the next, run {run}"),
                    recv.buffers == values(rank - 1, run, len),
                    true,
                )?;
            }
            recv.buffers.push(0);
            same("a longer buffer", matches!(recv.run(), Err(Error::Usage(_))), true)?;
        }
    }
    same("to oneself", comm.prepare_send(vec![0u8], rank).is_err(), true)?;
    same("to nobody", comm.prepare_recv(vec![0u8], ranks).is_err(), true)?;
    Ok(())
}

/// Buffers may be exchanged for others as long, and for no others; an operation in between is no matter.
fn buffers(comm: &Comm) -> Done {
    let ranks = comm.world_size() as u32;
    let mut sum = comm.prepare_all_reduce(vec![1u32; 5], ReduceOp::Sum)?;
    sum.run()?;
    same("the first run", &sum.buffers[..], &vec![ranks; 5][..])?;
    sum.buffers = vec![2; 5];
    comm.barrier()?;
    sum.run()?;
    same("another buffer", &sum.buffers[..], &vec![2 * ranks; 5][..])?;
    sum.buffers.push(1);
    let refused = sum.run();
    let right = matches!(
        &refused,
        Err(Error::Usage(error)) if matches!(**error, UsageError::Length { actual: 6, expected: 5, .. })
    );
    same("a longer buffer", right, true)?;
    sum.buffers.truncate(5);
    sum.buffers.fill(3);
    sum.run()?;
    same("after that", &sum.buffers[..], &vec![3 * ranks; 5][..])?;
    same("a root that is not there", comm.prepare_broadcast(vec![0u8], ranks as usize).is_err(), true)?;
    Ok(())
}
