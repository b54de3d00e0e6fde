//! [`Module`]: an image loaded on a GPU. [`Kernel`]: a kernel of it.

use super::program::Image;
use crate::gpu::cuda::driver;
use crate::types::error::{Error, Result, UsageError};
use cudarc::driver::sys::{
    self, CUdeviceptr, CUfunction, CUfunction_attribute, CUkernel, CUlibrary, CUresult,
};
use cudarc::driver::{CudaContext, CudaStream, DriverError};
use phalanx_sys::MissingFunction;
use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::mem::ManuallyDrop;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the end of a module waits for its kernels.
const PATIENCE: Duration = Duration::from_secs(10);

/// Compiled code on a GPU.
///
/// Clones and kernels are handles of the same module. Dropping the last handle waits up to 10 s for running
/// kernels and unloads the module; if they do not end, the module stays on the GPU and the log says so.
///
/// A module that uses NVSHMEM borrows the [`nvshmem::Context`](crate::nvshmem::Context) that it was
/// [loaded with](crate::nvshmem::Context::load).
#[derive(Debug, Clone)]
pub struct Module<'c> {
    loaded: Rc<Loaded<'c>>,
}

/// A kernel of a module, which lives as long.
#[derive(Debug, Clone)]
pub struct Kernel<'c> {
    pub(crate) module: Module<'c>,
    pub(crate) name: String,
    pub(crate) function: CUfunction,
    /// Bytes of each parameter; `None` if the driver cannot report them (before CUDA 12.4).
    pub(crate) parameters: Option<Vec<usize>>,
}

#[derive(Debug)]
struct Loaded<'c> {
    library: CUlibrary,
    gpu: Arc<CudaContext>,
    names: std::collections::BTreeMap<String, String>,
    /// Whether the driver can list kernels (CUDA 12.4).
    tells: bool,
    /// Streams on which its kernels were launched.
    streams: RefCell<Vec<Arc<CudaStream>>>,
    /// Its registration with NVSHMEM, if it uses NVSHMEM.
    registration: ManuallyDrop<Option<Box<dyn std::fmt::Debug + 'c>>>,
}

impl Module<'static> {
    /// Loads an image on a GPU.
    ///
    /// # Errors
    /// [`Error::Library`] if the driver refuses it: it is for another kind of GPU, or from a newer release of
    /// CUDA; [`UsageError::Kernel`] if it is not whole, or uses NVSHMEM, for which there is another way to
    /// load it.
    pub fn load(gpu: &Arc<CudaContext>, image: &Image) -> Result<Module<'static>> {
        let loaded = Loaded::new(gpu, image)?;
        if loaded.uses_nvshmem()? {
            let problem = "the image uses NVSHMEM".to_owned();
            return Err(usage("of the image", problem, "load it with nvshmem::Context::load"));
        }
        Ok(Module { loaded: Rc::new(loaded) })
    }
}

