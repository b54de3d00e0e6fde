//! Atomic operations on single elements of a PE's memory.
//!
//! The library exports host functions for them, which print "not implemented" and do nothing (3.4.5, 3.8.0).
//! So kernels of one thread do them here, on the peer's address, in system scope. The kernels are a few lines
//! of PTX, which the driver compiles.

use super::context::Context;
use super::device::{failed, raw};
use super::memory::{Shared, check_index};
use crate::os::sync::lock;
use crate::types::dtype::Element;
use crate::types::error::{Error, Result, UnsupportedError};
use crate::types::op::{element_bits, element_from_bits};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{self, CUdeviceptr, CUfunction, CUmodule, CUresult};
use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::Mutex;

/// An atomic operation, as PTX names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum AtomicOperation {
    Fetch,
    Swap,
    CompareSwap,
    Add,
    And,
    Or,
    Xor,
}

/// The types of atomic operations: those of 32 and 64 bits.
pub trait Atomic: Element {
    /// How PTX's addition calls the type.
    #[doc(hidden)]
    const ADDITION: &'static str;
}

macro_rules! atomics {
    ($($ty:ty: $addition:literal),*) => {$(
        impl Atomic for $ty {
            const ADDITION: &'static str = $addition;
        }
    )*};
}

// Two's complement: signed integers are added as unsigned ones.
atomics! { i32: "u32", u32: "u32", f32: "f32", i64: "u64", u64: "u64", f64: "f64" }

/// The integers among them, which also have bits.
pub trait AtomicBits: Atomic {}
impl AtomicBits for i32 {}
impl AtomicBits for u32 {}
impl AtomicBits for i64 {}
impl AtomicBits for u64 {}

/// The loaded kernels, by the GPU's context. They stay loaded as long as the process.
static LOADED: Mutex<BTreeMap<(usize, AtomicOperation, &str), Function>> = Mutex::new(BTreeMap::new());

/// A kernel.
#[derive(Debug, Clone, Copy)]
struct Function(CUfunction);

// SAFETY: a handle that the driver accepts on any thread.
unsafe impl Send for Function {}

impl AtomicOperation {
    /// The kernel: address, value, comparand, and where the old value goes unless that is null.
    fn ptx(self, addition: &str) -> String {
        let bits = if addition.ends_with("64") { 64 } else { 32 };
        let register = if bits == 64 { "rd" } else { "r" };
        let (value, comparand, old) =
            (format!("%{register}5"), format!("%{register}6"), format!("%{register}7"));
        let action = match self {
            AtomicOperation::Fetch => format!("atom.global.sys.or.b{bits} {old}, [%rd1], 0;"),
            AtomicOperation::Swap => format!("atom.global.sys.exch.b{bits} {old}, [%rd1], {value};"),
            AtomicOperation::CompareSwap => {
                format!("atom.global.sys.cas.b{bits} {old}, [%rd1], {comparand}, {value};")
            }
            AtomicOperation::And => format!("atom.global.sys.and.b{bits} {old}, [%rd1], {value};"),
            AtomicOperation::Or => format!("atom.global.sys.or.b{bits} {old}, [%rd1], {value};"),
            AtomicOperation::Xor => format!("atom.global.sys.xor.b{bits} {old}, [%rd1], {value};"),
            AtomicOperation::Add if addition.starts_with('f') => format!(
                "mov.b{bits} %f1, {value};\natom.global.sys.add.{addition} %f2, [%rd1], %f1;\nmov.b{bits} {old}, %f2;"
            ),
            AtomicOperation::Add => format!("atom.global.sys.add.{addition} {old}, [%rd1], {value};"),
        };
        format!(
            ".version 6.4\n.target sm_70\n.address_size 64\n.visible .entry {}(.param .u64 address, \
             .param .u{bits} value, .param .u{bits} comparand, .param .u64 answer)\n{{\n.reg .b64 %rd<8>;\n\
             .reg .b32 %r<8>;\n.reg .f{bits} %f<3>;\n.reg .pred %p<2>;\nld.param.u64 %rd1, [address];\n\
             ld.param.u64 %rd2, [answer];\nld.param.u{bits} {value}, [value];\n\
             ld.param.u{bits} {comparand}, [comparand];\n{action}\nsetp.eq.u64 %p1, %rd2, 0;\n\
             @%p1 bra done;\nst.global.u{bits} [%rd2], {old};\nfence.acq_rel.sys;\ndone:\nret;\n}}\n",
            self.name(addition)
        )
    }

