//! The names in docs/guide/coming-from.md are those of the interface.

use std::collections::BTreeSet;

/// What stands in code in the last column of the page's tables and looks like a name: `scan`, `ReduceOp::Sum`.
fn names_of(page: &str) -> Vec<&str> {
    let cells = page.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.rsplit('|').nth(1));
    let codes = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let is_name = |code: &&str| code.chars().all(|char| char.is_alphanumeric() || "_:".contains(char));
    // Of the standard library, of other crates, and variables.
    let is_elsewhere = |code: &&str| {
        code.starts_with("std::") || code.starts_with("phalanx_") || code.starts_with("PHALANX_")
    };
    codes.filter(is_name).filter(|code| !is_elsewhere(code)).collect()
}

#[test]
fn names_for_those_who_come_from_elsewhere_exist() {
    let page = include_str!("../../../../docs/guide/coming-from.md");
    let interface = include_str!("../../public-api.txt");
    let known: BTreeSet<&str> = interface
        .split(|char: char| !char.is_alphanumeric() && char != '_')
        .filter(|word| !word.is_empty())
        .collect();
    let names = names_of(page);
    assert!(names.len() > 60, "{} names found", names.len());
    // The last is there with the feature ndarray, and the interface is that of the default ones.
    let words = ["drop", "serde", "Future", "torchrun", "Strided"];
    let unknown: Vec<_> = names
        .into_iter()
        .filter(|name| !words.contains(name) && !name.split("::").all(|part| known.contains(part)))
        .collect();
    assert!(
        unknown.is_empty(),
        "docs/guide/coming-from.md names what public-api.txt does not have: {unknown:?}"
    );
}
