//! The values of all members: bytes that travel beside a frame, made once for all receivers.
//!
//! The frame announces length and digest, so it authenticates the table. A sender shares one copy between all its connections.

use super::protocol::{MAX_EXCHANGE, Malformed};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Bytes of a number in a table.
const NUMBER: usize = 4;
/// The longest table: the values, and a length for each of the most members.
pub const MAX_TABLE: usize = MAX_EXCHANGE + NUMBER * (1 + super::protocol::MAX_MEMBERS as usize);

/// What a frame says of the table that follows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    len: u32,
    digest: [u8; 32],
}

impl Summary {
    /// Length of the table in bytes.
    pub fn bytes(&self) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX)
    }
}

/// A value for each member: their number, the lengths, and the values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table(Arc<Vec<u8>>);

impl Table {
    /// The table of these values.
    pub fn of<'a>(values: impl ExactSizeIterator<Item = &'a [u8]> + Clone) -> Table {
        let number = |n: usize| u32::try_from(n).expect("values are small, and members few").to_le_bytes();
        let total: usize = values.clone().map(<[u8]>::len).sum();
        let mut bytes = Vec::with_capacity(NUMBER * (1 + values.len()) + total);
        bytes.extend(number(values.len()));
        values.clone().for_each(|value| bytes.extend(number(value.len())));
        values.for_each(|value| bytes.extend_from_slice(value));
        Table(Arc::new(bytes))
    }

    /// What to announce.
    pub fn summary(&self) -> Summary {
        Summary { len: u32::try_from(self.0.len()).expect("tables are short"), digest: digest(&self.0) }
    }

    /// The table in these bytes, if they are the announced ones.
    pub fn open(bytes: Vec<u8>, announced: &Summary) -> Result<Table, Malformed> {
        if digest(&bytes) != announced.digest {
            return Err(Malformed("the values are not the announced ones"));
        }
        let table = Table(Arc::new(bytes));
        let lengths =
            table.0.len().checked_sub(NUMBER).ok_or(Malformed("the values have no number"))? / NUMBER;
        if table.count() > lengths {
            return Err(Malformed("the values have no lengths"));
        }
        let total: usize = table.lengths().sum();
        match NUMBER * (1 + table.count()) + total == table.0.len() {
            true => Ok(table),
            false => Err(Malformed("the values have other lengths")),
        }
    }

    /// The bytes that are sent.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The number of values.
    pub fn count(&self) -> usize {
        self.number(0)
    }

    fn number(&self, place: usize) -> usize {
        let bytes = self.0[NUMBER * place..][..NUMBER].try_into().expect("four bytes");
        u32::from_le_bytes(bytes) as usize
    }

    fn lengths(&self) -> impl Iterator<Item = usize> + '_ {
        (1..=self.count()).map(|place| self.number(place))
    }

    /// The values in the order of members.
    pub fn values(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.0[NUMBER * (1 + self.count())..];
        self.lengths().map(move |len| {
            let (value, others) = rest.split_at(len);
            rest = others;
            value
        })
    }
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_and_other_bytes_are_refused() {
        for values in [&[][..], &[&b""[..]], &[b"one", b"", b"three"]] {
            let table = Table::of(values.iter().copied());
            let (bytes, summary) = (table.bytes().to_vec(), table.summary());
            assert_eq!((bytes.len(), table.count()), (summary.bytes(), values.len()));
            let opened = Table::open(bytes.clone(), &summary).unwrap();
            assert_eq!(opened.values().collect::<Vec<_>>(), values);
            let mut changed = bytes;
            changed[0] ^= 1;
            assert!(Table::open(changed, &summary).is_err());
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let number = |n: u32| n.to_le_bytes();
        for bytes in [
            vec![],
            number(1).to_vec(),
            number(u32::MAX).to_vec(),
            [number(1), number(1)].concat(),
            [number(1), number(0), number(0)].concat(),
            [number(2), number(u32::MAX), number(u32::MAX)].concat(),
        ] {
            let summary = Summary { len: bytes.len() as u32, digest: digest(&bytes) };
            assert!(Table::open(bytes.clone(), &summary).is_err(), "{bytes:?}");
        }
    }
}
