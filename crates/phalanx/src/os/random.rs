//! Random numbers of the system.

use crate::types::error::{Error, Result};

/// A number that nobody has drawn before; `need` says in the error what it is for.
pub(crate) fn random_number(need: &'static str) -> Result<u64> {
    getrandom::u64().map_err(|error| Error::system("getrandom", std::io::Error::other(error), need))
}
