//! The collectives of teams: types × reductions × sizes, on the world and on a part of it.

use crate::world::{barrier, context, done, expect, free, must, read, refused, upload, value, values};
use phalanx::cudarc::driver::DeviceRepr;
use phalanx::nvshmem::{Context, Team, TeamReduction};
use phalanx::{Comm, DType, Error};
use phalanx_testkit::scenario::Outcome;
use phalanx_testkit::{Number, Scenario, with_number};

pub const SCENARIOS: &[Scenario] = &[
    Scenario::rank("collectives/movements", movements),
    Scenario::rank("collectives/reductions", reductions),
    Scenario::rank("collectives/of_a_part", of_a_part),
    Scenario::rank("collectives/refused", refusals),
];

const SIZES: [usize; 5] = [0, 1, 17, 4096, 30_001];

fn movements(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    for dtype in DType::ALL {
        with_number!(dtype, T => move_all::<T>(&context, &context.world(), dtype))?;
    }
    must("finalize", context.finalize())?;
    done()
}

/// Numbers of PEs here are those in the team.
fn move_all<T: Number + DeviceRepr>(context: &Context, team: &Team<'_>, dtype: DType) -> Result<(), String> {
    let (me, pes) = (team.my_pe(), team.n_pes());
    let of = |pe: usize, index: usize| T::from_small(value(pe, index));
    let stream = context.stream();
    for len in SIZES {
        let what = |operation: &str| format!("{operation} of {len} {dtype} over {pes}");
        // All PEs allocate, also those who are not in the team.
        let (mine, mut one) =
            (upload(context, &values::<T>(me, len))?, upload(context, &values::<T>(7, len))?);
        let size = len * context.n_pes();
        let (all, mut many) =
            (upload(context, &values::<T>(me, size))?, upload(context, &values::<T>(7, size))?);
        let root = len % pes;
        must("broadcast", team.broadcast(&mut one, &mine, root, stream))?;
        expect(what("broadcast"), &read(&one)?, |index| of(root, index))?;
        must("fcollect", team.fcollect(&mut many.slice_mut(..len * pes), &mine, stream))?;
        let got = read(&many)?;
        expect(what("fcollect"), &got[..len * pes], |index| of(index / len.max(1), index % len.max(1)))?;
        let whole = len * pes;
        must("alltoall", team.alltoall(&mut many.slice_mut(..whole), &all.slice(..whole), stream))?;
        let transposed = |index: usize| of(index / len, me * len + index % len);
        expect(what("alltoall"), &read(&many)?[..whole], transposed)?;
        free([mine, one, all, many])?;
    }
    Ok(())
}

fn reductions(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    for dtype in DType::ALL {
        with_number!(dtype, T => reduce_all::<T>(&context, &context.world(), dtype, &SIZES))?;
    }
    must("finalize", context.finalize())?;
    done()
}

/// The combined value of all PEs at an index.
fn combined(op: TeamReduction, pes: usize, index: usize) -> i32 {
    let all = (0..pes).map(|pe| value(pe, index));
    let combine = |f: fn(i32, i32) -> i32| all.clone().reduce(f).unwrap_or(0);
    match op {
        TeamReduction::Sum => all.sum(),
        TeamReduction::Prod => all.product(),
        TeamReduction::Min => combine(i32::min),
        TeamReduction::Max => combine(i32::max),
        TeamReduction::And => combine(|a, b| a & b),
        TeamReduction::Or => combine(|a, b| a | b),
        _ => combine(|a, b| a ^ b),
    }
}

fn reduce_all<T: Number + DeviceRepr>(
    context: &Context,
    team: &Team<'_>,
    dtype: DType,
    sizes: &[usize],
) -> Result<(), String> {
    let (me, pes) = (team.my_pe(), team.n_pes());
    let stream = context.stream();
    for op in TeamReduction::ALL {
        if !op.supports(dtype) {
            let mut buffer = upload(context, &values::<T>(me, 2))?;
            let reduced = team.reduce_in_place(&mut buffer, op, stream);
            let error = refused("reduce", reduced, &[op.name(), dtype.name()])?;
            assert!(matches!(error, Error::Unsupported(_)), "{error}");
            must("free", buffer.free())?;
            continue;
        }
        for &len in sizes {
            let what = |operation: &str| format!("{operation} of {len} {dtype}, {op}, over {pes}");
            let whole = |index: usize| T::from_small(combined(op, pes, index));
            let size = len * context.n_pes();
            let mut mine = upload(context, &values::<T>(me, len))?;
            let mut dest = upload(context, &values::<T>(7, len))?;
            let all = upload(context, &values::<T>(me, size))?;
            must("reduce", team.reduce(&mut dest, &mine, op, stream))?;
            expect(what("reduce"), &read(&dest)?, whole)?;
            let scattered = team.reduce_scatter(&mut dest, &all.slice(..len * pes), op, stream);
            must("reduce_scatter", scattered)?;
            expect(what("reduce_scatter"), &read(&dest)?, |index| whole(me * len + index))?;
            must("reduce_in_place", team.reduce_in_place(&mut mine, op, stream))?;
            expect(what("reduce_in_place"), &read(&mine)?, whole)?;
            free([mine, dest, all])?;
        }
    }
    Ok(())
}

/// Rows of two: the teams work at the same time.
fn of_a_part(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (row, column) = must("split_2d", context.world().split_2d(2.min(context.n_pes())))?;
    // Rows of different lengths would allocate differently.
    if context.n_pes() == 1 || context.n_pes().is_multiple_of(2) {
        move_all::<f32>(&context, &row, DType::F32)?;
        reduce_all::<i32>(&context, &row, DType::I32, &[1000, 30_001])?;
        reduce_all::<f64>(&context, &column, DType::F64, &[1000])?;
    }
    barrier(&context)?;
    must("destroy", row.destroy())?;
    must("destroy", column.destroy())?;
    must("finalize", context.finalize())?;
    done()
}

fn refusals(comm: Comm, _: &[String]) -> Outcome {
    let context = context(&comm)?;
    let (world, stream, pes) = (context.world(), context.stream(), context.n_pes());
    let (mut a, b) = (must("alloc", context.alloc::<u32>(12))?, must("alloc", context.alloc::<u32>(11))?);
    refused("broadcast", world.broadcast(&mut a, &b, 0, stream), &["broadcast", "12 elements", "11"])?;
    let root = world.broadcast(&mut a.slice_mut(..11), &b, pes, stream);
    refused("root", root, &["does not exist"])?;
    refused("fcollect", world.fcollect(&mut a.slice_mut(..10), &b, stream), &["fcollect", "10 elements"])?;
    refused("reduce", world.reduce(&mut a, &b, TeamReduction::Sum, stream), &["reduce", "12 elements"])?;
    let scattered = world.reduce_scatter(&mut a, &b, TeamReduction::Sum, stream);
    refused("reduce_scatter", scattered, &["reduce_scatter", "11 elements"])?;
    if pes > 1 {
        let uneven = world.alltoall(&mut a.slice_mut(..pes + 1), &b.slice(..pes + 1), stream);
        refused("alltoall", uneven, &["cannot share", "evenly"])?;
    }
    barrier(&context)?;
    must("free", a.free())?;
    must("free", b.free())?;
    must("finalize", context.finalize())?;
    done()
}
