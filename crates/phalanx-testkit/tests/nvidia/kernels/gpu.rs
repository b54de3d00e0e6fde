//! Trials that launch kernels, where there is a GPU.

use super::trials::{Case, SCALE, case};
use cudarc::driver::{CudaContext, CudaStream, LaunchConfig};
use phalanx::jit::{Image, Kernel, Module, Program, reads, value, writes};
use phalanx::{Error, UsageError};
use std::sync::Arc;

pub const TRIALS: &[Case] = &[
    case("gpu/launch", launch),
    case("gpu/other_stream", other_stream),
    case("gpu/template", template),
    case("gpu/variable", variable),
    case("gpu/cooperative", cooperative),
    case("gpu/arguments", arguments),
    case("gpu/no_such_kernel", no_such_kernel),
    case("gpu/other_architecture", other_architecture),
    case("gpu/half_an_image", half_an_image),
    case("gpu/nvshmem_without_context", nvshmem_without_context),
    case("gpu/module_ends_after_its_kernels", module_ends_after_its_kernels),
];

/// Why no kernel can be launched here.
pub fn objection() -> Option<String> {
    phalanx_testkit::gpus::count().err().map(|why| format!("no GPU ({why})"))
}

const AXPY: &str = "extern \"C\" __global__ void axpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}";

const N: usize = 100_000;

fn gpu() -> (Arc<CudaContext>, Arc<CudaStream>) {
    phalanx_sys::cuda::DRIVER.open().map(std::mem::forget).unwrap();
    let gpu = CudaContext::new(0).unwrap();
    let stream = gpu.new_stream().unwrap();
    (gpu, stream)
}

fn kernel(gpu: &Arc<CudaContext>, program: &Program, name: &str) -> Kernel<'static> {
    Module::load(gpu, &program.compile_for(gpu).unwrap()).unwrap().kernel(name).unwrap()
}

fn one(threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (1, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

fn launch() {
    let (gpu, stream) = gpu();
    let axpy = kernel(&gpu, &Program::new("axpy.cu", AXPY), "axpy");
    let x = stream.clone_htod(&(0..N).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
    let mut y = stream.clone_htod(&vec![1.0f32; N]).unwrap();
    let config = LaunchConfig::for_num_elems(N as u32);
    for _ in 0..3 {
        let arguments = [value(&2.0f32), reads(&x), writes(&mut y), value(&(N as i32))];
        // SAFETY: the kernel's parameters; it stays within N elements.
        unsafe { axpy.launch(&stream, config, arguments).unwrap() };
    }
    let y = stream.clone_dtoh(&y).unwrap();
    stream.synchronize().unwrap();
    assert!(y.iter().enumerate().all(|(i, y)| *y == 1.0 + 6.0 * i as f32));
}

/// A kernel on another stream than the one that its buffers were written on, and are read on.
fn other_stream() {
    let (gpu, stream) = gpu();
    let other = gpu.new_stream().unwrap();
    let axpy = kernel(&gpu, &Program::new("axpy.cu", AXPY), "axpy");
    let config = LaunchConfig::for_num_elems(N as u32);
    let mut y = stream.alloc_zeros::<f32>(N).unwrap();
    for round in 1..=50 {
        let x = stream.clone_htod(&vec![round as f32; N]).unwrap();
        let arguments = [value(&1.0f32), reads(&x), writes(&mut y), value(&(N as i32))];
        // SAFETY: as above.
        unsafe { axpy.launch(&other, config, arguments).unwrap() };
    }
    let y = stream.clone_dtoh(&y).unwrap();
    stream.synchronize().unwrap();
    assert!(y.iter().all(|y| *y == 1275.0), "{:?}", &y[..4]);
}

fn template() {
    let (gpu, stream) = gpu();
    let scale = kernel(&gpu, &Program::new("scale.cu", SCALE).instantiate("scale<double>"), "scale<double>");
    let mut x = stream.clone_htod(&[1.0f64, 2.0, 3.0]).unwrap();
    // SAFETY: the kernel's parameters; it stays within 3 elements.
    unsafe { scale.launch(&stream, one(32), [writes(&mut x), value(&0.5f64), value(&3i32)]).unwrap() };
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [0.5, 1.0, 1.5]);
}

fn variable() {
    let (gpu, _) = gpu();
    let source =
        "extern \"C\" { __constant__ float weights[3]; __global__ void k(float* x) { x[0] = weights[1]; } }";
    let module = Module::load(&gpu, &Program::new("k.cu", source).compile_for(&gpu).unwrap()).unwrap();
    let (address, bytes) = module.global("weights").unwrap();
    assert!(address != 0 && bytes == 12);
    assert!(module.global("nothing").unwrap_err().to_string().contains("no variable \"nothing\""));
}

fn cooperative() {
    let (gpu, stream) = gpu();
    // The last block to come lets the others go.
    let source = "extern \"C\" __global__ void meet(unsigned* count) {
        if (threadIdx.x != 0) return;
        atomicAdd(count, 1);
        while (*(volatile unsigned*)count < gridDim.x) {}
    }";
    let meet = kernel(&gpu, &Program::new("meet.cu", source), "meet");
    let limit = meet.cooperative_blocks(1024, 0).unwrap();
    let mut count = stream.alloc_zeros::<u32>(1).unwrap();
    let mut config = LaunchConfig { grid_dim: (limit, 1, 1), ..one(1024) };
    // SAFETY: the kernel's parameter, a counter.
    unsafe { meet.launch_cooperative(&stream, config, [writes(&mut count)]).unwrap() };
    assert_eq!(stream.clone_dtoh(&count).unwrap(), [limit]);
    config.grid_dim.0 += 1;
    // SAFETY: as above; it is refused.
    let refused = unsafe { meet.launch_cooperative(&stream, config, [writes(&mut count)]) };
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("kernel meet") && text.contains(&format!("the limit is {limit}")), "{text}");
}

