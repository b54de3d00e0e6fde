//! [`Service`]: the thread that moves GPU memory between hosts, for the windows of this rank and for those that it has open.

use super::client::{Client, Job, Opened};
use super::note::{Note, Verdict};
use super::part::{Part, Parts};
use super::server::{Server, answer};
use super::staging::{Tools, Way};
use crate::backend::nccl::communicator::{Communicator, ENDING};
use crate::contract::messenger::MessengerAddress;
use crate::contract::{CopyDirection, Operation};
use crate::control::control_channel::AnnouncedCall;
use crate::os::sync::lock;
use crate::os::{RunInstant, unless_exiting};
use crate::types::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

/// After something has moved, the service looks without a pause for so long: more follows.
const KEEN: Duration = Duration::from_micros(300);
/// Then two looks are so far apart.
const NAP: Duration = Duration::from_micros(50);
/// And so far, when nothing has moved for [`QUIET`].
const LONG_NAP: Duration = Duration::from_micros(500);
const QUIET: Duration = Duration::from_millis(100);
/// Two looks at the other ranks are so far apart.
const LOOK: Duration = Duration::from_millis(20);
/// A connection that has broken is a reason to fail after this time. Before, the store may know more.
const BROKEN: Duration = Duration::from_secs(3);
/// How long the end waits for what is under way for other ranks.
const FLUSHING: Duration = Duration::from_secs(1);

/// Has the exit of the process wait for the service.
static AT_EXIT: Once = Once::new();

/// What the program's threads tell the service.
pub(super) enum Order {
    /// Open a window of a rank with this messenger.
    Open {
        opened: Arc<Opened>,
        address: MessengerAddress,
        channel: u64,
        dtype: u8,
        marked: u64,
    },
    Work(Arc<Opened>, Job),
    Close(Arc<Opened>),
    /// Tell the ranks that have a window open.
    Tell(Arc<Part>, Note),
    End,
}

/// What the service shares with the program's threads.
pub(super) struct Shared {
    pub communicator: Arc<Communicator>,
    pub parts: Parts,
    orders: Mutex<VecDeque<Order>>,
    ordered: Condvar,
}

impl Shared {
    pub fn new(communicator: &Arc<Communicator>) -> Shared {
        let (orders, ordered) = (Mutex::default(), Condvar::new());
        Shared { communicator: communicator.clone(), parts: Parts::default(), orders, ordered }
    }

    pub fn order(&self, order: Order) {
        lock(&self.orders).push_back(order);
        self.ordered.notify_one();
    }

    fn wait(&self, pause: Duration) {
        let orders = lock(&self.orders);
        if orders.is_empty() {
            drop(self.ordered.wait_timeout(orders, pause).unwrap_or_else(PoisonError::into_inner));
        }
    }
}

pub(super) struct Service {
    shared: Arc<Shared>,
    tools: Tools,
    client: Client,
    server: Server,
    /// Ranks that have said where they are. Notes of others do not count.
    known: Vec<bool>,
    failure: Option<Error>,
    looked: RunInstant,
    /// Since when the end is wanted.
    ending: Option<RunInstant>,
}

impl Service {
    pub fn new(shared: Arc<Shared>, tools: Tools, server: Server) -> Service {
        let known = vec![false; shared.communicator.ranks];
        let (client, looked) = (Client::new(shared.communicator.rank), RunInstant::now());
        Service { shared, tools, client, server, known, failure: None, looked, ending: None }
    }

    /// Works until it is told to end.
    pub fn run(mut self) {
        let current = self.tools.device.enter();
        let mut moved = RunInstant::now();
        while !self.is_over() {
            match unless_exiting(&AT_EXIT, || self.pass()) {
                Some(Ok(true)) => moved = RunInstant::now(),
                Some(Ok(false)) => {}
                Some(Err(error)) => self.fail(error),
                None => {
                    // The libraries may be gone.
                    std::mem::forget((self, current));
                    return;
                }
            }
            match moved.elapsed() {
                quiet if quiet < KEEN => std::thread::yield_now(),
                quiet if quiet < QUIET => self.shared.wait(NAP),
                _ => self.shared.wait(LONG_NAP),
            }
        }
        self.shared.parts.end();
        if !self.server.is_idle() || !self.client.is_idle() {
            let rank = self.shared.communicator.rank;
            crate::os::log::error!(rank, "copies between hosts are given up, and their memory is leaked");
            // A stream that comes to its copies later goes on.
            unless_exiting(&AT_EXIT, || self.client.fail(&Error::Aborted { rank }, &mut self.tools));
            std::mem::forget(self);
        }
    }

    fn is_over(&self) -> bool {
        let Some(since) = self.ending else { return false };
        self.server.is_idle() && self.client.is_idle() || since.elapsed() > FLUSHING
    }

