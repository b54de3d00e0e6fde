//! Requests: operations that go on while others are made.

use crate::world::both;
use libtest_mimic::Trial;
use phalanx::{BackendKind, Comm, DType, ReduceOp};
use phalanx_testkit::reference::{self, Combine};
use phalanx_testkit::ring::{Ring, STRIDE, same_values};
use phalanx_testkit::scenario::{ErrorContext, Outcome};
use phalanx_testkit::{Number, Scenario, random, with_number};
use std::rc::Rc;
use std::time::Duration;

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("requests/every_kind", |comm, _| every_kind(&comm)),
    Scenario::rank("requests/every_type", |comm, _| every_type(&comm)),
    Scenario::rank("requests/all_kinds_at_once", |comm, _| all_kinds_at_once(&comm)),
    Scenario::rank("requests/met_by_plain_calls", |comm, _| met_by_plain_calls(&comm)),
    Scenario::rank("requests/overlap_with_blocking", |comm, _| overlap_with_blocking(&comm)),
    Scenario::rank("requests/waited_in_reverse", |comm, _| waited_in_reverse(&comm)),
    Scenario::rank("requests/messages", |comm, _| messages(&comm)),
    Scenario::rank("requests/send_recv", |comm, _| send_recv(&comm)),
    Scenario::rank("requests/to_oneself", |comm, _| to_oneself(&comm)),
    Scenario::rank("requests/is_done", |comm, _| is_done(&comm)),
    Scenario::rank("requests/dropped", |comm, _| dropped(&comm)),
    Scenario::rank("requests/recorded", |comm, _| recorded(&comm)),
    Scenario::rank("requests/finalized", |comm, _| finalized(comm)),
];

/// Where messages may be posted beside collectives.
pub const AMONG_MESSAGES: &[Scenario] = &[
    Scenario::rank("requests/among_messages", |comm, _| among_messages(&comm)),
    Scenario::rank("requests/synced", |comm, _| synced(&comm)),
    Scenario::rank("requests/behind_a_barrier", |comm, _| behind_a_barrier(&comm)),
    Scenario::rank("requests/started_barrier", |comm, _| started_barrier(&comm)),
];

pub fn trials() -> Vec<Trial> {
    SCENARIOS.iter().chain(AMONG_MESSAGES).flat_map(|scenario| both(*scenario, &[1, 2, 4, 7])).collect()
}

const SIZES: [usize; 4] = [1, 1000, 70_001, 300_000];

fn text(error: phalanx::Error) -> String {
    error.to_string()
}

/// The inputs of all ranks, and what they sum to.
struct Data {
    ring: Ring<f32>,
    summed: Ring<f32>,
}

impl Data {
    fn new(seed: u64, ranks: usize) -> Rc<Data> {
        let ring = Ring::new(seed);
        let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
        Rc::new(Data { ring, summed })
    }
}

/// Each of them has a `start_` function.
const KINDS: [&str; 13] = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "all_gather_v",
    "reduce_scatter_v",
    "all_to_all_v",
    "gather_v",
    "scatter_v",
];

/// One collective, by its place in [`KINDS`].
#[derive(Clone)]
struct Cell {
    kind: usize,
    size: usize,
    start: usize,
    data: Rc<Data>,
    rank: usize,
    ranks: usize,
}

/// Waits for a request, and looks at its result.
type Waiter = Box<dyn FnOnce() -> Result<(), String>>;

impl Cell {
    fn new(comm: &Comm, kind: usize, size: usize, start: usize, data: &Rc<Data>) -> Cell {
        Cell { kind, size, start, data: data.clone(), rank: comm.rank(), ranks: comm.world_size() }
    }

    fn root(&self) -> usize {
        self.start % self.ranks
    }

    fn own(&self, len: usize) -> Vec<f32> {
        self.data.ring.window(self.start + self.rank * STRIDE, len)
    }

