//! NVRTC, the compiler: loaded once for the process.

use crate::os::sync::lock;
use crate::types::compile_error::{BuildStep, CompileError, diagnostics};
use crate::types::error::{Error, LibraryError, Result};
use phalanx_sys::nvrtc::{Api, nvrtcProgram, nvrtcResult};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::Mutex;

pub(crate) struct Nvrtc {
    pub api: Api,
}

/// Input of the compiler.
pub(crate) struct Task<'a> {
    pub name: &'a str,
    pub source: &'a str,
    pub options: &'a [String],
    /// Kernels named by an expression: templates, names in namespaces.
    pub expressions: &'a [String],
    /// Headers without a file: names and texts.
    pub headers: &'a [(&'static CStr, &'static CStr)],
    /// Hints to show with a compile error.
    pub missing: &'a [String],
}

/// Output of the compiler.
pub(crate) struct Compiled {
    pub cubin: Vec<u8>,
    /// Lowered names, in the cubin, of the kernels named by expressions.
    pub names: BTreeMap<String, String>,
    pub log: String,
}

/// Loads NVRTC, once for the process; a failure is not remembered.
pub(crate) fn load() -> Result<&'static Nvrtc> {
    static LOADED: Mutex<Option<&'static Nvrtc>> = Mutex::new(None);
    let mut loaded = lock(&LOADED);
    if let Some(library) = *loaded {
        return Ok(library);
    }
    let api = Api::load()?;
    let (major, minor) = api.version();
    crate::os::log::info!(version = format!("{major}.{minor}"), path = %api.library().path().display(), "NVRTC");
    let library: &'static Nvrtc = Box::leak(Box::new(Nvrtc { api }));
    *loaded = Some(library);
    Ok(library)
}

macro_rules! call {
    ($self:ident.$name:ident($($argument:expr),*)) => {{
        let function = $self.api.$name.ok_or_else(|| Error::from($self.api.lacks(stringify!($name))))?;
        // SAFETY: the arguments are those of the C function: programs that live, out-pointers that are valid,
        // texts that end in NUL.
        let result = unsafe { function($($argument),*) };
        $self.check(result, stringify!($name))
    }};
}

/// A program of the library.
struct Handle<'a> {
    nvrtc: &'a Nvrtc,
    program: nvrtcProgram,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if let Some(destroy) = self.nvrtc.api.nvrtcDestroyProgram {
            // SAFETY: made by nvrtcCreateProgram, ended once.
            unsafe { destroy(&raw mut self.program) };
        }
    }
}

impl Nvrtc {
    /// Its name, with the version.
    pub fn name(&self) -> String {
        let (major, minor) = self.api.version();
        format!("NVRTC {major}.{minor}")
    }

    pub fn compile(&self, task: &Task<'_>) -> Result<Compiled> {
        let (source, name) = (text("source", task.source)?, text("name", task.name)?);
        let options: Vec<CString> =
            task.options.iter().map(|option| text("option", option)).collect::<Result<_>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        let headers = task.headers.iter().map(|(name, text)| (name.as_ptr(), text.as_ptr()));
        let (names, texts): (Vec<_>, Vec<_>) = headers.unzip();
        call!(self.nvrtcCreateProgram(
            &raw mut program,
            source.as_ptr(),
            name.as_ptr(),
            names.len() as c_int,
            texts.as_ptr(),
            names.as_ptr()
        ))?;
        let handle = Handle { nvrtc: self, program };
        for expression in task.expressions {
            let expression = text("kernel", expression)?;
            call!(self.nvrtcAddNameExpression(program, expression.as_ptr()))?;
        }
        let compiled = call!(self.nvrtcCompileProgram(program, options.len() as c_int, options.as_ptr()));
        let log = handle.log()?;
        if let Err(error) = compiled {
            let its_fault =
                [nvrtcResult::Compilation, nvrtcResult::InvalidOption, nvrtcResult::NameExpressionNotValid];
            return match &error {
                Error::Library(error) if its_fault.contains(&nvrtcResult(error.code)) => Err(CompileError {
                    program: task.name.to_owned(),
                    step: BuildStep::Compile,
                    library: self.name(),
                    diagnostics: diagnostics(&log, task.name, task.source),
                    log: if log.trim().is_empty() { error.text.clone() } else { log },
                    missing: task.missing.to_vec(),
                }
                .into()),
                _ => Err(error),
            };
        }
        Ok(Compiled { cubin: handle.cubin()?, names: handle.names(task.expressions)?, log })
    }

    fn check(&self, result: nvrtcResult, function: &'static str) -> Result<()> {
        if result == nvrtcResult::Success {
            return Ok(());
        }
        let text = match self.api.nvrtcGetErrorString {
            // SAFETY: any code is allowed; the text is static.
            Some(describe) => unsafe { CStr::from_ptr(describe(result)) }.to_string_lossy().into_owned(),
            None => String::new(),
        };
        let library = self.name();
        Err(LibraryError { library, function, code: result.0, text, context: None, fatal: false }.into())
    }
}

impl Handle<'_> {
    fn log(&self) -> Result<String> {
        let nvrtc = self.nvrtc;
        let mut bytes = 0;
        call!(nvrtc.nvrtcGetProgramLogSize(self.program, &raw mut bytes))?;
        let mut log = vec![0u8; bytes];
        call!(nvrtc.nvrtcGetProgramLog(self.program, log.as_mut_ptr().cast()))?;
        log.retain(|byte| *byte != 0);
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let nvrtc = self.nvrtc;
        let mut bytes = 0;
        call!(nvrtc.nvrtcGetCUBINSize(self.program, &raw mut bytes))?;
        let mut cubin = vec![0u8; bytes];
        call!(nvrtc.nvrtcGetCUBIN(self.program, cubin.as_mut_ptr().cast()))?;
        Ok(cubin)
    }

    fn names(&self, expressions: &[String]) -> Result<BTreeMap<String, String>> {
        let nvrtc = self.nvrtc;
        let mut names = BTreeMap::new();
        for expression in expressions {
            let key = text("kernel", expression)?;
            let mut name = std::ptr::null();
            call!(nvrtc.nvrtcGetLoweredName(self.program, key.as_ptr(), &raw mut name))?;
            // SAFETY: a text that lives as long as the program, which ends later.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
            names.insert(expression.clone(), name);
        }
        Ok(names)
    }
}

/// A text for the library.
pub(crate) fn text(what: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|error| {
        crate::types::error::UsageError::Setting {
            name: format!("the {what}"),
            value: format!("a text with a NUL at byte {}", error.nul_position()),
            expected: "a text without NUL".to_owned(),
        }
        .into()
    })
}
