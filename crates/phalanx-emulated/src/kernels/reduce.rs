//! What a warp does to reduce: contributions are combined in rank order.

use super::element::{Convert, Number, PRE_MUL_SUM, Sum};
use super::exchange::{Arguments, Exchange, load_step, steps_of, store_step};
use super::lane::{MAX_RANKS, Protocol, Step};
use super::warps::Grid;

/// The factors of a pre-multiplied sum, by rank: every rank sends its own, since products are taken where they are
/// summed. `None` if the call is aborted.
async fn exchange_factors<E: Convert<A>, A>(exchange: &mut Exchange<'_>) -> Option<[u64; MAX_RANKS]> {
    let arguments = exchange.arguments;
    let mut own = arguments.factor;
    if arguments.factor_is_address != 0 {
        let mut bytes = [0; 8];
        // SAFETY: an element on this GPU, which the launch has checked.
        unsafe { std::ptr::copy_nonoverlapping(arguments.factor as *const u8, bytes.as_mut_ptr(), E::SIZE) };
        own = u64::from_ne_bytes(bytes);
    }
    let mut factors = [0; MAX_RANKS];
    let mut step = exchange.lane.protocol.step();
    step[0] = own;
    for peer in 0..arguments.ranks() {
        if exchange.sends[peer] > 0 {
            exchange.lane.send(peer, &step, 1).await;
        }
    }
    for (peer, factor) in factors.iter_mut().enumerate().take(arguments.ranks()) {
        if peer == arguments.rank() {
            *factor = own;
        } else if exchange.receives[peer] > 0 {
            if !exchange.lane.receive(peer, &mut step, 1).await {
                return None;
            }
            *factor = step[0];
        }
    }
    exchange.before = 1;
    Some(factors)
}

/// The factors, if the call needs some; `None` if it is aborted.
async fn factors<E: Convert<A>, A>(exchange: &mut Exchange<'_>) -> Option<[u64; MAX_RANKS]> {
    match exchange.arguments.op {
        PRE_MUL_SUM => exchange_factors::<E, A>(exchange).await,
        _ => Some([0; MAX_RANKS]),
    }
}

/// Combines the `nth` step of every rank, in rank order; of this rank, what is in `step`, where the result goes. False if the call is aborted.
async fn combine<E: Convert<A>, A: Number>(
    exchange: &mut Exchange<'_>,
    sum: &mut Sum<E, A>,
    factors: &[u64; MAX_RANKS],
    step: &mut Step,
    nth: u64,
) -> bool {
    let arguments = exchange.arguments;
    let mut theirs = step.clone();
    for (rank, factor) in factors.iter().enumerate().take(arguments.ranks()) {
        if rank == arguments.rank() {
            sum.put(rank, step, arguments.op, *factor);
        } else if exchange.lane.receive(rank, &mut theirs, nth).await {
            sum.put(rank, &theirs, arguments.op, *factor);
        } else {
            return false;
        }
    }
    sum.finish(step, arguments.op, arguments.ranks);
    true
}

/// Every rank gives each reader the block that is for it, and combines what it gets.
pub async fn reduce<E: Convert<A>, A: Number>(
    arguments: &Arguments,
    grid: &Grid,
    protocol: &'static Protocol,
    lane: usize,
) {
    let mut exchange = Exchange::new(arguments, grid, protocol, lane);
    let Some(factors) = factors::<E, A>(&mut exchange).await else { return };
    let (before, own) = (exchange.before, arguments.own_block());
    let combines = steps_of(protocol, own.recv_steps, lane);
    let mut step = protocol.step();
    let mut sum = Sum::<E, A>::new();
    exchange.send(0, before + 1).await;
    for i in 0..exchange.rounds {
        exchange.send(i + 1, before + i + 2).await;
        if i < combines {
            let start = exchange.start(i);
            load_step(&mut step, own.send, own.recv_bytes, start);
            if !combine(&mut exchange, &mut sum, &factors, &mut step, before + i + 1).await {
                return;
            }
            store_step(&step, own.recv, own.recv_bytes, start);
            exchange.emptied(i);
        }
        if exchange.lane.is_aborted {
            return;
        }
    }
    exchange.end();
}

/// An all_reduce in two hops: every rank combines one block, and gives it to all.
pub async fn two_hops<E: Convert<A>, A: Number>(
    arguments: &Arguments,
    grid: &Grid,
    protocol: &'static Protocol,
    lane: usize,
) {
    let mut exchange = Exchange::new(arguments, grid, protocol, lane);
    let Some(factors) = factors::<E, A>(&mut exchange).await else { return };
    let (before, own) = (exchange.before, arguments.own_block());
    // Step i to be combined has number 2i, its result 2i + 1. As many steps for all, those of the longest block.
    let (first, steps) = (before + 1, exchange.rounds);
    let mut step = protocol.step();
    let mut sum = Sum::<E, A>::new();
    exchange.send(0, first).await;
    for i in 0..steps {
        exchange.send(i + 1, first + 2 * (i + 1)).await;
        let start = exchange.start(i);
        load_step(&mut step, own.send, own.send_bytes, start);
        if !combine(&mut exchange, &mut sum, &factors, &mut step, first + 2 * i).await {
            return;
        }
        if i == 0 {
            exchange.learn(before);
        }
        store_step(&step, own.recv, own.recv_bytes, start);
        for distance in 1..arguments.ranks() {
            let to = (arguments.rank() + distance) % arguments.ranks();
            exchange.lane.send(to, &step, first + 2 * i + 1).await;
        }
        for peer in exchange.peers() {
            if !exchange.lane.receive(peer, &mut step, first + 2 * i + 1).await {
                return;
            }
            let block = &arguments.peers[peer];
            store_step(&step, block.recv, block.recv_bytes, start);
        }
        if exchange.lane.is_aborted {
            return;
        }
        exchange.learn(before + 2 * i + 1);
    }
    if steps > 0 {
        for peer in exchange.peers() {
            (exchange.sends[peer], exchange.receives[peer]) = (2 * steps, 2 * steps);
        }
    }
    exchange.end();
}
