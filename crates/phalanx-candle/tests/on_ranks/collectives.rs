//! Collectives and messages.

use crate::{Case, assert_close, dot, here, numbers, over_ranks};
use candle_core::{DType, Device, Result, Tensor, Var};
use phalanx::ReduceOp;
use phalanx_candle::{Ranks, part};

pub const CASES: &[Case] = &[
    ("collectives/values", values),
    ("collectives/gradients", gradients),
    ("collectives/regions", regions),
    ("collectives/types", types),
    ("collectives/in_place", in_place),
    ("collectives/empty", empty),
    ("collectives/views_are_copied", views_are_copied),
    ("collectives/messages", messages),
];

/// The tensors of all ranks.
fn of_all(ranks: &Ranks, shape: &[usize]) -> Result<Vec<Tensor>> {
    (0..ranks.world_size()).map(|rank| numbers(rank, shape)).collect()
}

fn values(ranks: &Ranks) -> Result<()> {
    let (size, rank) = (ranks.world_size(), ranks.rank());
    let shape = [3, 2 * size, 5];
    let all = of_all(ranks, &shape)?;
    let mine = &all[rank];
    let mut sum = all[0].clone();
    for other in &all[1..] {
        sum = (sum + other)?;
    }
    assert_close(&ranks.all_reduce(mine, ReduceOp::Sum)?, &sum, 0.0);
    assert_close(&ranks.all_reduce(mine, ReduceOp::Avg)?, &(&sum / size as f64)?, 1e-12);
    for dim in 0..3 {
        assert_close(&ranks.all_gather(mine, dim)?, &Tensor::cat(&all, dim)?, 0.0);
        let own = part(&(0..shape[dim]), size, rank);
        assert_close(&ranks.reduce_scatter(mine, dim)?, &sum.narrow(dim, own.start, own.len())?, 0.0);
        assert_close(&ranks.scatter_to(&sum, dim)?, &sum.narrow(dim, own.start, own.len())?, 0.0);
        let whole = numbers(9, &shape)?;
        let mine = whole.narrow(dim, own.start, own.len())?;
        assert_close(&ranks.all_gather_parts(&mine, dim, shape[dim])?, &whole, 0.0);
        assert_close(&ranks.gather_from(&mine, dim, shape[dim])?, &whole, 0.0);
    }
    for (root, of_root) in all.iter().enumerate() {
        assert_close(&ranks.broadcast(mine, root)?, of_root, 0.0);
    }
    for concat in 0..3 {
        let parts = all.iter().map(|other| other.narrow(1, 2 * rank, 2)).collect::<Result<Vec<_>>>()?;
        assert_close(&ranks.all_to_all(mine, 1, concat)?, &Tensor::cat(&parts, concat)?, 0.0);
    }
    Ok(())
}

/// A linear operation and its gradient are adjoint: `Σ <op(x), w> = Σ <x, gradient for w>`, whatever x is.
fn adjoint(
    ranks: &Ranks,
    shape: &[usize],
    operation: impl Fn(&Tensor) -> Result<Tensor>,
    weigh: impl Fn(f64) -> Result<[f64; 2]>,
) -> Result<()> {
    let rank = ranks.rank();
    let x = Var::from_tensor(&numbers(rank, shape)?)?;
    let y = operation(&x)?;
    let w = numbers(20 + rank, y.dims())?;
    let gradients = (&y * &w)?.sum_all()?.backward()?;
    let gradient = gradients.get(&x).expect("a gradient").clone();
    assert_eq!(gradient.dims(), shape);
    for seed in 0..4 {
        let other = numbers(40 + 5 * seed + rank, shape)?;
        let [outside, inside] = weigh(1.0)?;
        let forward = over_ranks(ranks, outside * dot(&operation(&other)?, &w)?)?;
        let back = over_ranks(ranks, inside * dot(&other, &gradient)?)?;
        assert!((forward - back).abs() < 1e-9, "{forward} {back}");
    }
    Ok(())
}

