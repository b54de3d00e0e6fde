//! [`Experts`]: tokens of a mixture of experts to the ranks of their experts, and back, without the host.

use super::nccl_comm::Nccl;
use super::surface::Surface;
use crate::api::comm::Comm;
use crate::backend::nccl::check_on_device;
use crate::backend::nccl::direct::{ExpertScratch, ExpertShape, ExpertTask};
use crate::buffer::loan::Loan;
use crate::buffer::{Source, Target};
use crate::contract::{Blocks, Call, Operation};
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError, UsageError};
use crate::types::memory::Space;
use cudarc::driver::CudaStream;
use half::bf16;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

/// Most experts of all ranks together.
const MOST_EXPERTS: usize = 1024;
/// Most experts of a token: a warp's threads have one each.
const MOST_CHOICES: usize = 32;
/// Most tokens of a rank, and values of a token.
const MOST_TOKENS: usize = 65_535;
const MOST_VALUES: usize = 65_536;

/// Sizes of a layer of experts, the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExpertLayout {
    /// Experts of all ranks together, a multiple of the number of ranks and at most 1,024. The first rank has the first ones.
    pub experts: usize,
    /// Most tokens that a rank dispatches in a call, 1 to 65,535.
    pub max_tokens: usize,
    /// Experts of each token, 1 to 32.
    pub top_k: usize,
    /// Values of a token, 1 to 65,536.
    pub hidden: usize,
    /// Type of the values that are dispatched: `DType::Bf16`, `DType::F8E4M3` or `DType::F8E5M2`. Combined are bf16.
    pub dtype: DType,
    /// Scales that travel with each token to its experts, each an `f32`: 1, or one for every 128 values, or 0.
    pub scales: usize,
}

impl ExpertLayout {
    fn check(&self, ranks: usize) -> Result<()> {
        let within = |name: &str, value: usize, most: usize| match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(wrong(name, value, format!("1 to {most}"))),
        };
        within("experts", self.experts, MOST_EXPERTS)?;
        within("max_tokens", self.max_tokens, MOST_TOKENS)?;
        within("top_k", self.top_k, MOST_CHOICES)?;
        within("hidden", self.hidden, MOST_VALUES)?;
        if !self.experts.is_multiple_of(ranks) {
            return Err(wrong("experts", self.experts, format!("a multiple of the {ranks} ranks")));
        }
        if self.scales > self.hidden {
            return Err(wrong("scales", self.scales, format!("at most hidden, {}", self.hidden)));
        }
        match self.dtype {
            DType::Bf16 | DType::F8E4M3 | DType::F8E5M2 => Ok(()),
            other => Err(wrong("dtype", other, "bf16, f8e4m3 or f8e5m2".into())),
        }
    }

    fn shape(&self, ranks: usize) -> ExpertShape {
        ExpertShape {
            experts: self.experts / ranks,
            max_tokens: self.max_tokens,
            top_k: self.top_k,
            hidden: self.hidden,
            value: self.dtype.size(),
            scales: self.scales,
        }
    }

    /// What stands for it in the ranks' announcements.
    fn tag(&self) -> usize {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish() as u32 as usize
    }
}

fn wrong(field: &str, value: impl ToString, expected: String) -> Error {
    UsageError::Setting { name: format!("ExpertLayout::{field}"), value: value.to_string(), expected }.into()
}

/// Dispatch and combine of a layer of experts, by phalanx's own kernels: made by [`Nccl::experts`].
///
/// Expert `e` of `experts` is on rank `e / (experts / ranks)`. A rank's experts get their tokens in rows: expert after expert, for each room for
/// `ranks × max_tokens` rows, of which the first `counts[expert]` are filled, in the order of the ranks and there of the tokens. What is behind
/// them stays as it was.
///
/// Nothing waits on the host, and counts and routing stay on the GPU, so a layer can be captured in a CUDA graph: replays follow what the
/// routing is then. Results are the same bits in every run.
///
/// One dispatch and then its combine, in turns; all ranks alike. What overlaps uses an `Experts` each.
pub struct Experts<'c> {
    front: &'c Comm,
    surface: Surface<'c>,
    layout: ExpertLayout,
    scratch: ExpertScratch,
    number: u32,
    /// Tokens of the dispatch that has not been combined yet.
    dispatched: Option<usize>,
}

