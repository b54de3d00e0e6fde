//! What a warp does to reduce: contributions are combined in rank order.

use super::element::{Convert, Number, PRE_MUL_SUM, Sum};
use super::exchange::{Arguments, Exchange, Once, load_step, start_of, steps_of, store_step};
use super::lane::{MAX_RANKS, Protocol};
use super::warps::Grid;

pub async fn reduce_once<E: Convert<A>, A: Number>(
    arguments: &Arguments,
    grid: &Grid,
    protocol: &'static Protocol,
    lane: usize,
) {
    let (mut once, mut step) = Once::new(arguments, grid, protocol, lane);
    let own = arguments.own_block();
    let combines = once.has(own.recv_steps);
    let mut mine = step.clone();
    if arguments.same == 0 && combines {
        load_step(&mut mine, own.send, own.recv_bytes, once.start);
    }
    once.send(&mut step).await;
    if combines {
        let mut sum = Sum::<E, A>::new();
        for rank in 0..arguments.ranks() {
            if rank == arguments.rank() {
                step.copy_from_slice(&mine);
            } else if !once.lane.receive(rank, &mut step, 1).await {
                return;
            }
            sum.put(rank, &step, arguments.op, 0);
        }
        sum.finish(&mut step, arguments.op, arguments.ranks);
        store_step(&step, own.recv, own.recv_bytes, once.start);
    }
    once.end();
}

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

/// Every rank gives each reader the block that is for it, and combines what it gets.
pub async fn reduce<E: Convert<A>, A: Number>(
    arguments: &Arguments,
    grid: &Grid,
    protocol: &'static Protocol,
    lane: usize,
) {
    let mut exchange = Exchange::new(arguments, grid, protocol, lane);
    let Some(factors) = factors::<E, A>(&mut exchange).await else { return };
    let own_block = arguments.own_block();
    let (rounds, own) = (exchange.rounds(), steps_of(protocol, own_block.recv_steps, lane));
    let (mut step, mut mine) = (protocol.step(), protocol.step());
    let mut sum = Sum::<E, A>::new();
    exchange.prepare();
    exchange.send(0).await;
    for i in 0..rounds {
        let combines = i < own;
        let start = start_of(protocol, i, lane);
        if combines {
            load_step(&mut mine, own_block.send, own_block.recv_bytes, start);
        }
        exchange.send(i + 1).await;
        if combines {
            for (rank, factor) in factors.iter().enumerate().take(arguments.ranks()) {
                if rank == arguments.rank() {
                    step.copy_from_slice(&mine);
                } else if !exchange.receive(rank, i, &mut step).await {
                    return;
                }
                sum.put(rank, &step, arguments.op, *factor);
            }
            sum.finish(&mut step, arguments.op, arguments.ranks);
            store_step(&step, own_block.recv, own_block.recv_bytes, start);
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
    // As many steps for all, those of the longest block.
    let steps = steps_of(protocol, arguments.peers[0].send_steps, lane);
    let Some(factors) = factors::<E, A>(&mut exchange).await else { return };
    let (before, own) = (exchange.before, arguments.own_block());
    let peers = || (0..arguments.ranks()).filter(|peer| *peer != arguments.rank());
    // Step i to be combined has number 2i, its result 2i + 1.
    let first = before + 1;
    let mut step = protocol.step();
    let mut sum = Sum::<E, A>::new();
    for following in 0..=steps {
        if following < steps {
            let start = start_of(protocol, following, lane);
            for peer in peers() {
                let block = &arguments.peers[peer];
                load_step(&mut step, block.send, block.send_bytes, start);
                exchange.lane.send(peer, &step, first + 2 * following).await;
            }
        }
        let Some(i) = following.checked_sub(1) else { continue };
        let start = start_of(protocol, i, lane);
        for (rank, factor) in factors.iter().enumerate().take(arguments.ranks()) {
            if rank == arguments.rank() {
                load_step(&mut step, own.send, own.send_bytes, start);
            } else {
                if !exchange.lane.receive(rank, &mut step, first + 2 * i).await {
                    return;
                }
                exchange.lane.learn(rank, before + if i > 1 { 2 * i - 2 } else { 0 });
            }
            sum.put(rank, &step, arguments.op, *factor);
        }
        sum.finish(&mut step, arguments.op, arguments.ranks);
        store_step(&step, own.recv, own.recv_bytes, start);
        for peer in peers() {
            exchange.lane.send(peer, &step, first + 2 * i + 1).await;
        }
        for peer in peers() {
            if !exchange.lane.receive(peer, &mut step, first + 2 * i + 1).await {
                return;
            }
            exchange.lane.learn(peer, before + 2 * i + 1);
            let block = &arguments.peers[peer];
            store_step(&step, block.recv, block.recv_bytes, start);
        }
        if exchange.lane.is_aborted {
            return;
        }
    }
    for peer in peers() {
        (exchange.sends[peer], exchange.receives[peer]) = (2 * steps, 2 * steps);
    }
    exchange.end();
}
