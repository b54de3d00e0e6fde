// Numbers as bytes (compress/host.rs). `fp8` says whether they are floating-point numbers (E4M3), else they are integers.
#include "number.cuh"

static __device__ __forceinline__ u8 code(u32 fp8, f32 x) {
    if (fp8) return (u8)E4m3::narrow(x);
    return x != x ? 0 : (u8)(signed char)fminf(fmaxf(rintf(x), -127.0f), 127.0f);
}

static __device__ __forceinline__ f32 number(u32 fp8, u8 code) {
    return fp8 ? E4m3::widen(code) : (f32)(signed char)code;
}

// A block has a block of numbers at a time.
template <class T> static __device__ void quantize(u32 fp8, size_t blocks, size_t block, const T* from, u8* bytes, f32* scales) {
    each_row(blocks, [&](size_t row) {
        f64 most = 0;
        bool is_finite = true;
        each_column(block, [&](size_t i) {
            const f32 x = fabsf(up<f32>(from[row * block + i]));
            is_finite = is_finite && x <= 3.402823466e38f;
            most = fmax(most, (f64)x);
        });
        const bool all_finite = __syncthreads_and(is_finite);
        most = block_greatest(most);
        const f32 scale = all_finite ? (f32)most / (fp8 ? 448.0f : 127.0f) : float_of(0x7fc00000);
        const f64 inverse = scale > 0 ? 1.0 / (f64)scale : 0.0;
        if (threadIdx.x == 0) scales[row] = scale;
        each_column(block, [&](size_t i) {
            bytes[row * block + i] = code(fp8, (f32)(up<f64>(from[row * block + i]) * inverse));
        });
    });
}

// Those of several ranks, one behind the other.
template <class T> static __device__ void sum_quantized(
    u32 fp8, size_t ranks, size_t len, size_t block, f64 factor, const u8* bytes, const f32* scales, T* to
) {
    for (size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x; at < len; at += (size_t)gridDim.x * THREADS) {
        f32 sum = -0.0f;
        for (size_t i = at; i < ranks * len; i += len) sum += scales[i / block] * number(fp8, bytes[i]);
        to[at] = down<T>(factor * (f64)sum);
    }
}

#define OF_ONE(T) \
    KERNEL phalanx_train_quantize_##T(u32 fp8, size_t blocks, size_t block, const T* from, u8* bytes, f32* scales) { \
        quantize(fp8, blocks, block, from, bytes, scales); \
    } \
    KERNEL phalanx_train_sum_quantized_##T( \
        u32 fp8, size_t ranks, size_t len, size_t block, f64 factor, const u8* bytes, const f32* scales, T* to \
    ) { \
        sum_quantized(fp8, ranks, len, block, factor, bytes, scales, to); \
    }
EACH(OF_ONE)
