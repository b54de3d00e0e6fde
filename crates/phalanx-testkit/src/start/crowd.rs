//! Some of the ranks of a job, in one process: a thread for each host, or for each rank that has a connection of its own.

use super::PATIENCE;
use clap::Args;
use phalanx::internal::store::protocol::{Carried, End, Reply, Request};
use phalanx::internal::store::{Carrier, Host, Rendezvous, Role, Store, Token};
use std::io::Write;
use std::ops::Range;
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
    /// Ranks of a host.
    #[arg(long)]
    pub per_host: usize,
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
            ("--per-host", self.per_host),
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
        let end = self.first + self.count;
        let hosts: Vec<_> = (self.first..end)
            .step_by(self.per_host)
            .map(|first| first..end.min(first + self.per_host))
            .collect();
        let (rendezvous, step) = (&rendezvous, &Barrier::new(hosts.len() + 1));
        std::thread::scope(|scope| {
            for host in hosts {
                let meet = move || match self.per_host {
                    1 => self.meet_alone(host.start, rendezvous, step),
                    _ => self.meet_as_host(host, rendezvous, step),
                };
                let thread = std::thread::Builder::new().stack_size(256 << 10);
                thread.spawn_scoped(scope, meet).expect("a thread");
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

    /// A rank with a connection of its own.
    fn meet_alone(&self, rank: usize, rendezvous: &Rendezvous, step: &Barrier) {
        step.wait();
        let store = Store::connect(rendezvous, rank, self.ranks, PATIENCE).expect("it joins");
        step.wait();
        step.wait();
        let all = store.exchange("numbers", &self.value(rank), PATIENCE).expect("all are there");
        self.check(all.iter().map(Vec::as_slice));
        step.wait();
        step.wait();
        drop(store);
    }

    /// The ranks of a host, on one connection.
    fn meet_as_host(&self, host: Range<usize>, rendezvous: &Rendezvous, step: &Barrier) {
        let number = |rank: usize| u32::try_from(rank).expect("ranks are few");
        step.wait();
        let mut carrier = Carrier::connect(rendezvous, PATIENCE).expect("it joins");
        let size = number(self.ranks);
        for rank in host.clone().map(number) {
            let (role, epoch, job) = (Role::Rank, 0, String::new());
            carrier.post(rank, Request::Join { role, rank, size, epoch, job });
        }
        let mut welcome = 0;
        while welcome < host.len() {
            for Carried { ranks, message } in carrier.receive().expect("the store is there") {
                assert!(matches!(message, Reply::Welcome { .. } | Reply::Heartbeat), "{message:?}");
                welcome += ranks.len();
            }
        }
        step.wait();
        step.wait();
        for rank in host.clone() {
            let (key, wait) = ("numbers".to_owned(), PATIENCE.as_secs() * 1000);
            let value = self.value(rank);
            carrier.post(number(rank), Request::Exchange { id: 1, key, value, wait });
        }
        let mut all = None;
        while all.is_none() {
            for Carried { ranks, message } in carrier.receive().expect("the store is there") {
                match message {
                    Reply::Heartbeat => {}
                    Reply::All { table: Some(table), .. } if ranks.len() == host.len() => all = Some(table),
                    message => panic!("{ranks:?}: {message:?}"),
                }
            }
        }
        self.check(all.iter().flat_map(|table| table.values()));
        step.wait();
        step.wait();
        host.map(number).for_each(|rank| carrier.post(rank, Request::Ended { end: End::Left }));
        carrier.leave();
    }

    /// Checks the values of all.
    fn check<'a>(&self, all: impl Iterator<Item = &'a [u8]>) {
        let mut count = 0;
        for (rank, value) in all.enumerate() {
            assert!(
                value.starts_with(&(rank as u64).to_le_bytes()[..self.bytes.min(8)])
                    && value.len() == self.bytes
            );
            count += 1;
        }
        assert_eq!(count, self.ranks);
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