impl<'a> Nccl<'a> {
    /// Makes dispatch and combine for layers of experts of this layout. Collective.
    ///
    /// It takes scratch on each GPU ([`scratch_bytes`](Experts::scratch_bytes)): for each peer two slots for each of `max_tokens` tokens, and
    /// one for each of a rank's own choices. [`free`](Experts::free) gives that back; a dropped one's goes with the communicator.
    ///
    /// ```no_run
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::{DType, bf16, nccl::ExpertLayout};
    /// # let comm = phalanx::init()?;
    /// let layout =
    ///     ExpertLayout { experts: 64, max_tokens: 128, top_k: 8, hidden: 4096, dtype: DType::Bf16, scales: 0 };
    /// let mut experts = comm.nccl().expect("NCCL").experts(&layout)?;
    /// let stream = comm.cuda_stream()?.clone();
    /// let tokens = stream.alloc_zeros::<bf16>(16 * 4096)?; // 16 tokens, from the layers before
    /// let routing = stream.alloc_zeros::<i32>(16 * 8)?; // and what their router chose
    /// let weights = stream.alloc_zeros::<f32>(16 * 8)?;
    /// let mut rows = stream.alloc_zeros::<bf16>(experts.rows() * 4096)?;
    /// let mut counts = stream.alloc_zeros::<i32>(experts.local().len())?;
    /// let mut output = stream.alloc_zeros::<bf16>(16 * 4096)?;
    /// experts.dispatch(&stream, &tokens, &routing, &mut rows, &mut counts)?;
    /// // … the experts' kernels, on the first counts[expert] rows of each …
    /// experts.combine(&stream, &rows, &weights, &mut output)?;
    /// comm.sync()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`UsageError::Setting`](crate::UsageError) for a layout that cannot be, before anything is done.
    /// [`Error::Unsupported`](crate::Error) on every rank, where own kernels cannot run: between hosts, for one rank, for GPUs that do not reach
    /// each other's memory, with `PHALANX_GPU_ALGORITHM=nccl`; use [`all_to_all_v`](Comm::all_to_all_v) there.
    /// [`MismatchError`](crate::MismatchError) if the ranks' layouts differ.
    pub fn experts(&self, layout: &ExpertLayout) -> Result<Experts<'a>> {
        let (comm, front) = (self.comm, self.front);
        let ranks = front.world_size();
        layout.check(ranks)?;
        let Some(direct) = comm.communicator.direct.get() else {
            return Err(refused(
                "own GPU kernels cannot run between these ranks (the log at level debug says why)",
            ));
        };
        let call = Call { root: layout.tag(), ..Call::empty(Operation::Experts) };
        self.gather(&call)?;
        // SAFETY: one thread at a time makes collective calls.
        let scratch = unsafe { comm.make_experts(direct, layout.shape(ranks)) }?;
        let scratch = scratch.map_err(|reason| refused(&reason.to_string()))?;
        let number = front.next_memory();
        Ok(Experts { front, surface: **self, layout: *layout, scratch, number, dispatched: None })
    }
}

fn refused(why: &str) -> Error {
    UnsupportedError {
        what: "dispatch and combine of experts".into(),
        why: why.into(),
        remedy: "use all_to_all_v, as phalanx_train::expert does".into(),
    }
    .into()
}

/// A buffer's length, and what it must be.
type Length = (&'static str, usize, usize, &'static str);

