//! Barriers and collectives of a team, on streams.

use super::completion::{awaited, complete, enqueue, queue};
use super::process::{Pe, nvshmem, with_own_gpu};
use crate::arithmetic::{Combine, Contribution, DataType, combine};
use crate::base::handles::Handle;
use crate::base::violation::violation;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The kind of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Broadcast { root: usize },
    Collect,
    AllToAll,
    Reduce,
    ReduceScatter,
}

type Combination = dyn Fn(&[Vec<u8>]) -> Vec<u8> + Send + Sync;

/// A reduction of bytes of several PEs.
struct Merge {
    combine: Arc<Combination>,
    /// Whether the library lets NCCL perform it, and not its own kernels.
    by_nccl: bool,
}

/// Scratch memory of the library's own kernels for a round of a reduction, in bytes.
const ROUND: usize = 32 << 10;
/// Scratch memory of the library's own kernels for the parts of a reduce_scatter, in bytes.
const PARTS: usize = 256 << 10;

/// The wrong result of the library's own kernels for a reduction in place that needs several rounds: in each
/// round a PE sends its partial result, and not its contribution.
fn in_rounds(merge: &Merge, me: usize, parts: Vec<Vec<u8>>) -> Vec<u8> {
    let n = parts.len();
    let mut held = parts;
    for distance in 1..n {
        let send = held.clone();
        for (pe, own) in held.iter_mut().enumerate() {
            *own = (merge.combine)(&[own.clone(), send[(pe + n - distance) % n].clone()]);
        }
    }
    held.swap_remove(me)
}

/// The arguments of a call: team, destination, source, bytes of a part, stream.
type Call = (c_int, u64, u64, usize, Handle);

/// Enqueues an operation of a team. One operation of a team is performed at a time.
fn enqueue_in_turn(
    function: &'static str,
    pe: &Arc<Pe>,
    team: c_int,
    stream: Handle,
    work: impl Fn() + Send + Sync + 'static,
) {
    // A graph may be launched never.
    let counted = usize::from(queue(function, pe, stream).capture().is_none());
    let own = Arc::clone(pe);
    pe.turns[team as usize].enqueued.fetch_add(counted, Ordering::AcqRel);
    enqueue(function, pe, stream, move || {
        own.turn(function, team, &work);
        own.turns[team as usize].enqueued.fetch_sub(counted, Ordering::AcqRel);
    });
}

fn collective(function: &'static str, kind: Kind, call: Call, merge: Option<Merge>) -> c_int {
    let (team, dest, source, bytes, stream) = call;
    with_own_gpu(function, |pe| {
        let of = pe.team(function, team);
        let n = of.members.len();
        if let Kind::Broadcast { root } = kind
            && root >= n
        {
            violation(function, format!("PE {root} of the team does not exist"));
        }
        let (from_len, to_len) = match kind {
            Kind::Broadcast { .. } | Kind::Reduce => (bytes, bytes),
            Kind::Collect => (bytes, bytes * n),
            Kind::AllToAll => (bytes * n, bytes * n),
            Kind::ReduceScatter => (bytes * n, bytes),
        };
        let to = pe.local(function, "the destination", dest, to_len);
        let from = pe.symmetric(function, "the source", source, from_len);
        let target = pe.symmetric(function, "the destination", dest, to_len);
        let code = match kind {
            Kind::Broadcast { root } => root as u64,
            Kind::Collect => 1 << 32,
            Kind::AllToAll => 2 << 32,
            Kind::Reduce => 3 << 32,
            Kind::ReduceScatter => 4 << 32,
        };
        let own = Arc::clone(pe);
        let by_kernel = merge.as_ref().is_some_and(|merge| !merge.by_nccl);
        if by_kernel && kind == Kind::ReduceScatter && bytes * n > PARTS {
            violation(function, format!("{n} parts of {bytes} bytes do not fit into the scratch memory"));
        }
        let is_wrong = by_kernel && kind == Kind::Reduce && from == target && bytes * (n - 1) > ROUND;
        enqueue_in_turn(function, pe, team, stream, move || {
            let mine: [u64; 14] =
                std::array::from_fn(|n| [code, from, target, bytes as u64].get(n).copied().unwrap_or(0));
            let all = own.world.exchange(team as usize, own.pe, &of.members, mine);
            if let Some(other) = all.iter().find(|words| **words != mine) {
                violation(
                    function,
                    format!("the PEs pass different arguments: {:?} and {:?}", &mine[..4], &other[..4]),
                );
            }
            let me = of.members.iter().position(|member| *member == own.pe).unwrap_or(0);
            let read = |member: usize, part: usize| {
                let offset = from + (part * bytes) as u64;
                own.remote(function, "the source", offset, bytes, of.members[member]).read()
            };
            let parts: Vec<Vec<u8>> = match kind {
                Kind::Broadcast { root } => vec![read(root, 0)],
                Kind::Collect | Kind::Reduce => (0..n).map(|member| read(member, 0)).collect(),
                Kind::AllToAll | Kind::ReduceScatter => (0..n).map(|member| read(member, me)).collect(),
            };
            let result = match &merge {
                Some(merge) if is_wrong => in_rounds(merge, me, parts),
                Some(merge) => (merge.combine)(&parts),
                None => parts.concat(),
            };
            // All PEs read before one writes: source and destination may be the same.
            own.world.barrier(team as usize, own.pe, &of.members);
            if !result.is_empty() {
                to.write(&result);
            }
            own.world.barrier(team as usize, own.pe, &of.members);
        });
        0
    })
}

