//! The part of the HIP runtime that phalanx uses: devices, memory, streams, events.
//!
//! Names are those of the C library.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

use crate::functions::{addresses, c_name, table};
use crate::{Library, NotFound, Place, Search};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

/// Where HIP may be. [`Api::load`] prefers a copy that the process has loaded, since two copies do not share state.
pub const HIP: Search = Search {
    name: "HIP",
    files: &["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"],
    variable: "PHALANX_HIP_LIB",
    homes: &["HIP_PATH", "ROCM_PATH", "ROCM_HOME"],
    wheels: &["_rocm_sdk_core/lib", "_rocm_sdk_devel/lib", "torch/lib"],
    global: false,
};

/// A status code.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct hipError_t(pub c_int);

/// The status codes that phalanx handles.
#[allow(missing_docs)]
impl hipError_t {
    pub const Success: Self = Self(0);
    pub const InvalidValue: Self = Self(1);
    pub const OutOfMemory: Self = Self(2);
    pub const NoDevice: Self = Self(100);
    pub const InvalidDevice: Self = Self(101);
    pub const NotReady: Self = Self(600);
    pub const NotSupported: Self = Self(801);
}

/// A stream; null is the default one of the current device.
pub type hipStream_t = *mut c_void;
/// An event.
pub type hipEvent_t = *mut c_void;

/// `hipMemcpyDefault`: the addresses say where the memory is.
pub const hipMemcpyDefault: c_int = 4;
/// `hipStreamNonBlocking`: the stream is not ordered with the default stream.
pub const hipStreamNonBlocking: c_uint = 1;
/// `hipEventDisableTiming`.
pub const hipEventDisableTiming: c_uint = 2;
/// `hipStreamCaptureStatusNone`: the stream is not being captured.
pub const hipStreamCaptureStatusNone: c_int = 0;
/// `hipHostMallocDefault`.
pub const hipHostMallocDefault: c_uint = 0;
/// Room for `hipDeviceProp_t` in any layout, in bytes.
const PROPERTIES: usize = 8192;

/// Offsets in `hipDeviceProp_t`, in bytes. ROCm 6 changed the layout, and the function that fills it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PropertyOffsets {
    /// `totalGlobalMem`, a `size_t`.
    pub memory: usize,
    /// `gcnArchName`, 256 bytes.
    pub architecture: usize,
}

/// Offsets for `hipGetDevicePropertiesR0600`, of ROCm 6 and later.
pub const R0600: PropertyOffsets = PropertyOffsets { memory: 288, architecture: 1160 };
/// Offsets for `hipGetDeviceProperties`, of ROCm before 6.
pub const R0000: PropertyOffsets = PropertyOffsets { memory: 256, architecture: 396 };

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// The device's name.
    pub name: String,
    /// The architecture, such as `gfx942:sramecc+:xnack-`.
    pub architecture: String,
    /// Bytes of memory.
    pub memory: usize,
}

macro_rules! functions {
    (required { $( $name:ident($($argument:ident: $ty:ty),*) -> $answer:ty; )* } optional { $( $maybe:ident($($other:ident: $other_ty:ty),*) -> $other_answer:ty; )* }) => {
        table! {
            /// The functions of a loaded library.
            #[allow(missing_docs)]
            pub struct Functions {
                $(pub $name: unsafe extern "C" fn($($argument: $ty),*) -> $answer,)*
                $(pub $maybe: Option<unsafe extern "C" fn($($other: $other_ty),*) -> $other_answer>,)*
            }
        }

        /// How many functions are required: the first ones.
        const REQUIRED: usize = [$(stringify!($name)),*].len();

        /// The symbol of each function.
        const SYMBOLS: [&CStr; Functions::FIELDS.len()] = [
            $(c_name(concat!(stringify!($name), "\0")),)*
            $(c_name(concat!(stringify!($maybe), "\0")),)*
        ];
    };
}

impl Functions {
    /// The functions, or the name of a required one that is missing.
    fn load(library: &Library) -> Result<Functions, &'static str> {
        let addresses = addresses(library, &SYMBOLS);
        if let Some(missing) = addresses[..REQUIRED].iter().position(Option::is_none) {
            return Err(Functions::FIELDS[missing]);
        }
        // SAFETY: the fields' types are those of the C header, and the required functions are there.
        Ok(unsafe { Functions::from_addresses(addresses) })
    }
}

functions! {
    required {
        hipRuntimeGetVersion(version: *mut c_int) -> hipError_t;
        hipGetErrorName(error: hipError_t) -> *const c_char;
        hipGetErrorString(error: hipError_t) -> *const c_char;

        hipGetDeviceCount(count: *mut c_int) -> hipError_t;
        hipGetDevice(device: *mut c_int) -> hipError_t;
        hipSetDevice(device: c_int) -> hipError_t;

        hipMalloc(start: *mut *mut c_void, bytes: usize) -> hipError_t;
        hipFree(start: *mut c_void) -> hipError_t;
        hipHostMalloc(start: *mut *mut c_void, bytes: usize, flags: c_uint) -> hipError_t;
        hipHostFree(start: *mut c_void) -> hipError_t;
        hipMemcpyAsync(target: *mut c_void, source: *const c_void, bytes: usize, kind: c_int, stream: hipStream_t) -> hipError_t;
        hipMemcpy2DAsync(target: *mut c_void, target_pitch: usize, source: *const c_void, source_pitch: usize, row: usize, rows: usize, kind: c_int, stream: hipStream_t) -> hipError_t;
        hipMemsetAsync(target: *mut c_void, value: c_int, bytes: usize, stream: hipStream_t) -> hipError_t;

        hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint) -> hipError_t;
        hipStreamDestroy(stream: hipStream_t) -> hipError_t;
        hipStreamQuery(stream: hipStream_t) -> hipError_t;
        hipStreamSynchronize(stream: hipStream_t) -> hipError_t;
        hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint) -> hipError_t;

        hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint) -> hipError_t;
        hipEventRecord(event: hipEvent_t, stream: hipStream_t) -> hipError_t;
        hipEventQuery(event: hipEvent_t) -> hipError_t;
        hipEventDestroy(event: hipEvent_t) -> hipError_t;
    }
    optional {
        hipStreamIsCapturing(stream: hipStream_t, status: *mut c_int) -> hipError_t;
        hipMallocAsync(start: *mut *mut c_void, bytes: usize, stream: hipStream_t) -> hipError_t;
        hipFreeAsync(start: *mut c_void, stream: hipStream_t) -> hipError_t;
        hipGetDevicePropertiesR0600(properties: *mut c_void, device: c_int) -> hipError_t;
        hipGetDeviceProperties(properties: *mut c_void, device: c_int) -> hipError_t;
        hipDeviceGetPCIBusId(id: *mut c_char, bytes: c_int, device: c_int) -> hipError_t;
    }
}

