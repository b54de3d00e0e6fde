#include <phalanx.cuh>

using Warp = phalanx::Warp<phalanx::PROTOCOL>;

static __device__ float gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678f)); }

// out = gelu(sum of all ranks' `partial` + bias): `n` values, of which `columns` are a row. Every rank gets the same bits, since all add in the
// order of the ranks.
extern "C" __global__ void sum_bias_gelu(const __grid_constant__ phalanx::Peers peers, const float* partial, const float* bias, float* out,
                                         long long n, int columns) {
    const unsigned lane = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lanes = gridDim.x * blockDim.x / 32;
    Warp warp(peers, lane);
    const long long bytes = n * (long long)sizeof(float);
    for (long long start = (long long)lane * Warp::BYTES; start < bytes; start += (long long)lanes * Warp::BYTES) {
        union Step {
            phalanx::u64 words[Warp::UNITS];
            float values[Warp::UNITS][2];
        } mine, theirs, sum = {};
        Warp::load(mine.words, (const char*)partial + start, bytes - start);
        for (unsigned rank = 0; rank < peers.ranks; rank++)
            if (rank != peers.rank && !warp.send(rank, mine.words)) return;
        for (unsigned rank = 0; rank < peers.ranks; rank++) {
            if (rank == peers.rank)
                theirs = mine;
            else if (!warp.receive(rank, theirs.words))
                return;
            for (unsigned unit = 0; unit < Warp::UNITS; unit++)
                for (unsigned i = 0; i < 2; i++) sum.values[unit][i] += theirs.values[unit][i];
        }
        for (unsigned unit = 0; unit < Warp::UNITS; unit++)
            for (unsigned i = 0; i < 2; i++) {
                const long long at = (start + Warp::place(unit)) / (long long)sizeof(float) + i;
                if (Warp::has(unit) && at < n) sum.values[unit][i] = gelu(sum.values[unit][i] + bias[at % columns]);
            }
        Warp::store(sum.words, (char*)out + start, bytes - start);
    }
}
