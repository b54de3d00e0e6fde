// One step of a 5-point stencil on a grid whose rows are shared out among the PEs.
#include <nvshmem.h>
#include <nvshmemx.h>

__device__ void relax(const float* from, float* to, size_t row, size_t width) {
    for (size_t x = threadIdx.x + 1; x + 1 < width; x += blockDim.x) {
        size_t i = row * width + x;
        to[i] = 0.25f * (from[i - width] + from[i + width] + from[i - 1] + from[i + 1]);
    }
}

__device__ void wait_for(uint64_t* signal, uint64_t step) {
    if (threadIdx.x == 0) {
        nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, step);
    }
    __syncthreads();
}

// Both grids have `rows` rows of this PE, and one above and one below them: the neighbours' or the edge. Block 0
// has the first row and the PE above, block 1 the last one and the PE below, all others the rows between.
//
// A neighbour sends its row of step s when it has read ours of step s - 1, so with two grids nothing is overwritten
// that is still needed.
extern "C" __global__ void halo(
    const float* from, float* to, uint64_t* arrived, size_t rows, size_t width, int above, int below, uint64_t step) {
    if (blockIdx.x > 1) {
        for (size_t row = blockIdx.x; row < rows; row += gridDim.x - 2) {
            relax(from, to, row, width);
        }
        return;
    }
    bool top = blockIdx.x == 0;
    int neighbour = top ? above : below;
    size_t row = top ? 1 : rows;
    if (neighbour >= 0) {
        // Its row of the step before; the first ones are there from the beginning.
        wait_for(arrived + (top ? 0 : 1), step);
    }
    relax(from, to, row, width);
    __syncthreads();
    if (neighbour >= 0) {
        // Our first row is the last but one more of the PE above; and the other way round.
        float* there = to + (top ? rows + 1 : 0) * width;
        nvshmemx_float_put_signal_nbi_block(
            there, to + row * width, width, arrived + (top ? 1 : 0), step + 1, NVSHMEM_SIGNAL_SET, neighbour);
    }
}
