//! What a warp does to move blocks: every rank gives each rank what is for it.

use super::exchange::{Arguments, Exchange, load_step, steps_of, store_step};
use super::lane::Protocol;
use super::warps::Grid;

pub async fn move_blocks(arguments: &Arguments, grid: &Grid, protocol: &'static Protocol, lane: usize) {
    let mut exchange = Exchange::new(arguments, grid, protocol, lane);
    let own_block = arguments.own_block();
    let moves_own = own_block.recv != own_block.send;
    let own = if moves_own { steps_of(protocol, own_block.recv_steps, lane) } else { 0 };
    let mut step = protocol.step();
    exchange.send(0, 1).await;
    for i in 0..exchange.rounds {
        exchange.send(i + 1, i + 2).await;
        let start = exchange.start(i);
        if i < own {
            load_step(&mut step, own_block.send, own_block.recv_bytes, start);
            store_step(&step, own_block.recv, own_block.recv_bytes, start);
        }
        // The kernel reads several peers' slots at once.
        for peer in exchange.peers().filter(|peer| i < exchange.receives[*peer]) {
            if !exchange.lane.receive(peer, &mut step, i + 1).await {
                return;
            }
            let from = &arguments.peers[peer];
            store_step(&step, from.recv, from.recv_bytes, start);
        }
        if exchange.lane.is_aborted {
            return;
        }
        exchange.emptied(i);
    }
    exchange.end();
}
