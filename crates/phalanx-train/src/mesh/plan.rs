//! Layouts by the names of parameters.

use super::{Axis, Layout, Placement};
use crate::{Error, Result};

/// What becomes of a name that no pattern matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unmatched {
    /// The parameter is replicated.
    #[default]
    Replicated,
    /// [`Plan::layout`] is an error.
    Refused,
}

/// Patterns of names with placements; the first pattern that matches counts.
///
/// A name consists of parts between dots: `layers.3.attention.q.weight`. In a pattern, `*` is any text within a part, `?` one character
/// of a part, and a part `**` any number of parts. All else is itself.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    rules: Vec<(String, Vec<(Axis, Placement)>)>,
    unmatched: Unmatched,
}

impl Plan {
    /// No patterns: all parameters are replicated.
    pub fn new() -> Plan {
        Plan::default()
    }

    /// Adds a pattern behind the others.
    #[must_use]
    pub fn rule(mut self, pattern: &str, placements: &[(Axis, Placement)]) -> Plan {
        self.rules.push((pattern.to_owned(), placements.to_vec()));
        self
    }

    /// What becomes of a name that no pattern matches; replicated by default.
    #[must_use]
    pub fn unmatched(mut self, unmatched: Unmatched) -> Plan {
        self.unmatched = unmatched;
        self
    }

    /// The layout of a parameter of this name and shape.
    ///
    /// # Errors
    /// [`Error::Usage`] for a name that no pattern matches, if the plan [refuses](Unmatched::Refused) those.
    pub fn layout(&self, name: &str, shape: &[usize]) -> Result<Layout> {
        let parts: Vec<&str> = name.split('.').collect();
        let matching = self.rules.iter().find(|(pattern, _)| {
            let pattern: Vec<&str> = pattern.split('.').collect();
            matches(&pattern, &parts)
        });
        match (matching, self.unmatched) {
            (Some((_, placements)), _) => {
                Ok(Layout { shape: shape.to_vec(), placements: placements.clone() })
            }
            (None, Unmatched::Replicated) => Ok(Layout::replicated(shape)),
            (None, Unmatched::Refused) => Err(Error::usage(format!(
                "no pattern of the plan matches the parameter {name:?}; add one, or let unmatched names be replicated"
            ))),
        }
    }
}

/// Whether the parts of a name match those of a pattern.
fn matches(pattern: &[&str], name: &[&str]) -> bool {
    match (pattern, name) {
        ([], []) => true,
        (["**", rest @ ..], _) => (0..=name.len()).any(|skipped| matches(rest, &name[skipped..])),
        ([first, rest @ ..], [part, parts @ ..]) => {
            part_matches(first.as_bytes(), part.as_bytes()) && matches(rest, parts)
        }
        _ => false,
    }
}

fn part_matches(pattern: &[u8], part: &[u8]) -> bool {
    match (pattern, part) {
        ([], []) => true,
        ([b'*', rest @ ..], _) => (0..=part.len()).any(|skipped| part_matches(rest, &part[skipped..])),
        ([b'?', rest @ ..], [_, parts @ ..]) => part_matches(rest, parts),
        ([first, rest @ ..], [byte, parts @ ..]) => first == byte && part_matches(rest, parts),
        _ => false,
    }
}
