//! [`Program`]: CUDA C++ source. [`Image`]: compiled code.

use super::compiler::Task;
use super::nccl::{NCCL_HEADERS, NCCL_PRELUDE_NAME, loaded_nccl};
use super::{compiler, elf, linker};
use crate::types::error::{Result, UnsupportedError, UsageError};
use cudarc::driver::CudaContext;
use phalanx_sys::nccl::kernels as nccl;
use phalanx_sys::nvshmem::kernels;
use phalanx_sys::{Found, NotFound};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Source text put before a program that uses NVSHMEM.
///
/// Under NVRTC, CUDA's headers define 64-bit integers as `long long`. nvcc, which compiled NVSHMEM's device
/// code, uses `long`, and mangled function names contain their parameters' types. So headers with such types
/// are included with the types redefined. The headers of 3.4 also use names of the C++ library, which NVRTC
/// lacks.
const PRELUDE: &CStr = c"
#define int64_t cuda_int64_t
#define uint64_t cuda_uint64_t
#define intptr_t cuda_intptr_t
#define uintptr_t cuda_uintptr_t
#include <cuda/std/cstdint>
#include <cuda_awbarrier_helpers.h>
#include <cuda_pipeline_helpers.h>
#undef int64_t
#undef uint64_t
#undef intptr_t
#undef uintptr_t
typedef long int64_t;
typedef unsigned long uint64_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;
namespace cuda {
namespace std {
using ::int64_t;
using ::uint64_t;
using ::intptr_t;
using ::uintptr_t;
}
}
#include <non_abi/nvshmem_version.h>
#if NVSHMEM_VENDOR_MAJOR_VERSION == 3 && NVSHMEM_VENDOR_MINOR_VERSION < 5
#include <cuda/std/type_traits>
namespace std {
using ::cuda::std::is_empty;
using ::cuda::std::is_integral;
using ::cuda::std::is_signed;
using ::cuda::std::is_unsigned;
}
#endif
";
const PRELUDE_NAME: &CStr = c"phalanx_nvshmem_prelude.h";

const NVSHMEM_HEADERS: &[(&CStr, &CStr)] = &[(PRELUDE_NAME, PRELUDE)];

/// What every program may include.
const HEADERS: &[(&CStr, &CStr)] = &[
    (c"phalanx.cuh", text(concat!(include_str!("../gpu/kernels/phalanx.cuh"), "\0"))),
    (c"phalanx/fifo.cuh", text(concat!(include_str!("../gpu/kernels/fifo.cuh"), "\0"))),
];

const fn text(with_nul: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(with_nul.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("one NUL, at the end"),
    }
}

/// A program in CUDA C++, to be compiled.
#[derive(Debug, Clone)]
pub struct Program {
    name: String,
    source: String,
    options: Vec<String>,
    includes: Vec<PathBuf>,
    expressions: Vec<String>,
    nvshmem: bool,
    nccl: bool,
}

/// Compiled code for one kind of GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub(crate) cubin: Vec<u8>,
    pub(crate) names: BTreeMap<String, String>,
    log: String,
}

impl Program {
    /// Creates a program. Error messages use the name, like that of a file: `ring.cu`.
    pub fn new(name: impl Into<String>, source: impl Into<String>) -> Program {
        Program {
            name: name.into(),
            source: source.into(),
            options: Vec::new(),
            includes: Vec::new(),
            expressions: Vec::new(),
            nvshmem: false,
            nccl: false,
        }
    }

    /// Adds NVSHMEM's device functions, for a source that includes `<nvshmem.h>` and `<nvshmemx.h>`.
    ///
    /// Compiling and linking take several seconds; store the result with [`Image::as_bytes`].
    pub fn nvshmem(mut self) -> Program {
        self.nvshmem = true;
        self
    }

