// Blocks that are copied between memory that this GPU reaches: a list in one launch, where a copy of its own for each block takes a
// microsecond or more to begin.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// In src/backend/nccl/gpu_window/list.rs.
struct Block {
    u8* to;
    const u8* from;
    u64 bytes;
};

constexpr u32 THREADS = 256;
// Loads of a thread that are under way: another GPU's memory is two microseconds away.
constexpr u32 UNITS = 4;
constexpr u64 PIECE = THREADS * UNITS * sizeof(uint4);

// Copies so many bytes, which are whole words.
template <class Word> __device__ __forceinline__ void copy_words(u8* to, const u8* from, u64 bytes) {
    Word* target = (Word*)to;
    const Word* source = (const Word*)from;
    const u64 words = bytes / sizeof(Word);
    for (u64 first = threadIdx.x; first < words; first += THREADS * UNITS) {
        Word v[UNITS];
#pragma unroll
        for (u32 u = 0; u < UNITS; u++)
            if (first + u * THREADS < words) v[u] = source[first + u * THREADS];
#pragma unroll
        for (u32 u = 0; u < UNITS; u++)
            if (first + u * THREADS < words) target[first + u * THREADS] = v[u];
    }
}

// Blocks go along x, pieces of a block along y.
extern "C" __global__ void __launch_bounds__(THREADS) phalanx_copy_blocks(const Block* blocks, u32 count) {
    for (u32 number = blockIdx.x; number < count; number += gridDim.x) {
        const Block block = blocks[number];
        const u64 alignment = (u64)block.to | (u64)block.from | block.bytes;
        for (u64 start = blockIdx.y * PIECE; start < block.bytes; start += gridDim.y * PIECE) {
            u8* to = block.to + start;
            const u8* from = block.from + start;
            const u64 bytes = block.bytes - start < PIECE ? block.bytes - start : PIECE;
            if (alignment % sizeof(uint4) == 0)
                copy_words<uint4>(to, from, bytes);
            else if (alignment % sizeof(u32) == 0)
                copy_words<u32>(to, from, bytes);
            else
                copy_words<u8>(to, from, bytes);
        }
    }
}
