//! From a [`Comm`] to the features of NCCL or RCCL.

use super::rccl::Rccl;
use super::surface::{Nccl, Surface};
use crate::api::comm::Comm;
use crate::backend::nccl::NcclComm;
use crate::contract::BackendKind;

impl Comm {
    /// NCCL's own features; `None` on other backends.
    pub fn nccl(&self) -> Option<Nccl<'_>> {
        Some(Nccl::new(self.surface_of(BackendKind::Nccl)?))
    }

    /// RCCL's own features; `None` on other backends.
    pub fn rccl(&self) -> Option<Rccl<'_>> {
        Some(Rccl::new(self.surface_of(BackendKind::Rccl)?))
    }

    fn surface_of(&self, kind: BackendKind) -> Option<Surface<'_>> {
        let nccl = NcclComm::of(&*self.backend).filter(|_| self.backend() == kind)?;
        Some(Surface { comm: nccl, stream: &self.lane, front: self })
    }
}
