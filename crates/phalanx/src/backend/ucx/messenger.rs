//! [`UcxMessenger`]: UCX for a backend that stages other memory through host memory. It has a worker of its own, and no part in a world.

use super::mail::{Header, Kind, Matching};
use super::tunables::FETCHED;
use super::worker::{Outcome, Worker};
use super::world::WAYS;
use crate::contract::Wanted;
use crate::contract::messenger::{LONGEST_NOTE, Messenger, MessengerAddress, Posted};
use crate::control::segment::SegmentId;
use crate::os::{RunInstant, random_number};
use crate::types::dtype::DType;
use crate::types::error::{Error, Result, UnsupportedError};
use std::time::Duration;

/// The only channel of a messenger's worker.
const CHANNEL: SegmentId = 1;

/// How long the end of a messenger waits until its last notes have gone.
const FLUSHING: Duration = Duration::from_secs(1);

const _: () = assert!(LONGEST_NOTE < FETCHED, "a note comes whole, so nobody has to fetch it");

/// A peer, once it is known.
#[derive(Clone, Copy)]
struct Peer {
    key: [u64; 2],
    /// Notes to it so far.
    notes: u64,
}

struct UcxMessenger {
    /// Taken at the end.
    worker: Option<Worker>,
    address: MessengerAddress,
    rank: usize,
    peers: Vec<Option<Peer>>,
    /// Notes that UCX may still read.
    leaving: Vec<(usize, Vec<u8>)>,
    /// Notes that come: the receive, its memory, and the sender.
    coming: Vec<(usize, Vec<u8>, usize)>,
}

/// Makes UCX's messenger: see [`MakeMessenger`](crate::contract::messenger::MakeMessenger).
pub(crate) fn messenger(rank: usize, ranks: usize) -> Result<Box<dyn Messenger>> {
    let need = "messages to a rank need a key";
    let key = [random_number(need)?, random_number(need)?];
    let mut worker = Worker::create(key, rank, ranks).map_err(without_ucx)?;
    let address = MessengerAddress { key, worker: worker.address()? };
    worker.meet(vec![Vec::new(); ranks], key);
    worker.mail().open(CHANNEL, ranks);
    let (peers, leaving, coming) = (vec![None; ranks], Vec::new(), Vec::new());
    let mut made = UcxMessenger { worker: Some(worker), address, rank, peers, leaving, coming };
    let own = made.address.clone();
    made.meet(rank, &own);
    Ok(Box::new(made))
}

fn without_ucx(error: Error) -> Error {
    match error {
        Error::LibraryNotFound(_) | Error::MissingFunction(_) => Error::from(UnsupportedError {
            what: "GPU memory that ranks of other hosts access".into(),
            why: format!("UCX carries it between hosts, and {error}"),
            remedy: format!("install UCX on each host.{WAYS}"),
        }),
        error => error,
    }
}

impl UcxMessenger {
    fn worker(&mut self) -> &mut Worker {
        self.worker.as_mut().expect("there until the messenger is dropped")
    }

    fn peer(&mut self, rank: usize) -> &mut Peer {
        self.peers[rank].as_mut().expect("nothing is sent to a rank before it is known")
    }

    fn header(&mut self, to: usize, kind: Kind, number: u64, bytes: usize) -> Header {
        Header {
            key: self.peer(to).key,
            channel: CHANNEL,
            source: self.rank as u32,
            kind: kind as u8,
            dtype: DType::U8.code(),
            number,
            marked: bytes as u64,
            ..Header::default()
        }
    }
}

impl Messenger for UcxMessenger {
    fn address(&self) -> &MessengerAddress {
        &self.address
    }

    fn meet(&mut self, rank: usize, address: &MessengerAddress) {
        if self.peers[rank].is_none() {
            self.peers[rank] = Some(Peer { key: address.key, notes: 0 });
            self.worker().introduce(rank, &address.worker);
        }
    }

    fn progress(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        worker.progress();
        self.leaving.retain(|(operation, _)| worker.forget(*operation).is_err());
    }

    fn send_note(&mut self, to: usize, note: Vec<u8>) {
        let header = self.header(to, Kind::User, 0, note.len());
        let peer = self.peer(to);
        peer.notes += 1;
        let header = Header { order: peer.notes, ..header };
        // SAFETY: the note is kept until the operation is over.
        let operation = unsafe { self.worker().send(to, header, note.as_ptr()) };
        self.leaving.push((operation, note));
    }

