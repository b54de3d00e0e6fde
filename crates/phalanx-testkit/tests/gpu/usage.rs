//! Wrong lengths, roots and peers in GPU memory: each operation says what is wrong and what would be right,
//! and enqueues nothing.

use crate::world::{both, done, expect, must, stream};
use libtest_mimic::Trial;
use phalanx::cudarc::driver::sys::{CUresult, cuStreamQuery};
use phalanx::cudarc::driver::{CudaSlice, DriverError};
use phalanx::nccl::{Buffer, Registration};
use phalanx::{Comm, Error, ReduceOp, Result, Target};
use phalanx_testkit::Scenario;
use phalanx_testkit::scenario::{ErrorContext, Outcome};

pub const SCENARIOS: &[Scenario] =
    &[Scenario::rank("wrong_slices", wrong_slices), Scenario::rank("wrong_buffers", wrong_buffers)];

pub fn trials(gpus: usize) -> Vec<Trial> {
    SCENARIOS.iter().flat_map(|scenario| both(*scenario, 1, gpus, &[""])).collect()
}

const SUM: ReduceOp = ReduceOp::Sum;

/// What all buffers hold, before and afterwards.
const UNTOUCHED: f32 = 7.0;

fn wrong_slices(comm: Comm, _: &[String]) -> Outcome {
    let make = |len| stream(&comm).clone_htod(&vec![UNTOUCHED; len]).context(|| "upload".into());
    wrong(&comm, &make, |slice: &CudaSlice<f32>| stream(&comm).clone_dtoh(slice))
}

fn wrong_buffers(comm: Comm, _: &[String]) -> Outcome {
    let nccl = comm.nccl().ok_or("NCCL")?;
    let make = |len| {
        // The best that the library can register.
        let registrations = [Registration::Symmetric, Registration::Local, Registration::Plain];
        let mut made = registrations.into_iter().map(|registration| nccl.alloc_as::<f32>(len, registration));
        let mut buffer = must("alloc", made.find(Result::is_ok).expect("three of them"))?;
        let filled = stream(&comm).memcpy_htod(&vec![UNTOUCHED; len], &mut buffer.view_mut());
        filled.context(|| "upload".into()).map(|()| buffer)
    };
    wrong(&comm, &make, |buffer: &Buffer<f32>| stream(&comm).clone_dtoh(&buffer.view()))
}