    /// Elements of a v-variant's block; only all_to_all_v has others for each sender.
    fn count(&self, from: usize, to: usize) -> usize {
        [self.size, 0, self.size / 2 + 1][(2 * from + to) % 3]
    }

    /// What a rank sends to each.
    fn counts(&self, from: usize) -> Vec<usize> {
        (0..self.ranks).map(|to| self.count(from, to)).collect()
    }

    /// What a rank gets from each.
    fn counts_to(&self, to: usize) -> Vec<usize> {
        (0..self.ranks).map(|from| self.count(from, to)).collect()
    }

    /// What this rank sends, and room for what it gets (none in place).
    fn buffers(&self) -> (Vec<f32>, Vec<f32>) {
        let (size, all) = (self.size, self.size * self.ranks);
        let if_root = |len: usize| if self.rank == self.root() { len } else { 0 };
        let at_root = if_root(all);
        let in_place = (size, 0);
        let sum = |counts: Vec<usize>| counts.iter().sum::<usize>();
        let (own, various) = (self.count(0, self.rank), sum(self.counts(0)));
        let (send, recv) = [
            in_place,
            in_place,
            in_place,
            (size, all),
            (all, size),
            (all, all),
            (size, at_root),
            (at_root, size),
            (own, various),
            (various, own),
            (sum(self.counts(self.rank)), sum(self.counts_to(self.rank))),
            (own, if_root(various)),
            (if_root(various), own),
        ][self.kind];
        (self.own(send), vec![0.0; recv])
    }

    fn start(self, comm: &Comm) -> Result<Waiter, String> {
        let (send, recv) = self.buffers();
        let (sum, root) = (ReduceOp::Sum, self.root());
        let request = match self.kind {
            0 => Ok(comm.start_all_reduce(send, sum).map_err(text)?),
            1 => Ok(comm.start_broadcast(send, root).map_err(text)?),
            2 => Ok(comm.start_reduce(send, sum, root).map_err(text)?),
            3 => Err(comm.start_all_gather(send, recv).map_err(text)?),
            4 => Err(comm.start_reduce_scatter(send, recv, sum).map_err(text)?),
            5 => Err(comm.start_all_to_all(send, recv).map_err(text)?),
            6 => Err(comm.start_gather(send, recv, root).map_err(text)?),
            7 => Err(comm.start_scatter(send, recv, root).map_err(text)?),
            8 => Err(comm.start_all_gather_v(send, recv, self.counts(0)).map_err(text)?),
            // A list that is borrowed is copied.
            9 => Err(comm.start_reduce_scatter_v(send, recv, &self.counts(0)[..], sum).map_err(text)?),
            10 => {
                let (to, from) = (self.counts(self.rank), self.counts_to(self.rank));
                Err(comm.start_all_to_all_v(send, to, recv, from).map_err(text)?)
            }
            11 => Err(comm.start_gather_v(send, recv, self.counts(0), root).map_err(text)?),
            _ => Err(comm.start_scatter_v(send, self.counts(0), recv, root).map_err(text)?),
        };
        Ok(Box::new(move || match request {
            Ok(in_place) => self.check(&in_place.wait().map_err(text)?),
            Err(out_of_place) => {
                let (send, recv) = out_of_place.wait().map_err(text)?;
                self.data
                    .ring
                    .expect_bits(&send, self.start + self.rank * STRIDE)
                    .context(|| "input".into())?;
                self.check(&recv)
            }
        }))
    }

