//! Messages whose sender, tag or length the receiver does not know.

use crate::world::{Done, both, outcome, same};
use libtest_mimic::Trial;
use phalanx::{BackendKind, Comm, Envelope, Error};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("any_source/in_groups", |comm, _| in_groups(&comm)),
    Scenario::rank("any_source/of_all", |comm, _| of_all(&comm)),
    Scenario::rank("any_source/lengths", |comm, _| lengths(&comm)),
    Scenario::rank("any_source/values", |comm, _| outcome(values(&comm))),
    Scenario::rank("any_source/probes", |comm, _| probes(&comm)),
    Scenario::rank("any_source/beside_receives", |comm, _| beside_receives(&comm)),
];

/// What MPI does not promise: it ends the job where a rank is missing.
pub const SURVIVED: &[Scenario] = &[
    Scenario::rank("any_source/some_have_left", |comm, _| some_have_left(comm)),
    Scenario::rank("any_source/nobody_sends", |comm, _| nobody_sends(&comm)),
];

pub fn trials() -> Vec<Trial> {
    let all = SCENARIOS.iter().flat_map(|scenario| both(*scenario, &[2, 3, 5]));
    all.chain(SURVIVED.iter().flat_map(|scenario| both(*scenario, &[3]))).collect()
}

fn expect(is_so: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if is_so { Ok(()) } else { Err(what()) }
}

/// Rank 0 gets all messages, those of a rank in the order of its sends.
fn of_all(comm: &Comm) -> Outcome {
    const EACH: usize = 8;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if rank > 0 {
        for number in 0..EACH {
            comm.send_tagged(&[rank, number], 0, number as u32 % 2).context(|| "send".into())?;
        }
        comm.barrier().context(|| "barrier".into())?;
        return Ok(String::new());
    }
    let mut seen = vec![0; ranks];
    for _ in 0..EACH * (ranks - 1) {
        let mut message = [0usize; 2];
        let envelope = comm.recv_any_tagged(&mut message, None).context(|| "recv_any".into())?;
        let [source, number] = message;
        let bytes = size_of_val(&message);
        expect(envelope == Envelope { source, tag: number as u32 % 2, bytes }, || format!("{envelope:?}"))?;
        expect(seen[source] == number, || format!("{number} of rank {source}, not {}", seen[source]))?;
        seen[source] += 1;
    }
    comm.barrier().context(|| "barrier".into())?;
    let left = comm.try_probe(None, None).context(|| "try_probe".into())?;
    expect(left.is_none(), || format!("a message more: {left:?}"))?;
    Ok(String::new())
}

/// Lengths within a line, a slot, and longer than what travels before its receive; of structs, too.
fn lengths(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for len in [0usize, 1, 13, 1000, 70_001] {
        let content = |rank: usize| (0..len + rank).map(|i| [i as u16, rank as u16, 7]).collect::<Vec<_>>();
        let request = comm.start_send(content(rank), next).context(|| "start_send".into())?;
        let (got, envelope) = comm.recv_vec::<[u16; 3]>(None, 0).context(|| "recv_vec".into())?;
        request.wait().context(|| "wait".into())?;
        expect(envelope.source == previous && got == content(previous), || {
            format!("{len} elements: {envelope:?}")
        })?;
        expect(envelope.count::<u64>().is_ok() == (envelope.bytes % 8 == 0), || "a count".into())?;
    }
    Ok(String::new())
}

/// A probe takes nothing, and finds what it was told to find.
fn probes(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if rank > 0 {
        comm.send_tagged(&[1u8; 3], 0, 10).context(|| "send".into())?;
        comm.send_tagged(&[2u8; 5], 0, 20 + rank as u32).context(|| "send".into())?;
        comm.barrier().context(|| "barrier".into())?;
        return Ok(String::new());
    }
    let last = ranks - 1;
    for _ in 0..2 {
        let found = comm.probe(None, 20 + last as u32).context(|| "probe".into())?;
        expect(found == Envelope { source: last, tag: 20 + last as u32, bytes: 5 }, || format!("{found:?}"))?;
        let found = comm.probe(1, None).context(|| "probe".into())?;
        expect(found == Envelope { source: 1, tag: 10, bytes: 3 }, || format!("{found:?}"))?;
        let found = comm.try_probe(1, 77).context(|| "try_probe".into())?;
        expect(found.is_none(), || format!("a message that nobody has sent: {found:?}"))?;
    }
    // Tags in another order than they came.
    for source in 1..ranks {
        let (got, _) = comm.recv_vec::<u8>(source, 20 + source as u32).context(|| "recv_vec".into())?;
        expect(got == [2; 5], || format!("{got:?}"))?;
        let mut got = [0u8; 3];
        comm.recv_any_tagged(&mut got, 10).context(|| "recv_any_tagged".into())?;
        expect(got == [1; 3], || format!("{got:?}"))?;
    }
    let refused = comm.probe(ranks, None);
    expect(matches!(refused, Err(Error::Usage(_))), || format!("a rank that is not there: {refused:?}"))?;
    comm.barrier().context(|| "barrier".into())?;
    Ok(String::new())
}

