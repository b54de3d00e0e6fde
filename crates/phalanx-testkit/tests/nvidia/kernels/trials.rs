//! The trials.

use phalanx::Error;
use phalanx::jit::{BuildStep, CompileError, Image, Program};
use std::path::PathBuf;

/// A trial: what a process does.
pub struct Case {
    pub name: &'static str,
    /// The variable that names a place which does not exist.
    pub nowhere: Option<&'static str>,
    pub body: fn(),
}

pub const NOWHERE: &str = "/no/such/place";

pub const TRIALS: &[Case] = &[
    case("plain", plain),
    case("template", template),
    case("definitions_and_options", definitions_and_options),
    case("headers_of_cuda", headers_of_cuda),
    case("error_with_its_line", error_with_its_line),
    case("error_in_a_header", error_in_a_header),
    case("architecture", architecture),
    case("virtual_architecture", virtual_architecture),
    case("text_with_nul", text_with_nul),
    case("examples/ring", || example("ring.cu", RING, &["ring"])),
    case("examples/halo", || example("halo.cu", HALO, &["halo"])),
    case("examples/heat_3d", || example("heat_3d.cu", HEAT_3D, &["step"])),
    case("examples/epilogue", epilogue),
    case("headers_of_phalanx", headers_of_phalanx),
    case("examples/fused", || example("fused.cu", FUSED, &["compute", "compute_and_put"])),
    case("nvshmem/functions", nvshmem_functions),
    case("nvshmem/error_with_its_line", nvshmem_error),
    case("nvshmem/unresolved", unresolved),
    case("nvshmem/forgotten", forgotten),
    case("nccl/device_api", nccl_device_api),
    case("nccl/error_with_its_line", nccl_error),
    case("nccl/both", nccl_and_nvshmem),
    missing("missing/nccl_headers", "PHALANX_NCCL_INCLUDE", no_nccl_headers),
    missing("missing/nvrtc", "PHALANX_NVRTC_LIB", no_nvrtc),
    missing("missing/nvjitlink", "PHALANX_NVJITLINK_LIB", no_nvjitlink),
    missing("missing/cuda_headers", "PHALANX_CUDA_INCLUDE", no_cuda_headers),
    missing("missing/cccl_headers", "PHALANX_CCCL_INCLUDE", no_cccl_headers),
    missing("missing/nvshmem_headers", "PHALANX_NVSHMEM_INCLUDE", no_nvshmem_headers),
    missing("missing/nvshmem_device", "PHALANX_NVSHMEM_DEVICE", no_nvshmem_device),
];

const RING: &str = include_str!("../../../../phalanx/examples/kernels/ring.cu");
const HALO: &str = include_str!("../../../../phalanx/examples/kernels/halo.cu");
const HEAT_3D: &str = include_str!("../../../../phalanx/examples/kernels/heat_3d.cu");
const EPILOGUE: &str = include_str!("../../../../phalanx/examples/kernels/epilogue.cu");
const FUSED: &str = include_str!("../../../../phalanx/examples/kernels/fused.cu");

/// A trial that needs no more than the environment.
pub const fn case(name: &'static str, body: fn()) -> Case {
    Case { name, nowhere: None, body }
}

/// A trial in which one thing is nowhere to be found.
const fn missing(name: &'static str, variable: &'static str, body: fn()) -> Case {
    Case { name, nowhere: Some(variable), body }
}

pub const SCALE: &str = "\
template <class T> __global__ void scale(T* x, T by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}
";

fn plain() {
    let source = "extern \"C\" __global__ void fill(float* x) { int unused; x[threadIdx.x] = 1; }";
    let image = Program::new("fill.cu", source).compile("sm_90").unwrap();
    assert!(is_code_with(&image, "fill"));
    assert!(image.log().contains("unused"), "no warning: {:?}", image.log());
    assert_eq!(Image::from_bytes(image.as_bytes()).as_bytes(), image.as_bytes());
    // Another kind of GPU, other code.
    for other in ["sm_75", "sm_80", "sm_100", "sm_120"] {
        assert_ne!(Program::new("fill.cu", source).compile(other).unwrap().as_bytes(), image.as_bytes());
    }
}

