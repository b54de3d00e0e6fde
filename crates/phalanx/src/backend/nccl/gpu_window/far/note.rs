//! What ranks of several hosts tell each other about windows, and the pieces in which copies travel.

use crate::backend::nccl::gpu_window::record::Place;
use crate::contract::GpuBlock;
use crate::contract::messenger::MessengerAddress;
use serde::{Deserialize, Serialize};

/// Most bytes of a piece. It goes through page-locked memory of so many bytes at both ends.
pub(super) const PIECE: usize = 1 << 20;

/// Most ranges of a piece: their list is a note.
pub(super) const RANGES: usize = 512;

/// The number of a registration.
pub(super) type Nonce = [u64; 2];

/// Bytes of a window: where they begin in it, and how many.
pub(super) type Range = (u64, u64);

/// What a rank keeps in the store, under its [`service`](store_key).
#[derive(Serialize, Deserialize)]
pub(super) struct Introduction {
    /// The communicator.
    pub channel: u64,
    pub rank: u64,
    pub address: MessengerAddress,
}

/// The key of a rank's introduction in the store.
pub(super) fn store_key(service: u64) -> String {
    format!("phalanx/gpu/{service:x}")
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Note {
    /// Asks to open a window, which has exactly these elements. It says where the answer goes.
    Open { number: u64, nonce: Nonce, channel: u64, dtype: u8, marked: u64, address: MessengerAddress },
    /// The rank begins no copy of the window any more.
    Close { nonce: Nonce },
    /// Data for these ranges follows, with the number.
    Put { number: u64, nonce: Nonce, ranges: Vec<Range> },
    /// Asks for the data of these ranges.
    Get { number: u64, nonce: Nonce, ranges: Vec<Range> },
    /// All copies before are complete.
    Signal { number: u64, nonce: Nonce },
    /// The window is open. Ranks of its host copy themselves, where they reach it.
    Opened { number: u64, place: Option<Place> },
    /// What has become of what was asked. After a get the data follows, if it is done.
    Answer { number: u64, verdict: Verdict },
    /// The window was released: its copies that were begun are still made.
    Released { nonce: Nonce },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    Done,
    /// There is no such window, or it is not open.
    Nothing,
    /// A range lies beyond the window.
    Outside,
}

impl Note {
    pub fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("plain data")
    }

    /// `None` for bytes that are no note.
    pub fn from_bytes(bytes: &[u8]) -> Option<Note> {
        postcard::from_bytes(bytes).ok()
    }
}

/// The number of the data that belongs to what was asked under a number: of a put from the rank that asked, of a get to it. Two ranks may use
/// the same numbers.
pub(super) fn data_number(number: u64, is_put: bool) -> u64 {
    number << 1 | u64::from(is_put)
}

/// Bytes of these ranges, if they are those of a piece.
pub(super) fn bytes_of(ranges: &[Range]) -> Option<usize> {
    let bytes = ranges.iter().try_fold(0u64, |sum, (_, len)| sum.checked_add(*len))?;
    usize::try_from(bytes).ok().filter(|bytes| *bytes <= PIECE)
}

/// Whether all ranges lie in a window of so many bytes.
pub(super) fn fit(ranges: &[Range], bytes: u64) -> bool {
    ranges.iter().all(|(start, len)| start.checked_add(*len).is_some_and(|end| end <= bytes))
}

/// A part of a copy.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Piece {
    /// In the window.
    pub ranges: Vec<Range>,
    /// Where each of the ranges begins in the caller's buffer, in bytes.
    pub places: Vec<usize>,
    pub bytes: usize,
}

impl Piece {
    /// Address and bytes of each of its ranges in the buffer, which begins at `local`.
    pub fn parts(&self, local: u64) -> impl Iterator<Item = (u64, usize)> + '_ {
        let address = move |place: &usize| local + *place as u64;
        self.places.iter().map(address).zip(self.ranges.iter().map(|(_, len)| *len as usize))
    }
}

/// Cuts a list of blocks into pieces.
#[derive(Clone)]
pub(super) struct Cutter {
    blocks: Vec<GpuBlock>,
    /// Bytes of an element.
    element: usize,
    block: usize,
    /// Bytes of the block that are in pieces already.
    done: usize,
}

impl Cutter {
    pub fn new(blocks: &[GpuBlock], element: usize) -> Cutter {
        Cutter { blocks: blocks.to_vec(), element, block: 0, done: 0 }
    }
}

impl Iterator for Cutter {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let mut piece = Piece::default();
        while let Some(block) = self.blocks.get(self.block) {
            let left = block.len * self.element - self.done;
            let taken = left.min(PIECE - piece.bytes);
            if taken > 0 {
                let start = block.remote * self.element + self.done;
                piece.ranges.push((start as u64, taken as u64));
                piece.places.push(block.local * self.element + self.done);
                piece.bytes += taken;
                self.done += taken;
            }
            if taken == left {
                (self.block, self.done) = (self.block + 1, 0);
            }
            if piece.bytes == PIECE || piece.ranges.len() == RANGES {
                break;
            }
        }
        (piece.bytes > 0).then_some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::messenger::LONGEST_NOTE;

    #[test]
    fn pieces_are_all_of_the_blocks_and_not_too_long() {
        let block = |local, remote, len| GpuBlock { local, remote, len };
        let long = PIECE / 4 + 3;
        let blocks = [block(1, 7, long), block(0, 0, 0), block(long + 1, 2 * PIECE, PIECE), block(0, 1, 1)];
        let pieces: Vec<Piece> = Cutter::new(&blocks, 4).collect();
        let (mut at, mut of_block) = (0, 0);
        for piece in &pieces {
            assert_eq!(bytes_of(&piece.ranges), Some(piece.bytes));
            for ((start, len), place) in piece.ranges.iter().zip(&piece.places) {
                while blocks[at].len * 4 == of_block {
                    (at, of_block) = (at + 1, 0);
                }
                assert_eq!(*start as usize, blocks[at].remote * 4 + of_block);
                assert_eq!(*place, blocks[at].local * 4 + of_block);
                of_block += *len as usize;
            }
        }
        assert_eq!((at, of_block), (3, 4));
        assert_eq!(pieces.len(), 6);
        assert!(pieces[..5].iter().all(|piece| piece.bytes == PIECE));
    }

    #[test]
    fn the_longest_note_is_not_too_long() {
        let blocks = vec![GpuBlock { local: 0, remote: usize::MAX / 16, len: 1 }; RANGES + 1];
        let pieces: Vec<Piece> = Cutter::new(&blocks, 16).collect();
        assert_eq!(pieces.iter().map(|piece| piece.ranges.len()).collect::<Vec<_>>(), [RANGES, 1]);
        let ranges = vec![(u64::MAX, u64::MAX); RANGES];
        let note = Note::Put { number: u64::MAX, nonce: [u64::MAX; 2], ranges };
        assert!(note.to_bytes().len() < LONGEST_NOTE);
        assert_eq!(Note::from_bytes(&note.to_bytes()), Some(note));
    }

    #[test]
    fn ranges_beyond_a_window_do_not_fit() {
        assert!(fit(&[(0, 100), (99, 1), (100, 0)], 100));
        for outside in [(0, 101), (100, 1), (u64::MAX, 1), (1, u64::MAX)] {
            assert!(!fit(&[(0, 1), outside], 100), "{outside:?}");
        }
        assert_eq!(bytes_of(&[(0, PIECE as u64), (0, 1)]), None);
        assert_eq!(bytes_of(&[(0, u64::MAX), (0, u64::MAX)]), None);
    }
}
