//! A collective: enqueued as the library's where possible, else carried out in pieces.

use super::join::CallProposal;
use super::pe::{ReductionMethod, ReductionQuery, TEAM_SCRATCH, TeamReduction, column};
use super::process::Half;
use super::staging::{ALIGNMENT, Combination, StagingPlan};
use super::team::TeamHandle;
use super::{NvshmemComm, device};
use crate::contract::{Backend, Blocks, Call, Operation};
use crate::os::sync::lock;
use crate::reduce::Reducer;
use crate::types::dtype::DType;
use crate::types::error::Result;
use crate::types::memory::{RawStream, Space};
use crate::types::op::ReductionCode;
use phalanx_sys::nvshmem::{Reduce, nvshmem_team_t};
use std::ffi::c_int;

impl NvshmemComm {
    /// Carries a collective out.
    ///
    /// # Safety
    /// The contract of `Backend::collective`.
    pub(crate) unsafe fn operate(&self, call: &Call<'_>) -> Result<()> {
        // The communicators of a process share the stage.
        let _operating = lock(&self.process.operating);
        let call = &Call { stream: self.stream_or_own(call.stream), ..*call };
        let places = self.places(call);
        let proposal = CallProposal { longest: self.longest(call), places, factor: call.reduction.factor };
        let proposals = self.join_call_with(call, proposal)?;
        // From here on the other ranks wait for this one, so every error is fatal.
        // SAFETY: the caller's contract.
        unsafe { self.carry_out(call, places, &proposals) }.map_err(|error| self.fail(error))
    }

    /// Carries the collective out, after the ranks have joined.
    ///
    /// # Safety
    /// As for [`operate`](NvshmemComm::operate).
    unsafe fn carry_out(&self, call: &Call<'_>, places: [u64; 2], proposals: &[CallProposal]) -> Result<()> {
        if call.operation == Operation::AllToAllV {
            // SAFETY: the caller's contract.
            unsafe { self.compare_counts(call) }?;
        }
        let longest = proposals.iter().map(|proposal| proposal.longest).max().unwrap_or(0) as usize;
        if longest == 0 {
            return Ok(());
        }
        self.process.order(call.stream)?;
        if let Some(TeamHandle { team, .. }) = self.team {
            let reduce = self.reduction(call, team)?;
            let is_symmetric = places != [0; 2] && proposals.iter().all(|proposal| proposal.places == places);
            // SAFETY: the caller's contract; the buffers are symmetric memory, at the same place on all PEs.
            if is_symmetric && unsafe { self.enqueue_collective(call, team, reduce) }? {
                return Ok(());
            }
            if let Some(reduce) = reduce {
                // SAFETY: the caller's contract.
                return unsafe { self.reduce_in_stage(call, longest, team, reduce) };
            }
        }
        let flow = StagingPlan::of(call, self.rank(), self.pes.len());
        let combination = call.operation.reduces().then(|| Combination {
            reducer: Reducer::new(call.dtype, call.reduction.code),
            factors: proposals.iter().map(|proposal| proposal.factor).collect(),
            size: call.dtype.size(),
        });
        // SAFETY: the caller's contract.
        unsafe { self.flow(call, &flow, longest, combination.as_ref()) }
    }

    /// The stream of a call; the communicator's for calls on host memory without one.
    pub(crate) fn stream_or_own(&self, stream: RawStream) -> RawStream {
        if stream == RawStream::NONE {
            RawStream(self.process.device.stream.cu_stream().cast())
        } else {
            stream
        }
    }

    fn longest(&self, call: &Call<'_>) -> u64 {
        (call.blocks.longest().max(call.recv_blocks.longest()) * call.dtype.size()) as u64
    }

    /// The places of the buffers, the same on every PE, if the library has the operation and both are
    /// symmetric memory; else 0.
    fn places(&self, call: &Call<'_>) -> [u64; 2] {
        use Operation::*;
        if call.spaces != [Space::Device; 2] || !matches!(call.blocks, Blocks::Equal(_)) {
            return [0; 2];
        }
        if !matches!(call.operation, AllReduce | Broadcast | AllGather | ReduceScatter | AllToAll) {
            return [0; 2];
        }
        // In place the library has reductions only.
        if call.operation != AllReduce && std::ptr::eq(call.send, call.recv) {
            return [0; 2];
        }
        let (flow, rank, ranks) = (call.flow(), self.rank(), self.pes.len());
        let places = [
            self.process.place(call.send, flow.send_len(rank, ranks)),
            self.process.place(call.recv, flow.recv_len(rank, ranks)),
        ];
        if places.contains(&0) { [0; 2] } else { places }
    }

