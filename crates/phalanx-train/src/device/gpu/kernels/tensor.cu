// Parts of tensors, and cross-entropy (tensor/host.rs). A block has a row at a time.
#include "number.cuh"

template <class T> static __device__ void copy_rows(
    size_t count, size_t len, const T* from, size_t from_row, T* to, size_t to_row
) {
    each_row(count, [&](size_t row) {
        each_column(len, [&](size_t i) { to[row * to_row + i] = from[row * from_row + i]; });
    });
}

template <class T> static __device__ void greatest(size_t rows, size_t columns, const T* logits, f64* greatest) {
    each_row(rows, [&](size_t row) {
        f64 own = -1.0 / 0.0;
        each_column(columns, [&](size_t i) { own = fmax(own, up<f64>(logits[row * columns + i])); });
        own = block_greatest(own);
        if (threadIdx.x == 0) greatest[row] = own;
    });
}

// Three sums a row: of exponentials, of the target, of all.
template <class T> static __device__ void sums(
    size_t rows, size_t columns, const T* logits, const f64* greatest, const u32* targets, f64* sums
) {
    each_row(rows, [&](size_t row) {
        f64 exponentials = 0, all = 0;
        each_column(columns, [&](size_t i) {
            const f64 shifted = up<f64>(logits[row * columns + i]) - greatest[row];
            exponentials += exp(shifted);
            all += shifted;
        });
        exponentials = block_sum(exponentials);
        all = block_sum(all);
        if (threadIdx.x == 0) {
            const u32 target = targets[row];
            sums[3 * row] = exponentials;
            sums[3 * row + 1] = target == NONE ? 0.0 : up<f64>(logits[row * columns + target]) - greatest[row];
            sums[3 * row + 2] = all;
        }
    });
}

template <class T> static __device__ void gradient(
    size_t rows, size_t columns, T* logits, const f64* greatest, const f64* sums, const u32* targets, f64 uniform, f64 peak,
    const f64* factors
) {
    each_row(rows, [&](size_t row) {
        each_column(columns, [&](size_t i) {
            T* z = logits + row * columns + i;
            const f64 softmax = exp(up<f64>(*z) - greatest[row]) / sums[3 * row];
            *z = down<T>(factors[row] * (softmax - uniform - (targets[row] == i ? peak : 0.0)));
        });
    });
}

#define OF_ONE(T) \
    KERNEL phalanx_train_copy_rows_##T(size_t count, size_t len, const T* from, size_t from_row, T* to, size_t to_row) { \
        copy_rows(count, len, from, from_row, to, to_row); \
    } \
    KERNEL phalanx_train_greatest_##T(size_t rows, size_t columns, const T* logits, f64* to) { \
        greatest(rows, columns, logits, to); \
    } \
    KERNEL phalanx_train_sums_##T( \
        size_t rows, size_t columns, const T* logits, const f64* greatest, const u32* targets, f64* to \
    ) { \
        sums(rows, columns, logits, greatest, targets, to); \
    } \
    KERNEL phalanx_train_gradient_##T( \
        size_t rows, size_t columns, T* logits, const f64* greatest, const f64* sums, const u32* targets, f64 uniform, f64 peak, \
        const f64* factors \
    ) { \
        gradient(rows, columns, logits, greatest, sums, targets, uniform, peak, factors); \
    }
EACH(OF_ONE)
