//! The layers of `src`: a file uses its own folder and lower ones, and no backend uses another. And ARCHITECTURE.md, the map of the layers,
//! names only files that exist.
//!
//! The order stands once, in ARCHITECTURE.md, in the block that begins with "```layers".

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::path::{Path, PathBuf};

/// A use of another module: the line, and the path from the crate's root.
struct Import {
    line: usize,
    path: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn architecture() -> String {
    let page = root().join("../../ARCHITECTURE.md");
    std::fs::read_to_string(&page).expect("ARCHITECTURE.md is at the repository's root")
}

/// The folders of `src` in the order of ARCHITECTURE.md, the highest first.
fn layers() -> Vec<String> {
    let text = architecture();
    let block = text.split("```layers\n").nth(1).and_then(|rest| rest.split("```").next());
    let folders = block.expect("a block ```layers").lines().flat_map(|line| {
        let names = line.split_whitespace().take_while(|word| word.ends_with('/'));
        names.map(|name| name.trim_end_matches('/').to_owned()).collect::<Vec<_>>()
    });
    folders.collect()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The module that a file of `src` is, as a path from the crate's root.
fn module(relative: &Path) -> Vec<String> {
    let mut parts: Vec<String> =
        relative.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod" || last == "lib") {
        parts.pop();
    }
    parts
}

/// Every path in the code that begins with `crate` or `super`, wherever it stands: imports, calls, macros.
fn imports(tokens: TokenStream, module: &[String], found: &mut Vec<Import>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is_colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(p)) if p.as_char() == ':');
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            // A module in the file: `super` means one level more there.
            TokenTree::Ident(word) if word == "mod" => {
                if let (Some(TokenTree::Ident(name)), Some(TokenTree::Group(body))) =
                    (tokens.get(at + 1), tokens.get(at + 2))
                {
                    // Unit tests look at the crate from above.
                    if name == "tests" {
                        at += 3;
                        continue;
                    }
                    let inner = [module, &[name.to_string()]].concat();
                    imports(body.stream(), &inner, found);
                    at += 3;
                    continue;
                }
            }
            TokenTree::Ident(word) if (word == "crate" || word == "super") && is_colon(at + 1) => {
                let is_inside_path = at >= 2 && is_colon(at - 1) && is_colon(at - 2);
                let is_of_macro =
                    at >= 1 && matches!(&tokens[at - 1], TokenTree::Punct(p) if p.as_char() == '$');
                if !is_inside_path && !is_of_macro {
                    let mut start = if word == "crate" { Vec::new() } else { module.to_vec() };
                    if word == "super" {
                        start.pop();
                    }
                    path(&tokens, at + 3, start, found, word.span().start().line);
                }
            }
            TokenTree::Group(group) => imports(group.stream(), module, found),
            _ => {}
        }
        at += 1;
    }
}

/// Follows a path, or the tree of a `use`, from the token behind its first `::`.
fn path(tokens: &[TokenTree], at: usize, mut prefix: Vec<String>, found: &mut Vec<Import>, line: usize) {
    match tokens.get(at) {
        Some(TokenTree::Ident(word)) if word == "super" => {
            prefix.pop();
            path(tokens, at + 3, prefix, found, line);
        }
        Some(TokenTree::Ident(word)) => {
            prefix.push(word.to_string());
            let goes_on = [1, 2]
                .iter()
                .all(|k| matches!(tokens.get(at + k), Some(TokenTree::Punct(p)) if p.as_char() == ':'));
            if goes_on {
                path(tokens, at + 3, prefix, found, line);
            } else {
                found.push(Import { line, path: prefix });
            }
        }
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            let tree: Vec<TokenTree> = group.stream().into_iter().collect();
            let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(p) if p.as_char() == ',');
            for part in tree.split(is_comma).filter(|part| !part.is_empty()) {
                path(part, 0, prefix.clone(), found, part[0].span().start().line);
            }
        }
        // `super::*` and the like: the module itself.
        _ => found.push(Import { line, path: prefix }),
    }
}

/// What is wrong with the uses in one file's text, as lines to print.
fn violations(layers: &[String], relative: &Path, text: &str) -> Vec<String> {
    let module = module(relative);
    let Some(own) = module.first() else { return Vec::new() };
    if module.iter().any(|part| part == "tests" || part.ends_with("_tests")) {
        return Vec::new();
    }
    let height = |folder: &str| layers.iter().position(|layer| layer == folder);
    let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{}: {error}", relative.display()));
    let mut found = Vec::new();
    imports(tokens, &module, &mut found);
    let own_height = height(own);
    let problem = |import: &Import| {
        let used = import.path.first()?;
        match (own_height, height(used)) {
            (None, _) => Some(format!("the folder `{own}` is not in ARCHITECTURE.md's block of layers")),
            (_, None) => Some(format!(
                "`{used}` is no layer: name the folder that has it, not the public name in lib.rs"
            )),
            (Some(own_height), Some(height)) if height < own_height => {
                Some(format!("`{own}` lies below `{used}`: a file uses its own layer and lower ones"))
            }
            _ if own == "backend" && used == "backend" => {
                let is_folder = |part: &&String| layers_of_backends().contains(part);
                let (one, other) = (module.get(1)?, import.path.get(1).filter(is_folder)?);
                (one != other && module.len() > 1)
                    .then(|| format!("backend `{one}` uses backend `{other}`: none uses another"))
            }
            _ => None,
        }
    };
    let line = |import: &Import| {
        let place = format!("{}:{}: {}", relative.display(), import.line, import.path.join("::"));
        problem(import).map(|problem| format!("{place}: {problem}"))
    };
    found.iter().filter_map(line).collect()
}

