//! Halos that arrive while their rank computes: [`HaloExchange`].

use super::Grid;
use super::halo::check;
#[cfg(feature = "_gpu")]
use super::on_gpu::GpuHalo;
use super::slab::Slab;
use crate::api::checks::same_len;
use crate::api::comm::Comm;
use crate::api::request::Request;
use crate::buffer::loan::Loan;
use crate::buffer::stream::Stream;
use crate::buffer::{Source, Target};
use crate::types::dtype::Plain;
use crate::types::error::{Result, UsageError};
use crate::types::memory::{Space, Span};
use std::ops::Range;

const OPERATION: &str = "start_exchange_halo";

/// The tag of the messages: below that of other neighbors' messages.
pub(super) const IN_FLIGHT_TAG: u32 = 32_764;

/// The halo of an array, on its way: [`Comm::start_exchange_halo`] makes it.
#[must_use = "the halo is filled by `finish`"]
pub struct HaloExchange<T> {
    shape: Vec<usize>,
    stream: Stream,
    under_way: UnderWay<T>,
}

enum UnderWay<T> {
    OnHost(Vec<(Vec<Range<usize>>, Messages<T>)>),
    #[cfg(feature = "_gpu")]
    OnGpu(GpuHalo),
}

/// The cells that go one way: those of this rank, those that come into its halo, or both.
enum Messages<T> {
    Sent(Request<Vec<T>>),
    Received(Request<Vec<T>>),
    Both(Request<(Vec<T>, Vec<T>)>),
}

impl<T: Plain> Messages<T> {
    /// Waits; answers what has come.
    fn wait(self) -> Result<Option<Vec<T>>> {
        Ok(match self {
            Messages::Sent(request) => request.wait().map(|_| None)?,
            Messages::Received(request) => Some(request.wait()?),
            Messages::Both(request) => Some(request.wait()?.1),
        })
    }

    fn is_done(&mut self) -> bool {
        match self {
            Messages::Sent(request) | Messages::Received(request) => request.is_done(),
            Messages::Both(request) => request.is_done(),
        }
    }
}

impl<T: Plain> HaloExchange<T> {
    /// Puts the neighbors' cells into the halo of the array, which has the shape that it had and is in memory of the same kind. Host memory:
    /// waits for them. GPU memory: this is enqueued behind them, on the stream of the exchange.
    ///
    /// # Errors
    /// Those of the messages; [`UsageError`](crate::UsageError) for an array of another length or in other memory.
    pub fn finish<A: Target<Elem = T> + ?Sized>(self, array: &mut A) -> Result<()> {
        let (len, expected) = (array.len(), self.shape.iter().product());
        let is_of_shape = same_len(OPERATION, "in-place", len, expected, "the product of the shape");
        match self.under_way {
            UnderWay::OnHost(messages) => {
                // All are waited for, even if some fail.
                let waited: Vec<Result<_>> =
                    messages.into_iter().map(|(ranges, messages)| Ok((ranges, messages.wait()?))).collect();
                let received = waited.into_iter().collect::<Result<Vec<_>>>()?;
                is_of_shape?;
                let loan = array.lend_mut(&self.stream)?;
                let start = address(&loan, Space::Host)?;
                // SAFETY: the contract of `lend_mut`: so many elements in host memory, which nothing else uses while the loan lasts.
                let array = unsafe { std::slice::from_raw_parts_mut(start.cast::<T>(), len) };
                for (ranges, cells) in received {
                    if let Some(cells) = cells {
                        Slab { shape: &self.shape, ranges }.unpack(&cells, array);
                    }
                }
                Ok(())
            }
            #[cfg(feature = "_gpu")]
            UnderWay::OnGpu(halo) => {
                is_of_shape?;
                let loan = array.lend_mut(&self.stream)?;
                let start = address(&loan, Space::Device)?;
                // SAFETY: the array is lent to the stream of the exchange, and has the shape.
                unsafe { halo.unpack::<T>(start as u64, &self.shape) }
            }
        }
    }

    /// Whether [`finish`](Self::finish) would answer at once. In GPU memory it always would.
    pub fn is_done(&mut self) -> bool {
        match &mut self.under_way {
            UnderWay::OnHost(messages) => {
                messages.iter_mut().fold(true, |all, (_, messages)| messages.is_done() && all)
            }
            #[cfg(feature = "_gpu")]
            UnderWay::OnGpu(_) => true,
        }
    }
}