    /// Adds NCCL's device API, for a source that includes `<nccl_device.h>` (NCCL 2.28.3) and is launched
    /// with a [`DeviceComm`](crate::nccl::DeviceComm): its teams, pointers to peers' memory, barriers and
    /// all-to-all of ranks that reach each other's memory, multicast. Networking (`ncclGin`) does not compile
    /// under NVRTC.
    ///
    /// Headers and library must be of one release: if NCCL is installed and its headers are of another, that
    /// is a compile error. `__host__` is defined as empty in such a source.
    pub fn nccl(mut self) -> Program {
        self.nccl = true;
        self
    }

    /// Defines a macro: `-D name=value`.
    pub fn define(self, name: &str, value: impl std::fmt::Display) -> Program {
        self.option(format!("--define-macro={name}={value}"))
    }

    /// Adds a folder with headers. It is searched before those of CUDA and NVSHMEM, which need no such call.
    pub fn include(mut self, folder: impl Into<PathBuf>) -> Program {
        self.includes.push(folder.into());
        self
    }

    /// Adds an option of NVRTC, such as `--use_fast_math`. Of options that contradict each other the last
    /// counts; the first is `--std=c++17`.
    pub fn option(mut self, option: impl Into<String>) -> Program {
        self.options.push(option.into());
        self
    }

    /// Adds a kernel that is not `extern "C"`: an instance of a template (`scale<float>`), or a name in a
    /// namespace. [`Module::kernel`](super::Module::kernel) takes the same text.
    pub fn instantiate(mut self, kernel: impl Into<String>) -> Program {
        self.expressions.push(kernel.into());
        self
    }

    /// Compiles for the GPU of a context.
    ///
    /// # Errors
    /// As for [`compile`](Program::compile).
    pub fn compile_for(&self, gpu: &Arc<CudaContext>) -> Result<Image> {
        let (major, minor) = gpu.compute_capability()?;
        self.compile(&format!("sm_{major}{minor}"))
    }

    /// Compiles for a kind of GPU, such as `sm_90`. Needs no GPU.
    ///
    /// # Errors
    /// - [`Error::Compile`](crate::Error::Compile) with the wrong lines, or the linker's log;
    /// - [`Error::LibraryNotFound`](crate::Error::LibraryNotFound) if NVRTC is not installed; with
    ///   [`nvshmem`](Program::nvshmem), also if nvJitLink, NVSHMEM's headers and device library, or the
    ///   headers of CUDA and CCCL are not; with [`nccl`](Program::nccl), if NCCL's headers or those are not;
    /// - [`Error::Unsupported`](crate::Error::Unsupported) for a program with both;
    /// - [`UsageError::Setting`] for an architecture that is none of a GPU (`compute_90`), for which there is
    ///   no code.
    pub fn compile(&self, architecture: &str) -> Result<Image> {
        let nvrtc = compiler::load()?;
        let mut folders = self.includes.clone();
        let mut missing = Vec::new();
        let mut archive = None;
        if self.nvshmem && self.nccl {
            return Err(crate::types::error::Error::from(UnsupportedError {
                what: "a program with NVSHMEM's and NCCL's device functions".into(),
                why: "their headers need different types of 64-bit integers under NVRTC".into(),
                remedy: "put their kernels into programs of their own".into(),
            }));
        }
        if self.nccl {
            folders.push(nccl::headers()?.folder);
        }
        if self.nvshmem {
            folders.push(kernels::headers()?.folder);
            archive = Some(kernels::device_library()?);
        }
        for found in [nvrtc.api.cuda_headers(), nvrtc.api.cccl_headers()] {
            match self.header(found, &mut missing)? {
                Some(folder) if !folders.contains(&folder) => folders.push(folder),
                _ => {}
            }
        }
        // Checked first, since compiling takes seconds.
        let linker = self.nvshmem.then(|| linker::load(nvrtc)).transpose()?;
        let options = self.all_options(architecture, &folders);
        crate::os::log::debug!(program = self.name, ?options, "NVRTC compiles");
        let headers = match (self.nvshmem, self.nccl) {
            (true, _) => NVSHMEM_HEADERS,
            (_, true) => NCCL_HEADERS,
            _ => &[],
        };
        let compiled = nvrtc.compile(&Task {
            name: &self.name,
            source: &self.source,
            options: &options,
            expressions: &self.expressions,
            headers: &[HEADERS, headers].concat(),
            missing: &missing,
        })?;
        if compiled.cubin.is_empty() {
            let (name, value) = ("the architecture".to_owned(), architecture.to_owned());
            let expected = "that of a GPU, such as sm_90: others have no code".to_owned();
            return Err(UsageError::Setting { name, value, expected }.into());
        }
        let cubin = match (linker, archive) {
            (Some(linker), Some(archive)) => {
                linker.link(&self.name, &compiled.cubin, &archive, architecture)?
            }
            _ => compiled.cubin,
        };
        let image = Image { cubin, names: compiled.names, log: compiled.log };
        image.check().map(|()| image)
    }