/// A message that a posted receive waits for is not found by a probe.
fn beside_receives(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for len in [3usize, 30_000] {
        let request = comm.start_recv(vec![0u32; len], previous).context(|| "start_recv".into())?;
        comm.barrier().context(|| "barrier".into())?;
        let sent = comm.start_send(vec![rank as u32; len], next).context(|| "start_send".into())?;
        let early = comm.try_probe(None, 0).context(|| "try_probe".into())?;
        // The second message, twice as long, may have come.
        let is_second = early.is_none_or(|found| found.bytes == 8 * len);
        expect(is_second, || format!("the message of a posted receive: {early:?}"))?;
        let second = comm.start_send(vec![7u32; 2 * len], next).context(|| "start_send".into())?;
        let (got, _) = comm.recv_vec::<u32>(previous, 0).context(|| "recv_vec".into())?;
        expect(got == vec![7; 2 * len], || format!("{} elements of another message", got.len()))?;
        let first = request.wait().context(|| "wait".into())?;
        expect(first == vec![previous as u32; len], || "the first message".into())?;
        sent.wait().and(second.wait()).context(|| "sends".into())?;
    }
    Ok(String::new())
}

/// Workers that have done their part leave; the others are still heard, and at last there is nobody.
fn some_have_left(comm: Comm) -> Outcome {
    if comm.backend() != BackendKind::Host {
        return Err("for host memory".into());
    }
    let mut message = [0u32];
    match comm.rank() {
        1 => {
            comm.send(&[11u32], 0).context(|| "send".into())?;
            comm.recv(&mut message, 0).context(|| "recv".into())?;
        }
        2 => {
            // Rank 1 has left by now.
            comm.recv(&mut message, 0).context(|| "recv".into())?;
            std::thread::sleep(Duration::from_millis(300));
            comm.send(&[22u32], 0).context(|| "send".into())?;
        }
        _ => {
            expect(comm.recv_any(&mut message).context(|| "recv_any".into())? == 1, || "rank 1's".into())?;
            comm.send(&[0u32], 1).context(|| "send".into())?;
            comm.send(&[0u32], 2).context(|| "send".into())?;
            let source = comm.recv_any(&mut message).context(|| "recv_any after a rank has left".into())?;
            expect((source, message) == (2, [22]), || format!("{message:?} of rank {source}"))?;
            let nobody = comm.recv_any(&mut message);
            expect(matches!(nobody, Err(Error::Peer(_))), || format!("all have left: {nobody:?}"))?;
        }
    }
    Ok(String::new())
}

/// The deadline ends a wait for any rank; the error says what was waited for.
fn nobody_sends(comm: &Comm) -> Outcome {
    if comm.rank() > 0 {
        // Until rank 0 has given up.
        let failed = comm.barrier();
        return expect(failed.is_err(), || "a barrier with a rank that waits".into()).map(|()| String::new());
    }
    match comm.within(Duration::from_millis(200)).recv_any(&mut [0u8]) {
        Err(error) if error.to_string().contains("from any rank") => Ok(String::new()),
        other => Err(format!("{other:?}")),
    }
}

/// Messages from all others at once, beside one of a known sender and those of another communicator.
fn in_groups(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let reversed = comm.split(Some(0), -(rank as i64)).context(|| "split".into())?.ok_or("no part")?;
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    // A tag for each round: a rank may be in the next one already.
    for (round, len) in (10..).zip([0, 1, 70_001]) {
        let own = vec![rank as u32; len];
        let mut named = vec![0; len];
        let mut others = vec![(vec![0u32; len], None); ranks - 1];
        let (number, mut elsewhere, mut from) = ([rank as u64], [0], None);
        phalanx::group(|g| {
            let mut here = g.on(comm);
            for peer in (0..ranks).filter(|peer| *peer != rank) {
                here.send_tagged(&own, peer, round)?;
            }
            for (buf, from) in &mut others {
                here.recv_any_tagged(buf, round, from)?;
            }
            here.send_tagged(&own, next, 7)?;
            here.recv_tagged(&mut named, previous, 7)?;
            let mut there = g.on(&reversed);
            there.recv_any_tagged(&mut elsewhere, None, &mut from)?;
            there.send_tagged(&number, (reversed.rank() + 1) % ranks, 3)
        })
        .context(|| format!("a group, {len} elements"))?;
        expect(named == vec![previous as u32; len], || format!("from rank {previous}, {len} elements"))?;
        let mut sources: Vec<usize> =
            others.iter().filter_map(|(_, from)| *from).map(|it| it.source).collect();
        for ((buf, _), source) in others.iter().zip(&sources) {
            expect(*buf == vec![*source as u32; len], || format!("from any, rank {source}: {len} elements"))?;
        }
        sources.sort_unstable();
        expect(sources == (0..ranks).filter(|peer| *peer != rank).collect::<Vec<_>>(), || {
            format!("messages of ranks {sources:?}")
        })?;
        let source = (reversed.rank() + ranks - 1) % ranks;
        let bytes = size_of::<u64>();
        expect(from == Some(Envelope { source, tag: 3, bytes }), || format!("elsewhere: {from:?}"))?;
        expect(elsewhere == [(ranks - 1 - source) as u64], || format!("elsewhere: {elsewhere:?}"))?;
    }
    Ok(String::new())
}

/// Messages of one value, from a rank that is named or from any.
fn values(comm: &Comm) -> Done {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    same("around", comm.send_recv_value(rank as u16, next, previous)?, previous as u16)?;
    if rank > 0 {
        comm.send_value(rank as f32, 0)?;
        same("from rank 0", comm.recv_value::<u128>(0)?, u128::MAX)?;
        return Ok(());
    }
    let mut sources = Vec::new();
    for _ in 1..ranks {
        let (value, source) = comm.recv_any_value::<f32>()?;
        same("from any rank", value, source as f32)?;
        sources.push(source);
        comm.send_value(u128::MAX, source)?;
    }
    sources.sort_unstable();
    same("from each rank", sources, (1..ranks).collect::<Vec<_>>())?;
    same("to oneself", comm.send_value(1u8, 0).is_err(), true)?;
    Ok(())
}