    fn plain(&self, comm: &Comm) -> Result<(), String> {
        let (mut send, mut recv) = self.buffers();
        let (sum, root) = (ReduceOp::Sum, self.root());
        match self.kind {
            0 => comm.all_reduce_in_place(&mut send, sum),
            1 => comm.broadcast_in_place(&mut send, root),
            2 => comm.reduce_in_place(&mut send, sum, root),
            3 => comm.all_gather(&send, &mut recv),
            4 => comm.reduce_scatter(&send, &mut recv, sum),
            5 => comm.all_to_all(&send, &mut recv),
            6 => comm.gather(&send, &mut recv, root),
            7 => comm.scatter(&send, &mut recv, root),
            8 => comm.all_gather_v(&send, &mut recv, &self.counts(0)),
            9 => comm.reduce_scatter_v(&send, &mut recv, &self.counts(0), sum),
            10 => {
                let (to, from) = (self.counts(self.rank), self.counts_to(self.rank));
                comm.all_to_all_v(&send, &to, &mut recv, &from)
            }
            11 => comm.gather_v(&send, &mut recv, &self.counts(0), root),
            _ => comm.scatter_v(&send, &self.counts(0), &mut recv, root),
        }
        .map_err(text)?;
        self.check(if self.kind < 3 { &send } else { &recv })
    }

    fn check(&self, result: &[f32]) -> Result<(), String> {
        let Cell { size, start, rank, .. } = *self;
        let blocks = |offset: usize| {
            (0..self.ranks).try_for_each(|from| {
                let block = &result[from * size..(from + 1) * size];
                self.data.ring.expect_bits(block, start + from * STRIDE + offset)
            })
        };
        // Blocks of these lengths, each from its rank's input, `offset` further on.
        let various = |counts: Vec<usize>, offset: &dyn Fn(usize) -> usize| {
            let mut rest = result;
            counts.into_iter().enumerate().try_for_each(|(from, count)| {
                let (block, further) = rest.split_at(count);
                rest = further;
                self.data.ring.expect_bits(block, start + from * STRIDE + offset(from))
            })
        };
        let before = |counts: Vec<usize>| counts[..rank].iter().sum::<usize>();
        match self.kind {
            0 => self.data.summed.expect_values(result, start),
            1 => self.data.ring.expect_bits(result, start + self.root() * STRIDE),
            2 if rank != self.root() => Ok(()),
            2 => self.data.summed.expect_values(result, start),
            3 => blocks(0),
            4 => self.data.summed.expect_values(result, start + rank * size),
            5 => blocks(rank * size),
            6 | 11 if rank != self.root() => Ok(()),
            6 => blocks(0),
            7 => self.data.ring.expect_bits(result, start + self.root() * STRIDE + rank * size),
            8 | 11 => various(self.counts(0), &|_| 0),
            9 => self.data.summed.expect_values(result, start + before(self.counts(0))),
            10 => various(self.counts_to(rank), &|from| before(self.counts(from))),
            _ => {
                let offset = before(self.counts(0));
                self.data.ring.expect_bits(result, start + self.root() * STRIDE + offset)
            }
        }
        .context(|| format!("{} of {size}, rank {rank}", KINDS[self.kind]))
    }
}

/// Each `start_` function delivers what its blocking counterpart does.
fn every_kind(comm: &Comm) -> Outcome {
    let data = Data::new(11, comm.world_size());
    for (i, size) in SIZES.into_iter().enumerate() {
        for kind in 0..KINDS.len() {
            Cell::new(comm, kind, size, i * 977, &data).start(comm)?()?;
        }
    }
    Ok(String::new())
}

/// Every type and reduction, all reductions of a type under way at once.
fn every_type(comm: &Comm) -> Outcome {
    for dtype in DType::ALL {
        let what = || format!("{dtype}, rank {}", comm.rank());
        with_number!(dtype, T => one_type::<T>(comm, dtype.code().into())).context(what)?;
    }
    Ok(String::new())
}

