//! The server of a host's ranks: it decides nothing, and passes their requests to the job's store on one connection.

use super::connection::ServerConnection;
use super::{Server, Service, refused};
use crate::rendezvous::store::Token;
use crate::rendezvous::store::address::Listeners;
use crate::rendezvous::store::client::Carrier;
use crate::rendezvous::store::namespace::{Group, Letter};
use crate::rendezvous::store::protocol::{Carried, End, Reply, Request, Role};
use crate::rendezvous::store::{Rendezvous, Settings};
use crate::types::error::Result;
use std::time::Duration;

/// What the store above has left of this server.
pub enum Above {
    Goes,
    /// It has ended in good order.
    Left,
    Lost,
}

impl Server {
    /// Serves the ranks of this host on a free port of the loopback interface: joins the job's store once for all of them. The
    /// settings give their number.
    ///
    /// # Errors
    /// Those of [`Store::connect`](crate::rendezvous::store::Store::connect), and [`Error::Bootstrap`](crate::Error::Bootstrap)
    /// if this host has no port.
    pub fn carrying(rendezvous: &Rendezvous, settings: Settings, timeout: Duration) -> Result<Server> {
        const ADDRESS: &str = "127.0.0.1:0";
        let carrier = Carrier::connect(rendezvous, timeout)?;
        carrier.set_nonblocking().map_err(refused("preparing a socket"))?;
        let listeners = Listeners::bind(ADDRESS).map_err(|e| e.into_error(ADDRESS))?;
        let bound = listeners.address().map_err(refused("asking for the store's address"))?;
        let listeners = listeners.into_nonblocking().map_err(refused("preparing the store's listener"))?;
        let token: Token = rendezvous.token.clone();
        Server::run(Some(bound), listeners, Vec::new(), token, settings, Some(carrier))
    }
}

impl Service {
    /// Asks the store above for a member's place. `None`: it is asked.
    pub(super) fn ask_above(&mut self, id: u64, role: Role, rank: u32, join: Request) -> Option<String> {
        let (Some(above), Some(connection)) = (&mut self.above, self.connections.get_mut(&id)) else {
            return Some("the store above is lost".to_owned());
        };
        if role != Role::Rank {
            return Some("this store is for the ranks of a host".to_owned());
        }
        if self.members.contains_key(&(Group::Ranks, rank)) {
            return Some(format!("two processes claim to be rank {rank}"));
        }
        self.members.insert((Group::Ranks, rank), id);
        connection.wait_for(Group::Ranks, rank);
        above.post(rank, join);
        None
    }

    /// Passes on what the store above says.
    pub(super) fn hear_above(&mut self) -> Above {
        let Some(above) = &mut self.above else {
            return Above::Goes;
        };
        let replies = match above.receive() {
            Ok(replies) => replies,
            Err(e) => {
                crate::os::log::warn!("the store above is lost: {e}");
                return Above::Lost;
            }
        };
        for Carried { ranks, message } in replies {
            match message {
                Reply::Goodbye if ranks.is_empty() => return Above::Left,
                Reply::Welcome { .. } => ranks.iter().for_each(|rank| self.decide_above(*rank, Ok(()))),
                Reply::Refused { id: 0, reason } => {
                    let (awaited, members): (Vec<u32>, Vec<u32>) =
                        ranks.iter().partition(|rank| self.is_awaited(**rank));
                    awaited.iter().for_each(|rank| self.decide_above(*rank, Err(reason.clone())));
                    self.deliver(
                        Group::Ranks,
                        vec![Letter { to: members, reply: Reply::Refused { id: 0, reason } }],
                    );
                }
                reply => self.deliver(Group::Ranks, vec![Letter { to: ranks, reply }]),
            }
        }
        Above::Goes
    }

    fn is_awaited(&self, rank: u32) -> bool {
        let id = self.members.get(&(Group::Ranks, rank));
        id.and_then(|id| self.connections.get(id)).is_some_and(ServerConnection::is_awaited)
    }

    fn decide_above(&mut self, rank: u32, outcome: std::result::Result<(), String>) {
        let Some(id) = self.members.get(&(Group::Ranks, rank)).copied() else {
            return;
        };
        if outcome.is_err() {
            self.members.remove(&(Group::Ranks, rank));
        }
        self.answer_join(id, Group::Ranks, rank, outcome);
        // It may have asked for something with its introduction.
        self.read(id, std::time::Instant::now());
    }

    /// Tells the store above how a member has ended.
    pub(super) fn end_above(&mut self, rank: u32, end: End) {
        if let Some(above) = &mut self.above {
            above.post(rank, Request::Ended { end });
        }
    }
}
