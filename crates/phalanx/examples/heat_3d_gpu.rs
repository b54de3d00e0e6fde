//! The heat equation in three dimensions on GPUs: each rank's halo travels while its GPU computes the cells that need none.
//!
//! ```text
//! cargo run --release -p phalanx --example heat_3d_gpu -- 2 256 100     2 ranks as threads, 256³ cells, 100 steps
//! phalanx launch -n 2 -- target/release/examples/heat_3d_gpu 2 256 100
//! ```
//!
//! The program first computes a small world on the host, too: it fails if a cell is another. Then it prints cell updates a second.

#[expect(dead_code, reason = "phalanx::jit finds its libraries itself")]
#[path = "shared/gpu.rs"]
mod gpu;

use gpu::Result;
use phalanx::cudarc::driver::{CudaSlice, DeviceRepr, LaunchConfig};
use phalanx::jit::{Kernel, Module, Program, reads, value, writes};
use phalanx::{Comm, Grid, ReduceOp};
use std::f64::consts::TAU;
use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

/// The part of a difference between two cells that flows in a step.
const FLOW: f64 = 0.1;
/// The halo in each dimension.
const WIDTH: [usize; 3] = [1; 3];
/// Cells in a dimension, and steps, of the world that is compared with the host.
const SMALL: (usize, usize) = (23, 12);

fn main() -> ExitCode {
    gpu::on_ranks("heat_3d_gpu", one_rank)
}

fn one_rank(comm: Comm) -> Result<()> {
    let argument = |place, default| std::env::args().nth(place).map_or(Ok(default), |text| text.parse());
    let (cells, steps) = (argument(2, 256)?, argument(3, 100)?);
    // The world goes round in each dimension.
    let grid = Grid::balanced(comm.world_size(), &[0; 3], &[true; 3])?;
    let context = comm.cuda_stream()?.context().clone();
    let source = include_str!("kernels/heat_3d.cu");
    let image = Program::new("heat_3d.cu", source).option("--fmad=false").compile_for(&context)?;
    let kernel = Module::load(&context, &image)?.kernel("step")?;

    let small = Part::new(&grid, comm.rank(), SMALL.0)?;
    let (on_gpu, _) = small.on_gpu(&comm, &kernel, SMALL.1)?;
    let on_host = small.on_host(&comm, SMALL.1)?;
    let differ = small.own_cells().filter(|(cell, _)| on_gpu[*cell].to_bits() != on_host[*cell].to_bits());
    let differ = comm.all_reduce_value(differ.count() as u64, ReduceOp::Sum)?;
    if differ > 0 {
        return Err(format!("{differ} of {}³ cells differ from the host's", SMALL.0).into());
    }

    let part = Part::new(&grid, comm.rank(), cells)?;
    let (_, seconds) = part.on_gpu(&comm, &kernel, steps)?;
    if comm.rank() == 0 {
        let rate = (cells.pow(3) * steps) as f64 / seconds / 1e9;
        println!("{}³ cells as on the host, bit for bit", SMALL.0);
        println!("{cells}³ cells on {:?} GPUs, {steps} steps: {rate:.2} billion cells/s", grid.sizes());
    }
    Ok(comm.finalize()?)
}

/// One rank's cells.
struct Part<'g> {
    grid: &'g Grid,
    /// Cells of the world in a dimension.
    cells: usize,
    /// This rank's cells in each dimension of the world.
    own: [Range<usize>; 3],
    /// Cells in memory, with the halo.
    shape: [usize; 3],
}

/// A box of cells, as the kernel has it: where it begins in memory, and its sizes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Cells {
    begin: [i32; 3],
    sizes: [i32; 3],
}

// SAFETY: the kernel's structure of this name.
unsafe impl DeviceRepr for Cells {}

