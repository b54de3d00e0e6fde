//! [`UniqueId`]: the bytes by which PEs find each other without a communicator.

use super::library;
use crate::types::error::{Result, UsageError};
use phalanx_sys::nvshmem::{nvshmemx_uniqueid_t, plugin};

/// The id by which PEs find each other: one PE makes it, and the program gives it to all others.
///
/// Making one opens a listening socket in this process, to which the other PEs connect;
/// `NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME` chooses the network interface. Keep the bytes private: any process
/// that has them can join. `nvshmemx_get_uniqueid`
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub(super) nvshmemx_uniqueid_t);

impl UniqueId {
    /// Size in bytes.
    pub const BYTES: usize = nvshmemx_uniqueid_t::BYTES;

    /// Makes a new id. Needs no GPU.
    ///
    /// # Errors
    /// [`Error::LibraryNotFound`](crate::Error::LibraryNotFound), [`Error::Library`](crate::Error::Library).
    pub fn new() -> Result<UniqueId> {
        let library = library::load()?;
        let name = "nvshmemx_get_uniqueid";
        let get = library.need(library.nvshmemx_get_uniqueid, name)?;
        plugin::UID.load(library.path())?;
        let mut id = nvshmemx_uniqueid_t::new();
        // SAFETY: a valid out-pointer whose version word is set; the function needs no initialisation.
        library.check(name, unsafe { get(&raw mut id) })?;
        Ok(UniqueId(id))
    }

    /// The bytes to give to the other PEs.
    pub fn to_bytes(&self) -> [u8; UniqueId::BYTES] {
        self.0.to_bytes()
    }

    /// The id from another PE's bytes.
    ///
    /// # Errors
    /// [`UsageError::Setting`] if the bytes are not those of an id.
    pub fn from_bytes(bytes: &[u8; UniqueId::BYTES]) -> Result<UniqueId> {
        nvshmemx_uniqueid_t::from_bytes(bytes).map(UniqueId).ok_or_else(|| {
            let value = format!("{:02x?}…", &bytes[..4]);
            let expected = "the 128 bytes of UniqueId::to_bytes, which begin with their version".into();
            UsageError::Setting { name: "the unique id".into(), value, expected }.into()
        })
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nvshmem::UniqueId(…)")
    }
}
