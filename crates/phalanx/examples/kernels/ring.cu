// An all-gather in one kernel: pieces travel around the ring of PEs, and the host does not take part.
#include <nvshmem.h>
#include <nvshmemx.h>

// `all` has `count` elements for each PE; this PE's own are there already. Each block carries its share of every
// piece, and has a signal for each step. Blocks wait for those of other PEs: the launch has to be cooperative.
extern "C" __global__ void ring(float* all, uint64_t* arrived, size_t count) {
    int me = nvshmem_my_pe(), pes = nvshmem_n_pes(), right = (me + 1) % pes;
    size_t share = (count + gridDim.x - 1) / gridDim.x;
    size_t from = min(share * blockIdx.x, count);
    size_t length = min(share, count - from);
    for (int step = 0; step < pes - 1; ++step) {
        // What arrived in the step before goes on to the right.
        int piece = (me - step + pes) % pes;
        float* part = all + piece * count + from;
        uint64_t* signal = arrived + blockIdx.x * pes + step;
        nvshmemx_float_put_signal_nbi_block(part, part, length, signal, 1, NVSHMEM_SIGNAL_SET, right);
        if (threadIdx.x == 0) {
            nvshmem_signal_wait_until(signal, NVSHMEM_CMP_EQ, 1);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        nvshmem_quiet();
    }
}
