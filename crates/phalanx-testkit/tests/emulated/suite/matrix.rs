//! Every collective, type and reduction, on ranks as threads and as processes, in place and out of place.

use super::child::{Settings, emulated, succeeds};
use super::nccl::{expect, nccl, ok};
use super::world::{Rank, at, own_rank, shared_id, threads, unique_id};
use libtest_mimic::Trial;
use phalanx::{DType, ReduceOp};
use phalanx_testkit::number::Wide;
use phalanx_testkit::processes::Launch;
use phalanx_testkit::reference::{self, Combine};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::{Number, Scenario, random, with_number};

pub const SCENARIOS: &[Scenario] =
    &[Scenario::process("matrix/threads", thread_ranks), Scenario::process("matrix/processes", process_rank)];

/// NCCL's types in the order of their codes.
const TYPES: [DType; 12] = [
    DType::I8,
    DType::U8,
    DType::I32,
    DType::U32,
    DType::I64,
    DType::U64,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::Bf16,
    DType::F8E4M3,
    DType::F8E5M2,
];

const PROCESSES: Settings = &[];

pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for ranks in ["1", "2", "3", "4"] {
        trials.push(succeeds(
            &format!("matrix/threads/{ranks}"),
            &[],
            "matrix/threads",
            &[ranks, "blocking"],
        ));
    }
    trials.push(succeeds(
        "matrix/threads/3/in_progress",
        &[("IN_PROGRESS", "1")],
        "matrix/threads",
        &["3", "late"],
    ));
    for ranks in [2, 3] {
        trials.push(Trial::test(format!("matrix/processes/{ranks}"), move || {
            let emulated = emulated(PROCESSES)?;
            let folder = emulated.folder().display().to_string();
            let launch = Launch::new("matrix/processes", ranks).arg(folder);
            Ok(emulated.launch(launch).reports().map(drop)?)
        }));
    }
    trials
}

fn thread_ranks(args: &[String]) -> Outcome {
    let ranks: usize = args[0].parse().map_err(|_| "how many ranks?")?;
    let id = unique_id();
    threads(ranks, |rank| every_type(&Rank::begin(id, rank, ranks, args[1] == "blocking")?))?;
    Ok(String::new())
}

fn process_rank(args: &[String]) -> Outcome {
    let ranks: usize =
        std::env::var("PHALANX_WORLD_SIZE").map_err(|e| e.to_string())?.parse().map_err(|_| "ranks?")?;
    let id = shared_id(&args[0], "id", own_rank())?;
    every_type(&Rank::begin(id, own_rank(), ranks, true)?)?;
    Ok(String::new())
}

fn every_type(rank: &Rank) -> Result<(), String> {
    for (code, dtype) in TYPES.into_iter().enumerate() {
        for len in [1, 33] {
            let case = Case { rank, code: code as i32, len };
            with_number!(dtype, T => case.every_operation::<T>())
                .map_err(|error| format!("{dtype} × {len}: {error}"))?;
        }
    }
    rank.end()
}

/// Elements of a type that can be on a device, as bytes there.
struct Case<'a> {
    rank: &'a Rank,
    code: i32,
    len: usize,
}

/// The elements' bytes.
fn bytes<T: Number>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|value| value.bits().to_le_bytes().into_iter().take(size_of::<T>())).collect()
}

fn values<T: Number>(bytes: &[u8]) -> Vec<T> {
    let value = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        T::from_pattern(u64::from_le_bytes(word))
    };
    bytes.chunks_exact(size_of::<T>()).map(value).collect()
}