fn one_type<T: Number>(comm: &Comm, seed: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let combines = Combine::<T>::all(ranks);
    let promised = combines.iter().filter(|combine| combine.is_promised_by(comm.backend()));
    let mut started = Vec::new();
    for (i, combine) in promised.enumerate() {
        let size = [40, 3001][i % 2];
        let inputs: Vec<Vec<T>> =
            (0..ranks).map(|from| random::values((seed * 64 + i * 8 + from) as u64, size * ranks)).collect();
        let (own, root) = (inputs[rank].clone(), i % ranks);
        let whole = comm.start_all_reduce(own.clone(), combine.reduction(rank)).map_err(text)?;
        let reduced = comm.start_reduce(own.clone(), combine.reduction(rank), root).map_err(text)?;
        let recv = vec![T::from_small(0); size];
        let scattered =
            comm.start_reduce_scatter(own.clone(), recv, combine.reduction(rank)).map_err(text)?;
        // The first rank gets nothing, the last one twice as much.
        let mut counts = vec![size; ranks];
        counts[0] = 0;
        counts[ranks - 1] += size;
        let recv = vec![T::from_small(0); counts[rank]];
        let various =
            comm.start_reduce_scatter_v(own, recv, counts, combine.reduction(rank)).map_err(text)?;
        let expected = reference::combined(&inputs, combine);
        started.push((combine, root, expected, whole, reduced, scattered, various));
    }
    if rank % 2 == 1 {
        started.reverse();
    }
    for (combine, root, expected, whole, reduced, scattered, various) in started {
        let what = |name: &str| format!("{name}, {}", combine.name());
        let (_, block) = various.wait().map_err(text)?;
        let start = rank.saturating_sub(1) * (expected.len() / ranks);
        let own = &expected[start..start + block.len()];
        same_values(&block, own).context(|| what("reduce_scatter_v"))?;
        let (_, block) = scattered.wait().map_err(text)?;
        let own = &expected[rank * block.len()..(rank + 1) * block.len()];
        same_values(&block, own).context(|| what("reduce_scatter"))?;
        same_values(&whole.wait().map_err(text)?, &expected).context(|| what("all_reduce"))?;
        let reduced = reduced.wait().map_err(text)?;
        if rank == root {
            same_values(&reduced, &expected).context(|| what("reduce"))?;
        }
    }
    Ok(())
}

/// All kinds under way at once, of all sizes; the ranks wait in different orders.
fn all_kinds_at_once(comm: &Comm) -> Outcome {
    let data = Data::new(16, comm.world_size());
    let mut waiters = Vec::new();
    for (i, size) in SIZES.into_iter().enumerate() {
        for kind in 0..KINDS.len() {
            waiters.push(Cell::new(comm, kind, size, i * 31 + kind * 977, &data).start(comm)?);
        }
    }
    // 7 and 52 have no common divisor.
    let count = waiters.len();
    let mut waiters: Vec<Option<Waiter>> = waiters.into_iter().map(Some).collect();
    for i in 0..count {
        let next = (i * 7 + comm.rank() * 5) % count;
        waiters[next].take().ok_or("waited for twice")?()?;
    }
    Ok(String::new())
}

/// It does not matter whether a rank starts a collective or calls it, but for the first one that is started.
fn met_by_plain_calls(comm: &Comm) -> Outcome {
    let data = Data::new(17, comm.world_size());
    comm.start_all_reduce(vec![1u8], ReduceOp::Sum).map_err(text)?.wait().map_err(text)?;
    for (i, size) in SIZES.into_iter().enumerate() {
        for kind in 0..KINDS.len() {
            for turn in 0..2 {
                let cell = Cell::new(comm, kind, size, i * 31 + kind * 977 + turn, &data);
                if (comm.rank() + turn).is_multiple_of(2) {
                    cell.start(comm)?()?;
                } else {
                    cell.plain(comm)?;
                }
            }
        }
    }
    // Some started, one behind the other, others called.
    let mut cells = (0..KINDS.len()).map(|kind| Cell::new(comm, kind, 5000, kind * 13, &data));
    if comm.rank() == 0 {
        let waiters: Vec<Waiter> = cells.map(|cell| cell.start(comm)).collect::<Result<_, String>>()?;
        comm.barrier().map_err(text)?;
        waiters.into_iter().rev().try_for_each(|wait| wait())?;
    } else {
        cells.try_for_each(|cell| cell.plain(comm))?;
        comm.barrier().map_err(text)?;
    }
    Ok(String::new())
}