fn template() {
    let program = Program::new("scale.cu", SCALE).instantiate("scale<float>").instantiate("scale<double>");
    let image = program.compile("sm_90").unwrap();
    for kernel in ["scale<float>", "scale<double>"] {
        assert!(is_code_with(&image, image.lowered_name(kernel).unwrap()), "{kernel}");
    }
    assert_eq!(image.lowered_name("scale<int>"), None);
    let error = program.instantiate("scale<nothing>").compile("sm_90").unwrap_err();
    assert!(compile_error(error).to_string().contains("nothing"));
}

fn definitions_and_options() {
    let source = "static_assert(SIZE == 42 && __cplusplus >= 202002L);\n";
    let program = Program::new("a.cu", source).define("SIZE", 42).option("--std=c++20");
    program.compile("sm_90").unwrap();
    let error = compile_error(program.option("--no-such-option").compile("sm_90").unwrap_err());
    assert!(error.to_string().contains("--no-such-option"), "{error}");
}

fn headers_of_cuda() {
    let source = "#include <cuda_fp16.h>\n#include <cuda/std/array>\n\
                  extern \"C\" __global__ void k(__half* x) { cuda::std::array<int, 2> a{1, 2}; x[0] = a[1]; }";
    assert!(is_code_with(&Program::new("k.cu", source).compile("sm_90").unwrap(), "k"));
}

/// The example, by both protocols.
fn epilogue() {
    for protocol in ["Ll", "Ll128"] {
        let image =
            Program::new("epilogue.cu", EPILOGUE).define("PROTOCOL", protocol).compile("sm_90").unwrap();
        assert!(is_code_with(&image, "sum_bias_gelu"), "{protocol}");
    }
}

/// Every function of `<phalanx.cuh>`, for old GPUs and new ones, beside names of the program and of CUDA.
fn headers_of_phalanx() {
    let source = "
        #include <cuda_fp16.h>
        #include <phalanx.cuh>
        typedef int Lane;
        template <class P> __device__ void all(const phalanx::Peers& peers, __half* x, long long n) {
            phalanx::Warp<P> warp(peers, threadIdx.x / 32);
            phalanx::u64 v[phalanx::Warp<P>::UNITS];
            warp.load(v, x, n);
            if (!warp.send(0, v) || !warp.receive(1, v) || !warp.barrier()) return;
            warp.store(v, x + warp.place(0) * warp.has(0), n);
        }
        extern \"C\" __global__ void k(phalanx::Peers peers, __half* x, long long n) {
            Lane which = peers.rank;
            if (which) all<phalanx::Ll>(peers, x, n); else all<phalanx::Ll128>(peers, x, n);
        }";
    for architecture in ["sm_75", "sm_80", "sm_90", "sm_100"] {
        let image = Program::new("k.cu", source).compile(architecture).unwrap();
        assert!(is_code_with(&image, "k"), "{architecture}");
        assert_eq!(image.log().trim(), "", "{architecture}");
    }
}

fn error_with_its_line() {
    let source = "extern \"C\" __global__ void k(float* x) {\n    x[0] = mistake;\n    x[1] = 1\n}\n";
    let error = compile_error(Program::new("broken.cu", source).compile("sm_90").unwrap_err());
    assert_eq!((error.step, error.program.as_str()), (BuildStep::Compile, "broken.cu"));
    let [undefined, semicolon] = &error.diagnostics[..] else { panic!("{error:?}") };
    assert_eq!((undefined.file.as_str(), undefined.line), ("broken.cu", 2));
    assert!(undefined.message.contains("\"mistake\" is undefined"), "{undefined}");
    assert_eq!(undefined.source.as_deref(), Some("    x[0] = mistake;"));
    assert_eq!(semicolon.line, 4, "{semicolon}");
    let text = error.to_string();
    for part in ["broken.cu does not compile (NVRTC 13.", "broken.cu:2: ", "\n    x[0] = mistake;"] {
        assert!(text.contains(part), "{text}");
    }
}

