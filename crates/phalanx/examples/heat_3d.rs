//! The heat equation in three dimensions. Each rank of a grid has a box of the cells, and a halo of one cell around it.
//!
//! ```text
//! cargo run --release -p phalanx --example heat_3d -- 4 64 100     4 ranks as threads, 64³ cells, 100 steps
//! phalanx launch -n 4 -- target/release/examples/heat_3d 4 64 100
//! ```
//!
//! The cells begin as a wave, whose exact values after each step are known: the program fails if the result is another.

#[path = "shared/ranks.rs"]
mod ranks;

use phalanx::{Comm, Grid, ReduceOp};
use ranks::{Result, number};
use std::f64::consts::TAU;
use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

/// The part of a difference between two cells that flows in a step.
const FLOW: f64 = 0.1;
/// The halo in each dimension.
const WIDTH: [usize; 3] = [1; 3];

fn main() -> ExitCode {
    ranks::on_ranks("heat_3d", |comm, arguments| {
        let cells = arguments.first().map_or(Ok(48), |text| number("cells", text))?;
        let steps = arguments.get(1).map_or(Ok(50), |text| number("steps", text))?;
        one_rank(comm, cells, steps)
    })
}

fn one_rank(comm: Comm, cells: usize, steps: usize) -> Result<()> {
    // The world goes round in each dimension.
    let grid = Grid::balanced(comm.world_size(), &[0; 3], &[true; 3])?;
    let mut part = Part::new(&grid, comm.rank(), cells)?;
    let start = Instant::now();
    for _ in 0..steps {
        comm.exchange_halo(&grid, &mut part.heat, &part.shape, &WIDTH)?;
        part.step();
    }
    let seconds = start.elapsed().as_secs_f64();
    let error = comm.all_reduce_value(part.largest_error(steps), ReduceOp::Max)?;
    if comm.rank() == 0 {
        let rate = (cells.pow(3) * steps) as f64 / seconds / 1e6;
        println!("{cells}³ cells on {:?} ranks, {steps} steps: {rate:.0} million cells/s", grid.sizes());
        println!("largest error {error:.1e}");
    }
    comm.finalize()?;
    if error > 1e-9 { Err(format!("the error is {error:e}, 1e-9 is allowed").into()) } else { Ok(()) }
}

/// One rank's cells.
struct Part {
    /// Cells of the world in a dimension.
    cells: usize,
    /// This rank's cells in each dimension of the world.
    own: [Range<usize>; 3],
    /// Cells in memory, with the halo.
    shape: [usize; 3],
    heat: Vec<f64>,
    next: Vec<f64>,
}

impl Part {
    fn new(grid: &Grid, rank: usize, cells: usize) -> Result<Part> {
        let place = grid.coordinates(rank);
        let own = [0, 1, 2].map(|d| {
            let begin = |place: usize| place * cells / grid.sizes()[d];
            begin(place[d])..begin(place[d] + 1)
        });
        if own.iter().any(Range::is_empty) {
            return Err(
                format!("{cells} cells in a dimension are too few for {:?} ranks", grid.sizes()).into()
            );
        }
        let shape = own.clone().map(|range| range.len() + 2);
        let heat = vec![0.0; shape.iter().product()];
        let mut part = Part { cells, own, shape, next: heat.clone(), heat };
        part.for_each_own(|part, cell, place| part.heat[cell] = part.wave(place));
        Ok(part)
    }

    /// Calls `f` with each own cell's place in memory and in the world.
    fn for_each_own(&mut self, mut f: impl FnMut(&mut Part, usize, [usize; 3])) {
        let [_, rows, columns] = self.shape;
        for (x, in_x) in self.own[0].clone().enumerate() {
            for (y, in_y) in self.own[1].clone().enumerate() {
                for (z, in_z) in self.own[2].clone().enumerate() {
                    f(self, ((x + 1) * rows + y + 1) * columns + z + 1, [in_x, in_y, in_z]);
                }
            }
        }
    }

    /// The heat at the beginning.
    fn wave(&self, place: [usize; 3]) -> f64 {
        place.iter().map(|at| (TAU * *at as f64 / self.cells as f64).cos()).product()
    }

    /// One step: heat flows between neighbors.
    fn step(&mut self) {
        let [planes, rows, columns] = self.shape;
        let plane = rows * columns;
        for x in 1..planes - 1 {
            for y in 1..rows - 1 {
                // Slices of one length: the compiler leaves out the checks of each cell, and vectorises.
                let first = x * plane + y * columns + 1;
                let row = |first: usize| &self.heat[first..][..columns - 2];
                let (here, left, right) = (row(first), row(first - 1), row(first + 1));
                let (above, below) = (row(first - columns), row(first + columns));
                let (before, behind) = (row(first - plane), row(first + plane));
                let next = &mut self.next[first..][..columns - 2];
                for z in 0..next.len() {
                    let around = left[z] + right[z] + above[z] + below[z] + before[z] + behind[z];
                    next[z] = here[z] + FLOW * (around - 6.0 * here[z]);
                }
            }
        }
        std::mem::swap(&mut self.heat, &mut self.next);
    }

    /// The largest difference from the exact result: each step makes a wave smaller by the same factor.
    fn largest_error(&mut self, steps: usize) -> f64 {
        let factor = 1.0 + 6.0 * FLOW * ((TAU / self.cells as f64).cos() - 1.0);
        let scale = factor.powi(steps as i32);
        let mut largest = 0.0;
        self.for_each_own(|part, cell, place| {
            largest = f64::max(largest, (part.heat[cell] - scale * part.wave(place)).abs());
        });
        largest
    }
}
