// Sums of squares, in f64 and in an order that depends on the length and the grid alone.
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

#define OF_ONE(T) KERNEL phalanx_train_squares_##T(const T* from, f64* partial, size_t len) { squares(from, partial, len); }
EACH(OF_ONE)