    /// Enqueues the library's own collective; false if it has none.
    ///
    /// # Safety
    /// The buffers are symmetric memory, at the same place on all PEs, and all PEs are here with the same
    /// call.
    unsafe fn enqueue_collective(
        &self,
        call: &Call<'_>,
        team: nvshmem_team_t,
        reduce: Option<LibraryReduction>,
    ) -> Result<bool> {
        let library = self.process.library;
        let (dest, source, stream) = (call.recv.cast(), call.send.cast(), call.stream.0);
        let count = call.blocks.longest();
        let bytes = count * call.dtype.size();
        let is_done = match reduce {
            None => !call.operation.reduces(),
            Some(reduce) => {
                reduce.method == ReductionMethod::Direct
                    || reduce.scatters && self.pes.len() * bytes <= TEAM_SCRATCH
            }
        };
        if !is_done {
            return Ok(false);
        }
        self.sync_team(team, call.stream)?;
        let turn = self.process.enter()?;
        // SAFETY: the caller's contract; a team that exists.
        let (name, code) = unsafe {
            match call.operation {
                Operation::Broadcast => {
                    let name = "nvshmemx_broadcastmem_on_stream";
                    let f = library.need(library.nvshmemx_broadcastmem_on_stream, name)?;
                    (name, f(team, dest, source, bytes, call.root as c_int, stream))
                }
                Operation::AllGather => {
                    let name = "nvshmemx_fcollectmem_on_stream";
                    let f = library.need(library.nvshmemx_fcollectmem_on_stream, name)?;
                    (name, f(team, dest, source, bytes, stream))
                }
                Operation::AllToAll => {
                    let name = "nvshmemx_alltoallmem_on_stream";
                    let f = library.need(library.nvshmemx_alltoallmem_on_stream, name)?;
                    (name, f(team, dest, source, bytes, stream))
                }
                _ => {
                    let Some(reduce) = reduce else { return Ok(false) };
                    (reduce.name, (reduce.function)(team, dest, source, count, stream))
                }
            }
        };
        drop(turn);
        library.check(name, code)?;
        self.process.enqueued(call.stream);
        Ok(true)
    }

    /// Makes each stream wait for all PEs. A peer writes to this rank's memory when its own stream gets
    /// there, which may be while this stream still uses it.
    fn sync_team(&self, team: nvshmem_team_t, stream: RawStream) -> Result<()> {
        let (name, library) = ("nvshmemx_team_sync_on_stream", self.process.library);
        let sync = library.need(library.nvshmemx_team_sync_on_stream, name)?;
        let turn = self.process.enter()?;
        // SAFETY: initialised; a team that exists, all of whose PEs are here; a stream of the device.
        let code = unsafe { sync(team, stream.0) };
        drop(turn);
        library.check(name, code)
    }

    /// The library's function for a reduction, if it has one.
    fn reduction(&self, call: &Call<'_>, team: nvshmem_team_t) -> Result<Option<LibraryReduction>> {
        if !call.operation.reduces() {
            return Ok(None);
        }
        let op = match call.reduction.code {
            ReductionCode::Sum => TeamReduction::Sum,
            ReductionCode::Prod => TeamReduction::Prod,
            ReductionCode::Min => TeamReduction::Min,
            ReductionCode::Max => TeamReduction::Max,
            // The others run on the host.
            _ => return Ok(None),
        };
        let (library, dtype): (_, DType) = (self.process.library, call.dtype);
        let Some(column) = column(dtype) else { return Ok(None) };
        let scatters = matches!(call.operation, Operation::ReduceScatter | Operation::ReduceScatterV);
        let (function, name) = if scatters {
            (library.reduce_scatter(column, op as usize), "nvshmemx_TYPE_OP_reducescatter_on_stream")
        } else {
            (library.reduce(column, op as usize), "nvshmemx_TYPE_OP_reduce_on_stream")
        };
        let pes = self.pes.len();
        let has_limits = scatters || pes > 2 && std::ptr::eq(call.send, call.recv);
        let method = if has_limits {
            let _turn = self.process.enter()?;
            self.process.limits.method(library, ReductionQuery { team, pes, dtype, op, scatters })
        } else {
            ReductionMethod::Direct
        };
        let function = function.filter(|_| method != ReductionMethod::Unsupported);
        Ok(function.map(|function| LibraryReduction { function, name, scatters, method }))
    }

