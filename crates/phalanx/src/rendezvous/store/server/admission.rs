//! Who is let in: members of the job's groups, new ranks, and launchers that carry ranks.

use super::Service;
use super::connection::ServerConnection;
use crate::rendezvous::store::namespace::{Group, Letter};
use crate::rendezvous::store::protocol::{End, Growth, Reply, Request, Role};
use std::result::Result as StdResult;

/// The remedy for growing where launchers carry their ranks' requests.
const CARRIED: &str = "the ranks of a host share one connection to the job's store, over which a communicator cannot grow: start the job \
                       with phalanx launch --restarts";

impl Service {
    /// Answers whoever says who it is.
    pub(super) fn introduced(&mut self, id: u64, request: Request) {
        match request {
            Request::Join { role, rank, size, epoch, job } => {
                let outcome = self.admit(role, rank, size, epoch, &job);
                self.answer_join(id, Group::of(role), rank, outcome);
            }
            Request::Grow { growth, rank, epoch, job } => self.admit_growing(id, growth, rank, epoch, &job),
            Request::Enter { epoch, job } => self.admit_newcomer(id, epoch, &job),
            Request::Carry { epoch, job } => self.admit_carrier(id, epoch, &job),
            _ => unreachable!("the connection has looked at it"),
        }
    }

    /// Lets a connection carry the ranks of a host, or refuses it.
    fn admit_carrier(&mut self, id: u64, epoch: u32, job: &str) {
        let current = self.settings.epoch;
        let problem = match self.above {
            Some(_) => Err("this store is for the ranks of a host".to_owned()),
            None if epoch != current => {
                Err(format!("its ranks are of epoch {epoch}, and the job is in epoch {current}"))
            }
            None => self.groups.of(Group::Ranks).check_job("a host's launcher", job),
        };
        let welcome = self.welcome(0, 0);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        match problem {
            Ok(()) => {
                connection.send(&[], welcome);
                connection.carry();
            }
            Err(reason) => refuse(connection, &[], reason),
        }
    }

    fn welcome(&self, rank: u32, size: u32) -> Reply {
        let silence = u32::try_from(self.settings.silence.as_millis()).unwrap_or(u32::MAX);
        Reply::Welcome { rank, size, silence, thread: self.thread.clone() }
    }

    /// Takes a member in, or says why not.
    fn admit(&mut self, role: Role, rank: u32, size: u32, epoch: u32, job: &str) -> StdResult<(), String> {
        if role == Role::Rank {
            self.check_epoch(&format!("rank {rank}"), epoch)?;
        }
        // The members of another job do no harm: those of this one may still come.
        let (group, client) = (Group::of(role), format!("{} {rank}", role.name()));
        self.groups.of(group).check_job(&client, job)?;
        let mut out = Vec::new();
        let outcome = self.groups.of(group).join(rank, size, job, &mut out);
        self.deliver(group, out);
        outcome
    }

    fn check_epoch(&self, client: &str, epoch: u32) -> StdResult<(), String> {
        match self.settings.epoch {
            current if current == epoch => Ok(()),
            current => Err(format!("{client} is of epoch {epoch}, and the job is in epoch {current}")),
        }
    }

    /// Takes a member of a communicator that grows into its group.
    fn admit_growing(&mut self, id: u64, growth: Growth, rank: u32, epoch: u32, job: &str) {
        let group = self.check_newcomer("a communicator that grows", epoch, job);
        let group = group.and_then(|()| self.groups.open(growth, rank));
        let Ok(group) = group else {
            return self.refuse_newcomer(id, group.expect_err("matched just now"));
        };
        let mut out = Vec::new();
        let outcome = self.groups.of(group).join(rank, growth.size, "", &mut out);
        self.deliver(group, out);
        self.answer_join(id, group, rank, outcome);
    }

    /// Gives a new rank the next place, if a communicator asks for new ranks.
    fn admit_newcomer(&mut self, id: u64, epoch: u32, job: &str) {
        if let Err(reason) = self.check_newcomer("a new rank", epoch, job) {
            return self.refuse_newcomer(id, reason);
        }
        let Some((group, rank)) = self.groups.free_place() else {
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.send(&[], Reply::NoPlace);
                connection.break_off(End::Left);
            }
            return;
        };
        let namespace = self.groups.of(group);
        let outcome = namespace.join(rank, namespace.size().unwrap_or(0), "", &mut Vec::new());
        self.answer_join(id, group, rank, outcome);
    }

    fn check_newcomer(&mut self, client: &str, epoch: u32, job: &str) -> StdResult<(), String> {
        if self.above.is_some() {
            return Err(CARRIED.to_owned());
        }
        self.check_epoch(client, epoch)?;
        self.groups.of(Group::Ranks).check_job(client, job)
    }

    fn refuse_newcomer(&mut self, id: u64, reason: String) {
        if let Some(connection) = self.connections.get_mut(&id) {
            refuse(connection, &[], reason);
        }
    }

    pub(super) fn answer_join(&mut self, id: u64, group: Group, rank: u32, outcome: StdResult<(), String>) {
        let mut out = Vec::new();
        let size = self.groups.of(group).size().unwrap_or(0);
        let welcome = self.welcome(rank, size);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        match outcome {
            Ok(()) => {
                self.members.insert((group, rank), id);
                connection.admit(group, rank);
                connection.send(&[rank], welcome);
                // Notify it of members lost before it joined.
                let lost = self.groups.of(group).lost();
                out.extend(lost.map(|(lost, end)| Letter::to(rank, Reply::Lost { rank: lost, end })));
            }
            Err(reason) => refuse(connection, &[rank], reason),
        }
        self.deliver(group, out);
    }
}

/// Refuses a connection's client, or one of the ranks that it carries.
fn refuse(connection: &mut ServerConnection, ranks: &[u32], reason: String) {
    connection.send(ranks, Reply::Refused { id: 0, reason: reason.clone() });
    if !connection.carries() {
        connection.cut_off(reason);
    }
}
