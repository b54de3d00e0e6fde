//! Halos that arrive while their rank computes: [`HaloExchange`].

use super::Grid;
use super::halo::{Slab, check};
use crate::api::checks::same_len;
use crate::api::comm::Comm;
use crate::api::request::Request;
use crate::types::dtype::Plain;
use crate::types::error::Result;
use std::ops::Range;

const OPERATION: &str = "start_exchange_halo";

/// The tag of the messages: below that of other neighbors' messages.
const TAG: u32 = 32_764;

/// The halo of an array, on its way: [`Comm::start_exchange_halo`] makes it.
#[must_use = "the halo is filled by `finish`"]
pub struct HaloExchange<T> {
    shape: Vec<usize>,
    messages: Vec<(Vec<Range<usize>>, Messages<T>)>,
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
    /// Waits for the neighbors' cells, and puts them into the halo of the array, which has the shape that it had.
    ///
    /// # Errors
    /// Those of the messages; [`UsageError::Length`](crate::UsageError::Length) for an array of another length.
    pub fn finish(self, array: &mut [T]) -> Result<()> {
        // All are waited for, even if some fail.
        let waited: Vec<Result<_>> =
            self.messages.into_iter().map(|(ranges, messages)| Ok((ranges, messages.wait()?))).collect();
        let received = waited.into_iter().collect::<Result<Vec<_>>>()?;
        same_len(
            OPERATION,
            "in-place",
            array.len(),
            self.shape.iter().product(),
            "the product of the shape",
        )?;
        for (ranges, cells) in received {
            if let Some(cells) = cells {
                Slab { shape: &self.shape, ranges }.unpack(&cells, array);
            }
        }
        Ok(())
    }

    /// Whether [`finish`](Self::finish) would answer at once.
    pub fn is_done(&mut self) -> bool {
        self.messages.iter_mut().fold(true, |all, (_, messages)| messages.is_done() && all)
    }
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
    /// phalanx::run(3, |comm| -> phalanx::Result<()> {
    ///     let grid = Grid::new(&[3], &[true])?;
    ///     let rank = comm.rank() as u32;
    ///     let mut cells = [9, 10 * rank, 10 * rank + 1, 9];
    ///     let halo = comm.start_exchange_halo(&grid, &cells, &[4], &[1])?;
    ///     // … compute what is away from the edges …
    ///     halo.finish(&mut cells)?;
    ///     assert_eq!((cells[0], cells[3]), (10 * ((rank + 2) % 3) + 1, 10 * ((rank + 1) % 3)));
    ///     Ok(())
    /// })?
    /// .into_iter()
    /// .collect()
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for `exchange_halo`.
    pub fn start_exchange_halo<T: Plain>(
        &self,
        grid: &Grid,
        array: &[T],
        shape: &[usize],
        width: &[usize],
    ) -> Result<HaloExchange<T>> {
        grid.check_ranks(OPERATION, self)?;
        check(OPERATION, grid, array.len(), shape, width)?;
        let coordinates = grid.coordinates(self.rank());
        let neighbor = |way: &[isize], sign: isize| {
            let place: Vec<isize> =
                coordinates.iter().zip(way).map(|(place, step)| *place as isize + sign * step).collect();
            grid.rank_at(&place)
        };
        let mut messages = Vec::new();
        // All ranks go through the ways in one order, so the messages between two match, also if they are neighbors in several ways.
        for way in ways(width) {
            let arriving = slab(shape, width, &way, arriving);
            let leaving = || slab(shape, width, &way, leaving).pack(array);
            let under_way = match (neighbor(&way, -1), neighbor(&way, 1)) {
                (None, None) => continue,
                (None, Some(destination)) => {
                    Messages::Sent(self.start_send_tagged(leaving(), destination, TAG)?)
                }
                (Some(source), None) => {
                    Messages::Received(self.start_recv_tagged(arriving.pack(array), source, TAG)?)
                }
                (Some(source), Some(destination)) => {
                    let received = arriving.pack(array);
                    let both = self.start_send_recv_tagged(leaving(), destination, received, source, TAG)?;
                    Messages::Both(both)
                }
            };
            messages.push((arriving.ranges, under_way));
        }
        Ok(HaloExchange { shape: shape.into(), messages })
    }
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
        f.debug_struct("HaloExchange").field("messages", &self.messages.len()).finish_non_exhaustive()
    }
}
