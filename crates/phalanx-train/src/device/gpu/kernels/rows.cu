// Rows of a matrix, of which a list says which (expert/rows.rs). A block has a row at a time.
#include "number.cuh"

// Without factors, a copy.
template <class T> static __device__ void gather_rows(
    size_t count, size_t width, const u32* rows, const f64* factors, const T* from, T* to
) {
    each_row(count, [&](size_t row) {
        each_column(width, [&](size_t i) {
            const T x = from[rows[row] * width + i];
            to[row * width + i] = factors ? down<T>(factors[row] * up<f64>(x)) : x;
        });
    });
}

template <class T> static __device__ void sum_rows(
    size_t count, size_t width, size_t of_each, const u32* rows, const f64* factors, const T* from, T* to
) {
    typedef typename Real<T>::Type R;
    each_row(count, [&](size_t row) {
        each_column(width, [&](size_t i) {
            R sum = 0;
            for (size_t part = row * of_each; part < (row + 1) * of_each; part++)
                if (rows[part] != NONE)
                    sum = sum + (factors ? (R)factors[part] : (R)1) * up<R>(from[rows[part] * width + i]);
            to[row * width + i] = down<T>(sum);
        });
    });
}

template <class T> static __device__ void dot_rows(
    size_t count, size_t width, const u32* a_rows, const T* a, const u32* b_rows, const T* b, f64* to
) {
    each_row(count, [&](size_t row) {
        const size_t a_row = a_rows[row], b_row = b_rows[row];
        f64 sum = 0;
        if (a_row != NONE && b_row != NONE)
            each_column(width, [&](size_t i) { sum += up<f64>(a[a_row * width + i]) * up<f64>(b[b_row * width + i]); });
        sum = block_sum(sum);
        if (threadIdx.x == 0) to[row] = sum;
    });
}

#define OF_ONE(T) \
    KERNEL phalanx_train_gather_rows_##T( \
        size_t count, size_t width, const u32* rows, const f64* factors, const T* from, T* to \
    ) { \
        gather_rows(count, width, rows, factors, from, to); \
    } \
    KERNEL phalanx_train_sum_rows_##T( \
        size_t count, size_t width, size_t of_each, const u32* rows, const f64* factors, const T* from, T* to \
    ) { \
        sum_rows(count, width, of_each, rows, factors, from, to); \
    } \
    KERNEL phalanx_train_dot_rows_##T( \
        size_t count, size_t width, const u32* a_rows, const T* a, const u32* b_rows, const T* b, f64* to \
    ) { \
        dot_rows(count, width, a_rows, a, b_rows, b, to); \
    }
EACH(OF_ONE)
