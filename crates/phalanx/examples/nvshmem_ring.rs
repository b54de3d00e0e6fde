//! An all-gather in one kernel, with NVSHMEM's puts and signals:
//! `phalanx launch -n 2 -- target/release/examples/nvshmem_ring`.

use phalanx::cudarc::driver::LaunchConfig;
use phalanx::jit::{Program, value, writes};
use phalanx::nvshmem::Context;

const KERNEL: &str = include_str!("kernels/ring.cu");
/// Elements of each PE.
const COUNT: usize = 1_000_003;
const BLOCKS: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let comm = phalanx::init()?;
    let nvshmem = Context::init(&comm)?;
    let (me, pes, stream) = (nvshmem.my_pe(), nvshmem.n_pes(), nvshmem.stream());

    let image = Program::new("ring.cu", KERNEL).nvshmem().compile_for(nvshmem.cuda_context())?;
    let ring = nvshmem.load(&image)?.kernel("ring")?;

    let mut all = nvshmem.alloc::<f32>(pes * COUNT)?;
    let mut arrived = nvshmem.alloc::<u64>(BLOCKS * pes)?;
    let element = |pe: usize, index: usize| (pe * COUNT + index) as f32;
    let mine: Vec<f32> = (0..COUNT).map(|index| element(me, index)).collect();
    stream.memcpy_htod(&mine, &mut all.view_mut().slice_mut(me * COUNT..(me + 1) * COUNT))?;

    let config =
        LaunchConfig { grid_dim: (BLOCKS as u32, 1, 1), block_dim: (512, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernel's parameters; it writes within the two buffers on every PE, and nobody else does.
    unsafe {
        ring.launch_cooperative(stream, config, [writes(&mut all), writes(&mut arrived), value(&COUNT)])?;
    }
    nvshmem.sync(stream)?;

    let got = stream.clone_dtoh(&all.view())?;
    let wrong = (0..pes * COUNT).filter(|&at| got[at] != element(at / COUNT, at % COUNT)).count();
    println!("PE {me} of {pes}: {} elements gathered, {wrong} wrong", pes * COUNT);
    all.free()?;
    arrived.free()?;
    drop(ring);
    nvshmem.finalize()?;
    if wrong == 0 { Ok(()) } else { Err("wrong elements".into()) }
}
