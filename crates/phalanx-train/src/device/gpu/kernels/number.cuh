// Numbers of f32, f64, f16 and bf16, and what all kernels of phalanx-train have in common. Conversions are those of
// `Number` (device/mod.rs) to the bit. Compile without fused multiply-add.
#pragma once
#include "element.cuh"  // of phalanx

typedef float f32;
typedef double f64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

constexpr u32 THREADS = 256;  // of a block, in every kernel

// What numbers are computed with: f64 for f64, else f32.
template <class A, class B = f32> struct Real { typedef f32 Type; };
template <class B> struct Real<f64, B> { typedef f64 Type; };
template <class A> struct Real<A, f64> { typedef f64 Type; };
template <> struct Real<f64, f64> { typedef f64 Type; };

template <class R> static __device__ __forceinline__ R up(f32 x) { return (R)x; }
template <class R> static __device__ __forceinline__ R up(f64 x) { return (R)x; }
template <class R> static __device__ __forceinline__ R up(f16 x) { return (R)widen_f16(x.bits); }
template <class R> static __device__ __forceinline__ R up(bf16 x) { return (R)widen_bf16(x.bits); }

// To f32, with the last bit set if anything is lost: rounding the result once more is then rounding once.
static __device__ __forceinline__ f32 to_odd(f64 x) {
    const f32 cut = __double2float_rz(x);
    return (f64)cut == x || x != x ? cut : float_of(bits_of(cut) | 1);
}

static __device__ __forceinline__ u64 bits_of(f64 x) { return (u64)__double_as_longlong(x); }
static __device__ __forceinline__ u64 bits_of(f16 x) { return x.bits; }
static __device__ __forceinline__ u64 bits_of(bf16 x) { return x.bits; }

template <class T> struct Down;
template <> struct Down<f32> {
    static __device__ __forceinline__ f32 of(f32 x) { return x; }
    static __device__ __forceinline__ f32 of(f64 x) { return (f32)x; }
};
template <> struct Down<f64> {
    static __device__ __forceinline__ f64 of(f64 x) { return x; }
};
template <> struct Down<f16> {
    static __device__ __forceinline__ f16 of(f32 x) { return f16{(u16)narrow_f16(x)}; }
    static __device__ __forceinline__ f16 of(f64 x) { return of(to_odd(x)); }
};
template <> struct Down<bf16> {
    static __device__ __forceinline__ bf16 of(f32 x) { return bf16{(u16)narrow_bf16(x)}; }
    static __device__ __forceinline__ bf16 of(f64 x) { return of(to_odd(x)); }
};
template <class T, class R> static __device__ __forceinline__ T down(R x) { return Down<T>::of(x); }

// Four neighbouring elements, which a thread loads and stores at once where the address allows it.
template <class T> struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) Four { T at[4]; };

template <class T> static __device__ __forceinline__ bool is_whole(const T* at, size_t i, size_t len) {
    return i + 4 <= len && (size_t)(at + i) % alignof(Four<T>) == 0;
}

template <class T> static __device__ __forceinline__ Four<T> load(const T* from, size_t i, size_t len) {
    if (is_whole(from, i, len)) return *(const Four<T>*)(from + i);
    Four<T> four = {};
    for (u32 k = 0; k < 4; k++)
        if (i + k < len) four.at[k] = from[i + k];
    return four;
}

template <class T> static __device__ __forceinline__ void store(T* to, size_t i, size_t len, const Four<T>& four) {
    if (is_whole(to, i, len)) {
        *(Four<T>*)(to + i) = four;
        return;
    }
    for (u32 k = 0; k < 4; k++)
        if (i + k < len) to[i + k] = four.at[k];
}

// Calls `body` with the first of each four elements that are this thread's.
template <class F> static __device__ __forceinline__ void each_four(size_t len, F body) {
    const size_t step = (size_t)gridDim.x * THREADS * 4;
    for (size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * 4; i < len; i += step) body(i);
}

// The sum over the block's threads, in a fixed order, for all of them.
template <class S> static __device__ __forceinline__ S block_sum(S own) {
    __shared__ S sums[THREADS];
    __syncthreads();
    sums[threadIdx.x] = own;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

// The greatest of the block's threads, for all of them.
static __device__ __forceinline__ f64 block_greatest(f64 own) {
    __shared__ f64 greatest[THREADS];
    __syncthreads();
    greatest[threadIdx.x] = own;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) greatest[threadIdx.x] = fmax(greatest[threadIdx.x], greatest[threadIdx.x + half]);
    }
    __syncthreads();
    return greatest[0];
}

// Calls `body` with each row that is this block's.
template <class F> static __device__ __forceinline__ void each_row(size_t rows, F body) {
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) body(row);
}

// Calls `body` with each column that is this thread's.
template <class F> static __device__ __forceinline__ void each_column(size_t columns, F body) {
    for (size_t column = threadIdx.x; column < columns; column += THREADS) body(column);
}

constexpr u32 NONE = 0xffffffff;  // no row, and no target

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define EACH(X) X(f32) X(f64) X(f16) X(bf16)
// Of all pairs of types.
#define PAIRS(X) OF_EACH(X, f32) OF_EACH(X, f64) OF_EACH(X, f16) OF_EACH(X, bf16)
#define OF_EACH(X, A) X(A, f32) X(A, f64) X(A, f16) X(A, bf16)
