// Merging attention over different keys (attention.rs). A block has a row at a time.
#include "number.cuh"

template <class T, class A> static __device__ void merge(
    size_t rows, size_t size, const T* more, const f64* more_sums, A* output, f64* sums
) {
    each_row(rows, [&](size_t row) {
        const f64 greatest = fmax(sums[row], more_sums[row]);
        const f64 before = exp(sums[row] - greatest), after = exp(more_sums[row] - greatest);
        // Before the sum is replaced.
        __syncthreads();
        if (greatest == -1.0 / 0.0) return;
        each_column(size, [&](size_t i) {
            A* out = output + row * size + i;
            *out = down<A>((before * up<f64>(*out) + after * up<f64>(more[row * size + i])) / (before + after));
        });
        if (threadIdx.x == 0) sums[row] = greatest + log(before + after);
    });
}

#define OF_TWO(T, A) \
    KERNEL phalanx_train_merge_##T##_##A( \
        size_t rows, size_t size, const T* more, const f64* more_sums, A* output, f64* sums \
    ) { \
        merge(rows, size, more, more_sums, output, sums); \
    }
PAIRS(OF_TWO)
