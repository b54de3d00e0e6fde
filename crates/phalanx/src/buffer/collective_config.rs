//! Settings of single collectives, as NCCL reads them.

use phalanx_sys::nccl::ncclCollConfig_t;
use std::ffi::CString;
use std::sync::{Arc, LazyLock};

/// Settings as the library reads them, with the text they point to.
#[derive(Debug)]
pub(crate) struct RawCollectiveConfig {
    /// `None`: the library carries the collective out, as it does by default.
    pub raw: Option<ncclCollConfig_t>,
    pub tag: u8,
    /// The text that `raw` points to.
    #[expect(dead_code, reason = "kept alive for `raw`")]
    pub algorithms: Option<CString>,
}

// SAFETY: never written after it is made, and the text it points to is its own.
unsafe impl Send for RawCollectiveConfig {}
// SAFETY: as above.
unsafe impl Sync for RawCollectiveConfig {}

impl RawCollectiveConfig {
    /// That the library carries collectives out, with nothing else set.
    pub fn of_library() -> Arc<RawCollectiveConfig> {
        static OF_LIBRARY: LazyLock<Arc<RawCollectiveConfig>> =
            LazyLock::new(|| Arc::new(RawCollectiveConfig { raw: None, tag: 1, algorithms: None }));
        OF_LIBRARY.clone()
    }

    /// Fingerprint by which ranks compare settings: never 0, and equal for equal settings.
    pub fn tag(&self) -> u8 {
        self.tag
    }
}
