//! Counts random keys in a hash table that is spread over the ranks. Each rank changes the others' parts itself: nobody answers requests.
//!
//! ```text
//! cargo run --release -p phalanx --example hash_table -- 4 1000000     4 ranks as threads, a million updates each
//! phalanx launch -n 4 -- target/release/examples/hash_table 4 1000000
//! ```

#[path = "shared/ranks.rs"]
mod ranks;

use phalanx::{Comm, Epoch, ReduceOp, SymmetricMemory};
use ranks::{Result, number};
use std::process::ExitCode;
use std::time::Instant;

/// Keys of all ranks are numbers from 1 to this.
const KEYS: u64 = 50_000;

fn main() -> ExitCode {
    ranks::on_ranks("hash_table", |comm, arguments| {
        let updates = arguments.first().map_or(Ok(100_000), |text| number("updates", text))?;
        one_rank(comm, updates)
    })
}

/// A part of the table on each rank: keys, and how often each was counted. A key of 0 is a free place.
struct Table<'c> {
    keys: SymmetricMemory<'c, u64>,
    counts: SymmetricMemory<'c, u64>,
}

/// The table while all ranks change it.
struct Counting<'m> {
    keys: Epoch<'m, u64>,
    counts: Epoch<'m, u64>,
    ranks: u64,
    places: u64,
}

impl<'c> Table<'c> {
    /// Twice as many places as keys.
    fn new(comm: &'c Comm) -> phalanx::Result<Table<'c>> {
        let places = 2 * KEYS as usize / comm.world_size() + 64;
        Ok(Table { keys: comm.symmetric(places)?, counts: comm.symmetric(places)? })
    }

    fn free(self) -> phalanx::Result<()> {
        self.keys.free()?;
        self.counts.free()
    }

    fn counting(&mut self, comm: &Comm) -> phalanx::Result<Counting<'_>> {
        let (ranks, places) = (comm.world_size() as u64, self.keys.len() as u64);
        Ok(Counting { keys: self.keys.epoch()?, counts: self.counts.epoch()?, ranks, places })
    }
}

impl Counting<'_> {
    fn count(&self, key: u64) -> phalanx::Result<()> {
        let hash = mixed(key);
        let rank = (hash % self.ranks) as usize;
        let mut place = (hash / self.ranks % self.places) as usize;
        loop {
            let mut there = self.keys.fetch(rank, place)?;
            if there == 0 {
                there = self.keys.compare_and_swap(0, key, rank, place)?;
            }
            if there == 0 || there == key {
                return self.counts.accumulate(&[1], rank, place, ReduceOp::Sum);
            }
            place = (place + 1) % self.places as usize;
        }
    }

    fn end(self) -> phalanx::Result<()> {
        self.keys.end()?;
        self.counts.end()
    }
}

fn one_rank(comm: Comm, updates: usize) -> Result<()> {
    let mut table = Table::new(&comm)?;
    let start = Instant::now();
    let counting = table.counting(&comm)?;
    for update in 0..updates as u64 {
        counting.count(1 + mixed(update * comm.world_size() as u64 + comm.rank() as u64) % KEYS)?;
    }
    counting.end()?;
    let seconds = start.elapsed().as_secs_f64();

    // Each rank has its part to itself again.
    let counted: u64 = table.counts.local().iter().sum();
    let keys = table.keys.local().iter().filter(|key| **key != 0).count() as u64;
    let mut all = [counted, keys];
    comm.all_reduce_in_place(&mut all, ReduceOp::Sum)?;
    let expected = (updates * comm.world_size()) as u64;
    if all[0] != expected {
        return Err(format!("{} updates were counted, {expected} were made", all[0]).into());
    }
    if comm.rank() == 0 {
        let rate = expected as f64 / seconds / 1e6;
        println!("{expected} updates of {} keys in {seconds:.3} s: {rate:.1} million/s", all[1]);
    }
    table.free()?;
    comm.finalize()?;
    Ok(())
}

/// One step of SplitMix64: another number for each number.
fn mixed(x: u64) -> u64 {
    let z = x.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
