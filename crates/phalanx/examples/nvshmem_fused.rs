//! "Compute and put" as one kernel, compared with a kernel and a put:
//! `phalanx launch -n 2 -- target/release/examples/nvshmem_fused`. Prints both times and their ratio.

use phalanx::cudarc::driver::LaunchConfig;
use phalanx::cudarc::driver::sys::CUevent_flags;
use phalanx::jit::{Kernel, Program, reads, value, writes};
use phalanx::nvshmem::{Compare, Context, SignalOp, Symmetric};

const KERNEL: &str = include_str!("kernels/fused.cu");
const ITERATIONS: u64 = 200;
const WARMUP: u64 = 20;
/// Elements.
const SIZES: [usize; 5] = [1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24];

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

struct Bench<'c> {
    nvshmem: &'c Context,
    compute: Kernel<'c>,
    compute_and_put: Kernel<'c>,
    input: phalanx::cudarc::driver::CudaSlice<f32>,
    result: Symmetric<'c, f32>,
    inbox: Symmetric<'c, f32>,
    arrived: Symmetric<'c, u64>,
    /// What the signal will have reached.
    expected: u64,
    quads: usize,
    config: LaunchConfig,
}

impl<'c> Bench<'c> {
    fn new(nvshmem: &'c Context, len: usize) -> Result<Bench<'c>> {
        let image = Program::new("fused.cu", KERNEL).nvshmem().compile_for(nvshmem.cuda_context())?;
        let module = nvshmem.load(&image)?;
        let input: Vec<f32> = (0..len).map(|index| (index % 1000) as f32 / 100.0 - 5.0).collect();
        let blocks = (len / 4).div_ceil(256).min(528) as u32;
        Ok(Bench {
            nvshmem,
            compute: module.kernel("compute")?,
            compute_and_put: module.kernel("compute_and_put")?,
            input: nvshmem.stream().clone_htod(&input)?,
            result: nvshmem.alloc(len)?,
            inbox: nvshmem.alloc(len)?,
            arrived: nvshmem.alloc(1)?,
            expected: 0,
            quads: len / 4,
            config: LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 },
        })
    }

    fn peer(&self) -> usize {
        (self.nvshmem.my_pe() + 1) % self.nvshmem.n_pes()
    }

    /// A kernel, then a put with a signal.
    fn two_steps(&mut self) -> Result<()> {
        let (peer, stream) = (self.peer(), self.nvshmem.stream());
        let arguments = [reads(&self.input), writes(&mut self.result), value(&self.quads)];
        // SAFETY: the kernel's parameters; it stays within the two buffers of so many quads.
        unsafe { self.compute.launch(stream, self.config, arguments)? };
        let signal = self.arrived.signal(0)?;
        self.nvshmem.put_signal_on_stream(
            &self.inbox,
            &self.result,
            &signal,
            1,
            SignalOp::Add,
            peer,
            stream,
        )?;
        self.expected += 1;
        Ok(())
    }

    /// One kernel.
    fn one_step(&mut self) -> Result<()> {
        let (peer, stream) = (self.peer() as i32, self.nvshmem.stream());
        let arguments = [
            reads(&self.input),
            writes(&mut self.inbox),
            writes(&mut self.arrived),
            value(&self.quads),
            value(&peer),
        ];
        // SAFETY: the kernel's parameters; it reads the input, and writes the peer's inbox and signal, which the peer
        // does not read meanwhile.
        unsafe { self.compute_and_put.launch(stream, self.config, arguments)? };
        self.expected += u64::from(self.config.grid_dim.0);
        Ok(())
    }

    /// Microseconds of one iteration, until the data of the last one has come.
    fn time(&mut self, mut iteration: impl FnMut(&mut Self) -> Result<()>) -> Result<f64> {
        let (nvshmem, stream) = (self.nvshmem, self.nvshmem.stream());
        (0..WARMUP).try_for_each(|_| iteration(self))?;
        nvshmem.world().barrier_on_stream(stream)?;
        let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
        (0..ITERATIONS).try_for_each(|_| iteration(self))?;
        nvshmem.signal_wait_until_on_stream(&self.arrived.signal(0)?, Compare::Ge, self.expected, stream)?;
        let end = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
        nvshmem.world().barrier_on_stream(stream)?;
        nvshmem.sync(stream)?;
        Ok(f64::from(start.elapsed_ms(&end)?) * 1e3 / ITERATIONS as f64)
    }

    /// The inbox, which is then made zero.
    fn take(&mut self) -> Result<Vec<f32>> {
        let stream = self.nvshmem.stream();
        let got = stream.clone_dtoh(&self.inbox.view())?;
        stream.memset_zeros(&mut self.inbox.view_mut())?;
        self.nvshmem.sync(stream)?;
        self.nvshmem.world().barrier()?;
        Ok(got)
    }

    fn free(self) -> Result<()> {
        self.result.free()?;
        self.inbox.free()?;
        Ok(self.arrived.free()?)
    }
}

fn main() -> Result<()> {
    let comm = phalanx::init()?;
    let nvshmem = Context::init(&comm)?;
    let me = nvshmem.my_pe();
    if me == 0 {
        println!("{:>12} {:>14} {:>14} {:>8}", "bytes", "two steps, us", "one step, us", "ratio");
    }
    let mut wrong = 0;
    for len in SIZES {
        let mut bench = Bench::new(&nvshmem, len)?;
        if nvshmem.n_pes() > 1 && bench.inbox.peer(bench.peer())?.is_none() {
            return Err("the kernel stores in the peer's memory: the GPUs need a link that allows it".into());
        }
        let separate = bench.time(Bench::two_steps)?;
        let expected = bench.take()?;
        let fused = bench.time(Bench::one_step)?;
        let got = bench.take()?;
        wrong += got.iter().zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        wrong += usize::from(expected.iter().all(|element| *element == 0.0));
        if me == 0 {
            println!("{:>12} {separate:>14.2} {fused:>14.2} {:>8.2}", len * 4, separate / fused);
        }
        bench.free()?;
    }
    println!("PE {me}: {wrong} wrong");
    nvshmem.finalize()?;
    if wrong == 0 { Ok(()) } else { Err("wrong elements".into()) }
}
