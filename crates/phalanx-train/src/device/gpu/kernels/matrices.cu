// What matrices need beside products (tensor/host.rs, optimizer/host.rs, compress/host.rs).
#include "number.cuh"

template <class T> static __device__ void add_to_rows(size_t rows, size_t columns, const T* bias, T* to) {
    each_row(rows, [&](size_t row) {
        each_column(columns, [&](size_t i) {
            T* x = to + row * columns + i;
            *x = down<T>(up<f64>(*x) + up<f64>(bias[i]));
        });
    });
}

// A thread has a column, and adds its rows in order.
template <class T> static __device__ void sum_of_rows(size_t rows, size_t columns, const T* from, T* to) {
    typedef typename Real<T>::Type R;
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < columns; i += step) {
        R sum = up<R>(to[i]);
        for (size_t row = 0; row < rows; row++) sum = sum + up<R>(from[row * columns + i]);
        to[i] = down<T>(sum);
    }
}

// By the root of a sum of squares, and epsilon.
template <class T> static __device__ void divide_by_norm(const f64* squares, f64 epsilon, T* data, size_t len) {
    typedef typename Real<T>::Type R;
    const R norm = (R)__dsqrt_rn(squares[0]) + (R)epsilon;
    each_four(len, [&](size_t i) {
        Four<T> x = load(data, i, len);
        for (u32 k = 0; k < 4; k++) x.at[k] = down<T>(up<R>(x.at[k]) / norm);
        store(data, i, len, x);
    });
}

// One block. A thread has the same rows throughout, so it needs nothing of the others but sums.
template <class T> static __device__ void orthonormalize(size_t rows, size_t rank, T* thin, f64* work) {
    const auto dot = [&](size_t a, size_t b) {
        f64 sum = 0;
        each_column(rows, [&](size_t row) { sum += work[row * rank + a] * work[row * rank + b]; });
        return block_sum(sum);
    };
    each_column(rows, [&](size_t row) {
        for (size_t k = 0; k < rank; k++) work[row * rank + k] = up<f64>(thin[row * rank + k]);
    });
    for (size_t k = 0; k < rank; k++) {
        const f64 before = __dsqrt_rn(dot(k, k));
        for (size_t other = 0; other < k; other++) {
            const f64 part = dot(other, k);
            each_column(rows, [&](size_t row) { work[row * rank + k] -= part * work[row * rank + other]; });
        }
        const f64 norm = __dsqrt_rn(dot(k, k));
        // What is left of a column that the others span is rounding.
        const f64 factor = norm > before * 1e-6 ? 1.0 / norm : 0.0;
        each_column(rows, [&](size_t row) { work[row * rank + k] *= factor; });
    }
    each_column(rows, [&](size_t row) {
        for (size_t k = 0; k < rank; k++) thin[row * rank + k] = down<T>(work[row * rank + k]);
    });
}

#define OF_ONE(T) \
    KERNEL phalanx_train_add_to_rows_##T(size_t rows, size_t columns, const T* bias, T* to) { \
        add_to_rows(rows, columns, bias, to); \
    } \
    KERNEL phalanx_train_sum_of_rows_##T(size_t rows, size_t columns, const T* from, T* to) { \
        sum_of_rows(rows, columns, from, to); \
    } \
    KERNEL phalanx_train_divide_by_norm_##T(const f64* squares, f64 epsilon, T* data, size_t len) { \
        divide_by_norm(squares, epsilon, data, len); \
    } \
    KERNEL phalanx_train_orthonormalize_##T(size_t rows, size_t rank, T* thin, f64* work) { \
        orthonormalize(rows, rank, thin, work); \
    }
EACH(OF_ONE)
