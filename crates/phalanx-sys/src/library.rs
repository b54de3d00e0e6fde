//! A loaded library and its functions.

use crate::NotFound;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// One place where a library may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file, or a name for the loader.
    pub file: PathBuf,
    /// The reason for the place: an environment variable, `the loader's path`, …
    pub origin: String,
}

/// The address of a function; `None` if the library does not have it.
pub(crate) type Address = Option<NonNull<()>>;

/// A loaded library. It stays loaded until the process ends, since its threads and exit handlers may run until then.
#[derive(Debug)]
pub struct Library {
    handle: ManuallyDrop<libloading::Library>,
    place: Place,
    path: PathBuf,
}

/// The error if a loaded library does not have a function.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{library} {version} ({}) has no function {function}; a version that has it is needed", path.display())]
pub struct MissingFunction {
    /// The function's name.
    pub function: &'static str,
    /// The library's name.
    pub library: &'static str,
    /// The library's version.
    pub version: String,
    /// The library's file.
    pub path: PathBuf,
}

debug_is_the_message!(MissingFunction);

/// The error if a library cannot be used.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No library was found.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The library is too old: it lacks a function.
    #[error(transparent)]
    MissingFunction(#[from] MissingFunction),
}

debug_is_the_message!(LoadError);

impl Library {
    pub(crate) fn new(handle: libloading::Library, place: Place, path: PathBuf) -> Library {
        Library { handle: ManuallyDrop::new(handle), place, path }
    }

    /// The address of a symbol, as a pointer type; `None` without such a symbol.
    ///
    /// # Safety
    /// `T` is a pointer or an `extern "C"` function of the symbol's type.
    pub unsafe fn symbol<T: Copy>(&self, name: &CStr) -> Option<T> {
        // SAFETY: `T` fits the symbol by the caller's contract.
        unsafe { self.handle.get::<T>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol)
    }

    /// The address of a symbol.
    pub(crate) fn address(&self, name: &CStr) -> Address {
        // SAFETY: an address is not a reference, and any symbol has one.
        unsafe { self.symbol::<Address>(name) }.flatten()
    }

    /// Whether the library has a symbol.
    pub fn has(&self, name: &CStr) -> bool {
        // SAFETY: the address is not followed.
        unsafe { self.symbol::<*const ()>(name) }.is_some()
    }

    /// The library's file; a bare name if the loader found it by name and its path is unknown.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The place where the library was found.
    pub fn place(&self) -> &Place {
        &self.place
    }
}

/// Loads a file, or a name that the loader finds.
#[cfg(unix)]
pub(crate) fn open(file: &Path, global: bool) -> Result<libloading::Library, String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
    let visibility = if global { RTLD_GLOBAL } else { RTLD_LOCAL };
    // SAFETY: the initialisers of the libraries that a `Search` names may run in any process.
    let opened = unsafe { Library::open(Some(file), RTLD_NOW | visibility) };
    opened.map(Into::into).map_err(|error| describe_error(&error))
}

/// Whether the loader finds a library of the driver or a toolkit by its bare name. It stays loaded.
pub fn is_loadable(name: &str) -> bool {
    open(Path::new(name), false).map(std::mem::forget).is_ok()
}

/// The loader's message.
fn describe_error(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(not(unix))]
pub(crate) fn open(file: &Path, _global: bool) -> Result<libloading::Library, String> {
    // SAFETY: the initialisers of the libraries that a `Search` names may run in any process.
    unsafe { libloading::Library::new(file) }.map_err(|error| describe_error(&error))
}
