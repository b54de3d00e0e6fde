//! The loaded library, and its context: what UCX is told before it starts.

use super::tunables::TCP_SEGMENT;
use crate::types::error::{Error, LibraryError, Result, UsageError};
use phalanx_sys::LoadError;
use phalanx_sys::ucx::*;
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

/// The interface whose network is used, by its name.
const INTERFACE: &str = "PHALANX_INTERFACE";

/// The loaded library.
pub(super) fn library() -> Result<&'static Ucx> {
    static LIBRARY: OnceLock<std::result::Result<Ucx, LoadError>> = OnceLock::new();
    let loaded = LIBRARY.get_or_init(|| {
        let ucx = Ucx::load()?;
        // Peers that end are this library's to report; UCX would also take over the handling of SIGSEGV.
        ucx.set_default(c"LOG_LEVEL", c"fatal");
        ucx.set_default(c"HANDLE_ERRORS", c"none");
        Ok(ucx)
    });
    loaded.as_ref().map_err(|error| error.clone().into())
}

/// A context for so many ranks.
pub(super) fn create_context(ucx: &'static Ucx, ranks: usize) -> Result<ucp_context_h> {
    let mut config = std::ptr::null_mut();
    // SAFETY: a variable for the settings; no prefix, no file.
    let read = unsafe { (ucx.ucp_config_read)(std::ptr::null(), std::ptr::null(), &raw mut config) };
    check(ucx, read, "ucp_config_read")?;
    lengthen_segments(ucx, config);
    let chosen = choose_interface(ucx, config);
    // SAFETY: all fields may be zero; the mask says which count.
    let params = ucp_params_t {
        field_mask: UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
        features: UCP_FEATURE_AM,
        estimated_num_eps: ranks,
        ..unsafe { std::mem::zeroed() }
    };
    let mut context = std::ptr::null_mut();
    let made = chosen.and_then(|()| {
        let (major, minor) = OLDEST;
        // SAFETY: parameters, settings, and a variable for the context.
        let made =
            unsafe { (ucx.ucp_init_version)(major, minor, &raw const params, config, &raw mut context) };
        check(ucx, made, "ucp_init")
    });
    // SAFETY: the settings from above, which UCX has copied.
    unsafe { (ucx.ucp_config_release)(config) };
    made.map(|()| context)
}

/// Sets how much UCX copies to a TCP connection at once, unless the user has. Without it all works, too.
fn lengthen_segments(ucx: &Ucx, config: ucp_config_t) {
    if ["UCX_TCP_RX_SEG_SIZE", "UCX_TCP_TX_SEG_SIZE"].iter().any(|name| std::env::var_os(name).is_some()) {
        return;
    }
    let set = |setting: &CStr| {
        // SAFETY: settings, and strings that are copied.
        let answer = unsafe { (ucx.ucp_config_modify)(config, setting.as_ptr(), TCP_SEGMENT.as_ptr()) };
        answer == ucs_status_t::Ok
    };
    // What is received must not be less than what is sent. UCX 1.13 knows a transport's settings without its name only.
    let _ = set(c"TCP_RX_SEG_SIZE") && set(c"TCP_TX_SEG_SIZE");
    let _ = set(c"RX_SEG_SIZE") && set(c"TX_SEG_SIZE");
}

/// Sets UCX's devices to the interface that the user has named, if so.
fn choose_interface(ucx: &Ucx, config: ucp_config_t) -> Result<()> {
    let Ok(interface) = std::env::var(INTERFACE) else { return Ok(()) };
    let refused = || {
        let expected =
            format!("the name of an interface of this host: {}", crate::os::interfaces().join(", "));
        Error::from(UsageError::Setting { name: INTERFACE.into(), value: interface.clone(), expected })
    };
    let known = |known: &String| known.split(' ').next() == Some(&*interface);
    if !crate::os::interfaces().iter().any(known) {
        return Err(refused());
    }
    let value = CString::new(&*interface).map_err(|_| refused())?;
    // SAFETY: settings, and strings that are copied.
    let set = unsafe { (ucx.ucp_config_modify)(config, c"NET_DEVICES".as_ptr(), value.as_ptr()) };
    check(ucx, set, "ucp_config_modify")
}

/// The error of a status that is one.
pub(super) fn check(ucx: &Ucx, status: ucs_status_t, function: &'static str) -> Result<()> {
    if status == ucs_status_t::Ok {
        return Ok(());
    }
    let (major, minor, release) = ucx.version();
    Err(LibraryError {
        library: format!("UCX {major}.{minor}.{release}"),
        function,
        code: status.0.into(),
        text: ucx.describe(status),
        context: None,
        fatal: true,
    }
    .into())
}