fn barrier(function: &'static str, team: c_int, stream: Handle, completes: bool) -> c_int {
    with_own_gpu(function, |pe: &Arc<Pe>| {
        let of = pe.team(function, team);
        let (own, awaited) = (Arc::clone(pe), awaited(pe));
        enqueue_in_turn(function, pe, team, stream, move || {
            if completes {
                complete(&own, &awaited);
            }
            own.world.barrier(team as usize, own.pe, &of.members);
        });
        0
    })
}

nvshmem! {
    fn nvshmemx_barrier_on_stream(team: c_int, stream: Handle) -> c_int {
        barrier(FUNCTION, team, stream, true)
    }

    fn nvshmemx_barrier_all_on_stream(stream: Handle) {
        barrier(FUNCTION, 0, stream, true);
    }

    fn nvshmemx_team_sync_on_stream(team: c_int, stream: Handle) -> c_int {
        barrier(FUNCTION, team, stream, false)
    }

    fn nvshmemx_sync_all_on_stream(stream: Handle) {
        barrier(FUNCTION, 0, stream, false);
    }

    fn nvshmemx_broadcastmem_on_stream(
        team: c_int, dest: u64, source: u64, bytes: usize, root: c_int, stream: Handle,
    ) -> c_int {
        collective(FUNCTION, Kind::Broadcast { root: root as usize }, (team, dest, source, bytes, stream), None)
    }

    fn nvshmemx_fcollectmem_on_stream(team: c_int, dest: u64, source: u64, bytes: usize, stream: Handle) -> c_int {
        collective(FUNCTION, Kind::Collect, (team, dest, source, bytes, stream), None)
    }

    fn nvshmemx_alltoallmem_on_stream(team: c_int, dest: u64, source: u64, bytes: usize, stream: Handle) -> c_int {
        collective(FUNCTION, Kind::AllToAll, (team, dest, source, bytes, stream), None)
    }
}

/// A reduction in the order of the PEs.
fn arithmetic(dtype: DataType, how: Combine) -> Merge {
    let combine = move |parts: &[Vec<u8>]| {
        let contributions: Vec<_> =
            parts.iter().map(|bytes| Contribution { bytes, factor: [0; 8] }).collect();
        combine(dtype, how, &contributions)
    };
    Merge { combine: Arc::new(combine), by_nccl: true }
}

fn integers16(how: Combine, signed: bool) -> Merge {
    let combine = move |parts: &[Vec<u8>]| {
        // 64 bits hold every element, and the low 16 bits of a sum or product are those of 16-bit arithmetic.
        let widen = |bytes: &[u8]| {
            let bits = u16::from_ne_bytes([bytes[0], bytes[1]]);
            if signed { i64::from(bits as i16) } else { i64::from(bits) }
        };
        let wide: Vec<Vec<u8>> = parts
            .iter()
            .map(|part| part.chunks_exact(2).flat_map(|bytes| widen(bytes).to_ne_bytes()).collect())
            .collect();
        let result = (arithmetic(DataType::I64, how).combine)(&wide);
        let narrow = |bytes: &[u8]| i64::from_ne_bytes(bytes.try_into().expect("8 bytes")) as u16;
        result.chunks_exact(8).flat_map(|bytes| narrow(bytes).to_ne_bytes()).collect()
    };
    Merge { combine: Arc::new(combine), by_nccl: false }
}

