//! Ranks in a store: processes that are killed and stopped.

use super::common::signal;
use super::node::Node;
use super::rank::member_command;
use libtest_mimic::{Failed, Trial};
use rustix::process::Signal;
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Time until all know of a loss: 2 s, and 1 s more for a busy machine.
const LIMIT: Duration = Duration::from_secs(3);

pub fn trials() -> Vec<Trial> {
    let trial = |name: &str, sent, victim, says| {
        Trial::test(format!("members/{name}"), move || lost(sent, victim, says))
    };
    vec![
        trial("a_killed_rank_is_named", Signal::KILL, 2, "lost 2: its connection to the store was closed"),
        trial("a_stopped_rank_is_named", Signal::STOP, 2, "lost 2: nothing was heard of it"),
        trial("the_killed_host_of_the_store_is_named", Signal::KILL, 0, "lost 0: it hosts the store"),
        trial("the_stopped_host_of_the_store_is_named", Signal::STOP, 0, "lost 0: it hosts the store"),
        Trial::test("members/a_rank_that_goes_on_knows_that_it_was_given_up", goes_on),
    ]
}

fn three() -> Result<[Node; 3], Failed> {
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let ranks = [0, 1, 2].map(|rank| Node::start(member_command(&address, rank, 3)));
    for rank in &ranks {
        rank.wait_for("ready")?;
    }
    Ok(ranks)
}

fn lost(sent: Signal, victim: usize, says: &str) -> Result<(), Failed> {
    let ranks = three()?;
    signal(ranks[victim].pid(), sent);
    let started = Instant::now();
    for (_, rank) in ranks.iter().enumerate().filter(|(rank, _)| *rank != victim) {
        rank.wait_for(says)?;
        if rank.said().matches("lost").count() > 1 {
            return Err(format!("more than one is lost: {}", rank.said()).into());
        }
    }
    if started.elapsed() > LIMIT {
        return Err(format!("it took {:?}", started.elapsed()).into());
    }
    Ok(())
}

/// A rank that is stopped for longer than the limit and continued must notice that it is lost.
fn goes_on() -> Result<(), Failed> {
    let ranks = three()?;
    signal(ranks[2].pid(), Signal::STOP);
    ranks[0].wait_for("lost 2: ")?;
    signal(ranks[2].pid(), Signal::CONT);
    ranks[2].wait_for("lost 2: nothing was heard of it")?;
    Ok(())
}
