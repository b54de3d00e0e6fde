//! Heat in a plate, its rows shared out among the PEs, whose kernels exchange the rows at their borders:
//! `phalanx launch -n 2 -- target/release/examples/nvshmem_halo`. PE 0 then computes it all alone and compares.

use phalanx::cudarc::driver::LaunchConfig;
use phalanx::jit::{Kernel, Program, reads, value, writes};
use phalanx::nvshmem::{Context, Symmetric};

const KERNEL: &str = include_str!("kernels/halo.cu");
/// Rows of each PE.
const ROWS: usize = 512;
const WIDTH: usize = 1024;
const STEPS: u64 = 500;

/// A plate: rows, and one above and one below, in two grids.
struct Plate<'c> {
    grids: [Symmetric<'c, f32>; 2],
    arrived: Symmetric<'c, u64>,
    rows: usize,
    neighbours: [i32; 2],
}

impl<'c> Plate<'c> {
    /// Cold, but for the edge above the first row.
    fn new(
        nvshmem: &'c Context,
        rows: usize,
        neighbours: [i32; 2],
    ) -> Result<Plate<'c>, Box<dyn std::error::Error>> {
        let len = (rows + 2) * WIDTH;
        let mut grids = [nvshmem.alloc(len)?, nvshmem.alloc(len)?];
        if neighbours[0] < 0 {
            for grid in &mut grids {
                nvshmem.stream().memcpy_htod(&[100.0; WIDTH], &mut grid.view_mut().slice_mut(..WIDTH))?;
            }
        }
        Ok(Plate { grids, arrived: nvshmem.alloc(2)?, rows, neighbours })
    }

    fn run(&mut self, nvshmem: &Context, halo: &Kernel<'_>) -> phalanx::Result<f64> {
        let stream = nvshmem.stream();
        let config = LaunchConfig { grid_dim: (130, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        let start = std::time::Instant::now();
        for step in 0..STEPS {
            let [even, odd] = &mut self.grids;
            let (from, to) = if step % 2 == 0 { (even, odd) } else { (odd, even) };
            // SAFETY: the kernel's parameters; it writes within the second grid and the signals, here and at the
            // neighbours, which do not read there meanwhile.
            unsafe {
                halo.launch_cooperative(
                    stream,
                    config,
                    [
                        reads(from),
                        writes(to),
                        writes(&mut self.arrived),
                        value(&self.rows),
                        value(&WIDTH),
                        value(&self.neighbours[0]),
                        value(&self.neighbours[1]),
                        value(&step),
                    ],
                )?;
            }
        }
        nvshmem.sync(stream)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// This PE's own rows.
    fn rows(&self, nvshmem: &Context) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
        let own = self.grids[STEPS as usize % 2].slice(WIDTH..(self.rows + 1) * WIDTH);
        Ok(nvshmem.stream().clone_dtoh(own.view())?)
    }

    fn free(self) -> phalanx::Result<()> {
        for grid in self.grids {
            grid.free()?;
        }
        self.arrived.free()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let comm = phalanx::init()?;
    let nvshmem = Context::init(&comm)?;
    let (me, pes) = (nvshmem.my_pe(), nvshmem.n_pes());
    let image = Program::new("halo.cu", KERNEL).nvshmem().compile_for(nvshmem.cuda_context())?;
    let halo = nvshmem.load(&image)?.kernel("halo")?;

    let below = if me + 1 < pes { me as i32 + 1 } else { -1 };
    let mut shared = Plate::new(&nvshmem, ROWS, [me as i32 - 1, below])?;
    nvshmem.world().barrier()?; // nobody sends before all are ready
    let seconds = shared.run(&nvshmem, &halo)?;
    println!("PE {me} of {pes}: {STEPS} steps of {ROWS} × {WIDTH} in {:.1} ms", seconds * 1e3);

    // All allocate, since memory is symmetric; PE 0 computes.
    let mut whole = Plate::new(&nvshmem, pes * ROWS, [-1, -1])?;
    let mine = shared.rows(&nvshmem)?;
    let mut gathered = nvshmem.alloc::<f32>(pes * ROWS * WIDTH)?;
    let mut source = nvshmem.alloc::<f32>(ROWS * WIDTH)?;
    nvshmem.stream().memcpy_htod(&mine, &mut source.view_mut())?;
    nvshmem.world().fcollect(&mut gathered, &source, nvshmem.stream())?;
    let mut wrong = 0;
    if me == 0 {
        let seconds = whole.run(&nvshmem, &halo)?;
        let (alone, together) = (whole.rows(&nvshmem)?, nvshmem.stream().clone_dtoh(&gathered.view())?);
        wrong = alone.iter().zip(&together).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        println!("PE 0 alone: {:.1} ms; {wrong} of {} elements differ", seconds * 1e3, alone.len());
    }
    shared.free()?;
    whole.free()?;
    gathered.free()?;
    source.free()?;
    drop(halo);
    nvshmem.finalize()?;
    if wrong == 0 { Ok(()) } else { Err("the results differ".into()) }
}
