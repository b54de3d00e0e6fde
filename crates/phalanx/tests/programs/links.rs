//! The documents' links lead somewhere: to a file, and to a heading in it. And the book has every page.

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// What a page has: where its links and pictures lead, and the anchors of its headings.
struct Page {
    links: Vec<String>,
    anchors: BTreeSet<String>,
}

/// The anchor of a heading, as GitHub and mdBook make it: `## The end: a walk` has `the-end-a-walk`.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn read(text: &str) -> Page {
    let mut page = Page { links: Vec::new(), anchors: BTreeSet::new() };
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                page.links.push(dest_url.to_string())
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let name = anchor(&heading.take().unwrap_or_default());
                // A second heading of the same text has a number.
                let numbered = (1..).map(|number| format!("{name}-{number}"));
                let free =
                    [name.clone()].into_iter().chain(numbered).find(|name| !page.anchors.contains(name));
                page.anchors.extend(free);
            }
            _ => {}
        }
    }
    page
}

fn add_pages(folder: &Path, found: &mut BTreeMap<PathBuf, Page>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.insert(path.clone(), read(&std::fs::read_to_string(&path).unwrap()));
        }
    }
}

/// The repository's documents, by their paths.
fn pages() -> BTreeMap<PathBuf, Page> {
    let mut found = BTreeMap::new();
    add_pages(&root().join("docs"), &mut found);
    for name in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"] {
        let path = root().join(name);
        found.insert(path.clone(), read(&std::fs::read_to_string(&path).unwrap()));
    }
    found
}

/// `folder/to`, without `..`. The file need not exist.
fn resolve(folder: &Path, to: &str) -> PathBuf {
    Path::new(to).components().fold(folder.to_owned(), |path, part| match part {
        Component::ParentDir => path.parent().expect("a path within the repository").to_owned(),
        part => path.join(part),
    })
}

/// Why a link of the page at `from` leads nowhere.
fn wrong(from: &Path, link: &str, pages: &BTreeMap<PathBuf, Page>) -> Option<&'static str> {
    if link.contains("://") {
        return None; // Another site's.
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let to = if file.is_empty() { from.to_owned() } else { resolve(from.parent().unwrap(), file) };
    if !to.exists() {
        return Some("there is no such file");
    }
    if !anchor.is_empty() && !pages.get(&to).is_some_and(|page| page.anchors.contains(anchor)) {
        return Some("there is no such heading");
    }
    let book = root().join("docs");
    (from.starts_with(&book) && !to.starts_with(&book)).then_some("it leads out of the book")
}

#[test]
fn links_of_the_documents_lead_somewhere() {
    let pages = pages();
    assert!(pages.values().map(|page| page.links.len()).sum::<usize>() > 150);
    let mut all_wrong = Vec::new();
    for (from, page) in &pages {
        for link in &page.links {
            if let Some(why) = wrong(from, link, &pages) {
                all_wrong.push(format!("{}: {link}: {why}", from.strip_prefix(root()).unwrap().display()));
            }
        }
    }
    assert!(all_wrong.is_empty(), "{}", all_wrong.join("\n"));
}

#[test]
fn the_book_has_every_page() {
    let pages = pages();
    let (docs, summary) = (root().join("docs"), root().join("docs/SUMMARY.md"));
    let listed: Vec<PathBuf> = pages[&summary].links.iter().map(|link| resolve(&docs, link)).collect();
    let missing: Vec<_> = pages
        .keys()
        .filter(|page| page.starts_with(&docs) && **page != summary && !listed.contains(page))
        .collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:?}");
    // mdBook shows it at the book's root as well, where relative links lead elsewhere.
    assert!(pages[&listed[0]].links.is_empty(), "the first page has links: {:?}", pages[&listed[0]].links);
}