/// The address of an array that is lent, if it is in memory of the kind in which the exchange was started.
fn address(loan: &Loan<'_>, started: Space) -> Result<*mut u8> {
    let name = |space| if space == Space::Host { "host memory" } else { "GPU memory" };
    let Span { start, space } = loan.span();
    if space == started {
        return Ok(start);
    }
    let (memory, wanted) = (name(space).into(), name(started).into());
    let remedy = "finish the exchange with the array, or a copy of it, with which it was started";
    Err(UsageError::Memory { memory, wanted, remedy }.into())
}

impl Comm {
    /// Starts an [`exchange_halo`](Comm::exchange_halo): copies this rank's outer cells, and sends them. The array is free until
    /// [`HaloExchange::finish`], so that the rank can compute the cells that need no halo meanwhile.
    ///
    /// Every rank of the grid calls this form. Edges and corners are messages of their own, so all are under way at once: up to 26 there
    /// and 26 back in three dimensions.
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// use phalanx::Grid;
    ///
    /// phalanx::try_run(3, |comm| -> phalanx::Result<()> {
    ///     let grid = Grid::new(&[3], &[true])?;
    ///     let rank = comm.rank() as u32;
    ///     let mut cells = [9, 10 * rank, 10 * rank + 1, 9];
    ///     let halo = comm.start_exchange_halo(&grid, &cells, &[4], &[1])?;
    ///     // … compute what is away from the edges …
    ///     halo.finish(&mut cells)?;
    ///     assert_eq!((cells[0], cells[3]), (10 * ((rank + 2) % 3) + 1, 10 * ((rank + 1) % 3)));
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # GPU memory
    /// This enqueues the copies of the outer cells and the messages on the communicator's stream, and `finish` the copies into the halo,
    /// behind all uses of the array until then. So a kernel on another stream that only reads the array runs between the two, beside the
    /// messages. The example `heat_3d_gpu` does so:
    ///
    /// ```no_run
    /// # #[cfg(all(feature = "nccl", feature = "jit"))] mod example {
    /// # use phalanx::cudarc::driver::{CudaSlice, CudaStream, LaunchConfig};
    /// # use phalanx::jit::{Kernel, reads, writes};
    /// # fn step(comm: phalanx::Comm, grid: phalanx::Grid, inside: Kernel<'_>, edges: Kernel<'_>, config: LaunchConfig,
    /// #     compute: std::sync::Arc<CudaStream>, mut heat: CudaSlice<f32>, mut next: CudaSlice<f32>) -> phalanx::Result<()> {
    /// let halo = comm.start_exchange_halo(&grid, &heat, &[66, 66, 66], &[1, 1, 1])?;
    /// # unsafe {
    /// inside.launch(&compute, config, [reads(&heat), writes(&mut next)])?;
    /// halo.finish(&mut heat)?;
    /// edges.launch(&compute, config, [reads(&heat), writes(&mut next)])?;
    /// # }
    /// # Ok(())
    /// # }
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for `exchange_halo`.
    pub fn start_exchange_halo<A>(
        &self,
        grid: &Grid,
        array: &A,
        shape: &[usize],
        width: &[usize],
    ) -> Result<HaloExchange<A::Elem>>
    where
        A: Source + ?Sized,
        A::Elem: Plain,
    {
        grid.check_ranks(OPERATION, self)?;
        check(OPERATION, grid, array.len(), shape, width)?;
        let ways = ways_of(grid, self.rank(), shape, width);
        let len = array.len();
        let loan = array.lend(&self.stream)?;
        let Span { start, space } = loan.span();
        let under_way = match space {
            Space::Host => {
                // SAFETY: the contract of `lend`: so many initialised elements in host memory, which do not change while the loan lasts.
                let array = unsafe { std::slice::from_raw_parts(start.cast(), len) };
                self.start_on_host(array, ways)?
            }
            #[cfg(feature = "_gpu")]
            // SAFETY: the array is lent to the stream, and has the shape.
            Space::Device => UnderWay::OnGpu(unsafe { self.start_on_gpu::<A::Elem>(OPERATION, loan, ways) }?),
            #[cfg(not(feature = "_gpu"))]
            Space::Device => unreachable!("no buffer is there"),
        };
        Ok(HaloExchange { shape: shape.into(), stream: self.stream.clone(), under_way })
    }

