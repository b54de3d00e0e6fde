//! An all_reduce with what follows it in a transformer: the residual is added, and the rows are normalised.

use super::nccl_comm::Nccl;
use crate::api::comm::Comm;
use crate::api::group::CommGroup;
use crate::backend::nccl::{NcclComm, check_on_device};
use crate::buffer::loan::Loan;
use crate::buffer::{Source, Target};
use crate::contract::{Call, Operation, RmsNorm, RowFormat};
use crate::types::dtype::{DType, Element, F8E4M3, bf16, f16};
use crate::types::error::{Error, Result, UnsupportedError, UsageError};

const PLAIN: &str = "all_reduce_rms_norm";
const QUANTIZED: &str = "all_reduce_rms_norm_quantized";
/// Elements of a row are a multiple of this.
const MULTIPLE: usize = 8;
/// Most elements of a row.
const LONGEST_ROW: usize = 16_384;

/// Elements of the rows of [`Nccl::all_reduce_rms_norm`]: `bf16` and `f16`.
pub trait RowElement: Element + sealed::Sealed {}
impl RowElement for bf16 {}
impl RowElement for f16 {}

/// Elements of quantised rows: `F8E4M3` and `i8`.
pub trait QuantizedElement: Element + sealed::Sealed {}
impl QuantizedElement for F8E4M3 {}
impl QuantizedElement for i8 {}

mod sealed {
    use crate::types::dtype::{F8E4M3, bf16, f16};

    pub trait Sealed {}
    impl Sealed for bf16 {}
    impl Sealed for f16 {}
    impl Sealed for F8E4M3 {}
    impl Sealed for i8 {}
}

/// A call, and the loans of its buffers until it is enqueued.
struct Normed<'a> {
    call: Call<'a>,
    loans: Vec<Loan<'a>>,
}

/// The number of rows of so many elements.
fn rows(operation: &'static str, elements: usize, hidden: usize) -> Result<usize> {
    if hidden == 0 || hidden > LONGEST_ROW || !hidden.is_multiple_of(MULTIPLE) {
        let expected = format!(
            "a multiple of {MULTIPLE} up to {LONGEST_ROW}: pad the rows, or normalise them by an own kernel"
        );
        let name = format!("{operation}: the weight's length");
        return Err(UsageError::Setting { name, value: hidden.to_string(), expected }.into());
    }
    let rows = elements / hidden;
    check_length(operation, "input", (elements, rows * hidden), "rows as long as the weight")?;
    Ok(rows)
}

fn check_length(
    operation: &'static str,
    buffer: &'static str,
    (actual, expected): (usize, usize),
    rule: &'static str,
) -> Result<()> {
    match actual == expected {
        true => Ok(()),
        false => Err(UsageError::Length { operation, buffer, actual, expected, rule }.into()),
    }
}

impl<'a> Normed<'a> {
    fn new<S, R, W, O>(
        comm: &'a Comm,
        operation: &'static str,
        (input, residual, weight, output): (&'a S, &'a mut R, &'a W, &'a mut O),
        (epsilon, format): (f32, RowFormat),
    ) -> Result<Normed<'a>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        W: Source<Elem = S::Elem> + ?Sized,
        O: Target + ?Sized,
    {
        let (len, hidden) = (input.len(), weight.len());
        rows(operation, len, hidden)?;
        check_length(operation, "residual", (residual.len(), len), "as many as the input")?;
        check_length(operation, "output", (output.len(), len), "as many as the input")?;
        if NcclComm::of(&*comm.backend).is_none() {
            return Err(Error::from(UnsupportedError {
                what: operation.into(),
                why: format!("the communicator is the {} backend's", comm.backend()),
                remedy:
                    "use all_reduce, and normalise the rows, or a communicator on GPUs (BackendKind::Nccl)"
                        .into(),
            }));
        }
        let stream = &comm.stream;
        let call = Call { dtype: input.dtype(), ..comm.shape().whole(Operation::AllReduceRmsNorm, len) };
        let loans = vec![
            input.lend(stream)?,
            output.lend_mut(stream)?,
            residual.lend_mut(stream)?,
            weight.lend(stream)?,
        ];
        on_device(&loans)?;
        let (residual, weight) = (address(&loans[2]), address(&loans[3]));
        let norm = RmsNorm { hidden, epsilon, residual, weight, format, scales: 0 };
        let call = Call { norm: Some(norm), ..call.between(&loans[0], &loans[1], stream) };
        Ok(Normed { call, loans })
    }

