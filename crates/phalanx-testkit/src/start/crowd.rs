//! Some of the ranks of a job, in one process: a thread each.

use super::PATIENCE;
use clap::Args;
use phalanx::internal::store::{Host, Rendezvous, Store, Token};
use std::io::Write;
use std::sync::Barrier;

/// The ranks of a process.
#[derive(Args, Debug)]
pub struct Crowd {
    /// The store's.
    #[arg(long)]
    pub address: String,
    /// The first rank.
    #[arg(long)]
    pub first: usize,
    /// How many ranks.
    #[arg(long)]
    pub count: usize,
    /// Ranks of the job.
    #[arg(long)]
    pub ranks: usize,
    /// Bytes that each gives.
    #[arg(long)]
    pub bytes: usize,
    /// Encrypted connections.
    #[arg(long)]
    pub encrypted: bool,
}

impl Crowd {
    /// What a process is told.
    pub fn arguments(&self) -> Vec<String> {
        let numbers = [
            ("--first", self.first),
            ("--count", self.count),
            ("--ranks", self.ranks),
            ("--bytes", self.bytes),
        ];
        let mut arguments = vec!["ranks".into(), "--address".into(), self.address.clone()];
        arguments.extend(numbers.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]));
        arguments.extend(self.encrypted.then(|| "--encrypted".to_owned()));
        arguments
    }

    /// Joins and exchanges, each step when the first process says so.
    pub fn meet(&self, token: &Token) {
        let rendezvous = Rendezvous {
            address: self.address.clone(),
            token: token.clone(),
            job: String::new(),
            epoch: 0,
            host: Host::Launcher,
            encrypted: self.encrypted,
        };
        let (rendezvous, step) = (&rendezvous, &Barrier::new(self.count + 1));
        std::thread::scope(|scope| {
            for rank in self.first..self.first + self.count {
                let rank_thread = move || {
                    step.wait();
                    let store = Store::connect(rendezvous, rank, self.ranks, PATIENCE).expect("it joins");
                    step.wait();
                    step.wait();
                    let own = self.value(rank);
                    let all = store.exchange("numbers", &own, PATIENCE).expect("all are there");
                    let is_right = |(rank, value): (usize, &Vec<u8>)| *value == self.value(rank);
                    assert!(all.len() == self.ranks && all.iter().enumerate().all(is_right));
                    step.wait();
                    step.wait();
                    drop(store);
                };
                let thread = std::thread::Builder::new().stack_size(256 << 10);
                thread.spawn_scoped(scope, rank_thread).expect("a thread");
            }
            // They join and exchange, each when the first process says so.
            for _ in 0..2 {
                ask_to_go_on();
                step.wait();
                step.wait();
            }
            ask_to_go_on();
            step.wait();
        });
    }

    /// The value of a rank: its number, repeated.
    fn value(&self, rank: usize) -> Vec<u8> {
        (rank as u64).to_le_bytes().into_iter().cycle().take(self.bytes).collect()
    }
}

fn ask_to_go_on() {
    println!("ready");
    let _ = std::io::stdout().flush();
    let mut line = String::new();
    // Without the first process this one has nothing to do.
    if std::io::stdin().read_line(&mut line).is_ok_and(|read| read == 0) {
        std::process::exit(0);
    }
}