/// All operations, each with one argument that is wrong on every rank.
fn wrong<B: Target<Elem = f32>>(
    comm: &Comm,
    make: &dyn Fn(usize) -> std::result::Result<B, String>,
    read: impl Fn(&B) -> std::result::Result<Vec<f32>, DriverError>,
) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (mut block, mut longer) = (make(3)?, make(4)?);
    let (mut all, mut more) = (make(3 * ranks)?, make(3 * ranks + 1)?);
    let (factor, no_root) = (make(1)?, ranks);
    let counts = vec![3; ranks];
    let uploaded = || stream(comm).synchronize().context(|| "synchronize".into());
    uploaded()?;

    // What is wrong, and what would be right.
    let is_four = ["4".to_owned(), "3".to_owned()];
    let is_three = ["3".to_owned(), "4".to_owned()];
    let is_more = [(3 * ranks + 1).to_string(), (3 * ranks).to_string()];
    let is_none = [ranks.to_string(), format!("the ranks are 0 to {}", ranks - 1)];
    let is_odd = [(3 * ranks + 1).to_string(), "pad it".to_owned()];
    let check = |name: &str, [value, right]: &[String; 2], result: Result<()>| {
        // SAFETY: a stream that is alive; nothing but a question.
        let state = unsafe { cuStreamQuery(stream(comm).cu_stream()) };
        let text = match result {
            Err(error @ Error::Usage(_)) if !error.is_fatal() => error.to_string(),
            other => return Err(format!("{name}: {other:?}")),
        };
        for part in [name, value, right] {
            if !text.contains(part) {
                return Err(format!("{name}: {part:?} is not in {text:?}"));
            }
        }
        if state == CUresult::CUDA_SUCCESS {
            Ok(())
        } else {
            Err(format!("{name} enqueued something: {state:?}"))
        }
    };

    check("all_reduce", &is_four, comm.all_reduce(&block, &mut longer, SUM))?;
    check("broadcast", &is_three, comm.broadcast(&block, &mut longer, rank))?;
    check("broadcast", &is_none, comm.broadcast_in_place(&mut block, no_root))?;
    check("reduce", &is_four, comm.reduce(&block, &mut longer, SUM, rank))?;
    check("reduce", &is_none, comm.reduce_in_place(&mut block, SUM, no_root))?;
    check("all_gather", &is_more, comm.all_gather(&block, &mut more))?;
    check("all_gather_v", &is_more, comm.all_gather_v(&block, &mut more, &counts))?;
    check("reduce_scatter", &is_more, comm.reduce_scatter(&more, &mut block, SUM))?;
    check("reduce_scatter_v", &is_more, comm.reduce_scatter_v(&more, &mut block, &counts, SUM))?;
    check("all_to_all", &is_more, comm.all_to_all(&all, &mut more))?;
    check("all_to_all_v", &is_more, comm.all_to_all_v(&all, &counts, &mut more, &counts))?;
    check("gather", &is_more, comm.gather(&block, &mut more, rank))?;
    check("gather", &is_none, comm.gather_in_place(&mut all, no_root))?;
    check("gather_v", &is_more, comm.gather_v(&block, &mut more, &counts, rank))?;
    check("scatter", &is_more, comm.scatter(&more, &mut block, rank))?;
    check("scatter", &is_none, comm.scatter_in_place(&mut all, no_root))?;
    check("scatter_v", &is_more, comm.scatter_v(&more, &counts, &mut block, rank))?;
    check("send", &is_none, comm.send(&block, no_root))?;
    check("recv", &is_none, comm.recv(&mut block, no_root))?;
    check("send", &is_none, comm.send_recv(&block, no_root, &mut longer, 0))?;
    check("recv", &is_none, comm.send_recv(&block, rank, &mut longer, no_root))?;
    if ranks > 1 {
        check("all_gather", &is_odd, comm.all_gather_in_place(&mut more))?;
        check("reduce_scatter", &is_odd, comm.reduce_scatter_in_place(&mut more, SUM))?;
        check("all_to_all", &is_odd, comm.all_to_all_in_place(&mut more))?;
    }
    check("all_reduce", &is_four, comm.group(|group| group.all_reduce(&block, &mut longer, SUM)))?;
    check("all_gather", &is_more, comm.group(|group| group.all_gather(&block, &mut more)))?;
    check("send", &is_none, comm.group(|group| group.send(&block, no_root)))?;
    // Of the two the first is right, and is not started either.
    let second_is_wrong = comm.group(|group| {
        group.all_gather(&block, &mut all)?;
        group.broadcast_in_place(&mut longer, no_root)
    });
    check("broadcast", &is_none, second_is_wrong)?;
    if let Some(nccl) = comm.nccl() {
        check("all_reduce", &is_four, nccl.all_reduce_scaled(&block, &mut longer, &factor))?;
        check("reduce", &is_none, nccl.reduce_scaled(&block, &mut longer, &factor, no_root))?;
        check("reduce_scatter", &is_more, nccl.reduce_scatter_scaled(&more, &mut block, &factor))?;
        let (is_not_one, mut other) = (["3".to_owned(), "1".to_owned()], make(4)?);
        uploaded()?;
        check("all_reduce_scaled", &is_not_one, nccl.all_reduce_scaled(&longer, &mut other, &block))?;
    }

    for (name, buffer) in [("block", &block), ("longer", &longer), ("all", &all), ("more", &more)] {
        expect(name, &read(buffer).context(|| "download".into())?, |_| UNTOUCHED)?;
    }
    must("afterwards", comm.all_reduce_in_place(&mut block, SUM))?;
    must("sync", comm.sync())?;
    expect("the sum", &read(&block).context(|| "download".into())?, |_| UNTOUCHED * ranks as f32)?;
    done()
}
