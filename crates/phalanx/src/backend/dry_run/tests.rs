//! What a dry run lists, and what its operations give, against ranks that exist.

use crate::{BackendKind, Comm, DryCall, Error, PreMulSum, ReduceOp, Result};

const RANKS: usize = 3;

/// All collectives with the same data on every rank, so that a rank that exists gets what a dry run gives. Only root 1 is a root.
fn program(comm: &Comm) -> Result<Vec<Vec<i32>>> {
    let own = [1, 2, 3];
    let whole: Vec<i32> = (0..9).collect();
    let counts = [1, 3, 2];
    let ragged = &whole[..6];
    let mut results = Vec::new();
    for op in ReduceOp::ALL {
        let mut out = [0; 3];
        comm.all_reduce(&own, &mut out, op)?;
        results.push(out.to_vec());
        let mut part = [0; 3];
        comm.reduce_scatter(&whole, &mut part, op)?;
        results.push(part.to_vec());
    }
    let mut scaled = own;
    comm.all_reduce_in_place(&mut scaled, PreMulSum(5))?;
    results.push(scaled.to_vec());
    let mut gathered = [0; 9];
    comm.all_gather(&own, &mut gathered)?;
    results.push(gathered.to_vec());
    let mut placed = [0; 9];
    placed[3 * comm.rank()..][..3].copy_from_slice(&own);
    comm.all_gather_in_place(&mut placed)?;
    results.push(placed.to_vec());
    let mut exchanged = whole.clone();
    comm.all_to_all_in_place(&mut exchanged)?;
    results.push(exchanged);
    let mut scattered = vec![0; counts[comm.rank()]];
    comm.reduce_scatter_v(ragged, &mut scattered, &counts, ReduceOp::Sum)?;
    results.push(scattered);
    let mut root = own;
    comm.broadcast_in_place(&mut root, 1)?;
    comm.reduce_in_place(&mut root, ReduceOp::Sum, 1)?;
    results.push(if comm.rank() == 1 { root.to_vec() } else { Vec::new() });
    comm.barrier()?;
    let started = comm.start_all_reduce(own.to_vec(), ReduceOp::Sum)?;
    results.push(started.wait()?);
    Ok(results)
}

#[test]
fn operations_give_what_ranks_with_the_same_data_get() {
    let of_ranks =
        Comm::builder().backend(BackendKind::Host).run(RANKS, |comm| program(&comm).unwrap()).unwrap();
    for (rank, expected) in of_ranks.iter().enumerate() {
        let (results, _) = crate::dry_run(rank, RANKS, |comm| program(&comm).unwrap()).unwrap();
        assert_eq!(&results, expected, "rank {rank}");
    }
}

#[test]
fn each_operation_is_listed_with_its_bytes() {
    let (_, calls) = crate::dry_run(1, RANKS, |comm| {
        assert_eq!(comm.backend(), BackendKind::DryRun);
        program(&comm).unwrap();
        comm.send(&[1u8; 5], 2).unwrap();
        let mut received = [7u64; 2];
        comm.recv(&mut received, 0).unwrap();
        assert_eq!(received, [0; 2]);
    })
    .unwrap();
    let short = |call: &DryCall| (call.operation, call.send_bytes, call.recv_bytes);
    let expected = [
        ("all_reduce", 12, 12),
        ("all_gather", 12, 36),
        ("all_gather", 12, 36),
        ("all_to_all", 36, 36),
        ("reduce_scatter_v", 24, 12),
        ("broadcast", 12, 12),
        ("reduce", 12, 12),
        ("barrier", 0, 0),
        ("all_reduce", 12, 12),
        ("send", 5, 0),
        ("recv", 0, 16),
    ];
    assert_eq!(calls[10..].iter().map(short).collect::<Vec<_>>(), expected);
    assert_eq!(calls.last().unwrap().peer, Some(0));
    assert_eq!(calls.last().unwrap().to_string(), "recv of u64, 0 B in, 16 B out, peer 0");
}

#[test]
fn a_grid_has_the_ranks_that_it_would_have() {
    let (_, calls) = crate::dry_run(700, 1200, |comm| {
        let parts = comm.split_grid(&[300, 4], &[&[1], &[0]]).unwrap();
        assert_eq!((parts[0].rank(), parts[0].world_size()), (0, 4));
        assert_eq!((parts[1].rank(), parts[1].world_size()), (175, 300));
        let inner = parts[0].split_grid(&[2, 2], &[&[1]]).unwrap().remove(0);
        inner.barrier().unwrap();
    })
    .unwrap();
    assert_eq!(*calls.last().unwrap().members, [700, 701]);
}

#[test]
fn what_depends_on_ranks_that_do_not_exist_is_refused() {
    crate::dry_run(0, 2, |comm| {
        assert!(matches!(comm.split(Some(0), 0), Err(Error::Unsupported(_))));
        assert!(matches!(comm.shrink(), Err(Error::Unsupported(_))));
        assert!(matches!(comm.grow(1), Err(Error::Unsupported(_))));
        comm.barrier().unwrap();
    })
    .unwrap();
    let chosen = Comm::builder().backend(BackendKind::DryRun).run(2, drop);
    assert!(matches!(chosen, Err(Error::Usage(_))), "{chosen:?}");
    let error = crate::dry_run(2, 2, drop).unwrap_err().to_string();
    assert!(error.contains("below 2"), "{error}");
}

#[test]
fn what_only_another_rank_has_is_zero_or_stays_in_place() {
    crate::dry_run(1, 3, |comm| {
        let (none, mut out): (&[i32], _) = (&[], [7; 2]);
        comm.broadcast(none, &mut out, 0).unwrap();
        assert_eq!(out, [0; 2]);
        let (mut whole, mut part) = ([7; 6], [7; 2]);
        comm.scatter(none, &mut part, 2).unwrap();
        assert_eq!(part, [0; 2]);
        comm.scatter_in_place(&mut whole, 2).unwrap();
        comm.broadcast_in_place(&mut whole, 0).unwrap();
        assert_eq!(whole, [7; 6]);
        // Blocks that are longer than this rank's.
        let mut all = [7; 6];
        comm.all_gather_v(&[5], &mut all, &[3, 1, 2]).unwrap();
        assert_eq!(all, [5, 0, 0, 5, 5, 0]);
        let mut all = [7; 3];
        comm.all_to_all_v(none, &[0; 3], &mut all, &[1, 0, 2]).unwrap();
        assert_eq!(all, [0; 3]);
    })
    .unwrap();
}
