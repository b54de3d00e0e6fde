//! Ranks without a launcher: the program tells the library their numbers (`Builder::place`).

use super::node::Node;
use super::rank::{identified_command, placed_command};
use libtest_mimic::{Failed, Trial};
use std::net::TcpListener;

const TOKEN: &str = "the secret of this test";

pub fn trials() -> Vec<Trial> {
    let trial = |name: &str, run: fn() -> Result<(), Failed>| Trial::test(format!("place/{name}"), run);
    vec![
        trial("ranks_of_a_host_meet_by_their_job", by_their_job),
        trial("other_launchers_variables_do_not_count", beside_a_launcher),
        trial("ranks_meet_at_a_store", at_a_store),
        trial("a_rank_with_another_token_is_refused", with_another_token),
        trial("ranks_meet_by_a_unique_id", || by_an_id("")),
        trial("ranks_meet_by_a_unique_id_that_listens", || by_an_id("127.0.0.1")),
        trial("what_makes_no_sense_is_named", senseless),
    ]
}

/// Starts all ranks, and expects the same line from each.
fn all_say(
    ranks: usize,
    store: Option<(&str, &str)>,
    what: &str,
    variables: &[(&str, &str)],
) -> Result<(), Failed> {
    let job = format!("{what} {}", std::process::id());
    let start = |rank| {
        let mut command = placed_command(rank, ranks, &job, store);
        command.envs(variables.iter().copied());
        Node::start(command)
    };
    for rank in (0..ranks).map(start).collect::<Vec<_>>() {
        let (_, said) = rank.end()?;
        if !said.contains(what) {
            return Err(format!("it should say {what:?}:\n{said}").into());
        }
    }
    Ok(())
}

fn by_their_job() -> Result<(), Failed> {
    all_say(3, None, "sum 6 on 1 host", &[])
}

fn beside_a_launcher() -> Result<(), Failed> {
    let torchrun =
        [("RANK", "7"), ("WORLD_SIZE", "8"), ("PHALANX_RANK", "1"), ("PHALANX_STORE", "nowhere:1")];
    all_say(2, None, "sum 3 on 1 host", &torchrun)
}

/// A free address.
fn address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn at_a_store() -> Result<(), Failed> {
    all_say(3, Some((&address(), TOKEN)), "sum 6 on 1 host", &[])
}

fn with_another_token() -> Result<(), Failed> {
    let address = address();
    let short = [("PHALANX_TIMEOUT", "3")];
    let [first, second] = [(0, TOKEN), (1, "not the secret of this test")].map(|(rank, token)| {
        let mut command = placed_command(rank, 2, "tokens", Some((&address, token)));
        command.envs(short);
        Node::start(command)
    });
    let (said, refused) = (first.end()?.1, second.end()?.1);
    for (said, what) in [(said, "these ranks have not come: [1]"), (refused, "token")] {
        if !said.contains("error: ") || !said.contains(what) {
            return Err(format!("it should say {what:?}:\n{said}").into());
        }
    }
    Ok(())
}

/// Starts the last rank first.
fn by_an_id(address: &str) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("id");
    let start = |rank| Node::start(identified_command(rank, 3, address, &file));
    for rank in (0..3).rev().map(start).collect::<Vec<_>>() {
        let (_, said) = rank.end()?;
        if !said.contains("sum 6 on 1 host") {
            return Err(said.into());
        }
    }
    Ok(())
}

fn senseless() -> Result<(), Failed> {
    let cases = [
        (2, 2, "job", None, "Builder::place(rank)"),
        (0, 0, "job", None, "Builder::place(world_size)"),
        (0, 1000, "job", None, "1 to 512"),
        (0, 2, "", None, "Builder::place(job)"),
        (0, 2, "job", Some(("127.0.0.1:1", "short")), "PHALANX_TOKEN"),
    ];
    for (rank, ranks, job, store, what) in cases {
        let (_, said) = Node::start(placed_command(rank, ranks, job, store)).end()?;
        if !said.contains(what) {
            return Err(format!("it should name {what:?}:\n{said}").into());
        }
    }
    Ok(())
}
