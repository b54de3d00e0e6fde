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

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx::internal::{Planned, work};
    use phalanx::{BackendKind, DType};

    const ROOMY: Placement = Placement { ranks: 4, hosts: 1, cores: 4, readable: false };

    /// The work of blocks of so many bytes.
    fn of(backend: BackendKind, operation: &str, bytes: usize, placement: Placement) -> Work {
        let planned = Planned { operation, dtype: DType::U8, count: bytes, root: 0 };
        work(backend, &planned, &placement).unwrap_or_else(|| panic!("no work of {operation}"))
    }

    fn count(most: usize, all: usize) -> Count {
        Count { most: most as f64, all: all as f64 }
    }

    #[test]
    fn slots_are_counted_as_a_hand_does() {
        let work = of(BackendKind::Host, "all_reduce", 8, ROOMY);
        assert_eq!(work.algorithm, "slots");
        // Each writes 8 bytes, reads those of 3 others, and combines 4 contributions.
        assert_eq!((work.copied, work.reduced), (count(8, 32), count(32, 128)));
        assert_eq!(
            (work.host.waits, work.host.messages, work.host.bytes),
            (1.0, count(3, 12), count(24, 96))
        );
        let work = of(BackendKind::Host, "gather", 8, ROOMY);
        // The root alone reads.
        assert_eq!((work.host.messages, work.host.bytes), (count(3, 3), count(24, 24)));
        let work = of(BackendKind::Host, "broadcast", 8, ROOMY);
        // Three ranks read one block each.
        assert_eq!((work.copied, work.host.bytes), (count(8, 8), count(8, 24)));
    }

    #[test]
    fn the_algorithm_is_the_one_that_the_library_chooses() {
        for (operation, bytes, ranks, algorithm) in [
            ("all_reduce", 256, 24, "grid"),
            ("all_reduce", 40 << 10, 5, "two-phase"),
            ("all_to_all", 1 << 20, 4, "pairwise"),
            ("all_gather", 1 << 20, 4, "one-phase"),
            ("ping_pong", 8, 2, "messages"),
        ] {
            let place = Placement { ranks, cores: 64, ..ROOMY };
            assert_eq!(of(BackendKind::Host, operation, bytes, place).algorithm, algorithm, "{operation}");
        }
        // Threads push a long all_reduce; processes cannot.
        let threads = Placement { readable: true, ..ROOMY };
        assert_eq!(of(BackendKind::Host, "all_reduce", 4 << 20, threads).algorithm, "push");
        let planned = Planned { operation: "all_reduce", dtype: DType::U8, count: 8, root: 0 };
        for none in [Placement { hosts: 2, ..ROOMY }, Placement { ranks: 1000, ..ROOMY }] {
            assert_eq!(work(BackendKind::Host, &planned, &none), None, "{none:?}");
        }
        assert_eq!(work(BackendKind::Nccl, &planned, &ROOMY), None);
    }

    #[test]
    fn ranks_of_a_host_share_its_connection() {
        let place = Placement { hosts: 2, ..ROOMY };
        let work = of(BackendKind::Ucx, "all_to_all", 2000, place);
        // Each of the two ranks of a host sends to two ranks of the other, and receives from them.
        assert_eq!((work.algorithm, work.switch.messages), ("near and far", count(4, 16)));
        assert_eq!(work.switch.bytes, count(8000, 16_000));
        // What stays on a host costs what the host backend says.
        let here = of(BackendKind::Host, "all_to_all", 2000, Placement { ranks: 2, ..ROOMY });
        let of_two = Count { all: 2.0 * here.host.bytes.all, ..here.host.bytes };
        assert_eq!((work.switch.waits, work.host.bytes), (1.0, of_two));
        // Short blocks go in one message from each host.
        let together = of(BackendKind::Ucx, "all_to_all", 100, place);
        assert_eq!((together.algorithm, together.switch.messages), ("by host", count(2, 4)));
        assert_eq!(together.switch.bytes, count(400, 800));
        // The leaders exchange what their hosts have.
        let by_host = of(BackendKind::Ucx, "all_gather", 1000, place);
        assert_eq!((by_host.algorithm, by_host.switch.messages), ("by host", count(2, 4)));
        assert_eq!(by_host.switch.bytes, count(2000, 4000));
        let tree = of(BackendKind::Ucx, "broadcast", 8, Placement { ranks: 8, hosts: 8, ..ROOMY });
        assert_eq!((tree.algorithm, tree.switch.waits, tree.switch.messages.most), ("tree", 3.0, 6.0));
        // Few messages where there are many ranks.
        let many = Placement { ranks: 1000, hosts: 1000, ..ROOMY };
        let rounds = of(BackendKind::Ucx, "all_reduce", 8, many);
        assert_eq!((rounds.algorithm, rounds.switch.waits), ("dissemination", 10.0));
        assert_eq!((rounds.switch.messages.most, rounds.switch.bytes.most), (20.0, 999.0 * 8.0));
        let gather = of(BackendKind::Ucx, "gather", 8, many);
        assert_eq!((gather.algorithm, gather.switch.waits), ("tree", 10.0));
    }

    #[test]
    fn ranks_that_share_cores_have_the_work_of_all() {
        let place = Placement { cores: 2, ..ROOMY };
        let work = of(BackendKind::Host, "gather", 1000, ROOMY);
        let (roomy, crowded) = (terms(&work, &ROOMY, false), terms(&work, &place, false));
        // Two ranks to a core: a wait is two turns. The root's bytes are as many; the copies of four share two cores.
        assert_eq!((roomy[Term::HostWait as usize], roomy[Term::HostTurn as usize]), (1.0, 0.0));
        assert_eq!((crowded[Term::HostWait as usize], crowded[Term::HostTurn as usize]), (0.0, 2.0));
        assert_eq!((roomy[Term::Copied as usize], crowded[Term::Copied as usize]), (1000.0, 2000.0));
        assert_eq!((roomy[Term::HostByte as usize], crowded[Term::HostByte as usize]), (3000.0, 3000.0));
        // Two hosts of two cores are one machine of two.
        let hosts = Placement { hosts: 2, cores: 2, ..ROOMY };
        let work = of(BackendKind::Ucx, "barrier", 0, hosts);
        assert_eq!(terms(&work, &hosts, false)[Term::SwitchWait as usize], 1.0);
        assert_eq!(terms(&work, &hosts, true)[Term::SwitchTurn as usize], 2.0);
    }
}
