//! NVRTC's C interface, which compiles CUDA C++ at run time, and the search for the headers that such code includes.

#![allow(non_camel_case_types)]

use crate::functions::functions;
use crate::{FileSearch, Found, Library, MissingFunction, NotFound, Place, Search};
use std::ffi::{c_char, c_int, c_void};

/// Where NVRTC may be.
pub const NVRTC: Search = Search {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    variable: "PHALANX_NVRTC_LIB",
    homes: &["CUDA_HOME", "CUDA_PATH"],
    wheels: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    global: false,
};

/// Where CUDA's headers may be.
pub const CUDA_HEADERS: FileSearch = FileSearch {
    name: "the CUDA headers (cuda_runtime.h)",
    file: "cuda_runtime.h",
    variable: "PHALANX_CUDA_INCLUDE",
    homes: &["CUDA_HOME", "CUDA_PATH"],
    below: &["include"],
    wheels: &["nvidia/cu13/include", "nvidia/cuda_runtime/include"],
    system: &["/usr/include"],
};

/// Where the headers of CCCL, the CUDA C++ core libraries, may be.
pub const CCCL_HEADERS: FileSearch = FileSearch {
    name: "the CCCL headers (cuda/std/type_traits)",
    file: "cuda/std/type_traits",
    variable: "PHALANX_CCCL_INCLUDE",
    homes: &["CUDA_HOME", "CUDA_PATH"],
    below: &["include/cccl", "include"],
    wheels: &[
        "nvidia/cu13/include/cccl",
        "nvidia/cu13/include",
        "nvidia/cuda_cccl/include",
        "nvidia/cuda_cccl/include/cccl",
    ],
    system: &["/usr/include/cccl", "/usr/include"],
};

/// A program.
pub type nvrtcProgram = *mut c_void;

/// A status code.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct nvrtcResult(pub c_int);

#[allow(missing_docs, non_upper_case_globals)]
impl nvrtcResult {
    pub const Success: Self = Self(0);
    pub const InvalidOption: Self = Self(5);
    pub const Compilation: Self = Self(6);
    pub const NameExpressionNotValid: Self = Self(10);
}

functions! {
    nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> nvrtcResult;
    nvrtcGetErrorString(result: nvrtcResult) -> *const c_char;
    nvrtcCreateProgram(program: *mut nvrtcProgram, source: *const c_char, name: *const c_char, headers: c_int, texts: *const *const c_char, names: *const *const c_char) -> nvrtcResult;
    nvrtcDestroyProgram(program: *mut nvrtcProgram) -> nvrtcResult;
    nvrtcCompileProgram(program: nvrtcProgram, options: c_int, list: *const *const c_char) -> nvrtcResult;
    nvrtcGetProgramLogSize(program: nvrtcProgram, bytes: *mut usize) -> nvrtcResult;
    nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char) -> nvrtcResult;
    nvrtcGetCUBINSize(program: nvrtcProgram, bytes: *mut usize) -> nvrtcResult;
    nvrtcGetCUBIN(program: nvrtcProgram, cubin: *mut c_char) -> nvrtcResult;
    nvrtcAddNameExpression(program: nvrtcProgram, expression: *const c_char) -> nvrtcResult;
    nvrtcGetLoweredName(program: nvrtcProgram, expression: *const c_char, name: *mut *const c_char) -> nvrtcResult;
}

/// A loaded NVRTC.
#[derive(Debug)]
pub struct Api {
    library: Library,
    functions: Functions,
    version: (u32, u32),
    _builtins: Option<Library>,
}

impl std::ops::Deref for Api {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Api {
    /// Loads NVRTC and reads its version.
    ///
    /// # Errors
    /// [`NotFound`] if there is none.
    pub fn load() -> Result<Api, NotFound> {
        let library = NVRTC.open()?;
        let functions = Functions::load(&library);
        let (mut major, mut minor) = (0, 0);
        if let Some(version) = functions.nvrtcVersion {
            // SAFETY: both pointers are valid.
            unsafe { version(&raw mut major, &raw mut minor) };
        }
        let version = (major as u32, minor as u32);
        let builtins = open_builtins(&library, version);
        Ok(Api { library, functions, version, _builtins: builtins })
    }

    /// Major and minor version, those of the CUDA release.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// CUDA's headers, preferably those that came with this library.
    ///
    /// # Errors
    /// [`NotFound`] with the folders that were tried.
    pub fn cuda_headers(&self) -> Result<Found, NotFound> {
        CUDA_HEADERS
            .find(&beside(&self.library, &["../include", "../../include", "../../cuda_runtime/include"]))
    }

    /// CCCL's headers, preferably those that came with this library.
    ///
    /// # Errors
    /// As for [`cuda_headers`](Api::cuda_headers).
    pub fn cccl_headers(&self) -> Result<Found, NotFound> {
        let folders = ["../include/cccl", "../include", "../../include/cccl", "../../cuda_cccl/include"];
        CCCL_HEADERS.find(&beside(&self.library, &folders))
    }

    /// The error for a missing function.
    #[cold]
    pub fn lacks(&self, function: &'static str) -> MissingFunction {
        let (major, minor) = self.version;
        MissingFunction {
            function,
            library: "NVRTC",
            version: format!("{major}.{minor}"),
            path: self.library.path().to_owned(),
        }
    }
}

/// Opens the library of built-ins, which NVRTC itself opens by its bare name. In a wheel, the loader would not find it.
fn open_builtins(library: &Library, (major, minor): (u32, u32)) -> Option<Library> {
    let file = library.path().with_file_name(format!("libnvrtc-builtins.so.{major}.{minor}"));
    let places = file.exists().then(|| Place { file, origin: "beside NVRTC".to_owned() });
    NVRTC.open_among(places.into_iter().collect()).ok()
}

/// Folders relative to the folder of a library's file.
pub(crate) fn beside(library: &Library, folders: &[&str]) -> Vec<Found> {
    let Some(folder) = library.path().parent().filter(|folder| folder.is_absolute()) else {
        return Vec::new();
    };
    let origin = format!("beside {}", library.path().display());
    folders.iter().map(|below| Found { folder: folder.join(below), origin: origin.clone() }).collect()
}
