//! Prelude for NCCL's device headers under NVRTC.

use phalanx_sys::nccl::Flavour;
use std::ffi::CStr;

/// Source text put before a program that uses NCCL's device API.
///
/// NCCL's headers are written for nvcc. Under NVRTC they need this:
/// - Names of the C library come from CUDA's own headers, included first: since 2.31 NCCL's headers include
///   them inside `extern "C"`.
/// - `__host__` is empty, so that declarations of host functions compile.
/// - GIN (networking) is left out: it needs packed structures, which NVRTC lacks, and system headers.
/// - Before 2.31, `loadConst` declares arrays without elements, which only nvcc accepts.
const PRELUDE: &CStr = c"
#define __host__
#include <cuda/std/cstdint>
#include <cuda/std/cstddef>
#include <cuda/std/climits>
#include <cuda/std/utility>
#include <cuda/std/type_traits>
#include <cuda/atomic>
using cuda::std::int8_t;
using cuda::std::int16_t;
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint8_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::intptr_t;
using cuda::std::uintptr_t;
#define NCCL_OS_LINUX 1
#define NCCL_GIN_PROXY_ENABLE 0
#define NCCL_GIN_GDAKI_ENABLE 0
#define NCCL_GIN_GPI_ENABLE 0
#define NCCL_GIN_EFA_GDA_ENABLE 0
#include <nccl.h>
#if defined(PHALANX_NCCL_VERSION) && PHALANX_NCCL_VERSION != NCCL_VERSION_CODE
#error these headers of NCCL are of another release than the library (PHALANX_NCCL_INCLUDE names the folder of others)
#endif
#if NCCL_VERSION_CODE < 23100
#define loadConst loadConstOfNvcc
#include <nccl_device/utility.h>
#undef loadConst
namespace nccl {
namespace utility {
template <typename T>
__device__ __forceinline__ T loadConst(T const* from) {
  static_assert(alignof(T) >= 4, \"loaded in words\");
  union { uint32_t words[sizeof(T) / 4]; T value; };
  for (unsigned i = 0; i < sizeof(T) / 4; i++) words[i] = __ldg((uint32_t const*)from + i);
  return value;
}
}
}
#endif
#include <nccl_device/coop.h>
#include <nccl_device/impl/core__funcs.h>
#include <nccl_device/impl/comm__funcs.h>
#include <nccl_device/impl/ptr__funcs.h>
#include <nccl_device/impl/ll_a2a__funcs.h>
#if NCCL_VERSION_CODE < 22807
#include <nccl_device/impl/mem_barrier__funcs.h>
#else
#include <nccl_device/impl/lsa_barrier__funcs.h>
#endif
";
pub(crate) const NCCL_PRELUDE_NAME: &CStr = c"phalanx_nccl_prelude.h";

/// Empty replacements of headers: those of C and C++ whose names the prelude has, and NCCL's umbrella header,
/// of which the prelude includes the parts that compile.
pub(crate) const NCCL_HEADERS: &[(&CStr, &CStr)] = &[
    (NCCL_PRELUDE_NAME, PRELUDE),
    (c"nccl_device.h", c""),
    (c"stdint.h", c""),
    (c"stddef.h", c""),
    (c"stdbool.h", c""),
    (c"stdlib.h", c""),
    (c"limits.h", c""),
    (c"type_traits", c"namespace std { using namespace cuda::std; }"),
];

/// Returns the version of the NCCL that is, or would be, loaded.
pub(crate) fn loaded_nccl() -> Option<u32> {
    crate::gpu::nccl::loaded_version(Flavour::Nccl)
}