fn error_in_a_header() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mine.h"), "\n\nint mistake(\n").unwrap();
    let program = Program::new("k.cu", "#include \"mine.h\"\n").include(folder.path());
    let error = compile_error(program.compile("sm_90").unwrap_err());
    let first = &error.diagnostics[0];
    assert!(first.file.ends_with("mine.h") && first.source.is_none(), "{error:?}");
}

fn architecture() {
    let error = compile_error(Program::new("k.cu", "").compile("sm_1").unwrap_err());
    assert!(error.to_string().contains("--gpu-architecture"), "{error}");
}

/// It has no code, which the driver would be given.
fn virtual_architecture() {
    let error = Program::new("k.cu", SCALE).compile("compute_90").unwrap_err();
    assert!(matches!(error, Error::Usage(_)), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("the architecture") && text.contains("compute_90"), "{text}");
}

fn text_with_nul() {
    let text = Program::new("k.cu", "int a;\0").compile("sm_90").unwrap_err().to_string();
    assert!(text.contains("source") && text.contains("NUL at byte 6"), "{text}");
}

fn example(name: &str, source: &str, kernels: &[&str]) {
    let image = Program::new(name, source).nvshmem().compile("sm_90").unwrap();
    for kernel in kernels {
        assert!(is_code_with(&image, kernel), "{kernel}");
    }
    // Where the host library puts a context's state.
    assert!(is_code_with(&image, "nvshmemi_device_state_d"));
}

/// Functions whose parts are in the device library, under names that types of 64 bits are part of.
fn nvshmem_functions() {
    let source = "#include <nvshmem.h>\n#include <nvshmemx.h>\n\
        extern \"C\" __global__ void all(float* x, uint64_t* s, int64_t* l, size_t n, int pe) {\n\
            nvshmem_float_put(x, x, n, pe);\n\
            nvshmem_float_get(x, x, n, pe);\n\
            nvshmem_float_p(x, nvshmem_float_g(x, pe), pe);\n\
            nvshmemx_putmem_signal_block(x, x, n, s, 1, NVSHMEM_SIGNAL_ADD, pe);\n\
            nvshmem_float_put_signal_nbi(x, x, n, s, 1, NVSHMEM_SIGNAL_SET, pe);\n\
            nvshmemx_signal_op(s, 1, NVSHMEM_SIGNAL_SET, pe);\n\
            nvshmem_signal_wait_until(s, NVSHMEM_CMP_GE, 1);\n\
            nvshmem_uint64_wait_until(s, NVSHMEM_CMP_EQ, 1);\n\
            nvshmem_long_atomic_add(l, 1, pe);\n\
            l[0] = nvshmem_uint64_atomic_fetch_add(s, 1, pe);\n\
            nvshmem_fence();\n\
            nvshmem_quiet();\n\
            nvshmemx_barrier_all_block();\n\
            nvshmem_sync_all();\n\
        }\n";
    assert!(is_code_with(&Program::new("all.cu", source).nvshmem().compile("sm_90").unwrap(), "all"));
}

fn nvshmem_error() {
    let source = "#include <nvshmem.h>\nextern \"C\" __global__ void k() {\n    nvshmem_barier_all();\n}\n";
    let error = compile_error(Program::new("k.cu", source).nvshmem().compile("sm_90").unwrap_err());
    let [only] = &error.diagnostics[..] else { panic!("{error}") };
    assert_eq!((only.line, only.source.as_deref()), (3, Some("    nvshmem_barier_all();")), "{error}");
}

