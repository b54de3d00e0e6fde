//! Stands in for `cipher.rs` in a build without the feature `multi-host`: connections are plain.

use crate::rendezvous::environment::switch;
use crate::types::error::{Result, UnsupportedError};
use std::io::{self, ErrorKind};

/// Nothing: there is no TLS session.
pub type Binding = Vec<u8>;

/// Whether connections are encrypted, from the value of `PHALANX_STORE_TLS`, if it is set.
///
/// # Errors
/// [`Unsupported`](crate::Error::Unsupported) if they are to be encrypted.
pub fn encrypted_from(value: Option<&str>) -> Result<bool> {
    match switch("PHALANX_STORE_TLS", value.map(str::trim))? {
        Some(true) => Err(UnsupportedError::left_out("TLS for the job's store", "multi-host")),
        _ => Ok(false),
    }
}

/// A store's key, which cannot be made.
#[derive(Clone)]
pub enum Identity {}

/// One end of a plain connection.
pub struct Cipher;

fn left_out() -> io::Error {
    io::Error::new(
        ErrorKind::Unsupported,
        "phalanx was built without its feature `multi-host`, so without TLS",
    )
}

impl Identity {
    /// Always an error.
    pub fn new() -> io::Result<Identity> {
        Err(left_out())
    }
}

impl Cipher {
    /// No encryption.
    pub const NONE: Cipher = Cipher;

    /// Always an error.
    pub fn client() -> io::Result<Cipher> {
        Err(left_out())
    }

    /// Never called: there is no identity.
    pub fn server(identity: &Identity) -> io::Result<Cipher> {
        match *identity {}
    }

    /// Whether it encrypts.
    pub fn encrypts(&self) -> bool {
        false
    }

    /// What both ends share: nothing.
    pub fn binding(&self) -> Option<Binding> {
        Some(Binding::new())
    }

    /// Appends what came from the network to `plain`.
    pub fn open(&mut self, bytes: &[u8], plain: &mut Vec<u8>, _wire: &mut Vec<u8>) -> io::Result<()> {
        plain.extend_from_slice(bytes);
        Ok(())
    }

    /// Appends `plain` to `wire`.
    pub fn seal(&mut self, plain: &[u8], wire: &mut Vec<u8>) -> io::Result<()> {
        wire.extend_from_slice(plain);
        Ok(())
    }

    /// Appends nothing.
    pub fn flush(&mut self, _wire: &mut Vec<u8>) -> io::Result<()> {
        Ok(())
    }
}