fn gradients(ranks: &Ranks) -> Result<()> {
    let size = ranks.world_size();
    let shape = [4, size, 3];
    let each = |_| Ok([1.0, 1.0]);
    adjoint(ranks, &shape, |x| ranks.all_reduce(x, ReduceOp::Sum), each)?;
    adjoint(ranks, &shape, |x| ranks.all_reduce(x, ReduceOp::Avg), each)?;
    for dim in 0..3 {
        adjoint(ranks, &shape, |x| ranks.all_gather(x, dim), each)?;
        adjoint(ranks, &shape, |x| ranks.reduce_scatter(x, dim), each)?;
        adjoint(ranks, &shape, |x| ranks.all_to_all(x, 1, dim), each)?;
        let mut part_shape = shape;
        part_shape[dim] = part(&(0..7), size, ranks.rank()).len();
        adjoint(ranks, &part_shape, |x| ranks.all_gather_parts(x, dim, 7), each)?;
    }
    for root in 0..size {
        adjoint(ranks, &shape, |x| ranks.broadcast(x, root), each)?;
    }
    Ok(())
}

/// Into a region and out of it: what all ranks have outside counts once.
fn regions(ranks: &Ranks) -> Result<()> {
    let (size, rank) = (ranks.world_size(), ranks.rank());
    let shape = [3, 7, 2];
    let mine = |whole: &Tensor, dim: usize| {
        let own = part(&(0..whole.dims()[dim]), size, rank);
        whole.narrow(dim, own.start, own.len())
    };
    // Into it: x is the same on all ranks.
    let x = numbers(3, &shape)?;
    let into = |operation: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<()> {
        let variable = Var::from_tensor(&x)?;
        let y = operation(&variable)?;
        let w = numbers(20 + rank, y.dims())?;
        let gradients = (y * &w)?.sum_all()?.backward()?;
        let gradient = gradients.get(&variable).expect("a gradient").clone();
        let other = numbers(50, &shape)?;
        let forward = over_ranks(ranks, dot(&operation(&other)?, &w)?)?;
        assert_eq!(forward, dot(&other, &gradient)?);
        Ok(())
    };
    into(&|x| ranks.copy_to(x))?;
    // Out of it: the result, and the gradient that comes, are the same on all ranks.
    let out_of = |shape: &[usize], operation: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<()> {
        let variable = Var::from_tensor(&numbers(rank, shape)?)?;
        let y = operation(&variable)?;
        let w = numbers(20, y.dims())?;
        let gradients = (y * &w)?.sum_all()?.backward()?;
        let gradient = gradients.get(&variable).expect("a gradient").clone();
        let other = numbers(50 + rank, shape)?;
        let forward = dot(&operation(&other)?, &w)?;
        assert_eq!(forward, over_ranks(ranks, dot(&other, &gradient)?)?);
        Ok(())
    };
    out_of(&shape, &|x| ranks.reduce_from(x))?;
    for (dim, whole) in shape.into_iter().enumerate() {
        into(&|x| ranks.scatter_to(x, dim))?;
        let part = mine(&x, dim)?.dims().to_vec();
        out_of(&part, &|x| ranks.gather_from(x, dim, whole))?;
    }
    Ok(())
}

/// Every type that candle and phalanx both have.
fn types(ranks: &Ranks) -> Result<()> {
    let size = ranks.world_size() as f64;
    let all = [
        DType::U8,
        DType::U32,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::BF16,
        DType::F16,
        DType::F32,
        DType::F64,
    ];
    for dtype in all {
        // On GPUs candle converts fewer types.
        let mine = Tensor::full(2.0f64, 6, &Device::Cpu)?.to_dtype(dtype)?.to_device(&here())?;
        let on_host = |tensor: Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let sum = ranks.all_reduce(&mine, ReduceOp::Sum)?;
        assert_eq!(sum.dtype(), dtype);
        assert_eq!(on_host(sum)?, [2.0 * size; 6]);
        assert_eq!(on_host(ranks.all_gather(&mine, 0)?)?, vec![2.0; 6 * size as usize]);
    }
    Ok(())
}

