//! What phalanx adds to MPI: all_reduce of f32 through phalanx and by the bare `MPI_Allreduce`, in one process, in turns.
//!
//! `mpirun -np 2 target/release/examples/mpi_overhead`. Each rank may be bound to a core of its own by mpirun. With the argument
//! `started` phalanx's are on a communicator on which a collective was started, so that they are polled.

#[cfg(all(target_pointer_width = "64", target_endian = "little"))]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use phalanx::{BackendKind, ReduceOp};
    use phalanx_sys::mpi::{Handle, Mpi};
    use std::time::Instant;

    /// Rounds of both.
    const ROUNDS: usize = 101;

    let comm = phalanx::init()?;
    if comm.backend() != BackendKind::Mpi {
        return Err("start it with mpirun, as two ranks or more".into());
    }
    if std::env::args().any(|argument| argument == "started") {
        comm.start_all_reduce(vec![1u8], ReduceOp::Sum)?.wait()?;
    }
    // The library that phalanx has loaded and initialised.
    let mpi = Mpi::load()?;
    let mut bare = Handle::ZERO;
    // SAFETY: MPI is initialised; the variable takes the new handle.
    unsafe { (mpi.functions.comm_dup)(mpi.constants.comm_world, &raw mut bare) };
    if comm.rank() == 0 {
        println!("{}, {} ranks", mpi.version, comm.world_size());
        println!("|    bytes |  bare µs | phalanx µs | ratio |");
        println!("|---------:|---------:|-----------:|------:|");
    }
    for bytes in (3..=24).map(|bits| 1usize << bits) {
        let count = bytes / 4;
        let (send, mut recv) = (vec![1.0f32; count], vec![0.0f32; count]);
        let calls = (20_000_000 / (bytes + 20_000)).clamp(2, 300);
        let mut times = [Vec::new(), Vec::new()];
        let mut ratios = Vec::new();
        for round in 0..ROUNDS + 10 {
            let mut taken = [0.0; 2];
            for turn in 0..2 {
                // Each comes first in every second round.
                let which = (round + turn) % 2;
                comm.barrier()?;
                let start = Instant::now();
                for _ in 0..calls {
                    if which == 0 {
                        let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
                        let (float, sum) = (mpi.constants.float, mpi.constants.sum);
                        // SAFETY: both buffers have so many elements; all ranks make this call.
                        let code =
                            unsafe { (mpi.functions.allreduce)(from, to, count as i32, float, sum, bare) };
                        assert_eq!(code, 0, "MPI_Allreduce");
                    } else {
                        comm.all_reduce(&send, &mut recv, ReduceOp::Sum)?;
                    }
                }
                taken[which] = start.elapsed().as_secs_f64() / calls as f64;
            }
            if round >= 10 {
                times[0].push(taken[0]);
                times[1].push(taken[1]);
                ratios.push(taken[1] / taken[0]);
            }
        }
        assert!(recv.iter().all(|sum| *sum == comm.world_size() as f32));
        let median = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let [bare, phalanx] = times.each_mut().map(|times| median(times) * 1e6);
        if comm.rank() == 0 {
            println!("| {bytes:8} | {bare:8.3} | {phalanx:10.3} | {:5.3} |", median(&mut ratios));
        }
    }
    comm.finalize()?;
    Ok(())
}

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
fn main() {}
