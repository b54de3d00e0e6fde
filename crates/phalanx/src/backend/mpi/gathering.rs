//! Scans, and reductions by closures, which MPI would not combine in rank order, or not at all: the contributions are gathered in
//! pieces, and each rank that gets a result combines them.

use crate::contract::{Blocks, Call, Operation, Who};
use crate::reduce::{Reducer, Targets};
use crate::types::error::Result;
use crate::types::op::ReductionCode;

/// Bytes of a piece, of each rank. A piece is at least an element.
const PIECE: usize = 256 << 10;

/// Carries a reduction out by gathering. `gather` carries out a gather or all_gather of bytes.
///
/// # Safety
/// The call was checked, and its memory is valid as its table says; `gather` writes the blocks of its call.
pub(crate) unsafe fn by_gathering(
    call: &Call<'_>,
    rank: usize,
    ranks: usize,
    gather: impl Fn(&Call<'_>) -> Result<()>,
) -> Result<()> {
    let (flow, size) = (call.flow(), call.dtype.size());
    let longest = (PIECE / size).max(1);
    let mut gathered = vec![0u128; (longest.min(call.blocks.longest()) * size * ranks).div_ceil(16)];
    let all = gathered.as_mut_ptr().cast::<u8>();
    let mut factors = Vec::new();
    if call.reduction.code == ReductionCode::PreMulSum {
        factors = vec![0u64; ranks];
        let (send, recv) = ((&raw const call.reduction.factor).cast(), factors.as_mut_ptr().cast());
        let bytes = Blocks::Equal(8);
        gather(&Call { send, recv, blocks: bytes, recv_blocks: bytes, ..Call::empty(Operation::AllGather) })?;
    }
    // A block for each rank, or one for all.
    let blocks = if flow.scattered { 0..ranks } else { 0..1 };
    for block in blocks {
        let reader = if flow.scattered { Who::Only(block) } else { flow.readers };
        let (operation, root) = match reader {
            Who::All => (Operation::AllGather, 0),
            Who::Only(root) => (Operation::Gather, root),
        };
        let (count, start) = (call.blocks.len(block), call.send.wrapping_add(flow.source_offset(block)));
        for done in (0..count).step_by(longest) {
            let len = (count - done).min(longest);
            let bytes = Blocks::Equal(len * size);
            let (send, recv) = (start.wrapping_add(done * size), all);
            gather(&Call { root, send, recv, blocks: bytes, recv_blocks: bytes, ..Call::empty(operation) })?;
            let combined = flow.combined(rank, ranks);
            if !reader.includes(rank) || combined.is_empty() {
                continue;
            }
            let sources: Vec<*const u8> =
                combined.map(|writer| all.wrapping_add(writer * len * size).cast_const()).collect();
            let target = call.recv.wrapping_add(done * size);
            // SAFETY: each source has a piece, and the piece of the result lies in `recv`, apart from them.
            unsafe { Reducer::of(call).run(Targets::new(&[target], false), &sources, &factors, len) };
        }
    }
    Ok(())
}
