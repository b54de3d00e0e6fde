//! From a [`Comm`] to the features of NCCL or RCCL.

#[cfg(feature = "nccl")]
use super::Nccl;
#[cfg(feature = "rccl")]
use super::rccl::Rccl;
use super::surface::Surface;
use crate::api::comm::Comm;
use crate::backend::nccl::NcclComm;
use crate::contract::BackendKind;

impl Comm {
    /// NCCL's own features; `None` on other backends.
    #[cfg(feature = "nccl")]
    pub fn nccl(&self) -> Option<Nccl<'_>> {
        Some(Nccl::new(self.surface_of(BackendKind::Nccl)?))
    }

    /// RCCL's own features; `None` on other backends.
    #[cfg(feature = "rccl")]
    pub fn rccl(&self) -> Option<Rccl<'_>> {
        Some(Rccl::new(self.surface_of(BackendKind::Rccl)?))
    }

    fn surface_of(&self, kind: BackendKind) -> Option<Surface<'_>> {
        let nccl = NcclComm::of(&*self.backend).filter(|_| self.backend() == kind)?;
        Some(Surface { comm: nccl, stream: &self.stream, front: self })
    }
}