impl<'c> Module<'c> {
    /// Puts an image on the GPU of a context, and gives it the context's state if it uses NVSHMEM.
    pub(crate) fn load_with(
        gpu: &Arc<CudaContext>,
        image: &Image,
        register: impl FnOnce(CUlibrary) -> Result<Box<dyn std::fmt::Debug + 'c>>,
    ) -> Result<Module<'c>> {
        let mut loaded = Loaded::new(gpu, image)?;
        if loaded.uses_nvshmem()? {
            *loaded.registration = Some(register(loaded.library)?);
        }
        Ok(Module { loaded: Rc::new(loaded) })
    }

    /// The kernel with this name: that of an `extern "C"` function, or what
    /// [`Program::instantiate`](super::Program::instantiate) was given.
    ///
    /// # Errors
    /// [`UsageError::Kernel`] with the names that there are.
    pub fn kernel(&self, name: &str) -> Result<Kernel<'c>> {
        let loaded = &self.loaded;
        let symbol = loaded.names.get(name).map_or(name, String::as_str);
        let kernel = loaded.kernel(symbol)?.ok_or_else(|| loaded.no_kernel(name))?;
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: a kernel of a library that lives; an out-pointer on the stack.
        check("cuKernelGetFunction", unsafe { sys::cuKernelGetFunction(&raw mut function, kernel) })?;
        let parameters = loaded.tells.then(|| parameters(kernel));
        Ok(Kernel { module: self.clone(), name: name.to_owned(), function, parameters })
    }

    /// Address and bytes of a variable of the code (`__device__` or `__constant__`), valid as long as the
    /// module.
    ///
    /// # Errors
    /// [`UsageError::Kernel`] if there is none.
    pub fn global(&self, name: &str) -> Result<(CUdeviceptr, usize)> {
        self.loaded.global(name)?.ok_or_else(|| {
            let problem = format!("the module has no variable {name:?}");
            usage(name, problem, "declare it extern \"C\" __device__, or look for its mangled name")
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<CudaContext> {
        &self.loaded.gpu
    }

    /// Records a stream on which its kernels run.
    pub(crate) fn used_on(&self, stream: &Arc<CudaStream>) {
        let mut streams = self.loaded.streams.borrow_mut();
        if !streams.iter().any(|known| known.cu_stream() == stream.cu_stream()) {
            streams.push(stream.clone());
        }
    }
}

impl<'c> Kernel<'c> {
    /// Its module.
    pub fn module(&self) -> &Module<'c> {
        &self.module
    }

    /// The driver's handle, valid as long as the kernel: for settings that have no method here.
    pub fn cu_function(&self) -> CUfunction {
        self.function
    }

    /// How many blocks of so many threads, with so much dynamic shared memory, are on the GPU at once: the
    /// limit of [`launch_cooperative`](Kernel::launch_cooperative).
    pub fn cooperative_blocks(&self, threads: u32, shared_bytes: usize) -> Result<u32> {
        let gpu = self.module.gpu();
        gpu.bind_to_thread()?;
        let mut each = 0;
        // SAFETY: a function of a module that lives; an out-pointer on the stack.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut each,
                self.function,
                threads as i32,
                shared_bytes,
            )
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(each as u32 * gpu.attribute(count)? as u32)
    }

    /// Allows launches with so much dynamic shared memory: more than 48 KiB must be asked for.
    pub fn allow_shared_memory(&self, bytes: u32) -> Result<()> {
        self.module.gpu().bind_to_thread()?;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function of a module that lives.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(self.function, attribute, bytes as i32)
        })
    }

    #[cold]
    pub(crate) fn refused(&self, problem: String, remedy: &'static str) -> Error {
        usage(&self.name, problem, remedy)
    }
}

