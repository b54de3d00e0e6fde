//! What every collective delivers: one plain function each, from all ranks' inputs to all ranks' outputs.
//!
//! `inputs[r]` is what rank r sends, the result's entry r what rank r receives. Nothing is shared with the
//! library: the accumulators are `f64`, `f32` and `i128`, the small floats come from [`crate::minifloat`].

use crate::gpus::ARE_OWN_KERNELS_FORCED;
use crate::number::{Number, Wide};
use crate::random::ANY_ORDER_IS_RIGHT;
use phalanx::{BackendKind, DType, ReduceOp};

/// How contributions are combined.
#[derive(Debug, Clone, PartialEq)]
pub enum Combine<T> {
    /// One of the operations without a parameter.
    Op(ReduceOp),
    /// The sum of each rank's contribution times its own factor.
    PreMulSum(Vec<T>),
}

impl<T: Number> Combine<T> {
    /// All of them; the factors are small and differ between ranks. Where any order has to be right (NCCL), a
    /// product must be exact, too: it is rounded to the type before it is added.
    pub fn all(ranks: usize) -> Vec<Combine<T>> {
        let factor = |rank: usize| if *ANY_ORDER_IS_RIGHT { 1 << (rank + 1) } else { rank as i32 + 2 };
        let factors = (0..ranks).map(|rank| T::from_small(factor(rank))).collect();
        let mut all: Vec<Combine<T>> = ReduceOp::ALL.into_iter().map(Combine::Op).collect();
        all.push(Combine::PreMulSum(factors));
        all
    }

    /// The argument that `rank` passes to the library.
    pub fn reduction(&self, rank: usize) -> phalanx::Reduction<T> {
        match self {
            Combine::Op(op) => (*op).into(),
            Combine::PreMulSum(factors) => phalanx::PreMulSum(factors[rank]).into(),
        }
    }

    /// Whether a backend has it, with this result: NCCL reduces no 16-bit integers, and its sums of integers
    /// wrap before an average divides them. Where phalanx's own kernels are forced, they do all of it.
    pub fn is_promised_by(&self, backend: BackendKind) -> bool {
        let is_float = !matches!(
            T::DTYPE,
            DType::I8
                | DType::I16
                | DType::I32
                | DType::I64
                | DType::U8
                | DType::U16
                | DType::U32
                | DType::U64
        );
        let is_average = matches!(self, Combine::Op(ReduceOp::Avg));
        backend != BackendKind::Nccl
            || *ARE_OWN_KERNELS_FORCED
            || is_float
            || !(is_average || size_of::<T>() == 2)
    }

    /// The operation's name.
    pub fn name(&self) -> &'static str {
        match self {
            Combine::Op(op) => op.name(),
            Combine::PreMulSum(_) => "pre-mul-sum",
        }
    }

    /// The ranks' contributions to one element, combined in rank order.
    fn fold(&self, contributions: impl Iterator<Item = T>) -> T {
        let mut ranks = 0;
        let mut sum: Option<T::Wide> = None;
        for (rank, contribution) in contributions.enumerate() {
            let mut next = contribution.widen();
            if let Combine::PreMulSum(factors) = self {
                next = next.mul(factors[rank].widen());
            }
            sum = Some(match sum {
                None => next,
                Some(sum) => match self {
                    Combine::Op(ReduceOp::Sum | ReduceOp::Avg) | Combine::PreMulSum(_) => sum.add(next),
                    Combine::Op(ReduceOp::Prod) => sum.mul(next),
                    Combine::Op(ReduceOp::Min) => sum.min(next),
                    Combine::Op(ReduceOp::Max) => sum.max(next),
                    Combine::Op(other) => panic!("there is no reference for {other}"),
                },
            });
            ranks += 1;
        }
        let sum = sum.expect("there is at least one rank");
        T::narrow(if *self == Combine::Op(ReduceOp::Avg) { sum.divide(ranks) } else { sum })
    }
}

/// Every element combined over the ranks.
pub fn combined<T: Number>(inputs: &[Vec<T>], combine: &Combine<T>) -> Vec<T> {
    (0..inputs[0].len()).map(|i| combine.fold(inputs.iter().map(|input| input[i]))).collect()
}

/// all_reduce: everyone has the combined elements.
pub fn all_reduce<T: Number>(inputs: &[Vec<T>], combine: &Combine<T>) -> Vec<Vec<T>> {
    vec![combined(inputs, combine); inputs.len()]
}

/// reduce: the root has them; the others receive nothing.
pub fn reduce<T: Number>(inputs: &[Vec<T>], combine: &Combine<T>, root: usize) -> Vec<Vec<T>> {
    at(root, inputs.len(), combined(inputs, combine))
}

/// scan: rank r has the combination of the ranks up to it.
pub fn scan<T: Number>(inputs: &[Vec<T>], combine: &Combine<T>) -> Vec<Vec<T>> {
    (1..=inputs.len()).map(|ranks| combined(&inputs[..ranks], combine)).collect()
}