fn bits(how: fn(u8, u8) -> u8) -> Merge {
    let combine = move |parts: &[Vec<u8>]| {
        let mut result = parts[0].clone();
        for part in &parts[1..] {
            result.iter_mut().zip(part).for_each(|(bits, other)| *bits = how(*bits, *other));
        }
        result
    };
    Merge { combine: Arc::new(combine), by_nccl: false }
}

macro_rules! reductions {
    ($($size:literal, $merge:expr, $reduce:ident, $scatter:ident;)*) => { nvshmem! { $(
        fn $reduce(team: c_int, dest: u64, source: u64, count: usize, stream: Handle) -> c_int {
            collective(FUNCTION, Kind::Reduce, (team, dest, source, count * $size, stream), Some($merge))
        }

        fn $scatter(team: c_int, dest: u64, source: u64, count: usize, stream: Handle) -> c_int {
            collective(FUNCTION, Kind::ReduceScatter, (team, dest, source, count * $size, stream), Some($merge))
        }
    )* } };
}

reductions! {
    4, arithmetic(DataType::F32, Combine::Sum), nvshmemx_float_sum_reduce_on_stream, nvshmemx_float_sum_reducescatter_on_stream;
    4, arithmetic(DataType::F32, Combine::Prod), nvshmemx_float_prod_reduce_on_stream, nvshmemx_float_prod_reducescatter_on_stream;
    4, arithmetic(DataType::F32, Combine::Min), nvshmemx_float_min_reduce_on_stream, nvshmemx_float_min_reducescatter_on_stream;
    4, arithmetic(DataType::F32, Combine::Max), nvshmemx_float_max_reduce_on_stream, nvshmemx_float_max_reducescatter_on_stream;
    8, arithmetic(DataType::F64, Combine::Sum), nvshmemx_double_sum_reduce_on_stream, nvshmemx_double_sum_reducescatter_on_stream;
    8, arithmetic(DataType::F64, Combine::Prod), nvshmemx_double_prod_reduce_on_stream, nvshmemx_double_prod_reducescatter_on_stream;
    8, arithmetic(DataType::F64, Combine::Min), nvshmemx_double_min_reduce_on_stream, nvshmemx_double_min_reducescatter_on_stream;
    8, arithmetic(DataType::F64, Combine::Max), nvshmemx_double_max_reduce_on_stream, nvshmemx_double_max_reducescatter_on_stream;
    2, arithmetic(DataType::F16, Combine::Sum), nvshmemx_half_sum_reduce_on_stream, nvshmemx_half_sum_reducescatter_on_stream;
    2, arithmetic(DataType::F16, Combine::Prod), nvshmemx_half_prod_reduce_on_stream, nvshmemx_half_prod_reducescatter_on_stream;
    2, arithmetic(DataType::F16, Combine::Min), nvshmemx_half_min_reduce_on_stream, nvshmemx_half_min_reducescatter_on_stream;
    2, arithmetic(DataType::F16, Combine::Max), nvshmemx_half_max_reduce_on_stream, nvshmemx_half_max_reducescatter_on_stream;
    2, arithmetic(DataType::Bf16, Combine::Sum), nvshmemx_bfloat16_sum_reduce_on_stream, nvshmemx_bfloat16_sum_reducescatter_on_stream;
    2, arithmetic(DataType::Bf16, Combine::Prod), nvshmemx_bfloat16_prod_reduce_on_stream, nvshmemx_bfloat16_prod_reducescatter_on_stream;
    2, arithmetic(DataType::Bf16, Combine::Min), nvshmemx_bfloat16_min_reduce_on_stream, nvshmemx_bfloat16_min_reducescatter_on_stream;
    2, arithmetic(DataType::Bf16, Combine::Max), nvshmemx_bfloat16_max_reduce_on_stream, nvshmemx_bfloat16_max_reducescatter_on_stream;
    1, arithmetic(DataType::I8, Combine::Sum), nvshmemx_int8_sum_reduce_on_stream, nvshmemx_int8_sum_reducescatter_on_stream;
    1, arithmetic(DataType::I8, Combine::Prod), nvshmemx_int8_prod_reduce_on_stream, nvshmemx_int8_prod_reducescatter_on_stream;
    1, arithmetic(DataType::I8, Combine::Min), nvshmemx_int8_min_reduce_on_stream, nvshmemx_int8_min_reducescatter_on_stream;
    1, arithmetic(DataType::I8, Combine::Max), nvshmemx_int8_max_reduce_on_stream, nvshmemx_int8_max_reducescatter_on_stream;
    1, bits(|a, b| a & b), nvshmemx_int8_and_reduce_on_stream, nvshmemx_int8_and_reducescatter_on_stream;
    1, bits(|a, b| a | b), nvshmemx_int8_or_reduce_on_stream, nvshmemx_int8_or_reducescatter_on_stream;
    1, bits(|a, b| a ^ b), nvshmemx_int8_xor_reduce_on_stream, nvshmemx_int8_xor_reducescatter_on_stream;
    1, arithmetic(DataType::U8, Combine::Sum), nvshmemx_uint8_sum_reduce_on_stream, nvshmemx_uint8_sum_reducescatter_on_stream;
    1, arithmetic(DataType::U8, Combine::Prod), nvshmemx_uint8_prod_reduce_on_stream, nvshmemx_uint8_prod_reducescatter_on_stream;
    1, arithmetic(DataType::U8, Combine::Min), nvshmemx_uint8_min_reduce_on_stream, nvshmemx_uint8_min_reducescatter_on_stream;
    1, arithmetic(DataType::U8, Combine::Max), nvshmemx_uint8_max_reduce_on_stream, nvshmemx_uint8_max_reducescatter_on_stream;
    1, bits(|a, b| a & b), nvshmemx_uint8_and_reduce_on_stream, nvshmemx_uint8_and_reducescatter_on_stream;
    1, bits(|a, b| a | b), nvshmemx_uint8_or_reduce_on_stream, nvshmemx_uint8_or_reducescatter_on_stream;
    1, bits(|a, b| a ^ b), nvshmemx_uint8_xor_reduce_on_stream, nvshmemx_uint8_xor_reducescatter_on_stream;
    2, integers16(Combine::Sum, true), nvshmemx_int16_sum_reduce_on_stream, nvshmemx_int16_sum_reducescatter_on_stream;
    2, integers16(Combine::Prod, true), nvshmemx_int16_prod_reduce_on_stream, nvshmemx_int16_prod_reducescatter_on_stream;
    2, integers16(Combine::Min, true), nvshmemx_int16_min_reduce_on_stream, nvshmemx_int16_min_reducescatter_on_stream;
    2, integers16(Combine::Max, true), nvshmemx_int16_max_reduce_on_stream, nvshmemx_int16_max_reducescatter_on_stream;
    2, bits(|a, b| a & b), nvshmemx_int16_and_reduce_on_stream, nvshmemx_int16_and_reducescatter_on_stream;
    2, bits(|a, b| a | b), nvshmemx_int16_or_reduce_on_stream, nvshmemx_int16_or_reducescatter_on_stream;
    2, bits(|a, b| a ^ b), nvshmemx_int16_xor_reduce_on_stream, nvshmemx_int16_xor_reducescatter_on_stream;
    2, integers16(Combine::Sum, false), nvshmemx_uint16_sum_reduce_on_stream, nvshmemx_uint16_sum_reducescatter_on_stream;
    2, integers16(Combine::Prod, false), nvshmemx_uint16_prod_reduce_on_stream, nvshmemx_uint16_prod_reducescatter_on_stream;
    2, integers16(Combine::Min, false), nvshmemx_uint16_min_reduce_on_stream, nvshmemx_uint16_min_reducescatter_on_stream;
    2, integers16(Combine::Max, false), nvshmemx_uint16_max_reduce_on_stream, nvshmemx_uint16_max_reducescatter_on_stream;
    2, bits(|a, b| a & b), nvshmemx_uint16_and_reduce_on_stream, nvshmemx_uint16_and_reducescatter_on_stream;
    2, bits(|a, b| a | b), nvshmemx_uint16_or_reduce_on_stream, nvshmemx_uint16_or_reducescatter_on_stream;
    2, bits(|a, b| a ^ b), nvshmemx_uint16_xor_reduce_on_stream, nvshmemx_uint16_xor_reducescatter_on_stream;
    4, arithmetic(DataType::I32, Combine::Sum), nvshmemx_int32_sum_reduce_on_stream, nvshmemx_int32_sum_reducescatter_on_stream;
    4, arithmetic(DataType::I32, Combine::Prod), nvshmemx_int32_prod_reduce_on_stream, nvshmemx_int32_prod_reducescatter_on_stream;
    4, arithmetic(DataType::I32, Combine::Min), nvshmemx_int32_min_reduce_on_stream, nvshmemx_int32_min_reducescatter_on_stream;
    4, arithmetic(DataType::I32, Combine::Max), nvshmemx_int32_max_reduce_on_stream, nvshmemx_int32_max_reducescatter_on_stream;
    4, bits(|a, b| a & b), nvshmemx_int32_and_reduce_on_stream, nvshmemx_int32_and_reducescatter_on_stream;
    4, bits(|a, b| a | b), nvshmemx_int32_or_reduce_on_stream, nvshmemx_int32_or_reducescatter_on_stream;
    4, bits(|a, b| a ^ b), nvshmemx_int32_xor_reduce_on_stream, nvshmemx_int32_xor_reducescatter_on_stream;
    4, arithmetic(DataType::U32, Combine::Sum), nvshmemx_uint32_sum_reduce_on_stream, nvshmemx_uint32_sum_reducescatter_on_stream;
    4, arithmetic(DataType::U32, Combine::Prod), nvshmemx_uint32_prod_reduce_on_stream, nvshmemx_uint32_prod_reducescatter_on_stream;
    4, arithmetic(DataType::U32, Combine::Min), nvshmemx_uint32_min_reduce_on_stream, nvshmemx_uint32_min_reducescatter_on_stream;
    4, arithmetic(DataType::U32, Combine::Max), nvshmemx_uint32_max_reduce_on_stream, nvshmemx_uint32_max_reducescatter_on_stream;
    4, bits(|a, b| a & b), nvshmemx_uint32_and_reduce_on_stream, nvshmemx_uint32_and_reducescatter_on_stream;
    4, bits(|a, b| a | b), nvshmemx_uint32_or_reduce_on_stream, nvshmemx_uint32_or_reducescatter_on_stream;
    4, bits(|a, b| a ^ b), nvshmemx_uint32_xor_reduce_on_stream, nvshmemx_uint32_xor_reducescatter_on_stream;
    8, arithmetic(DataType::I64, Combine::Sum), nvshmemx_int64_sum_reduce_on_stream, nvshmemx_int64_sum_reducescatter_on_stream;
    8, arithmetic(DataType::I64, Combine::Prod), nvshmemx_int64_prod_reduce_on_stream, nvshmemx_int64_prod_reducescatter_on_stream;
    8, arithmetic(DataType::I64, Combine::Min), nvshmemx_int64_min_reduce_on_stream, nvshmemx_int64_min_reducescatter_on_stream;
    8, arithmetic(DataType::I64, Combine::Max), nvshmemx_int64_max_reduce_on_stream, nvshmemx_int64_max_reducescatter_on_stream;
    8, bits(|a, b| a & b), nvshmemx_int64_and_reduce_on_stream, nvshmemx_int64_and_reducescatter_on_stream;
    8, bits(|a, b| a | b), nvshmemx_int64_or_reduce_on_stream, nvshmemx_int64_or_reducescatter_on_stream;
    8, bits(|a, b| a ^ b), nvshmemx_int64_xor_reduce_on_stream, nvshmemx_int64_xor_reducescatter_on_stream;
    8, arithmetic(DataType::U64, Combine::Sum), nvshmemx_uint64_sum_reduce_on_stream, nvshmemx_uint64_sum_reducescatter_on_stream;
    8, arithmetic(DataType::U64, Combine::Prod), nvshmemx_uint64_prod_reduce_on_stream, nvshmemx_uint64_prod_reducescatter_on_stream;
    8, arithmetic(DataType::U64, Combine::Min), nvshmemx_uint64_min_reduce_on_stream, nvshmemx_uint64_min_reducescatter_on_stream;
    8, arithmetic(DataType::U64, Combine::Max), nvshmemx_uint64_max_reduce_on_stream, nvshmemx_uint64_max_reducescatter_on_stream;
    8, bits(|a, b| a & b), nvshmemx_uint64_and_reduce_on_stream, nvshmemx_uint64_and_reducescatter_on_stream;
    8, bits(|a, b| a | b), nvshmemx_uint64_or_reduce_on_stream, nvshmemx_uint64_or_reducescatter_on_stream;
    8, bits(|a, b| a ^ b), nvshmemx_uint64_xor_reduce_on_stream, nvshmemx_uint64_xor_reducescatter_on_stream;
}