/// Lines that print or log by macros that can unwind, beside unit tests. `os::log` has those that cannot.
fn unwinding_prints(tokens: TokenStream, found: &mut Vec<usize>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Ident(word) if word == "tracing" => found.push(word.span().start().line),
            TokenTree::Ident(word)
                if ["print", "println", "eprint", "eprintln", "dbg"].iter().any(|name| word == name) =>
            {
                if matches!(tokens.get(at + 1), Some(TokenTree::Punct(p)) if p.as_char() == '!') {
                    found.push(word.span().start().line);
                }
            }
            TokenTree::Group(group) => {
                let is_tests =
                    at >= 1 && matches!(&tokens[at - 1], TokenTree::Ident(name) if name == "tests");
                if !is_tests {
                    unwinding_prints(group.stream(), found);
                }
            }
            _ => {}
        }
    }
}

#[test]
fn nothing_prints_or_logs_in_a_way_that_can_unwind() {
    let src = root().join("src");
    let mut found = Vec::new();
    files(&src, &mut found);
    let own = |file: &PathBuf| !file.ends_with("os/log.rs") && !file.to_string_lossy().contains("tests");
    let lines: Vec<String> = found
        .iter()
        .filter(|file| own(file))
        .flat_map(|file| {
            let mut lines = Vec::new();
            unwinding_prints(std::fs::read_to_string(file).unwrap().parse().unwrap(), &mut lines);
            lines
                .into_iter()
                .map(|line| format!("{}:{line}", file.strip_prefix(&src).unwrap().display()))
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(lines.is_empty(), "use the macros of os::log:\n{}", lines.join("\n"));
}

fn layers_of_backends() -> Vec<String> {
    let backends = std::fs::read_dir(root().join("src/backend")).unwrap().map(|entry| entry.unwrap());
    let folders = backends.filter(|entry| entry.path().is_dir());
    folders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn every_file_uses_its_own_layer_and_lower_ones() {
    let (layers, src) = (layers(), root().join("src"));
    let mut found = Vec::new();
    files(&src, &mut found);
    assert!(found.len() > 100, "the files of src");
    let lines: Vec<String> = found
        .iter()
        .flat_map(|file| {
            let text = std::fs::read_to_string(file).unwrap();
            violations(&layers, file.strip_prefix(&src).unwrap(), &text)
        })
        .collect();
    assert!(lines.is_empty(), "{} uses go up:\n{}", lines.len(), lines.join("\n"));
}

/// The files and folders that a page names, as `code.rs`, `code/`, or the target of a link, and that are neither in `src` nor at the root.
fn missing_files(page: &str, src: &[PathBuf]) -> Vec<String> {
    let code = page.split('`').skip(1).step_by(2).filter(|word| word.ends_with(".rs") || word.ends_with('/'));
    let links = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let exists = |name: &str| {
        // A name may leave out the folders above it.
        let is_in_src = src.iter().any(|file| file.ancestors().any(|path| path.ends_with(name)));
        is_in_src || root().join("../..").join(name).exists()
    };
    code.chain(links).filter(|name| !exists(name)).map(str::to_owned).collect()
}

#[test]
fn every_file_that_the_map_names_exists() {
    let mut src = Vec::new();
    files(&root().join("src"), &mut src);
    assert_eq!(missing_files(&architecture(), &src), Vec::<String>::new(), "named in ARCHITECTURE.md");

    let page = "`control/world.rs`, `world.rs`, `control/join/`, [docs](docs), but `nccl/world.rs`, `gone/`, [a](b.md)";
    assert_eq!(missing_files(page, &src), ["nccl/world.rs", "gone/", "b.md"]);
}

#[test]
fn a_use_of_a_higher_layer_is_found_wherever_it_stands() {
    let layers = layers();
    let check = |file: &str, text: &str| violations(&layers, Path::new(file), text);
    for text in [
        "use crate::api::comm::Comm;",
        "use crate::{os::Mapping, api::{self, comm::Comm}};",
        "fn f() { let _ = crate::api::comm::Comm::builder(); }",
        "macro_rules! m { () => { crate::start::choose() } }",
        "mod inner { use super::super::super::api::comm::Comm; }",
        "use super::super::api::comm::Comm;",
        "use crate::Comm;",
    ] {
        assert!(!check("watch/recorder.rs", text).is_empty(), "{text}");
    }
    assert!(check("api/comm.rs", "use crate::watch::Recorder; use super::group::Group;").is_empty());
    assert!(
        check("watch/recorder.rs", "use super::clock::Clock; /// See [`crate::Comm`].\nfn f() {}").is_empty()
    );
    let sideways = check("backend/mpi/mod.rs", "use crate::backend::host::HostComm;");
    assert!(sideways[0].contains("backend/mpi/mod.rs:1") && sideways[0].contains("none uses another"));
}
