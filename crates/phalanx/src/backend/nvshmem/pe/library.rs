//! The loaded library, its error codes, and calls with a time limit.

use crate::gpu::copies::LoggedCopies;
use crate::os::RunInstant;
use crate::os::sync::lock;
use crate::types::error::{Error, LibraryError, Result};
use phalanx_sys::nvshmem::{Api, NVSHMEM, version_text};
use std::ffi::c_int;
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Interval at which a wait for the library checks the peers.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// The loaded NVSHMEM.
#[derive(Debug)]
pub(crate) struct NvshmemLibrary {
    api: Api,
}

impl std::ops::Deref for NvshmemLibrary {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.api
    }
}

/// Loads NVSHMEM, once for the process; a failure is not remembered.
pub(crate) fn load() -> Result<&'static NvshmemLibrary> {
    static LOADED: Mutex<Option<&'static NvshmemLibrary>> = Mutex::new(None);
    static COPIES: LoggedCopies = LoggedCopies::new();
    let mut loaded = lock(&LOADED);
    if let Some(library) = *loaded {
        COPIES.look(&NVSHMEM, library.path());
        return Ok(library);
    }
    let api = Api::load()?;
    crate::os::log::info!(
        version = version_text(api.version()),
        path = %api.path().display(),
        found = api.library().place().origin,
        "NVSHMEM"
    );
    COPIES.look(&NVSHMEM, api.path());
    let library: &'static NvshmemLibrary = Box::leak(Box::new(NvshmemLibrary { api }));
    *loaded = Some(library);
    Ok(library)
}

/// The version of the NVSHMEM that is (or would be) loaded, as `major.minor.patch`. Needs no GPU.
///
/// `nvshmemx_vendor_get_version_info`
///
/// # Errors
/// [`Error::LibraryNotFound`] with every place that was tried: a program can go on without.
pub fn version() -> Result<String> {
    Ok(version_text(load()?.version()))
}

/// The version of OpenSHMEM that it follows, major and minor. Needs no GPU. `nvshmem_info_get_version`
///
/// # Errors
/// As for [`version`]; [`Error::MissingFunction`] if the library does not tell.
pub fn openshmem_version() -> Result<(u32, u32)> {
    let library = load()?;
    library.openshmem_version().ok_or_else(|| library.lacks("nvshmem_info_get_version").into())
}

/// The file of the NVSHMEM that is (or would be) loaded: kernels are linked with `libnvshmem_device.a` beside
/// it.
///
/// # Errors
/// As for [`version`].
pub fn path() -> Result<&'static Path> {
    Ok(load()?.path())
}

impl NvshmemLibrary {
    /// A function, or the error that it is missing.
    #[inline]
    pub fn need<F>(&self, function: Option<F>, name: &'static str) -> Result<F> {
        function.ok_or_else(|| self.api.lacks(name).into())
    }

    /// An error of the library, with a text.
    #[cold]
    pub fn error(&self, function: &'static str, code: c_int, text: impl Into<String>) -> LibraryError {
        LibraryError {
            library: format!("NVSHMEM {}", version_text(self.version())),
            function,
            code,
            text: text.into(),
            context: None,
            fatal: false,
        }
    }

    /// The error for a status code that is not zero.
    #[inline]
    pub fn check(&self, function: &'static str, code: c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(function, code, status_text(code)).into()) }
    }
}

/// The names of `nvshmemx_status`.
pub(crate) fn status_text(code: c_int) -> &'static str {
    match code {
        0 => "success",
        1 => "invalid value",
        2 => "out of memory",
        3 => "not supported",
        4 => "the PEs passed different arguments",
        5 => "no GPU is selected",
        6 => "a collective launch failed",
        7 => "internal error; NVSHMEM_DEBUG=WARN tells more",
        _ => "unknown status",
    }
}

/// Runs a call of the library in a thread of its own, waits for it, and checks the peers meanwhile. `None` if
/// it does not return in time: the thread is then left running, since nothing can end it.
pub(crate) fn within<R: Send + 'static>(
    function: &'static str,
    limit: Duration,
    mut look: impl FnMut(RunInstant) -> Result<()>,
    call: impl FnOnce() -> R + Send + 'static,
) -> Result<Option<R>> {
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("phalanx-nvshmem".into()).spawn(move || {
        // There is no receiver after the limit.
        let _ = sender.send(call());
    });
    thread.map_err(|error| {
        Error::system(
            "pthread_create",
            error,
            format!("{function} needs a thread; end others, or raise ulimit -u"),
        )
    })?;
    let since = RunInstant::now();
    loop {
        match receiver.recv_timeout(LOOK.min(limit.saturating_sub(since.elapsed()))) {
            Ok(answer) => return Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) if since.elapsed() >= limit => return Ok(None),
            Err(RecvTimeoutError::Timeout) => look(since)?,
            Err(RecvTimeoutError::Disconnected) => unreachable!("a call of C does not unwind"),
        }
    }
}