/// Messages between started collectives: whoever waits for one moves all of them along.
fn among_messages(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let data = Data::new(18, ranks);
    for (i, size) in SIZES.into_iter().enumerate() {
        let mut waiters = Vec::new();
        for kind in 0..KINDS.len() {
            let start = i * 31 + kind * 977;
            waiters.push(Cell::new(comm, kind, size, start, &data).start(comm)?);
            let message = data.ring.window(start + rank, size);
            let send = comm.start_send_tagged(message, next, kind as u32).map_err(text)?;
            let recv = comm.start_recv_tagged(vec![0f32; size], previous, kind as u32).map_err(text)?;
            // Not before the ranks on the other side of the collective's ring have come to this place, too.
            if kind % 2 == 0 {
                data.ring
                    .expect_bits(&recv.wait().map_err(text)?, start + previous)
                    .context(|| "early".into())?;
                send.wait().map_err(text)?;
                continue;
            }
            let data = data.clone();
            waiters.push(Box::new(move || {
                let message = recv.wait().map_err(text)?;
                send.wait().map_err(text)?;
                data.ring.expect_bits(&message, start + previous).context(|| "late".into())
            }));
        }
        if rank % 2 == 1 {
            waiters.reverse();
        }
        waiters.into_iter().try_for_each(|wait| wait())?;
    }
    Ok(String::new())
}

/// Blocking operations between the start of a request and its end, on all sizes of both.
fn overlap_with_blocking(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<i64>::new(12);
    let summed = ring.combined(ranks, &Combine::Op(ReduceOp::Sum));
    for (i, size) in SIZES.into_iter().enumerate() {
        for (j, blocking) in SIZES.into_iter().enumerate() {
            let (start, other) = (i * 101 + j * 7, i * 211 + j * 13 + 5);
            let buffer = comm.alloc::<i64>(size).map_err(text)?;
            let mut buffer = buffer;
            ring.fill(&mut buffer, start + rank * STRIDE);
            let request = comm.start_all_reduce(buffer, ReduceOp::Sum).map_err(text)?;

            let mut sum = ring.window(other + rank * STRIDE, blocking);
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
            summed.expect_values(&sum, other).context(|| format!("blocking {blocking} over {size}"))?;
            comm.barrier().map_err(text)?;
            let mut gathered = vec![0; ranks];
            comm.all_gather(&[rank as i64], &mut gathered).map_err(text)?;
            if gathered != (0..ranks as i64).collect::<Vec<_>>() {
                return Err(format!("gathered {gathered:?} over a request of {size}"));
            }

            let result = request.wait().map_err(text)?;
            summed.expect_values(&result, start).context(|| format!("request {size}, rank {rank}"))?;
        }
    }
    Ok(String::new())
}

/// Several requests at once; the order of the waits is free, and may differ between ranks.
fn waited_in_reverse(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<u32>::new(13);
    let greatest = ring.combined(ranks, &Combine::Op(ReduceOp::Max));
    let mut requests = Vec::new();
    for i in 0..12 {
        let window = ring.window(i * 1009 + rank * STRIDE, [3, 5000, 100_000][i % 3]);
        requests.push((i, comm.start_all_reduce(window, ReduceOp::Max).map_err(text)?));
    }
    if rank % 2 == 0 {
        requests.reverse();
    }
    for (i, request) in requests {
        let result = request.wait().map_err(text)?;
        greatest.expect_values(&result, i * 1009).context(|| format!("request {i}, rank {rank}"))?;
    }
    Ok(String::new())
}