fn in_place(ranks: &Ranks) -> Result<()> {
    let size = ranks.world_size();
    let variable = Var::from_tensor(&Tensor::full(ranks.rank() as f32, (4, 3), &here())?)?;
    // Rows of a variable lie together: the view is changed where it is.
    ranks.all_reduce_in_place(&variable.narrow(0, 1, 2)?, ReduceOp::Max)?;
    let (own, most) = (ranks.rank() as f32, (size - 1) as f32);
    assert_eq!(variable.to_vec2::<f32>()?, [[own; 3], [most; 3], [most; 3], [own; 3]]);
    ranks.broadcast_in_place(&variable, size - 1)?;
    assert_eq!(variable.to_vec2::<f32>()?, [[most; 3]; 4]);
    let scalar = Tensor::new(1.0f64, &here())?;
    ranks.all_reduce_in_place(&scalar, ReduceOp::Sum)?;
    assert_eq!(scalar.to_scalar::<f64>()?, size as f64);
    Ok(())
}

/// Tensors without elements, and parts of fewer rows than ranks.
fn empty(ranks: &Ranks) -> Result<()> {
    let (size, rank) = (ranks.world_size(), ranks.rank());
    let nothing = Tensor::zeros((0, 4), DType::F64, &here())?;
    assert_eq!(ranks.all_reduce(&nothing, ReduceOp::Sum)?.dims(), [0, 4]);
    assert_eq!(ranks.all_gather(&nothing, 1)?.dims(), [0, 4 * size]);
    let own = part(&(0..2), size, rank);
    let whole = numbers(1, &[3, 2])?;
    let mine = whole.narrow(1, own.start.min(1), 0)?;
    let mine = if own.is_empty() { mine } else { whole.narrow(1, own.start, own.len())? };
    assert_close(&ranks.all_gather_parts(&mine, 1, 2)?, &whole, 0.0);
    assert_eq!(ranks.reduce_scatter(&whole, 1)?.dims(), [3, own.len()]);
    Ok(())
}

fn views_are_copied(ranks: &Ranks) -> Result<()> {
    let x = numbers(ranks.rank(), &[4, 6])?;
    let turned = x.t()?;
    let sum = ranks.all_reduce(&turned, ReduceOp::Sum)?;
    assert_close(&sum, &ranks.all_reduce(&x, ReduceOp::Sum)?.t()?.contiguous()?, 0.0);
    let column = x.narrow(1, 2, 1)?;
    assert_eq!(ranks.all_gather(&column, 0)?.dims(), [4 * ranks.world_size(), 1]);
    let strided = turned.broadcast_as((2, 6, 4))?;
    assert_eq!(ranks.all_gather(&strided, 2)?.dims(), [2, 6, 4 * ranks.world_size()]);
    Ok(())
}

/// A tensor goes round: its gradient comes back the other way.
fn messages(ranks: &Ranks) -> Result<()> {
    let (size, rank) = (ranks.world_size(), ranks.rank());
    if size == 1 {
        return Ok(());
    }
    let x = Var::from_tensor(&numbers(rank, &[2, 3])?)?;
    if rank == 0 {
        // y = 3 x of rank 0, which the last rank weighs by its number.
        let sent = ranks.send(&(x.as_tensor() * 3.0)?, size - 1)?;
        let gradients = sent.backward()?;
        let expected = (numbers(7, &[2, 3])? * 3.0)?;
        assert_close(gradients.get(&x).expect("a gradient"), &expected, 0.0);
    } else if rank == size - 1 {
        let received = ranks.recv((2, 3), DType::F64, 0)?;
        assert_close(&received, &(numbers(0, &[2, 3])? * 3.0)?, 0.0);
        (received * numbers(7, &[2, 3])?)?.sum_all()?.backward()?;
    }
    ranks.barrier()
}
