//! Short pieces of a file: gathered by a rank of each host, which writes what is together at once.

use super::open::write_at;
use super::rounds::{Piece, in_order};
use crate::api::comm::Comm;
use crate::types::error::Result;
use std::fs::File;
use std::io;
use std::ops::Range;

/// Bytes that a gathering rank writes in one round.
const ROUND: u64 = 16 << 20;

/// Bytes that a rank has, and where they go in the file.
pub(super) struct Pieces<'a> {
    /// In the file's order.
    places: Vec<Piece>,
    /// Bytes of the longest piece.
    longest: u64,
    bytes: &'a [u8],
}

impl<'a> Pieces<'a> {
    /// The bytes of these places, one after the other.
    pub fn new(places: impl Iterator<Item = Range<u64>>, bytes: &'a [u8]) -> Pieces<'a> {
        let places = in_order(places);
        let longest = places.iter().map(|(place, _)| place.end - place.start).max().unwrap_or(0);
        Pieces { places, longest, bytes }
    }

    /// Places and bytes of what is in this range of the file, cut where it begins and ends.
    fn within(&self, range: Range<u64>) -> (Vec<u64>, Vec<u8>) {
        let (mut places, mut bytes) = (Vec::new(), Vec::new());
        let first = self.places.partition_point(|(place, _)| place.start + self.longest <= range.start);
        for (place, at) in self.places[first..].iter().take_while(|(place, _)| place.start < range.end) {
            let (start, end) = (place.start.max(range.start), place.end.min(range.end));
            if start < end {
                places.extend([start, end]);
                let at = at + (start - place.start) as usize;
                bytes.extend_from_slice(&self.bytes[at..][..(end - start) as usize]);
            }
        }
        (places, bytes)
    }
}

/// Writes all ranks' pieces to a part of the file. Collective.
pub(super) fn write(
    comm: &Comm,
    file: &mut File,
    pieces: &Pieces<'_>,
    whole: Range<u64>,
) -> Result<io::Result<()>> {
    let topology = comm.host_topology();
    let writers: Vec<usize> = (0..topology.num_hosts()).map(|host| topology.ranks_of(host)[0]).collect();
    let share = (whole.end - whole.start).div_ceil(writers.len() as u64).max(1);
    let rounds = share.div_ceil(ROUND);
    let mut outcome = Ok(());
    for round in 0..rounds {
        let of_writer = |number: usize| {
            let share =
                whole.start + number as u64 * share..whole.end.min(whole.start + (number as u64 + 1) * share);
            let start = share.start + round * ROUND;
            start.min(share.end)..(start + ROUND).min(share.end)
        };
        let (mut places, mut bytes) = (Vec::new(), Vec::new());
        let mut counts = vec![[0usize; 2]; comm.world_size()];
        for (number, writer) in writers.iter().enumerate() {
            let (own_places, own_bytes) = pieces.within(of_writer(number));
            counts[*writer] = [own_places.len(), own_bytes.len()];
            places.extend(own_places);
            bytes.extend(own_bytes);
        }
        let [of_places, of_bytes] =
            [0, 1].map(|which| counts.iter().map(|count| count[which]).collect::<Vec<_>>());
        let places = comm.all_to_all_vec(&places, &of_places)?.elements;
        let bytes = comm.all_to_all_vec(&bytes, &of_bytes)?.elements;
        if let Some(number) = writers.iter().position(|writer| *writer == comm.rank()) {
            outcome = outcome.and_then(|()| write_together(file, of_writer(number), &places, &bytes));
        }
    }
    Ok(outcome)
}

/// Writes what came, in pieces that are together in the file.
fn write_together(file: &mut File, range: Range<u64>, places: &[u64], bytes: &[u8]) -> io::Result<()> {
    let (pairs, _) = places.as_chunks::<2>();
    let mut together = vec![0u8; (range.end - range.start) as usize];
    let mut at = 0;
    for [start, end] in pairs {
        let len = (end - start) as usize;
        together[(start - range.start) as usize..][..len].copy_from_slice(&bytes[at..at + len]);
        at += len;
    }
    let mut ranges: Vec<[u64; 2]> = pairs.to_vec();
    ranges.sort_unstable();
    let mut joined: Vec<[u64; 2]> = Vec::new();
    for [start, end] in ranges {
        match joined.last_mut() {
            Some([_, reached]) if start <= *reached => *reached = end.max(*reached),
            _ => joined.push([start, end]),
        }
    }
    joined.into_iter().try_for_each(|[start, end]| {
        write_at(file, start, &together[(start - range.start) as usize..(end - range.start) as usize])
    })
}