impl Part<'_> {
    fn new(grid: &Grid, rank: usize, cells: usize) -> Result<Part<'_>> {
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
        Ok(Part { grid, cells, own, shape })
    }

    /// Each own cell's place in memory and in the world.
    fn own_cells(&self) -> impl Iterator<Item = (usize, [usize; 3])> {
        let ([_, rows, columns], own) = (self.shape, &self.own);
        let places = own[0].clone().flat_map(|x| own[1].clone().map(move |y| (x, y)));
        places.flat_map(move |(x, y)| {
            let row = ((x - own[0].start + 1) * rows + y - own[1].start + 1) * columns + 1;
            own[2].clone().map(move |z| (row + z - own[2].start, [x, y, z]))
        })
    }

    /// The heat at the beginning: a wave.
    fn start(&self) -> Vec<f64> {
        let mut heat = vec![0.0; self.shape.iter().product()];
        let wave = |at: usize| (TAU * at as f64 / self.cells as f64).cos();
        self.own_cells().for_each(|(cell, place)| heat[cell] = place.map(wave).iter().product());
        heat
    }

    /// The heat after some steps, and the seconds that they took.
    fn on_gpu(&self, comm: &Comm, kernel: &Kernel<'_>, steps: usize) -> Result<(Vec<f64>, f64)> {
        // Beside the communicator's stream, on which the halos travel.
        let compute = comm.cuda_stream()?.context().new_stream()?;
        let shape = self.shape.map(|size| size as i32);
        let step = |cells: &Cells, heat: &CudaSlice<f64>, next: &mut CudaSlice<f64>| -> Result<()> {
            if cells.sizes.contains(&0) {
                return Ok(());
            }
            let [planes, rows, columns] = cells.sizes.map(|size| size as u32);
            let (grid_dim, block_dim) = ((columns.div_ceil(64), rows.div_ceil(4), planes), (64, 4, 1));
            let config = LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 };
            let (rows, columns) = (value(&shape[1]), value(&shape[2]));
            let arguments = [reads(heat), writes(next), rows, columns, value(cells), value(&FLOW)];
            // SAFETY: the kernel's parameters; it reads the neighbors of own cells, which are all in memory.
            Ok(unsafe { kernel.launch(&compute, config, arguments) }?)
        };

        let mut heat = compute.clone_htod(&self.start())?;
        let mut next = compute.alloc_zeros::<f64>(heat.len())?;
        let [inside, edges @ ..] = self.boxes();
        comm.barrier()?;
        let began = Instant::now();
        for _ in 0..steps {
            let halo = comm.start_exchange_halo(self.grid, &heat, &self.shape, &WIDTH)?;
            step(&inside, &heat, &mut next)?;
            halo.finish(&mut heat)?;
            edges.iter().try_for_each(|edge| step(edge, &heat, &mut next))?;
            std::mem::swap(&mut heat, &mut next);
        }
        // A rank that is missing is an error here.
        comm.sync()?;
        compute.synchronize()?;
        let seconds = began.elapsed().as_secs_f64();
        Ok((compute.clone_dtoh(&heat)?, seconds))
    }

    /// The own cells that have no neighbor in the halo, and then the others in six boxes, of which some may be empty.
    fn boxes(&self) -> [Cells; 7] {
        let all = self.shape.map(|size| 1..size - 1);
        let low = [1, 1, 1].map(|first| first..2);
        let high = self.shape.map(|size| (size - 2).max(2)..size - 1);
        let mid = self.shape.map(|size| 2..(size - 2).max(2));
        let cells = |[x, y, z]: [&[Range<usize>; 3]; 3]| {
            let ranges = [x[0].clone(), y[1].clone(), z[2].clone()];
            Cells {
                begin: ranges.clone().map(|range| range.start as i32),
                sizes: ranges.map(|range| range.len() as i32),
            }
        };
        [
            [&mid, &mid, &mid],
            [&low, &all, &all],
            [&high, &all, &all],
            [&mid, &low, &all],
            [&mid, &high, &all],
            [&mid, &mid, &low],
            [&mid, &mid, &high],
        ]
        .map(cells)
    }

    /// The heat after some steps, computed on the host.
    fn on_host(&self, comm: &Comm, steps: usize) -> Result<Vec<f64>> {
        let (row, plane) = (self.shape[2], self.shape[1] * self.shape[2]);
        let mut heat = self.start();
        let mut next = heat.clone();
        for _ in 0..steps {
            comm.exchange_halo(self.grid, &mut heat, &self.shape, &WIDTH)?;
            for (cell, _) in self.own_cells() {
                let [x, y, z] = [plane, row, 1].map(|step| heat[cell - step] + heat[cell + step]);
                next[cell] = heat[cell] + FLOW * (x + y + z - 6.0 * heat[cell]);
            }
            std::mem::swap(&mut heat, &mut next);
        }
        Ok(heat)
    }
}
