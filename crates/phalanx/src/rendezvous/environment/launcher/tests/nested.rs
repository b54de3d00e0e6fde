//! Launchers inside launchers.

use super::*;
use crate::rendezvous::environment::nesting::Ancestors;
use std::collections::HashMap;

const ALL: [(&str, Variables); 9] = [
    ("phalanx launch", PHALANX),
    ("torchrun", TORCHRUN),
    ("Open MPI", OPEN_MPI_4),
    ("Open MPI", OPEN_MPI_5),
    ("MPICH or another launcher with PMI", MPICH),
    ("Intel MPI", INTEL_MPI),
    ("PMIx", PMIX),
    ("Cray PALS", PALS),
    ("Slurm", SLURM_STEP),
];

type Owned = HashMap<String, String>;

fn owned(variables: &[(&str, &str)]) -> Owned {
    variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// The environment of a rank: `layers` are what one launcher inside the other sets, the outermost first. A process of each
/// launcher is an ancestor, with a shell below it.
fn nested(layers: &[&[(&str, &str)]]) -> Environment {
    let mut started_with = Vec::new();
    let mut variables = Owned::new();
    for layer in layers {
        started_with.push(variables.clone());
        variables.extend(owned(layer));
        started_with.push(variables.clone());
    }
    started_with.reverse();
    Environment::new(variables.into_iter(), Ancestors::Known(started_with))
}

/// The variables of another rank of such a launcher.
fn numbered(
    variables: Variables,
    rank: &'static str,
    size: &'static str,
) -> Vec<(&'static str, &'static str)> {
    let rule = recognised(variables).rule;
    let number = |(name, value): &(&'static str, &'static str)| match *name {
        // Open MPI has the rank in PMIx's variables, too, and PALS in PMI's.
        "PMIX_RANK" | "PMI_RANK" => (*name, rank),
        name if name == rule.rank => (name, rank),
        name if rule.world_size.contains(&name) => (name, size),
        name => (name, *value),
    };
    variables.iter().map(number).collect()
}

#[test]
fn the_innermost_of_any_two_launchers_counts() {
    for (outer, outer_variables) in ALL {
        for (inner, inner_variables) in ALL.into_iter().filter(|(inner, _)| *inner != outer) {
            // The same rank as outside, and another.
            for (rank, size) in [("1", "2"), ("0", "3")] {
                let inner_variables = numbered(inner_variables, rank, size);
                let launcher = nested(&[outer_variables, &inner_variables]).launcher().unwrap().unwrap();
                let found = (launcher.name, launcher.rank);
                assert_eq!(found, (inner, rank.parse().unwrap()), "{inner} inside {outer}");
                assert!(launcher.ignored.contains(&outer), "{inner} inside {outer}: {:?}", launcher.ignored);
            }
        }
    }
}

#[test]
fn launchers_that_cannot_be_told_apart_are_named_with_the_variable_that_decides() {
    for (outer, outer_variables) in ALL {
        for (inner, inner_variables) in ALL.into_iter().filter(|(inner, _)| *inner != outer) {
            let outer_variables = numbered(outer_variables, "3", "4");
            let inner_variables = numbered(inner_variables, "0", "4");
            let mut variables = owned(&outer_variables);
            variables.extend(owned(&inner_variables));
            let unknown = |variables: &Owned| {
                Environment::new(variables.clone().into_iter(), Ancestors::default()).launcher()
            };
            let ids = [outer, inner].map(|name| RULES.iter().find(|rule| rule.name == name).unwrap().id);
            // The inner one has overwritten what shows the outer one's rank.
            let shares = ["PMI_RANK", "PMIX_RANK"].iter().any(|name| {
                let has = |variables: &[(&str, &str)]| variables.iter().any(|(other, _)| other == name);
                has(&outer_variables) && has(&inner_variables)
            });
            if !shares {
                let error = unknown(&variables).unwrap_err().to_string();
                let says = [outer, inner, "PHALANX_LAUNCHED_BY", ids[0], ids[1]];
                assert!(says.iter().all(|part| error.contains(part)), "{inner} inside {outer}: {error}");
            }
            for (name, id) in [outer, inner].into_iter().zip(ids) {
                variables.insert("PHALANX_LAUNCHED_BY".into(), id.into());
                assert_eq!(unknown(&variables).unwrap().unwrap().name, name);
            }
        }
    }
    let error = recognised_error(&[("PHALANX_LAUNCHED_BY", "mpirun"), ("RANK", "0"), ("WORLD_SIZE", "2")]);
    assert!(error.contains("PHALANX_LAUNCHED_BY=\"mpirun\"") && error.contains("openmpi"), "{error}");
    let error = recognised_error(&[("PHALANX_LAUNCHED_BY", "openmpi"), ("RANK", "0"), ("WORLD_SIZE", "2")]);
    assert!(error.contains("OMPI_COMM_WORLD_RANK=\"\""), "{error}");
}

fn recognised_error(variables: &[(&str, &str)]) -> String {
    environment(variables).launcher().unwrap_err().to_string()
}

#[test]
fn launchers_that_agree_are_one() {
    let both = |first: &[(&str, &str)], second: &[(&str, &str)]| {
        let launcher = recognised(&[first, second].concat());
        (launcher.name, launcher.ignored)
    };
    // srun starts MPI's ranks itself, and a script makes torchrun's variables of Slurm's.
    let (rank, size) = ("3", "4");
    assert_eq!(both(SLURM_STEP, &numbered(PMIX, rank, size)), ("PMIx", vec!["Slurm"]));
    let name = "MPICH or another launcher with PMI";
    assert_eq!(both(SLURM_STEP, &numbered(MPICH, rank, size)), (name, vec!["Slurm"]));
    assert_eq!(both(SLURM_STEP, &numbered(TORCHRUN, rank, size)), ("torchrun", vec!["Slurm"]));
    assert_eq!(recognised(OPEN_MPI_4).ignored, ["PMIx"]);
    assert_eq!(recognised(INTEL_MPI).ignored, [name]);
    assert_eq!(recognised(PALS).ignored, [name]);
}

#[test]
fn a_launcher_that_comes_twice_counts_as_what_it_was_last() {
    // The inner `phalanx launch` sets the same numbers again.
    let outer = [("PHALANX_RANK", "0"), ("PHALANX_WORLD_SIZE", "1"), ("PHALANX_JOB", "outer")];
    let inner = [("PHALANX_RANK", "0"), ("PHALANX_WORLD_SIZE", "1"), ("PHALANX_JOB", "inner")];
    let between = numbered(OPEN_MPI_4, "0", "2");
    let name = |layers: &[&[(&str, &str)]]| nested(layers).launcher().unwrap().unwrap().name;
    assert_eq!(name(&[&outer, &between]), "Open MPI");
    assert_eq!(name(&[&outer, &between, &inner]), "phalanx launch");
}

#[test]
fn the_store_of_an_outer_phalanx_launch_is_not_for_the_ranks_of_another_launcher() {
    let outer = [PHALANX, &[("PHALANX_STORE", "alpha:1"), ("PHALANX_TOKEN", "0123456789abcdef")]].concat();
    let inner = numbered(OPEN_MPI_4, "0", "2");
    let store = |layers: &[&[(&str, &str)]]| nested(layers).get("PHALANX_STORE").map(str::to_owned);
    assert_eq!(store(&[&outer]).as_deref(), Some("alpha:1"));
    assert_eq!(store(&[&outer, &inner]), None);
    assert_eq!(store(&[&inner, &outer]).as_deref(), Some("alpha:1"));
    // One that the user names inside.
    let own = [&inner[..], &[("PHALANX_STORE", "beta:2")]].concat();
    assert_eq!(store(&[&outer, &own]).as_deref(), Some("beta:2"));
    assert_eq!(store(&[&[("PHALANX_STORE", "beta:2")], &inner]).as_deref(), Some("beta:2"));
}
