//! Rounds of disjoint pairs, so that no measurement disturbs another one at its ends.

/// The most rounds: all pairs of 64 hosts.
const MOST: usize = 63;

/// For each round, the partner of each host, if it has one. All pairs of up to 64 hosts; beyond that every host is measured with 63 others,
/// at distances all over the hosts.
pub fn rounds(hosts: usize) -> Vec<Vec<Option<usize>>> {
    // The circle method: one host stays, the others turn. With an odd number, whoever meets the missing one has a break.
    let seats = hosts.next_multiple_of(2);
    let all = seats - 1;
    let count = all.min(MOST);
    let round = |number: usize| {
        let turn = number * all / count;
        let at = |seat: usize| if seat == 0 { 0 } else { 1 + (seat - 1 + turn) % all };
        let mut partners = vec![None; hosts];
        for seat in 0..seats / 2 {
            let (one, other) = (at(seat), at(seats - 1 - seat));
            if one < hosts && other < hosts {
                (partners[one], partners[other]) = (Some(other), Some(one));
            }
        }
        partners
    };
    (0..count).map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_pair_meets_once_and_nobody_is_in_two() {
        for hosts in 2..=20 {
            let mut met = BTreeSet::new();
            for partners in rounds(hosts) {
                for (host, partner) in partners.iter().enumerate() {
                    let Some(partner) = *partner else { continue };
                    assert!(partner != host && partners[partner] == Some(host));
                    assert!(met.insert((host, partner)), "{hosts} hosts: {host} and {partner} twice");
                }
            }
            assert_eq!(met.len(), hosts * (hosts - 1), "{hosts} hosts");
        }
    }

    #[test]
    fn many_hosts_are_a_sample() {
        let rounds = rounds(1000);
        assert_eq!(rounds.len(), 63);
        let partners: BTreeSet<_> = rounds.iter().filter_map(|partners| partners[7]).collect();
        assert!(partners.len() >= 62, "{}", partners.len());
    }
}