    /// With an output of 8 bits, and the scales of its rows.
    fn quantized<S, R, W, O, T>(
        comm: &'a Comm,
        (input, residual, weight, output): (&'a S, &'a mut R, &'a W, &'a mut O),
        epsilon: f32,
        scales: &'a mut T,
    ) -> Result<Normed<'a>>
    where
        S: Source + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        W: Source<Elem = S::Elem> + ?Sized,
        O: Target<Elem: QuantizedElement> + ?Sized,
        T: Target<Elem = f32> + ?Sized,
    {
        let rows = rows(QUANTIZED, input.len(), weight.len())?;
        check_length(QUANTIZED, "scales", (scales.len(), rows), "one for each row")?;
        let format = match <O::Elem as Element>::DTYPE {
            DType::I8 => RowFormat::I8,
            _ => RowFormat::F8E4M3,
        };
        let buffers = (input, residual, weight, output);
        let mut normed = Normed::new(comm, QUANTIZED, buffers, (epsilon, format))?;
        let scales = scales.lend_mut(&comm.stream)?;
        on_device(std::slice::from_ref(&scales))?;
        normed.call.norm = normed.call.norm.map(|norm| RmsNorm { scales: address(&scales), ..norm });
        normed.loans.push(scales);
        Ok(normed)
    }
}

fn address(loan: &Loan<'_>) -> u64 {
    loan.span().start.addr() as u64
}

fn on_device(loans: &[Loan<'_>]) -> Result<()> {
    let spaces: Vec<_> = loans.iter().map(|loan| loan.span().space).collect();
    check_on_device(&spaces, "GPU memory, for all buffers", "copy them to the GPU (CudaStream::clone_htod)")
}

impl Nccl<'_> {
    /// Sums the ranks' rows, adds the residual, and normalises each row by its root mean square: what follows a row-parallel layer of a
    /// transformer, in one kernel where own kernels carry the sum out (`PHALANX_GPU_ALGORITHM`), else as an all_reduce and a kernel.
    ///
    /// With `sum` as [`all_reduce`](Comm::all_reduce) would give it:
    ///
    /// ```text
    /// residual = residual + sum                       rounded to the element type
    /// output   = residual × weight / √(mean(residual²) + epsilon)
    /// ```
    ///
    /// `input`, `residual` and `output` are `rows × weight.len()` elements in GPU memory, row by row; `weight` is one row, a multiple of 8
    /// elements up to 16,384, the same on every rank. The arithmetic is in f32. Every rank gets the same bits, in every run and with any
    /// number of rows; whether the sum is one kernel or two changes nothing. In a group: [`CommGroup::all_reduce_rms_norm`].
    ///
    /// ```no_run
    /// # fn main() -> phalanx::Result<()> {
    /// # let comm = phalanx::init()?;
    /// use phalanx::bf16;
    /// let (stream, nccl) = (comm.cuda_stream()?, comm.nccl().expect("NCCL"));
    /// let (rows, hidden) = (8, 4096);
    /// let partial = stream.alloc_zeros::<bf16>(rows * hidden)?; // a row-parallel layer's output
    /// let mut residual = stream.alloc_zeros::<bf16>(rows * hidden)?;
    /// let weight = stream.clone_htod(&vec![bf16::ONE; hidden])?;
    /// let mut normed = stream.alloc_zeros::<bf16>(rows * hidden)?;
    /// nccl.all_reduce_rms_norm(&partial, &mut residual, &weight, 1e-6, &mut normed)?;
    /// # comm.finalize()
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`UsageError::Length`] and [`UsageError::Setting`] for lengths that do not fit; [`UsageError::Memory`] for host memory.
    pub fn all_reduce_rms_norm<S, R, W, O>(
        &self,
        input: &S,
        residual: &mut R,
        weight: &W,
        epsilon: f32,
        output: &mut O,
    ) -> Result<()>
    where
        S: Source<Elem: RowElement> + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        W: Source<Elem = S::Elem> + ?Sized,
        O: Target<Elem = S::Elem> + ?Sized,
    {
        let comm = self.front;
        let normed =
            Normed::new(comm, PLAIN, (input, residual, weight, output), (epsilon, RowFormat::AsInput))?;
        comm.run_call(&normed.call)
    }

    /// [`all_reduce_rms_norm`](Nccl::all_reduce_rms_norm) with an output of 8 bits: each row is multiplied by the reciprocal of a scale of its own, which
    /// goes to `scales` (one for each row).
    ///
    /// The scale is the row's largest magnitude over that of the type (448 for [`F8E4M3`], 127 for `i8`), or 1 for a row of zeroes, and
    /// values are rounded to the nearest. So `output × scale` is the row within half a step.
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce_rms_norm_quantized<S, R, W, O, T>(
        &self,
        input: &S,
        residual: &mut R,
        weight: &W,
        epsilon: f32,
        output: &mut O,
        scales: &mut T,
    ) -> Result<()>
    where
        S: Source<Elem: RowElement> + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        W: Source<Elem = S::Elem> + ?Sized,
        O: Target<Elem: QuantizedElement> + ?Sized,
        T: Target<Elem = f32> + ?Sized,
    {
        let comm = self.front;
        let normed = Normed::quantized(comm, (input, residual, weight, output), epsilon, scales)?;
        comm.run_call(&normed.call)
    }
}