fn unresolved() {
    let source = "#include <nvshmem.h>\nextern \"C\" __device__ int nowhere(int);\n\
                  extern \"C\" __global__ void k(int* x) { x[0] = nowhere(nvshmem_my_pe()); }\n";
    let error = compile_error(Program::new("k.cu", source).nvshmem().compile("sm_90").unwrap_err());
    assert_eq!(error.step, BuildStep::Link);
    let text = error.to_string();
    assert!(text.contains("k.cu does not link (nvJitLink 13.") && text.contains("'nowhere'"), "{text}");
}

/// A program that includes NVSHMEM's headers and does not say so.
fn forgotten() {
    let error = compile_error(Program::new("k.cu", "#include <nvshmem.h>\n").compile("sm_90").unwrap_err());
    assert!(error.to_string().contains("nvshmem.h"), "{error}");
}

/// What the prelude has of NCCL's device API, with the headers of each release that has it.
fn nccl_device_api() {
    let source = "#include <stdint.h>\n#include <nccl.h>\n#include <nccl_device.h>\n\
        extern \"C\" __global__ void all(ncclDevComm comm, ncclWindow_t window, ncclDevResourceHandle buffer,\n\
                ncclLsaBarrierHandle barriers, ncclLLA2AHandle slots, uint64_t* out) {\n\
            ncclCoopCta cta;\n\
            ncclTeam lsa = ncclTeamLsa(comm), world = ncclTeamWorld(comm), rail = ncclTeamRail(comm);\n\
            ncclLsaBarrierSession<ncclCoopCta> first(cta, comm, ncclTeamTagLsa(), blockIdx.x);\n\
            first.arrive(cta, cuda::memory_order_release);\n\
            first.wait(cta, cuda::memory_order_acquire);\n\
            ncclLsaBarrierSession<ncclCoopCta> own(cta, comm, lsa, barriers, blockIdx.x);\n\
            own.sync(cta, cuda::memory_order_acq_rel);\n\
            ncclLLA2ASession<ncclCoopCta> exchange(cta, comm, lsa, slots, blockIdx.x, 100);\n\
            for (int peer = threadIdx.x; peer < lsa.nRanks; peer += blockDim.x)\n\
                exchange.send(peer, lsa.rank, (uint64_t)peer);\n\
            out[0] = exchange.recv<uint64_t>(threadIdx.x);\n\
            exchange.endEpoch(cta);\n\
            out[1] = (uint64_t)ncclGetLsaPointer(window, 8, 0) + (uint64_t)ncclGetLocalPointer(window, 8);\n\
            out[2] = (uint64_t)ncclGetPeerPointer(window, 8, world, 0);\n\
            out[3] = (uint64_t)ncclGetLsaMultimemPointer(window, 8, comm);\n\
            out[4] = (uint64_t)ncclGetResourceBufferLsaPointer(comm, buffer, 0) + rail.stride;\n\
            out[5] = *ncclSymPtr<uint64_t>(window, 16).localPtr();\n\
        }\n";
    for include in nccl_headers() {
        let program = Program::new("all.cu", source).nccl().include(&include);
        let image = program.compile("sm_90").unwrap_or_else(|error| panic!("{include:?}: {error}"));
        assert!(is_code_with(&image, "all"), "{include:?}");
    }
}

/// Folders of the headers of each release of NCCL that is there, if it has any for devices.
fn nccl_headers() -> Vec<PathBuf> {
    let releases = std::env::var_os("PHALANX_TEST_NCCL").expect("PHALANX_TEST_NCCL names releases of NCCL");
    let headers = std::env::split_paths(&releases).map(|folder| folder.join("nvidia/nccl/include"));
    let headers: Vec<_> = headers.filter(|folder| folder.join("nccl_device.h").exists()).collect();
    assert!(!headers.is_empty(), "none of {releases:?} has headers for devices");
    headers
}

