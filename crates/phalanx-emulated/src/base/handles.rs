//! Handles that C callers hold: never null, never used twice, and not addresses.

use super::lock::lock;
use super::violation::violation;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A handle. As a pointer it is not canonical, so reading through it crashes.
pub type Handle = u64;

const FIRST: u64 = 0x0e00_0000_0000_0000;

/// Makes a new handle.
pub fn fresh() -> Handle {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    FIRST + NEXT.fetch_add(1, Ordering::Relaxed) * 16
}

/// The objects of one kind, by their handles.
#[derive(Debug)]
pub struct Handles<T> {
    kind: &'static str,
    table: Mutex<BTreeMap<Handle, Entry<T>>>,
}

#[derive(Debug)]
enum Entry<T> {
    Live(Arc<T>),
    Ended(&'static str),
}

impl<T> Handles<T> {
    /// An empty table; `kind` names the objects in messages.
    pub const fn new(kind: &'static str) -> Handles<T> {
        Handles { kind, table: Mutex::new(BTreeMap::new()) }
    }

    /// Enters an object under its handle.
    pub fn insert(&self, handle: Handle, object: Arc<T>) {
        lock(&self.table).insert(handle, Entry::Live(object));
    }

    /// The object of a handle. A handle without an object is a violation.
    pub fn get(&self, function: &str, handle: Handle) -> Arc<T> {
        match lock(&self.table).get(&handle) {
            Some(Entry::Live(object)) => Arc::clone(object),
            entry => self.refuse(function, handle, entry),
        }
    }

    /// The object of a handle, unless it has ended.
    pub fn find(&self, handle: Handle) -> Option<Arc<T>> {
        match lock(&self.table).get(&handle) {
            Some(Entry::Live(object)) => Some(Arc::clone(object)),
            _ => None,
        }
    }

    /// Takes an object out. Later violations with its handle name `how` as the call that ended it.
    pub fn end(&self, function: &str, handle: Handle, how: &'static str) -> Arc<T> {
        let mut table = lock(&self.table);
        match table.insert(handle, Entry::Ended(how)) {
            Some(Entry::Live(object)) => object,
            entry => self.refuse(function, handle, entry.as_ref()),
        }
    }

    /// All objects that have not ended.
    pub fn live(&self) -> Vec<Arc<T>> {
        let table = lock(&self.table);
        table
            .values()
            .filter_map(|e| if let Entry::Live(object) = e { Some(Arc::clone(object)) } else { None })
            .collect()
    }

    fn refuse(&self, function: &str, handle: Handle, entry: Option<&Entry<T>>) -> ! {
        let why: &dyn Display = match entry {
            Some(Entry::Ended(how)) => &format!("was ended by {how} before"),
            _ => &"is none",
        };
        violation(function, format!("the {} {handle:#x} {why}", self.kind))
    }
}