    /// A folder with headers. Code without NVSHMEM and NCCL may not need it, so a missing folder is only
    /// shown with a compile error.
    fn header(
        &self,
        found: std::result::Result<Found, NotFound>,
        missing: &mut Vec<String>,
    ) -> Result<Option<PathBuf>> {
        match found {
            Ok(found) => Ok(Some(found.folder)),
            Err(error) if self.nvshmem || self.nccl => Err(error.into()),
            Err(error) => {
                missing.push(error.to_string());
                Ok(None)
            }
        }
    }

    fn all_options(&self, architecture: &str, folders: &[PathBuf]) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
        if self.nvshmem {
            options.push("--relocatable-device-code=true".to_owned());
            // Not all functions of the headers of 3.4 say that they are for the device.
            options.push("--device-as-default-execution-space".to_owned());
            options.push(format!("--pre-include={}", PRELUDE_NAME.to_string_lossy()));
        }
        if self.nccl {
            options.push("--device-as-default-execution-space".to_owned());
            options.push(format!("--pre-include={}", NCCL_PRELUDE_NAME.to_string_lossy()));
            options.extend(loaded_nccl().map(|code| format!("--define-macro=PHALANX_NCCL_VERSION={code}")));
        }
        let include = |folder: &PathBuf| format!("--include-path={}", Path::display(folder));
        options.extend(folders.iter().map(include));
        options.extend(self.options.iter().cloned());
        options
    }
}

impl Image {
    /// Returns the code, an ELF file (a *cubin*), to store it: compiling takes seconds.
    pub fn as_bytes(&self) -> &[u8] {
        &self.cubin
    }

    /// Makes an image of stored code, or of code compiled by `nvcc --cubin`. Kernels that are not `extern
    /// "C"` go by their [lowered names](Image::lowered_name). An incomplete file is refused when it is
    /// loaded.
    pub fn from_bytes(cubin: impl Into<Vec<u8>>) -> Image {
        Image { cubin: cubin.into(), names: BTreeMap::new(), log: String::new() }
    }

    /// An error if this is not a complete ELF file.
    pub(crate) fn check(&self) -> Result<()> {
        if elf::is_whole(&self.cubin) {
            return Ok(());
        }
        let kernel = "of the image".to_owned();
        let problem = format!("its {} bytes are no whole cubin (an ELF file)", self.cubin.len());
        Err(UsageError::Kernel { kernel, problem, remedy: "compile it again, or keep all of its bytes" }
            .into())
    }

    /// Returns the lowered name of a kernel that was [instantiated](Program::instantiate).
    pub fn lowered_name(&self, kernel: &str) -> Option<&str> {
        self.names.get(kernel).map(String::as_str)
    }

    /// Returns the compiler's warnings.
    pub fn log(&self) -> &str {
        &self.log
    }
}