impl Loaded<'_> {
    fn new(gpu: &Arc<CudaContext>, image: &Image) -> Result<Self> {
        image.check()?;
        // cudarc panics when it needs a function that the driver lacks.
        let driver = driver()?;
        if !driver.has(c"cuLibraryLoadData") {
            let path = driver.path().to_owned();
            let version = "older than 12.0".to_owned();
            let function = "cuLibraryLoadData";
            return Err(MissingFunction { function, library: "the CUDA driver", version, path }.into());
        }
        gpu.bind_to_thread()?;
        let mut library: CUlibrary = std::ptr::null_mut();
        let (none, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a whole image, which the driver checks and copies; no options; an out-pointer on the stack.
        let result = unsafe {
            sys::cuLibraryLoadData(
                &raw mut library,
                image.cubin.as_ptr().cast(),
                none,
                nothing,
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
            )
        };
        check("cuLibraryLoadData", result)?;
        Ok(Loaded {
            library,
            gpu: gpu.clone(),
            names: image.names.clone(),
            tells: driver.has(c"cuKernelGetParamInfo"),
            streams: RefCell::default(),
            registration: ManuallyDrop::new(None),
        })
    }

    /// Whether NVSHMEM's device code is in it.
    fn uses_nvshmem(&self) -> Result<bool> {
        Ok(self.global("nvshmemi_device_state_d")?.is_some())
    }

    fn kernel(&self, symbol: &str) -> Result<Option<CUkernel>> {
        let Ok(symbol) = CString::new(symbol) else { return Ok(None) };
        self.gpu.bind_to_thread()?;
        let mut kernel: CUkernel = std::ptr::null_mut();
        // SAFETY: a library that lives, a text that ends in NUL, an out-pointer on the stack.
        let result = unsafe { sys::cuLibraryGetKernel(&raw mut kernel, self.library, symbol.as_ptr()) };
        found("cuLibraryGetKernel", result).map(|found| found.then_some(kernel))
    }

    fn global(&self, name: &str) -> Result<Option<(CUdeviceptr, usize)>> {
        let Ok(name) = CString::new(name) else { return Ok(None) };
        self.gpu.bind_to_thread()?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: a library that lives, a text that ends in NUL, out-pointers on the stack.
        let result =
            unsafe { sys::cuLibraryGetGlobal(&raw mut address, &raw mut bytes, self.library, name.as_ptr()) };
        found("cuLibraryGetGlobal", result).map(|found| found.then_some((address, bytes)))
    }

    #[cold]
    fn no_kernel(&self, name: &str) -> Error {
        let names = match self.kernels() {
            names if names.is_empty() => String::new(),
            names => format!("; it has {}", names.join(", ")),
        };
        usage(
            name,
            format!("the module has no such kernel{names}"),
            "declare it extern \"C\" __global__, or name it to Program::instantiate",
        )
    }

    /// Names of its kernels, as far as the driver lists them.
    fn kernels(&self) -> Vec<String> {
        if !self.tells {
            return Vec::new();
        }
        let mut count = 0;
        // SAFETY: a library that lives; an out-pointer on the stack.
        let result = unsafe { sys::cuLibraryGetKernelCount(&raw mut count, self.library) };
        if result != CUresult::CUDA_SUCCESS {
            return Vec::new();
        }
        let mut kernels: Vec<CUkernel> = vec![std::ptr::null_mut(); count as usize];
        // SAFETY: a library that lives, and room for as many.
        let result = unsafe { sys::cuLibraryEnumerateKernels(kernels.as_mut_ptr(), count, self.library) };
        if result != CUresult::CUDA_SUCCESS {
            return Vec::new();
        }
        let name = |kernel: CUkernel| {
            let mut name = std::ptr::null();
            // SAFETY: a kernel of a library that lives; an out-pointer on the stack.
            let result = unsafe { sys::cuKernelGetName(&raw mut name, kernel) };
            let known = result == CUresult::CUDA_SUCCESS && !name.is_null();
            // SAFETY: a text of the library, which lives.
            known.then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
        };
        kernels.into_iter().filter_map(name).collect()
    }

    /// Waits for its kernels with a bound; true if all have ended.
    fn is_idle(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        let idle = |stream: &Arc<CudaStream>| {
            loop {
                // SAFETY: a stream that lives.
                match unsafe { sys::cuStreamQuery(stream.cu_stream()) } {
                    CUresult::CUDA_SUCCESS => return true,
                    CUresult::CUDA_ERROR_NOT_READY if Instant::now() < deadline => {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                    _ => return false,
                }
            }
        };
        self.streams.borrow().iter().all(idle)
    }
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        self.gpu.record_err(self.gpu.bind_to_thread());
        if !self.is_idle() {
            crate::os::log::warn!(
                "a module stays on GPU {}: after {PATIENCE:?} a kernel of it is still running, or a stream with one failed",
                self.gpu.ordinal()
            );
            return;
        }
        // SAFETY: taken once. NVSHMEM forgets the module before it is unloaded.
        drop(unsafe { ManuallyDrop::take(&mut self.registration) });
        // SAFETY: loaded by `new`, unloaded once, and none of its kernels runs.
        unsafe { sys::cuLibraryUnload(self.library) };
    }
}

/// Bytes of each parameter.
fn parameters(kernel: CUkernel) -> Vec<usize> {
    let size = |index| {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: a kernel of a library that lives; out-pointers on the stack.
        let result = unsafe { sys::cuKernelGetParamInfo(kernel, index, &raw mut offset, &raw mut bytes) };
        (result == CUresult::CUDA_SUCCESS).then_some(bytes)
    };
    (0..).map_while(size).collect()
}

fn found(function: &'static str, result: CUresult) -> Result<bool> {
    match result {
        CUresult::CUDA_ERROR_NOT_FOUND => Ok(false),
        result => check(function, result).map(|()| true),
    }
}

pub(crate) fn check(function: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut error = Error::from(DriverError(result));
    if let Error::Library(error) = &mut error {
        error.function = function;
    }
    Err(error)
}

#[cold]
fn usage(kernel: &str, problem: String, remedy: &'static str) -> Error {
    UsageError::Kernel { kernel: kernel.to_owned(), problem, remedy }.into()
}
