// Sums of squares, in f64 and in an order that depends on the length and the grid alone; and checksums.
#include "number.cuh"

template <class T> static __device__ void squares(const T* from, f64* partial, size_t len) {
    f64 sum = 0;
    each_four(len, [&](size_t i) {
        const Four<T> x = load(from, i, len);
        for (u32 k = 0; k < 4; k++) sum += up<f64>(x.at[k]) * up<f64>(x.at[k]);
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block: adds the sums of `squares` to `to`.
KERNEL phalanx_train_add_sums(const f64* partial, f64* to, size_t len) {
    f64 sum = 0;
    for (size_t i = threadIdx.x; i < len; i += THREADS) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) to[0] += sum;
}

// A number's bits and its place, mixed (norm.rs).
static __device__ __forceinline__ u64 mix(u64 word, u64 at) {
    u64 x = word + (at + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// Adds the sum of all to `to`. It wraps, so any order gives the same.
template <class T> static __device__ void checksum(const T* from, u64* to, size_t len) {
    u64 sum = 0;
    each_four(len, [&](size_t i) {
        const Four<T> x = load(from, i, len);
        for (u32 k = 0; k < 4; k++)
            if (i + k < len) sum += mix(bits_of(x.at[k]), i + k);
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) atomicAdd(to, sum);
}

#define OF_ONE(T) \
    KERNEL phalanx_train_squares_##T(const T* from, f64* partial, size_t len) { squares(from, partial, len); } \
    KERNEL phalanx_train_checksum_##T(const T* from, u64* to, size_t len) { checksum(from, to, len); }
EACH(OF_ONE)
