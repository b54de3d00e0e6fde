//! What a warp does to move blocks: every rank gives each rank what is for it.

use super::exchange::{Arguments, Exchange, Once, load_step, start_of, steps_of, store_step};
use super::lane::Protocol;
use super::warps::Grid;

pub async fn move_once(arguments: &Arguments, grid: &Grid, protocol: &'static Protocol, lane: usize) {
    let (mut once, mut step) = Once::new(arguments, grid, protocol, lane);
    once.send(&mut step).await;
    let own = arguments.own_block();
    if once.has(own.recv_steps) && own.recv != own.send {
        load_step(&mut step, own.send, own.recv_bytes, once.start);
        store_step(&step, own.recv, own.recv_bytes, once.start);
    }
    // The kernel reads several peers' slots at once.
    for peer in (0..arguments.ranks()).filter(|peer| *peer != arguments.rank()) {
        let from = &arguments.peers[peer];
        if once.has(from.recv_steps) {
            if !once.lane.receive(peer, &mut step, 1).await {
                return;
            }
            store_step(&step, from.recv, from.recv_bytes, once.start);
        }
    }
    once.end();
}

pub async fn move_all(arguments: &Arguments, grid: &Grid, protocol: &'static Protocol, lane: usize) {
    let mut exchange = Exchange::new(arguments, grid, protocol, lane);
    let own_block = arguments.own_block();
    let moves_own = own_block.recv != own_block.send;
    let own = if moves_own { steps_of(protocol, own_block.recv_steps, lane) } else { 0 };
    let rounds = exchange.rounds().max(own);
    let mut step = protocol.step();
    exchange.prepare();
    exchange.send(0).await;
    for i in 0..rounds {
        exchange.send(i + 1).await;
        let start = start_of(protocol, i, lane);
        let mut peer = arguments.rank();
        for d in 0..arguments.ranks() {
            let from = &arguments.peers[peer];
            let has_step = i < if d == 0 { own } else { exchange.receives[peer] };
            if has_step {
                if d == 0 {
                    load_step(&mut step, from.send, from.recv_bytes, start);
                } else if !exchange.receive(peer, i, &mut step).await {
                    return;
                }
                store_step(&step, from.recv, from.recv_bytes, start);
            }
            peer = if peer == 0 { arguments.ranks() - 1 } else { peer - 1 };
        }
        if exchange.lane.is_aborted {
            return;
        }
    }
    exchange.end();
}
