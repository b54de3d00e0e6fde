//! NVSHMEM over a [`Comm`].

use crate::api::comm::Comm;
use crate::backend::nvshmem::pe::{Builder, Context, Control};
use crate::backend::nvshmem::{Nvshmem, NvshmemComm};
use crate::start;
use crate::types::error::Result;