    fn take_note(&mut self) -> Option<(usize, Vec<u8>)> {
        let worker = self.worker.as_mut()?;
        while let Some(found) = worker.mail().probe(CHANNEL, Wanted { source: None, tag: None }) {
            let mut note = vec![0; found.bytes];
            let matching = Matching { kind: Kind::User, number: 0, tag: found.tag.into() };
            let from = (found.source, found.source);
            // SAFETY: the note is kept until the receive is over.
            let receive = unsafe { worker.receive(CHANNEL, from, matching, note.as_mut_ptr(), note.len()) };
            self.coming.push((receive, note, found.source));
        }
        // A rank's notes are taken in their order.
        let mut waiting = Vec::new();
        for place in 0..self.coming.len() {
            let (receive, _, source) = &self.coming[place];
            match worker.outcome(*receive) {
                Some((outcome, _)) if !waiting.contains(source) => {
                    let (receive, note, source) = self.coming.remove(place);
                    let _ = worker.forget(receive);
                    return (outcome == Outcome::Complete).then_some((source, note));
                }
                _ => waiting.push(*source),
            }
        }
        None
    }

    unsafe fn send(&mut self, to: usize, number: u64, data: *const u8, len: usize) -> Posted {
        let header = self.header(to, Kind::Internal, number, len);
        // SAFETY: the caller's contract.
        Posted(unsafe { self.worker().send(to, header, data) })
    }

    unsafe fn receive(&mut self, from: usize, number: u64, target: *mut u8, len: usize) -> Posted {
        let matching = Matching { kind: Kind::Internal, number, tag: 0 };
        // SAFETY: the caller's contract.
        Posted(unsafe { self.worker().receive(CHANNEL, (from, from), matching, target, len) })
    }

    fn outcome(&mut self, Posted(operation): Posted) -> Option<bool> {
        let (outcome, _) = self.worker().outcome(operation)?;
        let _ = self.worker().forget(operation);
        Some(outcome == Outcome::Complete)
    }

    fn give_up(&mut self, Posted(operation): Posted) -> bool {
        match self.worker().forget(operation) {
            Ok(()) => true,
            Err(peer) => {
                self.worker().disconnect(peer);
                false
            }
        }
    }

    fn failure(&self, rank: usize) -> Option<String> {
        let worker = self.worker.as_ref()?;
        (worker.failures(rank) > 0).then(|| worker.last_failure(rank))
    }
}

impl Drop for UcxMessenger {
    fn drop(&mut self) {
        let since = RunInstant::now();
        while !self.leaving.is_empty() && since.elapsed() < FLUSHING {
            self.progress();
            std::thread::yield_now();
        }
        let Some(worker) = self.worker.take() else { return };
        if !worker.end() {
            // UCX may still read them.
            std::mem::forget(std::mem::take(&mut self.leaving));
            std::mem::forget(std::mem::take(&mut self.coming));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// What the second messenger takes within so long.
    fn next_note(pair: &mut [Box<dyn Messenger>; 2], limit: Duration) -> Option<(usize, Vec<u8>)> {
        let since = Instant::now();
        while since.elapsed() < limit {
            pair.iter_mut().for_each(|messenger| messenger.progress());
            if let Some(note) = pair[1].take_note() {
                return Some(note);
            }
        }
        None
    }

    #[test]
    fn a_message_without_the_key_does_not_count() {
        let second = match messenger(1, 2) {
            Ok(second) => second,
            Err(error) => {
                assert!(std::env::var_os("PHALANX_TEST_UCX").is_none(), "{error}");
                return eprintln!("not tried: {error}");
            }
        };
        let address = second.address().clone();
        let mut stranger = [messenger(0, 2).unwrap(), second];
        stranger[0].meet(1, &MessengerAddress { key: [1, 2], ..address.clone() });
        stranger[0].send_note(1, b"a stranger's".to_vec());
        assert_eq!(next_note(&mut stranger, Duration::from_millis(200)), None);
        let [stranger, second] = stranger;
        let mut pair = [messenger(0, 2).unwrap(), second];
        pair[0].meet(1, &address);
        pair[0].send_note(1, b"first".to_vec());
        pair[0].send_note(1, b"second".to_vec());
        for text in [&b"first"[..], b"second"] {
            assert_eq!(next_note(&mut pair, Duration::from_secs(20)), Some((0, text.to_vec())));
        }
        drop(stranger);
        let (sent, mut came) = ([7u8; 1000], [0u8; 1000]);
        // SAFETY: the bytes stay until both are over.
        let (send, receive) = unsafe {
            (pair[0].send(1, 5, sent.as_ptr(), 1000), pair[1].receive(0, 5, came.as_mut_ptr(), 1000))
        };
        let since = Instant::now();
        let [mut is_sent, mut has_come] = [None; 2];
        while is_sent.is_none() || has_come.is_none() {
            pair.iter_mut().for_each(|messenger| messenger.progress());
            is_sent = is_sent.or_else(|| pair[0].outcome(send));
            has_come = has_come.or_else(|| pair[1].outcome(receive));
            assert!(since.elapsed() < Duration::from_secs(20), "the data does not come");
        }
        assert_eq!((is_sent, has_come, came), (Some(true), Some(true), sent));
    }
}
