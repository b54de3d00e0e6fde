//! nvJitLink's C interface, which links device code at run time.
//!
//! The C header calls functions with the release in their names (`__nvJitLinkCreate_13_0`). The plain names are the same
//! functions in every release.

#![allow(non_camel_case_types)]

use crate::functions::functions;
use crate::nvrtc::{self, beside};
use crate::{Library, MissingFunction, NotFound, Place, Search};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Where nvJitLink may be.
pub const NVJITLINK: Search = Search {
    name: "nvJitLink",
    files: &["libnvJitLink.so.13", "libnvJitLink.so.12", "libnvJitLink.so"],
    variable: "PHALANX_NVJITLINK_LIB",
    homes: &["CUDA_HOME", "CUDA_PATH"],
    wheels: &["nvidia/cu13/lib", "nvidia/nvjitlink/lib"],
    global: false,
};

/// A linker.
pub type nvJitLinkHandle = *mut c_void;
/// A status code; 0 is success.
pub type nvJitLinkResult = c_int;

/// A device program: the only kind of input of which uncalled kernels are kept.
pub const NVJITLINK_INPUT_CUBIN: c_int = 1;
/// An archive of objects with device code.
pub const NVJITLINK_INPUT_LIBRARY: c_int = 6;

functions! {
    nvJitLinkVersion(major: *mut c_uint, minor: *mut c_uint) -> nvJitLinkResult;
    nvJitLinkCreate(linker: *mut nvJitLinkHandle, options: u32, list: *const *const c_char) -> nvJitLinkResult;
    nvJitLinkDestroy(linker: *mut nvJitLinkHandle) -> nvJitLinkResult;
    nvJitLinkAddData(linker: nvJitLinkHandle, kind: c_int, data: *const c_void, bytes: usize, name: *const c_char) -> nvJitLinkResult;
    nvJitLinkAddFile(linker: nvJitLinkHandle, kind: c_int, file: *const c_char) -> nvJitLinkResult;
    nvJitLinkComplete(linker: nvJitLinkHandle) -> nvJitLinkResult;
    nvJitLinkGetLinkedCubinSize(linker: nvJitLinkHandle, bytes: *mut usize) -> nvJitLinkResult;
    nvJitLinkGetLinkedCubin(linker: nvJitLinkHandle, cubin: *mut c_void) -> nvJitLinkResult;
    nvJitLinkGetErrorLogSize(linker: nvJitLinkHandle, bytes: *mut usize) -> nvJitLinkResult;
    nvJitLinkGetErrorLog(linker: nvJitLinkHandle, log: *mut c_char) -> nvJitLinkResult;
}

/// A loaded nvJitLink.
#[derive(Debug)]
pub struct Api {
    library: Library,
    functions: Functions,
    version: Option<(u32, u32)>,
}

impl std::ops::Deref for Api {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Api {
    /// Loads nvJitLink, preferably from beside NVRTC: an older nvJitLink refuses the output of NVRTC.
    ///
    /// # Errors
    /// [`NotFound`] if there is none.
    pub fn load(nvrtc: Option<&nvrtc::Api>) -> Result<Api, NotFound> {
        let mut places = NVJITLINK.places();
        let named = crate::environment::chosen(NVJITLINK.variable).is_some();
        if let Some(nvrtc) = nvrtc.filter(|_| !named) {
            let folders = beside(nvrtc.library(), &["", "../../nvjitlink/lib"]);
            let files = |folder: crate::Found| {
                let place =
                    move |file| Place { file: folder.folder.join(file), origin: folder.origin.clone() };
                NVJITLINK.files.iter().map(place)
            };
            let beside = folders.into_iter().flat_map(files).filter(|place| place.file.exists());
            places.splice(0..0, beside);
        }
        let library = NVJITLINK.open_among(places)?;
        let functions = Functions::load(&library);
        let version = functions.nvJitLinkVersion.map(|version| {
            let (mut major, mut minor) = (0, 0);
            // SAFETY: both pointers are valid.
            unsafe { version(&raw mut major, &raw mut minor) };
            (major, minor)
        });
        Ok(Api { library, functions, version })
    }

    /// Major and minor version, those of the CUDA release; `None` in the first releases, which do not report it.
    pub fn version(&self) -> Option<(u32, u32)> {
        self.version
    }

    /// The version for messages.
    pub fn version_text(&self) -> String {
        self.version.map_or("of unknown version".to_owned(), |(major, minor)| format!("{major}.{minor}"))
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The error for a missing function.
    #[cold]
    pub fn lacks(&self, function: &'static str) -> MissingFunction {
        MissingFunction {
            function,
            library: "nvJitLink",
            version: self.version_text(),
            path: self.library.path().to_owned(),
        }
    }
}
