//! A line of `name=value` pairs: how a rank tells the test what it saw, whatever is in the values.

use std::collections::BTreeMap;
use std::fmt;

/// Named values, in one line of text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields(BTreeMap<String, String>);

impl Fields {
    /// None yet.
    pub fn new() -> Fields {
        Fields::default()
    }

    /// With one more.
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Fields {
        self.0.insert(name.into(), value.to_string());
        self
    }

    /// The value of a name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// The value of a name as a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.parse().ok()
    }

    /// Without the values of some names.
    pub fn without(mut self, names: &[&str]) -> Fields {
        self.0.retain(|name, _| !names.contains(&name.as_str()));
        self
    }

    /// The fields of a line that [`Display`](fmt::Display) wrote; `None` if it is not one.
    pub fn parse(line: &str) -> Option<Fields> {
        let pairs = line.split('\t').filter(|pair| !pair.is_empty());
        let pairs = pairs.map(|pair| {
            let (name, value) = pair.split_once('=')?;
            Some((name.to_owned(), unescape(value)))
        });
        Some(Fields(pairs.collect::<Option<_>>()?))
    }
}

impl fmt::Display for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.0.iter().enumerate() {
            let tab = if i == 0 { "" } else { "\t" };
            write!(f, "{tab}{name}={}", escape(value))?;
        }
        Ok(())
    }
}

/// The text without tabs and line breaks.
pub fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\t', "\\t").replace('\n', "\\n").replace('\r', "\\r")
}

/// The inverse of [`escape`].
pub fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        plain.push(match c {
            '\\' => match chars.next() {
                Some('t') => '\t',
                Some('n') => '\n',
                Some('r') => '\r',
                Some(other) => other,
                None => '\\',
            },
            other => other,
        });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_value_survives() {
        let fields = Fields::new().with("text", "a\tb\nc\\t=d\r").with("empty", "").with("n", 17);
        let line = fields.to_string();
        assert!(!line.contains('\n'));
        assert_eq!(Fields::parse(&line), Some(fields));
        assert_eq!(Fields::parse("no pair"), None);
    }
}
