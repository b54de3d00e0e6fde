//! nvJitLink, the linker: loaded once for the process.

use super::compiler;
use super::compiler::text;
use crate::os::sync::lock;
use crate::types::compile_error::{BuildStep, CompileError};
use crate::types::error::{Error, LibraryError, Result};
use phalanx_sys::nvjitlink::{
    Api, NVJITLINK_INPUT_CUBIN, NVJITLINK_INPUT_LIBRARY, nvJitLinkHandle, nvJitLinkResult,
};
use std::ffi::{CString, c_char};
use std::path::Path;
use std::sync::Mutex;

pub(crate) struct NvJitLink {
    api: Api,
}

/// Loads nvJitLink, once for the process; a failure is not remembered.
pub(crate) fn load(nvrtc: &compiler::Nvrtc) -> Result<&'static NvJitLink> {
    static LOADED: Mutex<Option<&'static NvJitLink>> = Mutex::new(None);
    let mut loaded = lock(&LOADED);
    if let Some(library) = *loaded {
        return Ok(library);
    }
    let api = Api::load(Some(&nvrtc.api))?;
    crate::os::log::info!(version = api.version_text(), path = %api.library().path().display(), "nvJitLink");
    let library: &'static NvJitLink = Box::leak(Box::new(NvJitLink { api }));
    *loaded = Some(library);
    Ok(library)
}

/// A linker of the library.
struct Handle<'a> {
    library: &'a NvJitLink,
    program: &'a str,
    linker: nvJitLinkHandle,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if let Some(destroy) = self.library.api.nvJitLinkDestroy {
            // SAFETY: made by nvJitLinkCreate, ended once.
            unsafe { destroy(&raw mut self.linker) };
        }
    }
}

macro_rules! call {
    ($self:ident.$name:ident($($argument:expr),*)) => {{
        let api = &$self.library.api;
        let function = api.$name.ok_or_else(|| Error::from(api.lacks(stringify!($name))))?;
        // SAFETY: the arguments are those of the C function: a linker that lives, out-pointers that are
        // valid, texts that end in NUL, data of the given length.
        let result = unsafe { function($self.linker, $($argument),*) };
        $self.check(result, stringify!($name))
    }};
}

impl NvJitLink {
    /// Its name, with the version.
    pub fn name(&self) -> String {
        format!("nvJitLink {}", self.api.version_text())
    }

    /// Links a compiled program with an archive of device code.
    pub fn link(&self, program: &str, cubin: &[u8], archive: &Path, architecture: &str) -> Result<Vec<u8>> {
        let options = [text("architecture", &format!("-arch={architecture}"))?];
        let linker = self.create(program, &options)?;
        let name = text("name", program)?;
        let archive = text("path", &archive.to_string_lossy())?;
        let data = cubin.as_ptr().cast();
        call!(linker.nvJitLinkAddData(NVJITLINK_INPUT_CUBIN, data, cubin.len(), name.as_ptr()))?;
        call!(linker.nvJitLinkAddFile(NVJITLINK_INPUT_LIBRARY, archive.as_ptr()))?;
        let complete = self.api.nvJitLinkComplete.ok_or_else(|| self.api.lacks("nvJitLinkComplete"))?;
        // SAFETY: a linker that lives.
        linker.check(unsafe { complete(linker.linker) }, "nvJitLinkComplete")?;
        let mut bytes = 0;
        call!(linker.nvJitLinkGetLinkedCubinSize(&raw mut bytes))?;
        let mut linked = vec![0u8; bytes];
        call!(linker.nvJitLinkGetLinkedCubin(linked.as_mut_ptr().cast()))?;
        Ok(linked)
    }

    fn create<'a>(&'a self, program: &'a str, options: &[CString]) -> Result<Handle<'a>> {
        let create = self.api.nvJitLinkCreate.ok_or_else(|| self.api.lacks("nvJitLinkCreate"))?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut handle = Handle { library: self, program, linker: std::ptr::null_mut() };
        // SAFETY: an out-pointer that is valid, and a list of texts that end in NUL.
        let result = unsafe { create(&raw mut handle.linker, options.len() as u32, options.as_ptr()) };
        handle.check(result, "nvJitLinkCreate")?;
        Ok(handle)
    }
}

impl Handle<'_> {
    /// The linker's log, if its inputs are wrong; else the status code.
    fn check(&self, code: nvJitLinkResult, function: &'static str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let log = self.log().unwrap_or_default();
        if log.trim().is_empty() {
            let text = "it gives no reason".to_owned();
            let library = self.library.name();
            return Err(LibraryError { library, function, code, text, context: None, fatal: false }.into());
        }
        Err(CompileError {
            program: self.program.to_owned(),
            step: BuildStep::Link,
            library: self.library.name(),
            diagnostics: Vec::new(),
            log,
            missing: Vec::new(),
        }
        .into())
    }

    fn log(&self) -> Option<String> {
        let api = &self.library.api;
        if self.linker.is_null() {
            return None;
        }
        let mut bytes = 0;
        // SAFETY: a linker that lives, and an out-pointer that is valid.
        unsafe { api.nvJitLinkGetErrorLogSize?(self.linker, &raw mut bytes) };
        let mut log = vec![0u8; bytes];
        // SAFETY: a linker that lives, and memory of the length it asked for.
        unsafe { api.nvJitLinkGetErrorLog?(self.linker, log.as_mut_ptr().cast()) };
        log.retain(|byte| *byte != 0);
        Some(String::from_utf8_lossy(&log).into_owned())
    }
}