/// exclusive_scan: rank r has the combination of the ranks before it, rank 0 what it held.
pub fn exclusive_scan<T: Number>(inputs: &[Vec<T>], combine: &Combine<T>, held: Vec<T>) -> Vec<Vec<T>> {
    let others = scan(&inputs[..inputs.len() - 1], combine);
    std::iter::once(held).chain(others).collect()
}

/// broadcast: everyone has what the root sent.
pub fn broadcast<T: Number>(inputs: &[Vec<T>], root: usize) -> Vec<Vec<T>> {
    vec![inputs[root].clone(); inputs.len()]
}

/// all_gather and all_gather_v: everyone has all contributions, in rank order.
pub fn all_gather<T: Number>(inputs: &[Vec<T>]) -> Vec<Vec<T>> {
    vec![inputs.concat(); inputs.len()]
}

/// gather and gather_v: the root has them.
pub fn gather<T: Number>(inputs: &[Vec<T>], root: usize) -> Vec<Vec<T>> {
    at(root, inputs.len(), inputs.concat())
}

/// scatter and scatter_v: rank r has the root's block r, which has `counts[r]` elements.
pub fn scatter<T: Number>(inputs: &[Vec<T>], counts: &[usize], root: usize) -> Vec<Vec<T>> {
    blocks(&inputs[root], counts)
}

/// reduce_scatter and reduce_scatter_v: rank r has block r of the combined elements.
pub fn reduce_scatter<T: Number>(inputs: &[Vec<T>], counts: &[usize], combine: &Combine<T>) -> Vec<Vec<T>> {
    blocks(&combined(inputs, combine), counts)
}

/// all_to_all and all_to_all_v: rank r has block r of every rank, in rank order; `counts[s][r]` elements
/// go from rank s to rank r.
pub fn all_to_all<T: Number>(inputs: &[Vec<T>], counts: &[Vec<usize>]) -> Vec<Vec<T>> {
    let sent: Vec<Vec<Vec<T>>> =
        inputs.iter().zip(counts).map(|(input, counts)| blocks(input, counts)).collect();
    (0..inputs.len()).map(|to| sent.iter().flat_map(|from| from[to].clone()).collect()).collect()
}

fn at<T: Number>(root: usize, ranks: usize, result: Vec<T>) -> Vec<Vec<T>> {
    let mut outputs = vec![Vec::new(); ranks];
    outputs[root] = result;
    outputs
}

fn blocks<T: Number>(whole: &[T], counts: &[usize]) -> Vec<Vec<T>> {
    assert_eq!(whole.len(), counts.iter().sum::<usize>(), "the blocks make up the buffer");
    let mut start = 0;
    counts
        .iter()
        .map(|count| {
            start += count;
            whole[start - count..start].to_vec()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx::{F8E4M3, bf16};

    fn one<T: Number>(op: ReduceOp, contributions: &[T]) -> T {
        Combine::Op(op).fold(contributions.iter().copied())
    }

    #[test]
    fn integers_wrap_and_averages_do_not() {
        assert_eq!(one(ReduceOp::Sum, &[i8::MAX, 1]), i8::MIN);
        assert_eq!(one(ReduceOp::Prod, &[u64::MAX, u64::MAX, u64::MAX]), u64::MAX);
        assert_eq!(one(ReduceOp::Avg, &[i64::MIN, i64::MIN]), i64::MIN);
        assert_eq!(one(ReduceOp::Avg, &[-3i32, 0]), -1);
    }

    #[test]
    fn floats_keep_rank_order_and_small_ones_round_once() {
        assert_eq!(one(ReduceOp::Sum, &[1.0f32, 1e8, -1e8]), 0.0);
        assert_eq!(one(ReduceOp::Sum, &[1e8f32, -1e8, 1.0]), 1.0);
        // 1 + 2^-8 + 2^-8 is a bf16 when it is rounded once, and 1 when every step is rounded.
        let small = bf16::from_f32(2f32.powi(-8));
        assert_eq!(one(ReduceOp::Sum, &[bf16::ONE, small, small]).to_f32(), 1.0078125);
        assert_eq!(one(ReduceOp::Sum, &[F8E4M3::from_bits(0x7e); 2]).to_bits(), 0x7e);
        assert!(one(ReduceOp::Min, &[f64::NAN, 1.0]).is_nan());
        assert!(one(ReduceOp::Max, &[1.0, f64::NAN]).is_nan());
    }

    #[test]
    fn blocks_go_where_they_belong() {
        let inputs = [vec![1u8, 2, 3], vec![4, 5, 6]];
        let counts = [vec![1, 2], vec![3, 0]];
        assert_eq!(all_to_all(&inputs, &counts), [vec![1, 4, 5, 6], vec![2, 3]]);
        assert_eq!(scatter(&inputs, &[0, 3], 1), [vec![], vec![4, 5, 6]]);
        assert_eq!(gather(&inputs, 1), [vec![], vec![1, 2, 3, 4, 5, 6]]);
    }
}
