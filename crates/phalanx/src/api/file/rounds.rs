//! A rank's places in a file, in the file's order, and cut into what one call of a backend moves.

use std::ops::Range;

/// A place in the file, and where in the rank's bytes it begins.
pub(super) type Piece = (Range<u64>, usize);

/// Bytes of a call: MPI counts them in a C `int`.
const ROUND: u64 = 64 << 20;

/// Pieces of a call, each of which MPI keeps a note of.
const PIECES: usize = 1 << 20;

/// Places whose bytes are one after the other in a buffer, in the file's order.
pub(super) fn in_order(places: impl Iterator<Item = Range<u64>>) -> Vec<Piece> {
    let mut at = 0;
    let mut pieces: Vec<Piece> = places
        .map(|place| {
            let start = at;
            at += (place.end - place.start) as usize;
            (place, start)
        })
        .collect();
    pieces.sort_unstable_by_key(|(place, _)| place.start);
    pieces
}

/// Cuts pieces that are in the file's order into rounds, in none of which two overlap.
pub(super) fn rounds(pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    let mut rounds: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for (mut place, mut at) in pieces {
        while !place.is_empty() {
            let follows = |round: &Vec<Piece>| {
                round.len() < PIECES && round.last().is_none_or(|(last, _)| last.end <= place.start)
            };
            if room == 0 || !rounds.last().is_some_and(follows) {
                rounds.push(Vec::new());
                room = ROUND;
            }
            let len = room.min(place.end - place.start);
            let round = rounds.last_mut().expect("one was made");
            round.push((place.start..place.start + len, at));
            (place.start, at, room) = (place.start + len, at + len as usize, room - len);
        }
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_short_and_nothing_overlaps_in_one() {
        let long = 5 * ROUND / 2;
        // The last place comes first in the buffer, and two have bytes in common.
        let places = [long..long + 10, 0..long, long - 3..long + 2];
        let rounds = rounds(in_order(places.into_iter()));
        let found: Vec<Vec<_>> = rounds
            .iter()
            .map(|round| round.iter().map(|(place, at)| (place.clone(), *at)).collect())
            .collect();
        let cut = |number: u64| {
            let start = number * ROUND;
            (start..(start + ROUND).min(long), 10 + start as usize)
        };
        let common = (long - 3..long + 2, 10 + long as usize);
        assert_eq!(
            found,
            [vec![cut(0)], vec![cut(1)], vec![cut(2)], vec![common], vec![(long..long + 10, 0)]]
        );
        assert!(super::rounds(in_order(std::iter::once(3..3))).is_empty());
    }
}