fn arguments() {
    let (gpu, stream) = gpu();
    let axpy = kernel(&gpu, &Program::new("axpy.cu", AXPY), "axpy");
    let x = stream.alloc_zeros::<f32>(1).unwrap();
    let mut host = [0.0f32];
    // SAFETY: they are refused, before anything is enqueued.
    let errors = unsafe {
        [
            axpy.launch(&stream, one(1), [value(&2.0f32), reads(&x)]),
            axpy.launch(&stream, one(1), [value(&2.0f64), reads(&x), reads(&x), value(&1i32)]),
            axpy.launch(&stream, one(1), [value(&2.0f32), reads(&x), writes(&mut host), value(&1i32)]),
        ]
    };
    for (error, part) in
        errors.into_iter().zip(["[4, 8]", "[8, 8, 8, 4]", "argument 2 is a buffer in host memory"])
    {
        let error = error.unwrap_err();
        assert!(
            matches!(&error, Error::Usage(usage) if matches!(**usage, UsageError::Kernel { .. })),
            "{error:?}"
        );
        assert!(error.to_string().contains(part), "{error}");
    }
}

fn no_such_kernel() {
    let (gpu, _) = gpu();
    let module = Module::load(&gpu, &Program::new("axpy.cu", AXPY).compile_for(&gpu).unwrap()).unwrap();
    let text = module.kernel("apxy").unwrap_err().to_string();
    assert!(text.contains("kernel apxy") && text.contains("it has axpy"), "{text}");
}

fn other_architecture() {
    let (gpu, _) = gpu();
    let (major, _) = gpu.compute_capability().unwrap();
    let other = if major == 8 { "sm_90" } else { "sm_80" };
    let error = Module::load(&gpu, &Program::new("axpy.cu", AXPY).compile(other).unwrap()).unwrap_err();
    assert!(error.to_string().contains("NO_BINARY_FOR_GPU"), "{error}");
}

/// The driver is told no length.
fn half_an_image() {
    let (gpu, _) = gpu();
    let image = Program::new("axpy.cu", AXPY).compile_for(&gpu).unwrap();
    let whole = image.as_bytes();
    for part in [&whole[..0], &whole[..64], &whole[..whole.len() - 1], &b"no code"[..]] {
        let error = Module::load(&gpu, &Image::from_bytes(part)).unwrap_err();
        let is_refused =
            matches!(&error, Error::Usage(usage) if matches!(**usage, UsageError::Kernel { .. }));
        assert!(is_refused, "{error:?}");
        assert!(error.to_string().contains(&format!("{} bytes", part.len())), "{error}");
    }
}

fn nvshmem_without_context() {
    let (gpu, _) = gpu();
    let source = "#include <nvshmem.h>\nextern \"C\" __global__ void k(int* x) { x[0] = nvshmem_my_pe(); }";
    let image = Program::new("k.cu", source).nvshmem().compile_for(&gpu).unwrap();
    let error = Module::load(&gpu, &image).unwrap_err().to_string();
    assert!(error.contains("nvshmem::Context::load"), "{error}");
}

fn module_ends_after_its_kernels() {
    let (gpu, stream) = gpu();
    let source = "extern \"C\" __global__ void slow(int* x) {
        for (int i = 0; i < 200; ++i) __nanosleep(1000000);
        x[0] = 7;
    }";
    let slow = kernel(&gpu, &Program::new("slow.cu", source), "slow");
    let mut x = stream.alloc_zeros::<i32>(1).unwrap();
    // SAFETY: the kernel's parameter.
    unsafe { slow.launch(&stream, one(1), [writes(&mut x)]).unwrap() };
    drop(slow);
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [7]);
}
