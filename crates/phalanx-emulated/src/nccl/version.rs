//! Releases of NCCL that changed what it does. Layouts of structures are with the structures.

use crate::base::settings::settings;
use std::ffi::c_int;

/// From here on a communicator's finalisation waits for all ranks of the host, which are all ranks here.
pub const FINALIZE_WAITS_FOR_ALL: c_int = 23100;
/// From here on communicators have several contexts and signals, and signals need a window first.
pub const SEVERAL_SIGNALS: c_int = 23100;
/// From here on several ranks may use one GPU, if the environment allows it.
pub const SHARED_GPUS: c_int = 23003;
/// From here on registration asks for the allocation's handle (`ncclRegister`), which pool memory does not
/// have.
pub const REGISTRATION_NEEDS_HANDLE: c_int = 23007;

/// Whether the reported version is this release or a later one.
pub fn is_since(release: c_int) -> bool {
    settings().nccl_version >= release
}