/// A loaded HIP runtime.
#[derive(Debug)]
pub struct Api {
    library: Library,
    functions: Functions,
    version: c_int,
}

impl std::ops::Deref for Api {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Api {
    /// Loads HIP: the copy that the process has loaded, or else the first that the search finds.
    ///
    /// # Errors
    /// [`NotFound`] if none loads. A library without a required function counts as one that does not load.
    pub fn load() -> Result<Api, NotFound> {
        let library = HIP.open_among(places())?;
        let functions = match Functions::load(&library) {
            Ok(functions) => functions,
            Err(function) => {
                let error = Some(format!("it has no function {function}"));
                let attempt = crate::Attempt { place: library.place().clone(), error };
                return Err(NotFound { library: HIP.name, variable: HIP.variable, tried: vec![attempt] });
            }
        };
        let mut version = 0;
        // SAFETY: an out-pointer on the stack, written during the call.
        unsafe { (functions.hipRuntimeGetVersion)(&raw mut version) };
        Ok(Api { library, functions, version })
    }

    /// The runtime's version, `major.minor.patch`.
    pub fn version(&self) -> String {
        let version = self.version;
        format!("{}.{}.{}", version / 10_000_000, version / 100_000 % 100, version % 100_000)
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The number of devices that this process sees (`hipGetDeviceCount`); 0 without a device.
    pub fn device_count(&self) -> Result<usize, hipError_t> {
        let mut count = 0;
        // SAFETY: an out-pointer on the stack, written during the call.
        match unsafe { (self.hipGetDeviceCount)(&raw mut count) } {
            hipError_t::Success => Ok(usize::try_from(count).unwrap_or(0)),
            hipError_t::NoDevice => Ok(0),
            error => Err(error),
        }
    }

    /// The properties of a device (`hipGetDeviceProperties`).
    pub fn properties(&self, device: usize) -> Result<Properties, hipError_t> {
        let (get, offsets) = match (self.hipGetDevicePropertiesR0600, self.hipGetDeviceProperties) {
            (Some(get), _) => (get, R0600),
            (None, Some(get)) => (get, R0000),
            (None, None) => return Err(hipError_t::NotSupported),
        };
        // Words, for the alignment of the C structure. Every known layout is smaller.
        let mut words = [0u64; PROPERTIES / 8];
        // SAFETY: the function writes its structure, which is smaller than this.
        match unsafe { get(words.as_mut_ptr().cast(), device as c_int) } {
            hipError_t::Success => {}
            error => return Err(error),
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let text = |start: usize| {
            let text: Vec<u8> =
                bytes[start..start + 256].iter().copied().take_while(|byte| *byte != 0).collect();
            String::from_utf8_lossy(&text).into_owned()
        };
        let memory = bytes[offsets.memory..offsets.memory + 8].try_into().expect("8 bytes");
        Ok(Properties {
            name: text(0),
            architecture: text(offsets.architecture),
            memory: u64::from_ne_bytes(memory) as usize,
        })
    }

    /// The PCI bus id of a device (`hipDeviceGetPCIBusId`), by which RCCL identifies devices.
    pub fn bus_id(&self, device: usize) -> Result<String, hipError_t> {
        let get = self.hipDeviceGetPCIBusId.ok_or(hipError_t::NotSupported)?;
        let mut id = [0u8; 64];
        // SAFETY: room for the given number of bytes; the last byte of the array stays NUL.
        match unsafe { get(id.as_mut_ptr().cast(), id.len() as c_int - 1, device as c_int) } {
            hipError_t::Success => {}
            error => return Err(error),
        }
        let text = CStr::from_bytes_until_nul(&id).expect("the last byte is NUL");
        Ok(text.to_string_lossy().into_owned())
    }

    /// The name and HIP's text of a status code.
    pub fn describe(&self, error: hipError_t) -> String {
        // SAFETY: any code is allowed; the results are static texts.
        let texts = unsafe { [(self.hipGetErrorName)(error), (self.hipGetErrorString)(error)] };
        let text = |start: *const c_char| {
            if start.is_null() {
                return String::new();
            }
            // SAFETY: a text of the library, which ends in NUL and is never freed.
            unsafe { CStr::from_ptr(start) }.to_string_lossy().into_owned()
        };
        format!("{}, {}", text(texts[0]), text(texts[1]))
    }
}

/// The copy that the process has loaded, unless the user chose a file; or else the search's places.
fn places() -> Vec<Place> {
    let named = crate::environment::chosen(HIP.variable).is_some();
    match HIP.loaded().into_iter().next() {
        Some(file) if !named => vec![Place { file, origin: "this process has it already".to_owned() }],
        _ => HIP.places(),
    }
}