/// Everybody sends to everybody else before anybody receives.
fn messages(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let ring = Ring::<u8>::new(14);
    for size in SIZES {
        let start = |from: usize, to: usize| from * 7919 + to * 31;
        let peers: Vec<usize> = (0..ranks).filter(|peer| *peer != rank).collect();
        let mut sends = Vec::new();
        for &to in &peers {
            sends.push(comm.start_send(ring.window(start(rank, to), size), to).map_err(text)?);
        }
        let mut receives = Vec::new();
        for &from in &peers {
            receives.push((from, comm.start_recv(vec![0u8; size], from).map_err(text)?));
        }
        for (from, request) in receives.into_iter().rev() {
            let message = request.wait().map_err(text)?;
            let what = || format!("{size} from {from} to {rank}");
            ring.expect_bits(&message, start(from, rank)).context(what)?;
        }
        for request in sends {
            request.wait().map_err(text)?;
        }
    }
    Ok(String::new())
}

/// Both ways at once, several under way, each of lengths of its own; the ranks wait in different orders, or
/// ask until it is done.
fn send_recv(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let ring = Ring::<i16>::new(19);
    let start = |from: usize, tag: u32| from * 7919 + tag as usize * 31;
    for size in SIZES {
        let len = |from: usize, tag: u32| size + from + tag as usize;
        let begin = |tag: u32| {
            let send = ring.window(start(rank, tag), len(rank, tag));
            let recv = vec![0i16; len(previous, tag)];
            match tag {
                0 => comm.start_send_recv(send, next, recv, previous),
                _ => comm.start_send_recv_tagged(send, next, recv, previous, tag),
            }
            .map(|request| (tag, request))
        };
        let mut started = (0..4).map(begin).collect::<Result<Vec<_>, _>>().map_err(text)?;
        if rank % 2 == 1 {
            started.reverse();
        }
        for (tag, mut request) in started {
            let what = || format!("{size}, tag {tag}, rank {rank}");
            if tag % 2 == 1 {
                let since = std::time::Instant::now();
                while !request.is_done() {
                    if since.elapsed() > Duration::from_secs(60) {
                        return Err(format!("{} is not done after a minute of asking", what()));
                    }
                    std::thread::yield_now();
                }
            }
            let (sent, received) = request.wait().map_err(text)?;
            ring.expect_bits(&sent, start(rank, tag)).context(what)?;
            ring.expect_bits(&received, start(previous, tag)).context(what)?;
        }
    }
    Ok(String::new())
}

/// A started message to oneself is what a receive from oneself waits for.
fn to_oneself(comm: &Comm) -> Outcome {
    let rank = comm.rank();
    for size in SIZES {
        let ring = Ring::<u32>::new(15);
        let send = comm.start_send(ring.window(rank, size), rank).map_err(text)?;
        let mut message = vec![0u32; size];
        comm.recv(&mut message, rank).map_err(text)?;
        ring.expect_bits(&message, rank).context(|| format!("{size} elements"))?;
        send.wait().map_err(text)?;
    }
    Ok(String::new())
}

/// `is_done` becomes true without a wait, and the result is there then.
fn is_done(comm: &Comm) -> Outcome {
    let ranks = comm.world_size();
    for size in SIZES {
        let mut request = comm.start_all_reduce(vec![1u32; size], ReduceOp::Sum).map_err(text)?;
        let since = std::time::Instant::now();
        while !request.is_done() {
            if since.elapsed() > std::time::Duration::from_secs(60) {
                return Err(format!("a request of {size} elements is not done after a minute of asking"));
            }
            std::thread::yield_now();
        }
        if request.wait().map_err(text)? != vec![ranks as u32; size] {
            return Err(format!("wrong sum of {size} elements"));
        }
    }
    Ok(String::new())
}

/// A request that nobody waits for neither dangles nor disturbs what follows.
fn dropped(comm: &Comm) -> Outcome {
    let ranks = comm.world_size();
    for size in SIZES {
        drop(comm.start_all_reduce(vec![1u32; size], ReduceOp::Sum).map_err(text)?);
        let mut sum = vec![1u32; size];
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).map_err(text)?;
        if sum != vec![ranks as u32; size] {
            return Err(format!("wrong sum of {size} elements after a dropped request"));
        }
    }
    Ok(String::new())
}