    fn start_on_host<T: Plain>(&self, array: &[T], ways: Vec<Way<'_>>) -> Result<UnderWay<T>> {
        let start = |way: Way<'_>| -> Result<_> {
            let leaving = way.leaving.map(|(destination, slab)| (slab.pack(array), destination));
            let arriving = way.arriving.map(|(source, slab)| (slab.pack(array), source, slab.ranges));
            Ok(match (leaving, arriving) {
                (None, None) => None,
                (Some((cells, destination)), None) => {
                    let request = self.start_send_tagged(cells, destination, IN_FLIGHT_TAG)?;
                    Some((Vec::new(), Messages::Sent(request)))
                }
                (None, Some((cells, source, ranges))) => {
                    Some((ranges, Messages::Received(self.start_recv_tagged(cells, source, IN_FLIGHT_TAG)?)))
                }
                (Some((cells, destination)), Some((received, source, ranges))) => {
                    let both =
                        self.start_send_recv_tagged(cells, destination, received, source, IN_FLIGHT_TAG)?;
                    Some((ranges, Messages::Both(both)))
                }
            })
        };
        let started = ways.into_iter().filter_map(|way| start(way).transpose());
        Ok(UnderWay::OnHost(started.collect::<Result<_>>()?))
    }
}

/// One of the ways in which cells go: those of this rank with the rank that gets them, and the places of those that come, with the rank that
/// sends them.
pub(super) struct Way<'s> {
    pub leaving: Option<(usize, Slab<'s>)>,
    pub arriving: Option<(usize, Slab<'s>)>,
}

/// All ways of a rank. All ranks go through them in one order, so the messages between two match, also if they are neighbors in several ways.
fn ways_of<'s>(grid: &Grid, rank: usize, shape: &'s [usize], width: &[usize]) -> Vec<Way<'s>> {
    let coordinates = grid.coordinates(rank);
    let neighbor = |way: &[isize], sign: isize| {
        let place: Vec<isize> =
            coordinates.iter().zip(way).map(|(place, step)| *place as isize + sign * step).collect();
        grid.rank_at(&place)
    };
    let with_slabs = |way: Vec<isize>| Way {
        leaving: neighbor(&way, 1).map(|rank| (rank, slab(shape, width, &way, leaving))),
        arriving: neighbor(&way, -1).map(|rank| (rank, slab(shape, width, &way, arriving))),
    };
    ways(width).into_iter().map(with_slabs).collect()
}

/// The ways in which cells go: a step of -1, 0 or 1 in each dimension that has a halo, but for none at all.
fn ways(width: &[usize]) -> Vec<Vec<isize>> {
    let steps = |width: usize| if width == 0 { 0..=0 } else { -1..=1 };
    let mut ways = vec![Vec::new()];
    for width in width {
        ways = ways
            .iter()
            .flat_map(|way: &Vec<isize>| steps(*width).map(move |step| [&way[..], &[step]].concat()))
            .collect();
    }
    ways.retain(|way| way.iter().any(|step| *step != 0));
    ways
}

fn slab<'s>(
    shape: &'s [usize],
    width: &[usize],
    way: &[isize],
    range: fn(usize, usize, isize) -> Range<usize>,
) -> Slab<'s> {
    let ranges = shape.iter().zip(width).zip(way).map(|((size, width), step)| range(*size, *width, *step));
    Slab { shape, ranges: ranges.collect() }
}

/// The own places that go this way.
fn leaving(size: usize, width: usize, step: isize) -> Range<usize> {
    match step {
        1 => size - 2 * width..size - width,
        -1 => width..2 * width,
        _ => width..size - width,
    }
}

/// The places of the halo that are filled by what goes this way.
fn arriving(size: usize, width: usize, step: isize) -> Range<usize> {
    match step {
        1 => 0..width,
        -1 => size - width..size,
        _ => width..size - width,
    }
}

impl<T> std::fmt::Debug for HaloExchange<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HaloExchange").field("shape", &self.shape).finish_non_exhaustive()
    }
}
