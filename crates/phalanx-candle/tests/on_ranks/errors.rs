//! What is refused, and phalanx's errors through candle's.

use crate::{Case, here, numbers};
use candle_core::{DType, Result, Tensor, Var};
use phalanx::ReduceOp;
use phalanx_candle::{Ranks, kv_heads, phalanx_error};
use std::time::Duration;

pub const CASES: &[Case] = &[
    ("errors/usage", usage),
    ("errors/no_gradient_of_max", no_gradient_of_max),
    ("errors/mismatch", mismatch),
    ("errors/ended", ended),
    ("errors/timeout", timeout),
];

/// Of processes alone: rank 1 ends in the middle.
pub const KILLED: Case = ("errors/killed", killed);

#[track_caller]
fn refused<T>(outcome: Result<T>, words: &[&str]) {
    let Err(error) = outcome else { panic!("it was not refused: {words:?}") };
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

/// Arguments that make no sense: refused before anything is sent, so that the barrier works.
fn usage(ranks: &Ranks) -> Result<()> {
    let size = ranks.world_size();
    let x = numbers(0, &[3, 4])?;
    refused(ranks.all_reduce_in_place(&x.t()?, ReduceOp::Sum), &["contiguous()", "[4, 3]"]);
    refused(ranks.broadcast(&x, size), &["root", &size.to_string()]);
    refused(ranks.broadcast_in_place(&x, size), &["root", &size.to_string()]);
    refused(ranks.all_gather(&x, 2), &["dim"]);
    refused(ranks.send(&x, ranks.rank()), &["this rank"]);
    refused(ranks.recv(3, DType::F32, size), &["peer", &size.to_string()]);
    refused(ranks.all_gather_parts(&x, 0, 3 * size + size), &["all_gather_parts", "3 rows"]);
    if size > 1 {
        refused(ranks.all_to_all(&numbers(0, &[size + 1, 2])?, 0, 1), &["evenly", &(size + 1).to_string()]);
    }
    if size == 4 {
        refused(kv_heads(ranks, 3), &["[1, 3, 6]"]);
        let head = kv_heads(ranks, 2)?;
        assert_eq!(head, ranks.rank() / 2..ranks.rank() / 2 + 1);
    }
    ranks.barrier()
}

fn no_gradient_of_max(ranks: &Ranks) -> Result<()> {
    let x = Var::from_tensor(&numbers(ranks.rank(), &[3])?)?;
    let most = ranks.all_reduce(&x, ReduceOp::Max)?;
    refused(most.sum_all()?.backward(), &["no gradient", "detach()"]);
    ranks.barrier()
}

/// Ranks that differ get phalanx's error, on a communicator that has then failed.
fn mismatch(ranks: &Ranks) -> Result<()> {
    if ranks.world_size() == 1 {
        return Ok(());
    }
    let others = ranks.split(Some(0), 0)?.expect("all have a colour");
    let shape = if ranks.rank() == 0 { 3 } else { 4 };
    let x = Tensor::zeros(shape, DType::F32, &here())?;
    let error = others.all_reduce(&x, ReduceOp::Sum).and_then(|_| others.barrier()).unwrap_err();
    assert!(matches!(phalanx_error(&error), Some(phalanx::Error::Mismatch(_))), "{error}");
    let context = error.context("in a layer");
    assert!(phalanx_error(&context).is_some());
    assert!(phalanx_error(&x.reshape(99).unwrap_err()).is_none());
    ranks.barrier()
}

/// Whoever waits for a rank longer than the deadline gets phalanx's error, with that rank's number.
fn timeout(ranks: &Ranks) -> Result<()> {
    let (size, late) = (ranks.world_size(), ranks.world_size() - 1);
    let others = ranks.split(Some(0), 0)?.expect("all have a colour");
    if size > 1 && ranks.rank() != late {
        let hasty = others.within(Duration::from_millis(300))?;
        let x = numbers(0, &[1000])?;
        let error = hasty.all_reduce(&x, ReduceOp::Sum).and_then(|_| hasty.sync()).unwrap_err();
        let Some(phalanx::Error::Timeout(timeout)) = phalanx_error(&error) else { panic!("{error}") };
        assert!(timeout.missing.iter().any(|missing| missing.rank == late), "{timeout}");
    }
    // Until the others have seen it.
    ranks.barrier()
}

fn killed(ranks: &Ranks) -> Result<()> {
    let x = numbers(ranks.rank(), &[1000])?;
    ranks.all_reduce(&x, ReduceOp::Sum)?;
    ranks.sync()?;
    if ranks.rank() == 1 {
        std::process::abort();
    }
    let error = ranks.all_reduce(&x, ReduceOp::Sum).and_then(|_| ranks.sync()).unwrap_err();
    match phalanx_error(&error) {
        Some(phalanx::Error::Peer(_)) if error.to_string().contains("rank 1") => Ok(()),
        _ => Err(error),
    }
}

fn ended(ranks: &Ranks) -> Result<()> {
    let others = ranks.split(Some(0), 0)?.expect("all have a colour");
    let layer = others.clone();
    others.finalize()?;
    let error = layer.all_reduce(&numbers(0, &[2])?, ReduceOp::Sum).unwrap_err();
    assert!(matches!(phalanx_error(&error), Some(phalanx::Error::Usage(_))), "{error}");
    Ok(())
}