/// The record of a request that nobody waits for says that it has ended.
fn recorded(comm: &Comm) -> Outcome {
    drop(comm.start_all_reduce(vec![1u32; 70_001], ReduceOp::Max).map_err(text)?);
    comm.sync().map_err(text)?;
    let folder =
        std::env::temp_dir().join(format!("phalanx-recorded-{}-{}", std::process::id(), comm.rank()));
    let path = comm.write_flight_record(&folder).map_err(text)?;
    let record = std::fs::read_to_string(path).map_err(|error| error.to_string());
    let _ = std::fs::remove_dir_all(&folder);
    let expected = "\"operation\":\"all_reduce\",\"sequence\":1,\"state\":\"completed\",\"dtype\":\"u32\"";
    let record = record?;
    if record.contains(expected) { Ok(String::new()) } else { Err(format!("{expected} is not in {record}")) }
}

/// `sync` waits for messages as for collectives.
fn synced(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for size in SIZES {
        let mut recv = comm.start_recv(vec![0u32; size], previous).map_err(text)?;
        if rank == 0 {
            // Whatever comes from it comes late.
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut send = comm.start_send(vec![rank as u32; size], next).map_err(text)?;
        comm.sync().map_err(text)?;
        if !send.is_done() || !recv.is_done() {
            return Err(format!("rank {rank} has synchronised before its messages of {size} were complete"));
        }
        if recv.wait().map_err(text)? != vec![previous as u32; size] {
            return Err(format!("rank {rank} received something else"));
        }
        send.wait().map_err(text)?;
    }
    Ok(String::new())
}

/// A barrier does not wait for messages: what is received may be sent behind it.
fn behind_a_barrier(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for size in SIZES {
        let recv = comm.start_recv(vec![0u32; size], previous).map_err(text)?;
        comm.barrier().map_err(text)?;
        let send = comm.start_send(vec![rank as u32; size], next).map_err(text)?;
        if recv.wait().map_err(text)? != vec![previous as u32; size] {
            return Err(format!("rank {rank} received something else"));
        }
        send.wait().map_err(text)?;
    }
    Ok(String::new())
}

/// A barrier that was started is over when the last rank has come, and not before.
fn started_barrier(comm: &Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if matches!(comm.backend(), BackendKind::Nccl | BackendKind::Rccl) {
        // A message comes behind what was started before it.
        return comm.start_barrier().and_then(|barrier| barrier.wait()).map(|()| String::new()).map_err(text);
    }
    for round in 0..20 {
        let last = round % ranks;
        if rank == last {
            // Each of the others has seen that it is not over.
            for other in (0..ranks).filter(|other| *other != last) {
                comm.recv(&mut [0u8], other).map_err(text)?;
            }
            comm.start_barrier().map_err(text)?.wait().map_err(text)?;
            continue;
        }
        let mut barrier = comm.start_barrier().map_err(text)?;
        if barrier.is_done() {
            return Err(format!("rank {rank} is through, and rank {last} has not come"));
        }
        comm.send(&[1u8], last).map_err(text)?;
        barrier.wait().map_err(text)?;
    }
    Ok(String::new())
}

/// `finalize` waits for what was started.
fn finalized(comm: Comm) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let recv = comm.start_recv(vec![0u32; 300_000], previous).map_err(text)?;
    let send = comm.start_send(vec![rank as u32; 300_000], next).map_err(text)?;
    comm.finalize().map_err(text)?;
    send.wait().map_err(text)?;
    let received = recv.wait().map_err(text)?;
    if received == vec![previous as u32; 300_000] {
        Ok(String::new())
    } else {
        Err("something else came".into())
    }
}
