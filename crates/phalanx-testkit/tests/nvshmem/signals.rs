//! Signals, and waiting for them.

use crate::world::{barrier, context, done, expect, free, must, read, refused, upload, value, values};
use phalanx::nvshmem::{Compare, Context, SignalOp, Waitable};
use phalanx::{Comm, Error};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::{Number, Scenario};
use std::time::{Duration, Instant};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("signals/ring", ring),
    Scenario::rank("signals/forms", forms),
    Scenario::rank("signals/adding", adding),
    Scenario::rank("signals/variables", variables),
    Scenario::rank("signals/host", host),
];

/// Round and round, each PE passing on what it got: nothing but signals orders it.
fn ring(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (stream, right) = (context.stream(), (me + 1) % pes);
    let len = 5000;
    // Two boxes, used in turn, and a word back that says a box was read.
    let boxes = upload(&context, &values::<i32>(me, 2 * len))?;
    let arrived = must("alloc", context.alloc::<u64>(2))?;
    barrier(&context)?;
    let rounds = 20u64;
    for round in 1..=rounds {
        let (from, to) = ((round % 2) as usize, ((round + 1) % 2) as usize);
        let (from, to) = (boxes.slice(from * len..(from + 1) * len), boxes.slice(to * len..(to + 1) * len));
        let signal = must("signal", arrived.signal((round % 2) as usize))?;
        must("put", context.put_signal_on_stream(&to, &from, &signal, round, SignalOp::Set, right, stream))?;
        must("wait", context.signal_wait_until_on_stream(&signal, Compare::Ge, round, stream))?;
        // The right PE must not be two rounds ahead with the same box.
        must("barrier", context.world().sync_on_stream(stream))?;
    }
    must("sync", context.sync(stream))?;
    let start = (me + pes * rounds as usize - rounds as usize % pes) % pes;
    // It has come from so many PEs to the left, and was their second box at first.
    let got = read(&boxes)?;
    let last = ((rounds + 1) % 2) as usize;
    expect("after all rounds", &got[last * len..(last + 1) * len], |index| value(start, len + index))?;
    barrier(&context)?;
    must("free", boxes.free())?;
    must("free", arrived.free())?;
    must("finalize", context.finalize())?;
    done()
}

fn forms(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let (stream, left, right) = (context.stream(), (me + pes - 1) % pes, (me + 1) % pes);
    let (source, inbox) =
        (upload(&context, &values::<f64>(me, 777))?, must("alloc", context.alloc::<f64>(777))?);
    let words = must("alloc", context.alloc::<u64>(4))?;
    let signal = |index| must("signal", words.signal(index));
    barrier(&context)?;
    must("put_signal", context.put_signal(&inbox, &source, &signal(0)?, 3, SignalOp::Set, right))?;
    must("wait", context.signal_wait_until_on_stream(&signal(0)?, Compare::Eq, 3, stream))?;
    expect("put_signal", &read(&inbox)?, |index| f64::from(value(left, index)))?;
    barrier(&context)?;
    let nbi = context.put_signal_nbi_on_stream(&inbox, &source, &signal(1)?, 5, SignalOp::Add, right, stream);
    must("put_signal_nbi_on_stream", nbi)?;
    must("quiet", context.quiet_on_stream(stream))?;
    must("wait", context.signal_wait_until_on_stream(&signal(1)?, Compare::Gt, 4, stream))?;
    must("signal_op", context.signal_op_on_stream(&signal(2)?, 8, SignalOp::Set, right, stream))?;
    must("wait", context.signal_wait_until_on_stream(&signal(2)?, Compare::Ne, 0, stream))?;
    must("wait", context.signal_wait_until_on_stream(&signal(2)?, Compare::Le, 8, stream))?;
    must("wait", context.signal_wait_until_on_stream(&signal(3)?, Compare::Lt, 1, stream))?;
    must("sync", context.sync(stream))?;
    let seen: Result<Vec<u64>, String> =
        (0..4).map(|index| must("signal_fetch", context.signal_fetch(&signal(index)?))).collect();
    assert_eq!(seen?, [3, 5, 8, 0]);
    refused("no such element", words.signal(4), &["4 elements"])?;
    let beyond = context.signal_op_on_stream(&signal(0)?, 1, SignalOp::Set, pes, stream);
    refused("no such PE", beyond, &["does not exist"])?;
    let longer = context.put_signal(&inbox.slice(1..), &source, &signal(0)?, 1, SignalOp::Set, me);
    refused("lengths", longer, &["776 elements"])?;
    barrier(&context)?;
    free([source, inbox])?;
    must("free", words.free())?;
    must("finalize", context.finalize())?;
    done()
}

/// Everybody adds to PE 0's signal, and nothing is lost.
fn adding(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (me, pes) = (context.my_pe(), context.n_pes());
    let words = must("alloc", context.alloc::<u64>(1))?;
    let signal = must("signal", words.signal(0))?;
    barrier(&context)?;
    for _ in 0..50 {
        must("add", context.signal_op_on_stream(&signal, me as u64 + 1, SignalOp::Add, 0, context.stream()))?;
    }
    barrier(&context)?;
    let sum = (1..=pes as u64).sum::<u64>() * 50;
    if me == 0 {
        assert_eq!(must("signal_wait_until", context.signal_wait_until(&signal, Compare::Eq, sum))?, sum);
    }
    barrier(&context)?;
    must("free", words.free())?;
    must("finalize", context.finalize())?;
    done()
}

fn variables(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    waits::<i16>(&context)?;
    waits::<u16>(&context)?;
    waits::<i32>(&context)?;
    waits::<u32>(&context)?;
    waits::<i64>(&context)?;
    waits::<u64>(&context)?;
    must("finalize", context.finalize())?;
    done()
}

fn waits<T: Waitable + Number>(context: &Context) -> Result<(), String> {
    let right = (context.my_pe() + 1) % context.n_pes();
    let flags = must("alloc", context.alloc::<T>(2))?;
    let stream = context.stream();
    barrier(context)?;
    let other = must("stream", context.cuda_context().new_stream().map_err(Into::into))?;
    must("p_on_stream", context.p_on_stream(&flags, 1, T::from_small(4), right, &other))?;
    must("wait", context.wait_until_on_stream(&flags, 1, Compare::Gt, T::from_small(3), stream))?;
    must("wait", context.wait_until_on_stream(&flags, 0, Compare::Eq, T::from_small(0), stream))?;
    must("sync", context.sync(stream))?;
    let beyond = context.wait_until_on_stream(&flags, 2, Compare::Eq, T::from_small(0), stream);
    refused("no such element", beyond, &["2 elements"])?;
    must("sync", context.sync(&other))?;
    barrier(context)?;
    must("free", flags.free())
}

/// Waiting on the host has an end, and does not spoil anything.
fn host(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let words = must("alloc", context.alloc::<u64>(1))?;
    let signal = must("signal", words.signal(0))?;
    let before = context.timeout();
    context.set_timeout(Duration::from_millis(300));
    let since = Instant::now();
    let error = refused(
        "nobody signals",
        context.signal_wait_until(&signal, Compare::Ge, 1),
        &["signal_wait_until"],
    )?;
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    context.set_timeout(before);
    barrier(&context)?;
    let right = (context.my_pe() + 1) % context.n_pes();
    must("signal", context.signal_op_on_stream(&signal, 1, SignalOp::Set, right, context.stream()))?;
    assert_eq!(must("signal_wait_until", context.signal_wait_until(&signal, Compare::Ge, 1))?, 1);
    barrier(&context)?;
    must("free", words.free())?;
    must("finalize", context.finalize())?;
    done()
}