    /// Does what can be done now; whether something has moved.
    fn pass(&mut self) -> Result<bool> {
        let orders = std::mem::take(&mut *lock(&self.shared.orders));
        let mut has_moved = !orders.is_empty();
        orders.into_iter().for_each(|order| self.obey(order));
        self.tools.messenger.progress();
        while let Some((from, note)) = self.tools.messenger.take_note() {
            has_moved = true;
            if let Some(note) = Note::from_bytes(&note) {
                self.take(from, note);
            }
        }
        has_moved |= self.server.advance(&self.shared.parts, &mut self.tools)?;
        has_moved |= self.client.advance(&mut self.tools)?;
        if self.looked.elapsed() > LOOK {
            self.looked = RunInstant::now();
            self.look()?;
        }
        Ok(has_moved)
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Open { opened, address, channel, dtype, marked } => {
                if self.failure.is_some() {
                    return;
                }
                self.tools.messenger.meet(opened.copies.rank, &address);
                self.known[opened.copies.rank] = true;
                let (nonce, address) = (opened.nonce, self.tools.messenger.address().clone());
                let note = |number| Note::Open { number, nonce, channel, dtype, marked, address };
                self.client.open(opened, note, &mut self.tools);
            }
            Order::Work(opened, job) => {
                self.client.add(&opened, job);
                if let Some(failure) = &self.failure {
                    self.client.fail(failure, &mut self.tools);
                }
            }
            Order::Close(opened) => self.client.close(&opened),
            Order::Tell(part, note) => {
                for rank in part.holders() {
                    self.tools.messenger.send_note(rank, note.clone().to_bytes());
                }
            }
            Order::End => self.ending = Some(RunInstant::now()),
        }
    }

    fn take(&mut self, from: usize, note: Note) {
        // Memory that ranks of this host have open is theirs until they close it.
        if self.failure.is_some() && !matches!(note, Note::Close { .. }) {
            return;
        }
        let (parts, tools) = (&self.shared.parts, &mut self.tools);
        match note {
            Note::Open { number, nonce, channel, dtype, marked, address } => {
                tools.messenger.meet(from, &address);
                self.known[from] = true;
                let own = &self.shared.communicator.control_channel;
                let asks = (from, own.shares_host_with(from));
                let is_ours = channel == own.id();
                match is_ours.then(|| parts.open(nonce, asks, dtype, marked)).flatten() {
                    Some(place) => tools.messenger.send_note(from, Note::Opened { number, place }.to_bytes()),
                    None => answer(tools, from, number, Verdict::Nothing),
                }
            }
            _ if !self.known[from] => {}
            Note::Close { nonce } => parts.close(&nonce, from),
            Note::Put { number, nonce, ranges } => {
                self.server.ask((from, number), nonce, CopyDirection::Put, ranges, tools)
            }
            Note::Get { number, nonce, ranges } => {
                self.server.ask((from, number), nonce, CopyDirection::Get, ranges, tools)
            }
            Note::Signal { number, nonce } => answer(tools, from, number, parts.signal(&nonce, from)),
            Note::Opened { number, place } => self.client.opened(from, number, place),
            Note::Answer { number, verdict } => self.client.take_answer(from, number, verdict),
            Note::Released { nonce } => self.client.released(from, &nonce),
        }
    }

    /// An error if the communicator has failed, or fails now: a rank that this one waits for is gone, or too late.
    fn look(&mut self) -> Result<()> {
        let communicator = &self.shared.communicator;
        let channel = &communicator.control_channel;
        let is_lost = |rank: usize| channel.has_exited(rank);
        self.server.give_up(is_lost, &mut self.tools);
        if self.failure.is_some() {
            return Ok(());
        }
        channel.check()?;
        for (rank, since) in self.client.awaited() {
            let announced = AnnouncedCall::of_rank(communicator.collectives(), Operation::OneSided, rank);
            channel.check_peers(&announced, since)?;
            if let Some(text) = self.tools.messenger.failure(rank).filter(|_| since.elapsed() > BROKEN) {
                crate::os::log::error!(
                    rank = communicator.rank,
                    "UCX has lost the connection to rank {rank}: {text}"
                );
                return Err(channel.fail_unreachable(rank, &announced, since.elapsed()));
            }
        }
        Ok(())
    }

    /// Gives up all that is under way, lets the streams go on, and fails the communicator.
    fn fail(&mut self, error: Error) {
        if self.failure.is_some() {
            return;
        }
        // Nothing is copied any more when the streams go on, and when owners free their memory. Where a copy does not end, its piece does not
        // either, so that its window's memory is kept.
        let ended = [Way::ToGpu, Way::ToHost].map(|way| {
            let waited = self.tools.device.wait_idle(self.tools.stream(way).raw(), ENDING);
            let rank = self.shared.communicator.rank;
            waited
                .inspect_err(|error| crate::os::log::error!(rank, "copies between hosts do not end: {error}"))
                .is_ok()
        });
        self.failure = Some(error.clone());
        unless_exiting(&AT_EXIT, || {
            self.client.fail(&error, &mut self.tools);
            self.server.end_pieces(|way| ended[way as usize]);
            self.server.give_up(|_| true, &mut self.tools);
        });
        self.shared.parts.end();
        self.shared.communicator.fail(error);
    }
}