    fn name(self, addition: &str) -> String {
        let operation = match self {
            AtomicOperation::Fetch => "fetch",
            AtomicOperation::Swap => "swap",
            AtomicOperation::CompareSwap => "compare_swap",
            AtomicOperation::Add => "add",
            AtomicOperation::And => "and",
            AtomicOperation::Or => "or",
            AtomicOperation::Xor => "xor",
        };
        format!("phalanx_atomic_{operation}_{addition}")
    }
}

fn check(function: &'static str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(failed(function, error, false)),
    }
}

/// Each changes or reads one element of a PE's memory in one step, also beside other PEs, kernels and this
/// PE. The memory must be mapped here ([`Symmetric::peer`](super::Symmetric::peer)). `nvshmem_TYPE_atomic_…`,
/// which the library itself does not implement.
///
/// Forms without a result are enqueued on the given stream. Fetching forms run as [`put`](Context::put) does
/// and are waited for with the timeout; they are not ordered with any stream, also not with forms enqueued
/// there.
///
/// The first use of an operation with a type loads its kernel, for which the driver may wait until all
/// streams are idle (limited by the timeout). A program that needs it while a stream waits for a peer has to
/// use it once before.
///
/// All fail with [`UsageError`](crate::UsageError) for an element or PE that does not exist and for a stream
/// of another GPU, and with [`Error::Unsupported`] if the PE's memory is not mapped here. Fetching forms and
/// first uses also fail as [`sync`](Context::sync).
impl Context {
    /// The element. `nvshmem_TYPE_atomic_fetch`
    pub fn atomic_fetch<D: Shared<Elem: Atomic> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        pe: usize,
    ) -> Result<D::Elem> {
        self.fetching(AtomicOperation::Fetch, place, index, pe, None, None)
    }

    /// Sets the element. `nvshmem_TYPE_atomic_set`
    pub fn atomic_set<D: Shared<Elem: Atomic> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
        stream: &CudaStream,
    ) -> Result<()> {
        self.launch(AtomicOperation::Swap, place, index, pe, [Some(value), None], 0, stream)
    }

    /// Sets the element and answers what it was. `nvshmem_TYPE_atomic_swap`
    pub fn atomic_swap<D: Shared<Elem: Atomic> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
    ) -> Result<D::Elem> {
        self.fetching(AtomicOperation::Swap, place, index, pe, Some(value), None)
    }

    /// Sets the element if it is `expected`, bit by bit, and answers what it was.
    /// `nvshmem_TYPE_atomic_compare_swap`
    pub fn atomic_compare_swap<D: Shared<Elem: Atomic> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        expected: D::Elem,
        value: D::Elem,
        pe: usize,
    ) -> Result<D::Elem> {
        self.fetching(AtomicOperation::CompareSwap, place, index, pe, Some(value), Some(expected))
    }

    /// Adds to the element; integers wrap. With 1 it is `nvshmem_TYPE_atomic_inc`. `nvshmem_TYPE_atomic_add`
    pub fn atomic_add<D: Shared<Elem: Atomic> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
        stream: &CudaStream,
    ) -> Result<()> {
        self.launch(AtomicOperation::Add, place, index, pe, [Some(value), None], 0, stream)
    }

    /// Adds to the element and answers what it was. With 1 it is `nvshmem_TYPE_atomic_fetch_inc`.
    /// `nvshmem_TYPE_atomic_fetch_add`
    pub fn atomic_fetch_add<D: Shared<Elem: Atomic> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
    ) -> Result<D::Elem> {
        self.fetching(AtomicOperation::Add, place, index, pe, Some(value), None)
    }

    /// Keeps the bits of the element that `value` has, and answers what it was.
    /// `nvshmem_TYPE_atomic_fetch_and`, `…_and`
    pub fn atomic_fetch_and<D: Shared<Elem: AtomicBits> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
    ) -> Result<D::Elem> {
        self.fetching(AtomicOperation::And, place, index, pe, Some(value), None)
    }

    /// Sets the bits that `value` has, and answers what the element was. `nvshmem_TYPE_atomic_fetch_or`,
    /// `…_or`
    pub fn atomic_fetch_or<D: Shared<Elem: AtomicBits> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
    ) -> Result<D::Elem> {
        self.fetching(AtomicOperation::Or, place, index, pe, Some(value), None)
    }

    /// Turns the bits that `value` has, and answers what the element was. `nvshmem_TYPE_atomic_fetch_xor`,
    /// `…_xor`
    pub fn atomic_fetch_xor<D: Shared<Elem: AtomicBits> + ?Sized>(
        &self,
        place: &D,
        index: usize,
        value: D::Elem,
        pe: usize,
    ) -> Result<D::Elem> {
        self.fetching(AtomicOperation::Xor, place, index, pe, Some(value), None)
    }

    fn fetching<D: Shared<Elem: Atomic> + ?Sized>(
        &self,
        operation: AtomicOperation,
        place: &D,
        index: usize,
        pe: usize,
        value: Option<D::Elem>,
        comparand: Option<D::Elem>,
    ) -> Result<D::Elem> {
        let (answer, stream) = (self.answer()?, self.host_stream());
        self.launch(operation, place, index, pe, [value, comparand], answer as CUdeviceptr, stream)?;
        self.sync(stream)?;
        // SAFETY: page-locked memory of this context's, written by the kernel, which is over.
        Ok(element_from_bits(unsafe { answer.read_volatile() }))
    }

    #[allow(clippy::too_many_arguments, reason = "one place for all of them")]
    fn launch<D: Shared<Elem: Atomic> + ?Sized>(
        &self,
        operation: AtomicOperation,
        place: &D,
        index: usize,
        pe: usize,
        values: [Option<D::Elem>; 2],
        mut answer: CUdeviceptr,
        stream: &CudaStream,
    ) -> Result<()> {
        check_index("atomic", place.len(), index)?;
        self.device.check(stream)?;
        self.enter()?;
        let Some(start) = self.peer("atomic", place.place(), pe)? else {
            return Err(Error::from(UnsupportedError {
                what: format!("an atomic operation on PE {pe}'s memory"),
                why: "it cannot be reached by loads and stores (NVLink, PCIe) from here".into(),
                remedy: "use signals, or NVSHMEM's atomics in a kernel".into(),
            }));
        };
        let function = self.kernel(operation, <D::Elem as Atomic>::ADDITION)?;
        let mut address = start + (index * size_of::<D::Elem>()) as u64;
        // Parameters of 32 bits are the lower halves.
        let mut bits = values.map(|value| value.map_or(0, element_bits));
        let [value, comparand] = &mut bits;
        let mut parameters: [*mut c_void; 4] = [
            (&raw mut address).cast(),
            (&raw mut *value).cast(),
            (&raw mut *comparand).cast(),
            (&raw mut answer).cast(),
        ];
        let (stream, none) = (raw(stream).cast(), std::ptr::null_mut());
        // SAFETY: the function's parameters, copied during the call; the element is mapped here and stays so
        // until all PEs free it, behind all work of this GPU; the answer's word lives as long as the process.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters.as_mut_ptr(), none)
        })
    }

    /// The word into which kernels write what they fetched.
    fn answer(&self) -> Result<*mut u64> {
        self.enter()?;
        let word = self.device.word();
        // SAFETY: a word that lives as long as the process; no kernel is under way that would write to it.
        // The upper half of 32 bits stays zero.
        unsafe { word.write_volatile(0) };
        Ok(word)
    }

    fn kernel(&self, operation: AtomicOperation, addition: &'static str) -> Result<CUfunction> {
        let key = (self.device.context.cu_ctx() as usize, operation, addition);
        if let Some(Function(function)) = lock(&LOADED).get(&key) {
            return Ok(*function);
        }
        // The driver may wait for whatever is on the GPU.
        let loaded = self.bounded("cuModuleLoadData".into(), move || load(operation, addition))??;
        lock(&LOADED).insert(key, loaded);
        Ok(loaded.0)
    }
}

/// Loads a kernel, for good. The device is current.
fn load(operation: AtomicOperation, addition: &'static str) -> Result<Function> {
    let text = |text: String| CString::new(text).expect("no NUL in it");
    let (image, name) = (text(operation.ptx(addition)), text(operation.name(addition)));
    let (mut module, mut function): (CUmodule, CUfunction) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: PTX that ends in NUL; an out-pointer on the stack. The module is never unloaded.
    check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
    // SAFETY: the module's function; an out-pointer on the stack.
    check("cuModuleGetFunction", unsafe {
        sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr())
    })?;
    Ok(Function(function))
}