fn nccl_error() {
    let source = "#include <nccl_device.h>\nextern \"C\" __global__ void k(ncclDevComm comm) {\n    ncclTeamLocal(comm);\n}\n";
    let error = compile_error(Program::new("k.cu", source).nccl().compile("sm_90").unwrap_err());
    let [only] = &error.diagnostics[..] else { panic!("{error}") };
    assert_eq!((only.line, only.source.as_deref()), (3, Some("    ncclTeamLocal(comm);")), "{error}");
}

fn nccl_and_nvshmem() {
    let error = uses_nvshmem().nccl().compile("sm_90").unwrap_err();
    assert!(matches!(error, Error::Unsupported(_)), "{error}");
    assert!(error.to_string().contains("programs of their own"), "{error}");
}

fn no_nccl_headers() {
    let text = not_found(Program::new("k.cu", "#include <nccl_device.h>\n").nccl().compile("sm_90"));
    assert!(text.contains("nccl_device.h") && text.contains("PHALANX_NCCL_INCLUDE"), "{text}");
}

fn no_nvrtc() {
    let text = not_found(Program::new("k.cu", "").compile("sm_90"));
    assert!(text.contains("NVRTC was not found") && text.contains("PHALANX_NVRTC_LIB"), "{text}");
}

fn no_nvjitlink() {
    let text = not_found(uses_nvshmem().compile("sm_90"));
    assert!(text.contains("nvJitLink was not found") && text.contains("PHALANX_NVJITLINK_LIB"), "{text}");
    // Code that does not use NVSHMEM needs no linker.
    Program::new("k.cu", "").compile("sm_90").unwrap();
}

fn no_cuda_headers() {
    let text = not_found(uses_nvshmem().compile("sm_90"));
    assert!(text.contains("cuda_runtime.h") && text.contains("PHALANX_CUDA_INCLUDE"), "{text}");
    // Other code may do without; if it cannot, it is told where they were looked for.
    Program::new("k.cu", "").compile("sm_90").unwrap();
    let error = Program::new("k.cu", "#include <cuda_fp16.h>\n").compile("sm_90").unwrap_err();
    let text = compile_error(error).to_string();
    assert!(text.contains("cuda_fp16.h") && text.contains("/no/such/place/cuda_runtime.h"), "{text}");
}

fn no_cccl_headers() {
    let text = not_found(uses_nvshmem().compile("sm_90"));
    assert!(text.contains("CCCL") && text.contains("PHALANX_CCCL_INCLUDE"), "{text}");
}

fn no_nvshmem_headers() {
    let text = not_found(uses_nvshmem().compile("sm_90"));
    assert!(text.contains("nvshmem.h") && text.contains("PHALANX_NVSHMEM_INCLUDE"), "{text}");
}

fn no_nvshmem_device() {
    let text = not_found(uses_nvshmem().compile("sm_90"));
    assert!(text.contains("libnvshmem_device.a") && text.contains("PHALANX_NVSHMEM_DEVICE"), "{text}");
}

fn uses_nvshmem() -> Program {
    Program::new("k.cu", "#include <nvshmem.h>\n").nvshmem()
}

/// Whether it is an ELF file with such a symbol.
fn is_code_with(image: &Image, symbol: &str) -> bool {
    let code = image.as_bytes();
    let symbol = [b"\0", symbol.as_bytes(), b"\0"].concat();
    code.starts_with(b"\x7fELF") && code.windows(symbol.len()).any(|window| window == symbol)
}

#[track_caller]
fn compile_error(error: Error) -> CompileError {
    match error {
        Error::Compile(error) => *error,
        other => panic!("{other:?}"),
    }
}

/// The text of the error for what is not there, which names where it was looked for.
#[track_caller]
fn not_found(result: phalanx::Result<Image>) -> String {
    match result {
        Err(Error::LibraryNotFound(error)) => {
            let text = error.to_string();
            assert!(text.contains(NOWHERE), "{text}");
            text
        }
        other => panic!("{other:?}"),
    }
}
