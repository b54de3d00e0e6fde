//! What phalanx adds to NVSHMEM: CPU time of an enqueue and time of an operation, against the bare C call on the same
//! memory and stream, in alternating rounds of one process.
//!
//! `phalanx launch -n 2 -- target/release/examples/nvshmem_overhead [LARGEST BYTES]`

#[path = "shared/rounds.rs"]
mod rounds;

use phalanx::Result;
use phalanx::nvshmem::{Compare, Context, SignalOp, Symmetric};
use phalanx_sys::nvshmem::{Api, cmp, signal_op};
use rounds::{Comparison, Sample};
use std::time::Instant;

/// Rounds of each kind; medians count, of the rounds' differences and ratios too.
const ROUNDS: usize = 41;

fn main() -> Result<()> {
    let largest = std::env::args().nth(1).map_or(1 << 28, |arg| arg.parse().expect("a number"));
    let comm = phalanx::init()?;
    let nvshmem = Context::init(&comm)?;
    // SAFETY: all memory of these is used on the context's one stream.
    unsafe { nvshmem.cuda_context().disable_event_tracking() };
    run(&nvshmem, largest, &[Kind::Put, Kind::PutSignal])?;
    // SAFETY: that memory is free. What the host waits for runs on another stream, behind the events of the buffer.
    unsafe { nvshmem.cuda_context().enable_event_tracking() };
    run(&nvshmem, largest, &[Kind::BlockingPut])?;
    nvshmem.finalize()
}

fn run(nvshmem: &Context, largest: usize, kinds: &[Kind]) -> Result<()> {
    let mut bench = Bench {
        library: Api::load()?,
        nvshmem,
        send: nvshmem.alloc(largest)?,
        recv: nvshmem.alloc(largest)?,
        arrived: nvshmem.alloc(1)?,
        calls: 0,
    };
    for kind in kinds {
        bench.measure(*kind, largest)?;
    }
    let Bench { send, recv, arrived, .. } = bench;
    send.free()?;
    recv.free()?;
    arrived.free()
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Put,
    /// With a signal, and a wait for that of the PE before.
    PutSignal,
    /// The host waits until the source can be written again.
    BlockingPut,
}

struct Bench<'c> {
    library: Api,
    nvshmem: &'c Context,
    send: Symmetric<'c, u8>,
    recv: Symmetric<'c, u8>,
    arrived: Symmetric<'c, u64>,
    calls: u64,
}

impl Bench<'_> {
    fn measure(&mut self, kind: Kind, largest: usize) -> Result<()> {
        let (version, pes) = (self.nvshmem.version(), self.nvshmem.n_pes());
        if self.nvshmem.my_pe() == 0 {
            println!("NVSHMEM {version}, {pes} PEs, {kind:?}");
            println!(
                "     bytes  enqueue us: bare  phalanx  more   time us: bare  phalanx  ratio       GB/s"
            );
        }
        let mut bytes = 8;
        while bytes <= largest {
            let repeats = if bytes <= 1 << 22 { 200 } else { 50 };
            let (mut bare, mut ours) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS + 1 {
                let safe = self.timed(repeats, |bench| bench.ours(kind, bytes))?;
                let raw = self.timed(repeats, |bench| bench.bare(kind, bytes))?;
                if round > 0 {
                    ours.push(safe);
                    bare.push(raw);
                }
            }
            if self.nvshmem.my_pe() == 0 {
                report(bytes, &bare, &ours);
            }
            bytes *= 8;
        }
        Ok(())
    }

    fn next(&self) -> usize {
        (self.nvshmem.my_pe() + 1) % self.nvshmem.n_pes()
    }

    fn ours(&mut self, kind: Kind, bytes: usize) -> Result<()> {
        let (nvshmem, next, stream) = (self.nvshmem, self.next(), self.nvshmem.stream());
        let (send, recv) = (self.send.slice(..bytes), self.recv.slice(..bytes));
        match kind {
            Kind::Put => nvshmem.put_on_stream(&recv, &send, next, stream),
            Kind::BlockingPut => nvshmem.put(&recv, &send, next),
            Kind::PutSignal => {
                self.calls += 1;
                let signal = self.arrived.signal(0)?;
                nvshmem.put_signal_on_stream(&recv, &send, &signal, 1, SignalOp::Add, next, stream)?;
                nvshmem.signal_wait_until_on_stream(&signal, Compare::Ge, self.calls, stream)
            }
        }
    }

    fn bare(&mut self, kind: Kind, bytes: usize) -> Result<()> {
        let (next, stream) = (self.next() as i32, self.nvshmem.stream().cu_stream().cast());
        let (send, recv) = (self.send.device_ptr() as *const _, self.recv.device_ptr() as *mut _);
        let signal = self.arrived.device_ptr() as *mut _;
        let library = &self.library;
        let there = "every NVSHMEM has it";
        // SAFETY: symmetric memory of so many bytes, a PE that exists, the stream of the context.
        unsafe {
            match kind {
                Kind::Put => {
                    library.nvshmemx_putmem_on_stream.expect(there)(recv, send, bytes, next, stream);
                }
                Kind::BlockingPut => library.nvshmem_putmem.expect(there)(recv, send, bytes, next),
                Kind::PutSignal => {
                    self.calls += 1;
                    let put = library.nvshmemx_putmem_signal_on_stream.expect(there);
                    put(recv, send, bytes, signal, 1, signal_op::ADD, next, stream);
                    let wait = library.nvshmemx_signal_wait_until_on_stream.expect(there);
                    wait(signal, cmp::GE, self.calls, stream);
                }
            }
        }
        Ok(())
    }

    fn timed(&mut self, repeats: u32, mut call: impl FnMut(&mut Self) -> Result<()>) -> Result<Sample> {
        self.nvshmem.world().barrier()?;
        let start = Instant::now();
        for _ in 0..repeats {
            call(self)?;
        }
        let enqueue = start.elapsed() / repeats;
        self.nvshmem.quiet_on_stream(self.nvshmem.stream())?;
        // Spinning: the context's own wait naps.
        let end = self.nvshmem.stream().record_event(None)?;
        while !end.try_is_complete()? {
            std::hint::spin_loop();
        }
        Ok(Sample { enqueue, total: start.elapsed() / repeats })
    }
}

fn report(bytes: usize, bare: &[Sample], ours: &[Sample]) {
    let Comparison { enqueue, more, total, ratio } = Comparison::of(bare, ours);
    println!(
        "{bytes:>10} {:>17.2} {:>8.2} {more:>5.2} {:>15.2} {:>8.2} {ratio:>6.3} {:>10.2}",
        enqueue[0],
        enqueue[1],
        total[0],
        total[1],
        bytes as f64 / total[1] / 1e3,
    );
}
