//! The kinds of work of an operation, as numbers that have one time each: the time of an operation is the sum of their products.

use phalanx::internal::{Count, Placement, Traffic, Work};
use serde::Serialize;

/// A kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Term {
    /// The call itself.
    Call,
    /// A byte that a rank copies to where others read it.
    Copied,
    /// A byte that is combined.
    Reduced,
    /// A wait for a rank of the host that has a core of its own.
    HostWait,
    /// A turn of all ranks that share a core.
    HostTurn,
    HostMessage,
    HostByte,
    /// The same between hosts.
    SwitchWait,
    SwitchTurn,
    SwitchMessage,
    SwitchByte,
}

/// The level of a kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    Core,
    Host,
    Switch,
}

pub const TERMS: usize = Term::ALL.len();

impl Term {
    pub const ALL: [Term; 11] = [
        Term::Call,
        Term::Copied,
        Term::Reduced,
        Term::HostWait,
        Term::HostTurn,
        Term::HostMessage,
        Term::HostByte,
        Term::SwitchWait,
        Term::SwitchTurn,
        Term::SwitchMessage,
        Term::SwitchByte,
    ];

    pub fn level(self) -> Level {
        match self {
            Term::Call | Term::Copied | Term::Reduced => Level::Core,
            Term::HostWait | Term::HostTurn | Term::HostMessage | Term::HostByte => Level::Host,
            Term::SwitchWait | Term::SwitchTurn | Term::SwitchMessage | Term::SwitchByte => Level::Switch,
        }
    }

    /// The kind of work whose time stands in where this one was not measured.
    pub fn substitute(self) -> Option<Term> {
        match self {
            Term::HostWait => Some(Term::HostTurn),
            Term::HostTurn => Some(Term::HostWait),
            Term::SwitchWait => Some(Term::SwitchTurn),
            Term::SwitchTurn => Some(Term::SwitchWait),
            _ => None,
        }
    }

    pub fn words(self) -> &'static str {
        match self {
            Term::Call => "calls",
            Term::Copied => "copies",
            Term::Reduced => "reductions",
            Term::HostWait => "waits between ranks of a host that have a core each",
            Term::HostTurn => "waits between ranks of a host that share cores",
            Term::HostMessage => "messages between ranks of a host",
            Term::HostByte => "bytes between ranks of a host",
            Term::SwitchWait => "waits between hosts whose ranks have a core each",
            Term::SwitchTurn => "waits between hosts whose ranks share cores",
            Term::SwitchMessage => "messages between hosts",
            Term::SwitchByte => "bytes between hosts",
        }
    }
}

/// Numbers by kind of work, in the order of [`Term::ALL`].
pub type Terms = [f64; TERMS];

/// Ranks that share a core.
pub fn turns(placement: &Placement, one_machine: bool) -> f64 {
    placement.ranks as f64 / cores(placement, one_machine)
}

/// Cores of all machines.
fn cores(placement: &Placement, one_machine: bool) -> f64 {
    (if one_machine { 1 } else { placement.hosts } * placement.cores) as f64
}

/// The numbers of an operation's work. With `one_machine`, all hosts share the cores of one.
pub fn terms(work: &Work, placement: &Placement, one_machine: bool) -> Terms {
    let (cores, turns) = (cores(placement, one_machine), turns(placement, one_machine));
    // The busiest rank has its own time; ranks that share cores have the time of all.
    let busy = |count: Count| count.most.max(count.all / cores);
    let level = |traffic: &Traffic, bytes: f64| {
        let (waits, taken) = if turns > 1.0 { (0.0, traffic.waits * turns) } else { (traffic.waits, 0.0) };
        [waits, taken, busy(traffic.messages), bytes]
    };
    let bytes = work.switch.bytes;
    let switch_bytes = if one_machine { busy(bytes) } else { bytes.most };
    let [wait, turn, message, byte] = level(&work.host, busy(work.host.bytes));
    let [far_wait, far_turn, far_message, far_byte] = level(&work.switch, switch_bytes);
    [
        1.0,
        busy(work.copied),
        busy(work.reduced),
        wait,
        turn,
        message,
        byte,
        far_wait,
        far_turn,
        far_message,
        far_byte,
    ]
}