impl<'env> CommGroup<'_, 'env> {
    /// See [`Nccl::all_reduce_rms_norm`](super::Nccl::all_reduce_rms_norm). In a [CUDA graph](super::Graph) it is captured as others are.
    ///
    /// # Errors
    /// As there; [`Error::Unsupported`] on a communicator that is not NCCL's.
    pub fn all_reduce_rms_norm<S, R, W, O>(
        &mut self,
        input: &'env S,
        residual: &'env mut R,
        weight: &'env W,
        epsilon: f32,
        output: &'env mut O,
    ) -> Result<()>
    where
        S: Source<Elem: RowElement> + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        W: Source<Elem = S::Elem> + ?Sized,
        O: Target<Elem = S::Elem> + ?Sized,
    {
        let comm = self.comm();
        let Normed { call, loans } =
            Normed::new(comm, PLAIN, (input, residual, weight, output), (epsilon, RowFormat::AsInput))?;
        self.push(call, loans);
        Ok(())
    }

    /// See [`Nccl::all_reduce_rms_norm_quantized`](super::Nccl::all_reduce_rms_norm_quantized).
    ///
    /// # Errors
    /// As [`all_reduce_rms_norm`](CommGroup::all_reduce_rms_norm).
    pub fn all_reduce_rms_norm_quantized<S, R, W, O, T>(
        &mut self,
        input: &'env S,
        residual: &'env mut R,
        weight: &'env W,
        epsilon: f32,
        output: &'env mut O,
        scales: &'env mut T,
    ) -> Result<()>
    where
        S: Source<Elem: RowElement> + ?Sized,
        R: Target<Elem = S::Elem> + ?Sized,
        W: Source<Elem = S::Elem> + ?Sized,
        O: Target<Elem: QuantizedElement> + ?Sized,
        T: Target<Elem = f32> + ?Sized,
    {
        let comm = self.comm();
        let Normed { call, loans } =
            Normed::quantized(comm, (input, residual, weight, output), epsilon, scales)?;
        self.push(call, loans);
        Ok(())
    }
}