impl Experts<'_> {
    /// The sizes that it was made for.
    pub fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    /// The experts of this rank.
    pub fn local(&self) -> Range<usize> {
        let each = self.layout.experts / self.front.world_size();
        let first = self.front.rank() * each;
        first..first + each
    }

    /// Rows of all this rank's experts, filled or not: `experts / ranks × ranks × max_tokens`.
    pub fn rows(&self) -> usize {
        self.layout.experts * self.layout.max_tokens
    }

    /// Bytes of GPU memory that it takes on each rank.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.bytes
    }

    /// Enqueues the way of the tokens to their experts, on a stream. Collective.
    ///
    /// - `tokens`: `[n, hidden]`, for any n up to `max_tokens`, which may differ between the ranks; 0 is possible.
    /// - `routing`: `[n, top_k]`, numbers of experts as `i32` or `i64`. A number that is no expert's, such as -1, counts as not routed.
    ///   A token that names an expert twice is one row there.
    /// - `rows`: `[experts / ranks, ranks × max_tokens, hidden]`, what this rank's experts get.
    /// - `counts`: `[experts / ranks]`, how many rows each has.
    ///
    /// # Errors
    /// [`UsageError`](crate::UsageError) for buffers of other lengths or types, or in host memory, before anything is enqueued;
    /// [`Error::Unsupported`](crate::Error) for a layout with scales: see [`dispatch_scaled`](Experts::dispatch_scaled). A rank that is missing
    /// or lost is named by [`Comm::sync`].
    pub fn dispatch<X, R, Y, C>(
        &mut self,
        stream: &Arc<CudaStream>,
        tokens: &X,
        routing: &R,
        rows: &mut Y,
        counts: &mut C,
    ) -> Result<()>
    where
        X: Source + ?Sized,
        R: Source + ?Sized,
        Y: Target<Elem = X::Elem> + ?Sized,
        C: Target<Elem = i32> + ?Sized,
    {
        if self.layout.scales != 0 {
            return Err(wrong("scales", self.layout.scales, "0 for dispatch; use dispatch_scaled".into()));
        }
        let n = self.check_dispatch((tokens, routing), (rows, counts))?;
        let on = self.front.on(stream)?;
        let (tokens, routing) = (tokens.lend(&on.stream)?, (routing.dtype(), routing.lend(&on.stream)?));
        let (rows, counts) = (rows.lend_mut(&on.stream)?, counts.lend_mut(&on.stream)?);
        self.enqueue_dispatch(&on, n, (&tokens, None), (routing.0, &routing.1), (&rows, None), &counts)
    }

    /// [`dispatch`](Experts::dispatch) of tokens with scales, `[n, scales]`, which come to rows of `row_scales`:
    /// `[experts / ranks, ranks × max_tokens, scales]`.
    ///
    /// # Errors
    /// As `dispatch`; for a layout without scales, too.
    pub fn dispatch_scaled<X, S, R, Y, T, C>(
        &mut self,
        stream: &Arc<CudaStream>,
        (tokens, scales): (&X, &S),
        routing: &R,
        (rows, row_scales): (&mut Y, &mut T),
        counts: &mut C,
    ) -> Result<()>
    where
        X: Source + ?Sized,
        S: Source<Elem = f32> + ?Sized,
        R: Source + ?Sized,
        Y: Target<Elem = X::Elem> + ?Sized,
        T: Target<Elem = f32> + ?Sized,
        C: Target<Elem = i32> + ?Sized,
    {
        if self.layout.scales == 0 {
            return Err(wrong("scales", 0, "at least 1 for dispatch_scaled; use dispatch".into()));
        }
        let n = self.check_dispatch((tokens, routing), (rows, counts))?;
        check_lengths(
            "expert_dispatch",
            &[
                ("scales", scales.len(), n * self.layout.scales, "tokens × scales"),
                (
                    "row_scales",
                    row_scales.len(),
                    self.rows() * self.layout.scales,
                    "experts × max_tokens × scales",
                ),
            ],
        )?;
        let on = self.front.on(stream)?;
        let (tokens, scales) = (tokens.lend(&on.stream)?, scales.lend(&on.stream)?);
        let routing = (routing.dtype(), routing.lend(&on.stream)?);
        let (rows, row_scales) = (rows.lend_mut(&on.stream)?, row_scales.lend_mut(&on.stream)?);
        let counts = counts.lend_mut(&on.stream)?;
        let (from, to) = ((&tokens, Some(&scales)), (&rows, Some(&row_scales)));
        self.enqueue_dispatch(&on, n, from, (routing.0, &routing.1), to, &counts)
    }

    /// Enqueues the way back: each token's sum of what its experts made of it, on a stream. Collective; once after each dispatch.
    ///
    /// - `rows`: `[experts / ranks, ranks × max_tokens, hidden]`, the experts' results at the places of the dispatched rows.
    /// - `weights`: `[n, top_k]`, for the tokens of the last dispatch. Choices that counted as not routed add nothing.
    /// - `output`: `[n, hidden]`, the sums of weights times rows: in f32, in the order of the choices, rounded once.
    ///
    /// # Errors
    /// As [`dispatch`](Experts::dispatch); [`UsageError::Setting`] without a dispatch since the last combine.
    pub fn combine<Y, W, O>(
        &mut self,
        stream: &Arc<CudaStream>,
        rows: &Y,
        weights: &W,
        output: &mut O,
    ) -> Result<()>
    where
        Y: Source<Elem = bf16> + ?Sized,
        W: Source<Elem = f32> + ?Sized,
        O: Target<Elem = bf16> + ?Sized,
    {
        let Some(n) = self.dispatched else {
            let expected = "a dispatch before each combine".into();
            let (name, value) = ("Experts::combine".into(), "without a dispatch".into());
            return Err(UsageError::Setting { name, value, expected }.into());
        };
        let ExpertLayout { hidden, top_k, .. } = self.layout;
        check_lengths(
            "expert_combine",
            &[
                ("rows", rows.len(), self.rows() * hidden, "experts × max_tokens × hidden"),
                ("weights", weights.len(), n * top_k, "dispatched tokens × top_k"),
                ("output", output.len(), n * hidden, "dispatched tokens × hidden"),
            ],
        )?;
        let on = self.front.on(stream)?;
        let (rows, weights) = (rows.lend(&on.stream)?, weights.lend(&on.stream)?);
        let output = output.lend_mut(&on.stream)?;
        check_all_on_device(&[&rows, &weights, &output])?;
        let mut arguments = self.scratch.arguments(ExpertTask::Combine);
        (arguments.input, arguments.weights, arguments.output) =
            (address(&rows), address(&weights), address(&output));
        arguments.tokens = n as u32;
        let call = self.call(&on, Operation::ExpertCombine, DType::Bf16);
        self.run(&on, &call, |communicator| {
            // SAFETY: buffers of the checked lengths, lent for the call.
            unsafe { communicator.enqueue_experts(&call, ExpertTask::Combine, &self.scratch, &arguments) }
        })?;
        self.dispatched = None;
        Ok(())
    }

    /// Gives the scratch back. Collective: waits for the communicator's work, and for all ranks. Graphs with a dispatch or combine must not be
    /// launched any more. The driver gets the memory when no communicator of the process has work on a GPU.
    ///
    /// # Errors
    /// Those of [`Comm::sync`] and [`Comm::barrier`]; the scratch then goes with the communicator.
    pub fn free(self) -> Result<()> {
        self.surface.free_peer_memory(&self.scratch.memory, self.number)
    }

    /// The number of tokens, if the buffers of a dispatch fit it.
    fn check_dispatch<X, R, Y, C>(
        &self,
        (tokens, routing): (&X, &R),
        (rows, counts): (&Y, &C),
    ) -> Result<usize>
    where
        X: Source + ?Sized,
        R: Source + ?Sized,
        Y: Target<Elem = X::Elem> + ?Sized,
        C: Target<Elem = i32> + ?Sized,
    {
        let ExpertLayout { hidden, top_k, max_tokens, dtype, .. } = self.layout;
        if tokens.dtype() != dtype {
            return Err(wrong("dtype", dtype, format!("{}, which the tokens are", tokens.dtype())));
        }
        if !matches!(routing.dtype(), DType::I32 | DType::I64) {
            let (name, value) = ("Experts::dispatch: routing".into(), routing.dtype().to_string());
            return Err(UsageError::Setting { name, value, expected: "i32 or i64".into() }.into());
        }
        let n = tokens.len() / hidden;
        if n > max_tokens {
            return Err(wrong(
                "max_tokens",
                max_tokens,
                format!("at least {n}, as many tokens as there are"),
            ));
        }
        check_lengths(
            "expert_dispatch",
            &[
                ("tokens", tokens.len(), n * hidden, "a multiple of hidden"),
                ("routing", routing.len(), n * top_k, "tokens × top_k"),
                ("rows", rows.len(), self.rows() * hidden, "experts × max_tokens × hidden"),
                ("counts", counts.len(), self.local().len(), "experts / ranks"),
            ],
        )?;
        Ok(n)
    }

    fn enqueue_dispatch(
        &mut self,
        on: &Comm,
        n: usize,
        (tokens, scales): (&Loan<'_>, Option<&Loan<'_>>),
        (index, routing): (DType, &Loan<'_>),
        (rows, row_scales): (&Loan<'_>, Option<&Loan<'_>>),
        counts: &Loan<'_>,
    ) -> Result<()> {
        let of_scales = [scales.unwrap_or(tokens), row_scales.unwrap_or(rows)];
        check_all_on_device(&[tokens, routing, rows, counts])?;
        check_all_on_device(&of_scales)?;
        let mut arguments = self.scratch.arguments(ExpertTask::Dispatch);
        (arguments.input, arguments.routing) = (address(tokens), address(routing));
        (arguments.output, arguments.counts) = (address(rows), address(counts));
        arguments.scales = scales.map_or(0, address);
        arguments.row_scales = row_scales.map_or(0, address);
        (arguments.tokens, arguments.index_bytes) = (n as u32, index.size() as u32);
        let call = self.call(on, Operation::ExpertDispatch, self.layout.dtype);
        self.run(on, &call, |communicator| {
            // SAFETY: buffers of the checked lengths, lent for the call.
            unsafe { communicator.enqueue_experts(&call, ExpertTask::Dispatch, &self.scratch, &arguments) }
        })?;
        self.dispatched = Some(n);
        Ok(())
    }

    fn call<'s>(&self, on: &'s Comm, operation: Operation, dtype: DType) -> Call<'s> {
        Call {
            dtype,
            root: self.number as usize,
            blocks: Blocks::Equal(self.layout.hidden),
            spaces: [Space::Device; 2],
            stream: on.stream.raw(),
            ..Call::empty(operation)
        }
    }

    /// Compares the call between the ranks, if that is asked for, and records it.
    fn run(
        &self,
        on: &Comm,
        call: &Call<'_>,
        enqueue: impl FnOnce(&crate::backend::nccl::communicator::Communicator) -> Result<()>,
    ) -> Result<()> {
        let surface = Surface { front: on, stream: &on.stream, ..self.surface };
        // SAFETY: no other thread is inside: `Comm` is not `Sync`.
        unsafe { surface.prepare_collective(call) }?;
        on.recorded(call, || enqueue(&self.surface.comm.communicator))
    }
}

fn address(loan: &Loan<'_>) -> u64 {
    loan.span().start.addr() as u64
}

fn check_all_on_device(loans: &[&Loan<'_>]) -> Result<()> {
    let remedy = "use a CudaSlice or nccl::Buffer";
    loans.iter().try_for_each(|loan| {
        check_on_device(&[loan.span().space], "GPU memory, for tokens and experts", remedy)
    })
}

fn check_lengths(operation: &'static str, lengths: &[Length]) -> Result<()> {
    let wrong = lengths.iter().find(|(_, actual, expected, _)| actual != expected);
    wrong.map_or(Ok(()), |&(buffer, actual, expected, rule)| {
        Err(UsageError::Length { operation, buffer, actual, expected, rule }.into())
    })
}

impl std::fmt::Debug for Experts<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Experts").field("layout", &self.layout).field("number", &self.number).finish()
    }
}