    /// A reduction by the library in the stage. On device memory enqueued; on host memory complete when it
    /// returns.
    ///
    /// # Safety
    /// The contract of `Backend::collective`; all PEs are here with the same call.
    unsafe fn reduce_in_stage(
        &self,
        call: &Call<'_>,
        longest: usize,
        team: nvshmem_team_t,
        reduce: LibraryReduction,
    ) -> Result<()> {
        let (rank, ranks, size) = (self.rank(), self.pes.len(), call.dtype.size());
        let (stream, process) = (call.stream, &self.process);
        let (piece, parts) = match (reduce.scatters, reduce.method) {
            (true, ReductionMethod::Direct) => (self.place_bytes(), ranks),
            (true, _) => {
                (self.place_bytes().min(TEAM_SCRATCH / ranks / ALIGNMENT * ALIGNMENT).max(ALIGNMENT), ranks)
            }
            (false, _) => (process.stage, 1),
        };
        let flow = call.flow();
        let wanted = flow.readers.includes(rank);
        for begin in (0..longest).step_by(piece) {
            let bytes = (longest - begin).min(piece);
            for part in 0..parts {
                let block = if reduce.scatters { part } else { rank };
                let len = flow.source(rank, block).len();
                let source = call.send.wrapping_add(flow.source_offset(part) + begin);
                // The tail of a shorter block holds old contents of the stage, whose result is not used.
                // SAFETY: the caller's contract; what the stage held was used on this stream, or before all
                // met.
                unsafe {
                    self.bring(
                        part * bytes,
                        source,
                        call.spaces[0],
                        len.saturating_sub(begin).min(bytes),
                        stream,
                    )
                }?;
            }
            let (dest, source) = (process.at(Half::Out, 0), process.at(Half::In, 0));
            self.sync_team(team, stream)?;
            let code = {
                let _turn = process.enter()?;
                // SAFETY: initialised; a team that exists; symmetric memory of so many elements.
                unsafe {
                    (reduce.function)(team, dest.cast(), source.cast_const().cast(), bytes / size, stream.0)
                }
            };
            process.library.check(reduce.name, code)?;
            process.enqueued(stream);
            let own = flow.target(rank, rank).len().saturating_sub(begin).min(bytes);
            let target = call.recv.wrapping_add(begin);
            if call.spaces[1] == Space::Device && wanted {
                // SAFETY: the caller's contract.
                unsafe { device::copy(target, dest, own, stream) }?;
            } else if wanted {
                let pinned = process.on_host(Half::Out, 0)?;
                // SAFETY: pinned memory mirrors the stage; the copy is complete when it is copied from.
                unsafe {
                    device::copy(pinned, dest, own, stream)?;
                    self.wait_for_stream(stream, &self.current_call())?;
                    std::ptr::copy_nonoverlapping(pinned, target, own);
                }
            }
            if call.spaces[0] == Space::Host {
                // The pinned mirror is refilled by the next step or operation.
                self.wait_for_stream(stream, &self.current_call())?;
            }
        }
        Ok(())
    }

    /// Checks that each rank sends as much in an all_to_all_v as the receiver expects.
    ///
    /// # Safety
    /// As for [`operate`](NvshmemComm::operate).
    unsafe fn compare_counts(&self, call: &Call<'_>) -> Result<()> {
        let (rank, ranks) = (self.rank(), self.pes.len());
        let own: Vec<u64> = (0..ranks).map(|to| call.blocks.len(to) as u64).collect();
        let mut all = vec![0u64; ranks * ranks];
        let blocks = Blocks::Equal(ranks);
        let exchange = Call {
            dtype: DType::U64,
            send: own.as_ptr().cast(),
            recv: all.as_mut_ptr().cast(),
            blocks,
            recv_blocks: blocks,
            ..Call::empty(Operation::AllGather)
        };
        // SAFETY: one thread at a time is in a collective; lists of so many words.
        self.on_host_channel(|channel| unsafe { channel.collective(&exchange) })?;
        let differs = |from: &usize| all[from * ranks + rank] != call.recv_blocks.len(*from) as u64;
        // All ranks report before any goes on.
        let wrong = (0..ranks).find(differs);
        let own_answer = [
            wrong.map_or(0, |from| from as u64 + 1),
            wrong.map_or(0, |from| call.recv_blocks.len(from) as u64),
        ];
        let mut answers = vec![[0u64; 2]; ranks];
        // SAFETY: as above.
        self.on_host_channel(|channel| unsafe {
            channel.all_gather_words(&own_answer, answers.as_flattened_mut())
        })?;
        match answers.iter().position(|answer| answer[0] != 0) {
            None => Ok(()),
            Some(to) => {
                let from = answers[to][0] as usize - 1;
                let (given, expected) = (all[from * ranks + to], answers[to][1]);
                Err(self.unequal(call.dtype, (from, given), (to, expected)))
            }
        }
    }
}

/// A reduction function of the library.
#[derive(Clone, Copy)]
struct LibraryReduction {
    function: Reduce,
    name: &'static str,
    scatters: bool,
    method: ReductionMethod,
}
