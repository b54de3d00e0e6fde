//! The names in docs/guide/coming-from.md are those of the interface.

use std::collections::BTreeSet;
use std::path::Path;

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

/// Every `.rs` file below a folder.
fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            sources(&entry, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(std::fs::read_to_string(&entry).unwrap());
        }
    }
}

/// The functions of MPI and NCCL that the front page and the guide's tables name are aliases, by which the search of the documentation finds
/// what takes their place.
#[test]
fn c_functions_are_found_by_the_search_of_the_documentation() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    // Of requests, the table of their methods has them.
    let is_alias = |line: &&str| {
        line.contains("#[doc(alias")
            || ["start_", "prepare_"].iter().any(|name| line.trim().starts_with(name))
    };
    let lines = files.iter().flat_map(|file| file.lines()).filter(is_alias);
    let aliases: BTreeSet<&str> = lines.flat_map(|line| line.split('"').skip(1).step_by(2)).collect();
    let front = include_str!("../../src/lib.rs").lines().filter_map(|line| line.strip_prefix("//! | ["));
    let page = include_str!("../../../../docs/guide/coming-from.md").lines();
    let answered = |line: &&str| !["std::", "not there", "not needed"].iter().any(|text| line.contains(text));
    let rows = page.filter(|line| line.starts_with("| ")).filter(answered);
    let cells = front.chain(rows.filter_map(|line| line.split('|').nth(1)));
    let words = cells.flat_map(|cell| cell.split(|char: char| !char.is_alphanumeric() && char != '_'));
    let is_function = |word: &&str| {
        (word.starts_with("MPI") || word.starts_with("nccl")) && word.chars().any(char::is_lowercase)
    };
    let functions: BTreeSet<&str> = words.filter(is_function).collect();
    assert!(functions.len() > 80, "{} functions found", functions.len());
    // No function, or without a counterpart.
    let others = ["MPI_Group_", "MPI_Intercomm_create", "nccl"];
    let missing: Vec<_> = functions.difference(&aliases).filter(|name| !others.contains(name)).collect();
    assert!(missing.is_empty(), "no #[doc(alias = …)] has {missing:?}");
}
