// "Compute, then put" in two steps and in one.
#include <nvshmem.h>
#include <nvshmemx.h>

// GELU, by its usual approximation: work for each element, as between two layers of a network.
__device__ float4 gelu(float4 x) {
    auto one = [](float x) { return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); };
    return make_float4(one(x.x), one(x.y), one(x.z), one(x.w));
}

// The first of two steps: the result stays here, and the host enqueues a put of it.
extern "C" __global__ void compute(const float4* input, float4* result, size_t quads) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < quads; i += (size_t)gridDim.x * blockDim.x) {
        result[i] = gelu(input[i]);
    }
}

// Both steps in one: what is computed is stored in the peer's memory. Each block then adds 1 to the peer's signal.
extern "C" __global__ void compute_and_put(
    const float4* input, float4* inbox, uint64_t* arrived, size_t quads, int peer) {
    float4* there = (float4*)nvshmem_ptr(inbox, peer);
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < quads; i += (size_t)gridDim.x * blockDim.x) {
        there[i] = gelu(input[i]);
    }
    // What all threads of the block have stored is there before the signal.
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        nvshmemx_signal_op(arrived, 1, NVSHMEM_SIGNAL_ADD, peer);
    }
}