impl Case<'_> {
    /// All ranks' inputs: each rank knows them.
    fn inputs<T: Number>(&self, blocks: usize) -> Vec<Vec<T>> {
        let value = |rank: usize, n: usize| T::from_small((rank * 3 + n * 7) as i32 % 5 + 1);
        let of = |rank: usize| {
            let mut values: Vec<T> = random::values(rank as u64 * 1000 + self.len as u64, blocks * self.len);
            // Half of it small numbers, half of it anything.
            values.iter_mut().step_by(2).enumerate().for_each(|(n, place)| *place = value(rank, n));
            values
        };
        (0..self.rank.ranks).map(of).collect()
    }

    fn compare<T: Number>(&self, what: &str, result: &[T], expected: &[T]) -> Result<(), String> {
        let differs = (0..expected.len()).find(|n| !result[*n].same(expected[*n]));
        match differs {
            None if result.len() == expected.len() => Ok(()),
            differs => Err(format!("{what}: differs at {differs:?}: {result:?} and not {expected:?}")),
        }
    }

    /// Calls an operation out of place, and in place with the send buffer at a block of the receive buffer or
    /// the other way round.
    fn check<T: Number>(
        &self,
        what: &str,
        input: &[T],
        expected: &[T],
        in_place: Option<(usize, usize)>,
        call: impl Fn(u64, u64) -> i32,
    ) -> Result<(), String> {
        let rank = self.rank;
        let send = rank.upload(&bytes(input));
        let receive = rank.upload(&vec![0x5au8; size_of_val(expected).max(1)]);
        rank.done(what, call(at(&send), at(&receive)))?;
        if !expected.is_empty() {
            self.compare(what, &values::<T>(&rank.download(&receive)), expected)?;
        }
        self.compare(&format!("the input of {what}"), &values::<T>(&rank.download(&send)), input)?;
        let Some((send_block, receive_block)) = in_place else { return Ok(()) };
        let block = self.len * size_of::<T>();
        let all = (input.len().max(expected.len())) * size_of::<T>();
        let mut whole = vec![0u8; all];
        whole[send_block * block..][..size_of_val(input)].copy_from_slice(&bytes(input));
        let whole = rank.upload(&whole);
        rank.done(
            what,
            call(at(&whole) + (send_block * block) as u64, at(&whole) + (receive_block * block) as u64),
        )?;
        let result = rank.download(&whole);
        let result = &result[receive_block * block..][..size_of_val(expected)];
        self.compare(&format!("{what} in place"), &values::<T>(result), expected)
    }

    fn every_operation<T: Number>(&self) -> Result<(), String> {
        let Rank { rank, ranks, comm, .. } = *self.rank;
        let (n, code, stream) = (self.len, self.code, self.rank.queue());
        let root = ranks - 1;
        let counts = vec![n; ranks];
        let one = self.inputs::<T>(1);
        let many = self.inputs::<T>(ranks);
        // The block at which a buffer lies in the other one; only the root has more than one.
        let at_root = if rank == root { root } else { 0 };
        for combine in Combine::<T>::all(ranks) {
            let op = self.operator(&combine)?;
            let name = combine.name();
            if combine == Combine::Op(ReduceOp::Avg) && self.code < 6 {
                self.average_of_integers(&one)?;
                continue;
            }
            let expected = reference::all_reduce(&one, &combine);
            self.check(&format!("all_reduce {name}"), &one[rank], &expected[rank], Some((0, 0)), |s, r| {
                nccl().all_reduce(s, r, n, code, op, comm, stream)
            })?;
            let expected = reference::reduce(&one, &combine, root);
            self.check(&format!("reduce {name}"), &one[rank], &expected[rank], Some((0, 0)), |s, r| {
                nccl().reduce(s, r, n, code, op, root as i32, comm, stream)
            })?;
            let expected = reference::reduce_scatter(&many, &counts, &combine);
            self.check(
                &format!("reduce_scatter {name}"),
                &many[rank],
                &expected[rank],
                Some((0, rank)),
                |s, r| nccl().reduce_scatter(s, r, n, code, op, comm, stream),
            )?;
            if op >= 5 {
                ok("destroy of an operator", nccl().destroy_op(op, comm))?;
            }
        }
        let expected = reference::broadcast(&one, root);
        self.check("broadcast", &one[rank], &expected[rank], Some((0, 0)), |s, r| {
            nccl().broadcast(s, r, n, code, root as i32, comm, stream)
        })?;
        let expected = reference::all_gather(&one);
        self.check("all_gather", &one[rank], &expected[rank], Some((rank, 0)), |s, r| {
            nccl().all_gather(s, r, n, code, comm, stream)
        })?;
        let expected = reference::all_to_all(&many, &vec![counts.clone(); ranks]);
        self.check("all_to_all", &many[rank], &expected[rank], None, |s, r| {
            nccl().all_to_all(s, r, n, code, comm, stream)
        })?;
        let expected = reference::gather(&one, root);
        self.check("gather", &one[rank], &expected[rank], Some((at_root, 0)), |s, r| {
            nccl().gather(s, r, n, code, root as i32, comm, stream)
        })?;
        let expected = reference::scatter(&many, &counts, root);
        self.check("scatter", &many[rank], &expected[rank], Some((0, at_root)), |s, r| {
            nccl().scatter(s, r, n, code, root as i32, comm, stream)
        })?;
        self.ring::<T>(&one)
    }

    /// NCCL's sums of integers wrap before they are divided; the reference's do not.
    fn average_of_integers<T: Number>(&self, inputs: &[Vec<T>]) -> Result<(), String> {
        let Rank { rank, ranks, comm, .. } = *self.rank;
        let sum = reference::combined(inputs, &Combine::Op(ReduceOp::Sum));
        let expected: Vec<T> = sum.into_iter().map(|sum| T::narrow(sum.widen().divide(ranks))).collect();
        self.check("all_reduce avg", &inputs[rank], &expected, Some((0, 0)), |s, r| {
            nccl().all_reduce(s, r, self.len, self.code, 4, comm, self.rank.queue())
        })
    }

    /// To the next rank, from the previous one.
    fn ring<T: Number>(&self, inputs: &[Vec<T>]) -> Result<(), String> {
        let Rank { rank, ranks, comm, .. } = *self.rank;
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let send = self.rank.upload(&bytes(&inputs[rank]));
        let receive = self.rank.upload(&vec![0u8; self.len * size_of::<T>()]);
        ok("group start", nccl().group_start())?;
        let queue = self.rank.queue();
        ok("send", nccl().send(at(&send), self.len, self.code, next as i32, comm, queue))?;
        ok("recv", nccl().recv(at(&receive), self.len, self.code, previous as i32, comm, queue))?;
        self.rank.done("group end", nccl().group_end())?;
        self.compare("ring", &values::<T>(&self.rank.download(&receive)), &inputs[previous])
    }

    /// NCCL's number of a reduction.
    fn operator<T: Number>(&self, combine: &Combine<T>) -> Result<i32, String> {
        let comm = self.rank.comm;
        let factors = match combine {
            Combine::Op(ReduceOp::Sum) => return Ok(0),
            Combine::Op(ReduceOp::Prod) => return Ok(1),
            Combine::Op(ReduceOp::Max) => return Ok(2),
            Combine::Op(ReduceOp::Min) => return Ok(3),
            Combine::Op(ReduceOp::Avg) => return Ok(4),
            Combine::Op(other) => return Err(format!("NCCL has no {other}")),
            Combine::PreMulSum(factors) => factors,
        };
        let mut op = 0;
        let scalar = bytes(&factors[self.rank.rank..][..1]);
        let call = nccl().pre_mul_sum(&mut op, scalar.as_ptr() as u64, self.code, 1, comm);
        expect("pre-mul-sum", call, 0)?;
        Ok(op)
    }
}
