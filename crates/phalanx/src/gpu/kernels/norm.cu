// What follows a row-parallel layer, in one kernel: the ranks' partial results are summed, the residual is added, and each row is
// normalised by its root mean square. Compiled once for each element type (-D ELEMENT=Bf16 -D TYPE=bf16).
//
// A block takes rows blockIdx.x, blockIdx.x + gridDim.x, ... A warp has of each row the steps warp, warp + warps, ...: at most STEPS.
#include "element.cuh"

// `NormArguments` in src/gpu/kernels/norm.rs.
struct NormArguments {
    Inbox* inboxes[MAX_RANKS];  // of this rank, in the peers' memory
    Inbox* own;                 // of the peers, in this rank's memory
    const u32* abort;           // not 0: give up
    const u8* input;            // rows of this rank's contribution
    u8* residual;               // rows to which the sum is added
    const u8* weight;           // one row
    u8* output;
    float* scales;              // of quantised rows, one each
    u32 rank, ranks;
    u32 rows, hidden;
    float epsilon;
    u32 format;
};
enum Format : u32 { AS_INPUT, F8E4M3_ROWS, I8_ROWS };

constexpr u32 MAX_WARPS = 18;
constexpr u32 MAX_STEPS = 2;  // of a row, for a warp
// What the squares are summed in, so that the order of the sum depends on the row's length alone: the 480 bytes of a line.
constexpr u32 LINES = 2;
constexpr u32 MAX_LINES = MAX_WARPS * MAX_STEPS * LINES;

typedef Ll128 P;
constexpr u32 EACH = 4;  // elements in eight bytes

// Two elements in a word, as numbers and back: rounded as element.cuh rounds them, but for the bits of NaN.
template <class T> struct Two;
template <> struct Two<Bf16> {
    static __device__ __forceinline__ float low(u32 word) { return float_of(word << 16); }
    static __device__ __forceinline__ float high(u32 word) { return float_of(word & 0xffff0000); }
    static __device__ __forceinline__ u32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
        u32 word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
#else
        return (narrow_bf16(low) & 0xffff) | narrow_bf16(high) << 16;
#endif
    }
};
template <> struct Two<F16> {
    static __device__ __forceinline__ float low(u32 word) { return widen_f16(word & 0xffff); }
    static __device__ __forceinline__ float high(u32 word) { return widen_f16(word >> 16); }
    static __device__ __forceinline__ u32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
#else
        return narrow_f16(low) | narrow_f16(high) << 16;
#endif
    }
};

static __device__ __forceinline__ void unpack(u64 unit, float (&x)[EACH]) {
    const u32 first = (u32)unit, second = (u32)(unit >> 32);
    x[0] = Two<ELEMENT>::low(first), x[1] = Two<ELEMENT>::high(first);
    x[2] = Two<ELEMENT>::low(second), x[3] = Two<ELEMENT>::high(second);
}

static __device__ __forceinline__ u64 pack(const float (&x)[EACH]) {
    return Two<ELEMENT>::pack(x[0], x[1]) | (u64)Two<ELEMENT>::pack(x[2], x[3]) << 32;
}

static __device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) x += __shfl_xor_sync(ALL, x, d);
    return x;
}

static __device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, d));
    return x;
}

// Four elements of a quantised row, by the reciprocal of its scale.
template <u32 FORMAT> static __device__ __forceinline__ u32 quantise(const float (&y)[EACH], float reciprocal) {
    float x[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; i++) x[i] = y[i] * reciprocal;
#if __CUDA_ARCH__ >= 890
    if (FORMAT == F8E4M3_ROWS) {
        u16 first, second;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(first) : "f"(x[1]), "f"(x[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(second) : "f"(x[3]), "f"(x[2]));
        return first | (u32)second << 16;
    }
#endif
    u32 bits = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        const int whole = min(max(__float2int_rn(x[i]), -127), 127);
        bits |= (FORMAT == F8E4M3_ROWS ? E4m3::narrow(x[i]) : (u32)whole & 0xff) << 8 * i;
    }
    return bits;
}

static __device__ __forceinline__ void store_quantised(u8* to, u32 bits) {
    if (((u64)to & 3) == 0) {
        *(u32*)to = bits;
    } else {
        for (u32 i = 0; i < 4; i++) to[i] = (u8)(bits >> 8 * i);
    }
}

template <u32 STEPS, bool SUMS> struct Rows {
    const NormArguments& a;
    Lane<P> lane;
    u32 warp, warps, thread;
    u32 bytes, steps;  // of a row: its length, and its steps for this warp
    u32 row;           // how many rows this block has had
    float values[STEPS][P::UNITS][EACH];

    __device__ __forceinline__ Rows(const NormArguments& a)
        : a(a), warp(threadIdx.x / 32), warps(blockDim.x / 32), thread(threadIdx.x % 32), row(0) {
        bytes = a.hidden * ELEMENT::SIZE;
        const u32 all = (bytes + P::BYTES - 1) / P::BYTES;
        steps = warp >= all ? 0 : (all - warp + warps - 1) / warps;
        if (!SUMS) return;
        const bool is_peer = thread < a.ranks && thread != a.rank;
        Inbox* own = a.own + (thread < a.rank ? thread : thread - 1);
        lane.begin(is_peer ? a.inboxes[thread % MAX_RANKS] : nullptr, own, blockIdx.x * warps + warp, a.abort);
    }

    __device__ __forceinline__ u32 start(u32 k) const { return (k * warps + warp) * P::BYTES; }

    __device__ __forceinline__ void load(u64 (&v)[STEPS][P::UNITS], const u8* rows, u32 number) const {
        const u8* from = rows + (u64)number * bytes;
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) load_step<P>(v[k], from + start(k), (long long)bytes - start(k));
    }

    // Sends every peer the block's row with this number.
    __device__ __forceinline__ void send(const u64 (&v)[STEPS][P::UNITS], u32 number) {
        u32 to = a.rank;
#pragma unroll 1
        for (u32 d = 1; d < a.ranks; d++) {
            to = to + 1 == a.ranks ? 0 : to + 1;
#pragma unroll
            for (u32 k = 0; k < STEPS; k++)
                if (k < steps) lane.send(a.inboxes[to], to, v[k], number * steps + k + 1);
        }
    }

    // Sums the ranks' contributions to step k, in rank order.
    __device__ __forceinline__ bool sum(u32 k, const u64 (&mine)[P::UNITS], u64 (&v)[P::UNITS]) {
        constexpr u32 G = P::AT_ONCE;
        float all[P::UNITS][EACH] = {};
#pragma unroll 1
        for (u32 first = 0; first < a.ranks; first += G) {
            u32 senders = 0;
#pragma unroll
            for (u32 g = 0; g < G; g++)
                if (first + g < a.ranks && first + g != a.rank) senders |= 1 << g;
            u64 theirs[G][P::UNITS];
            if (!lane.template receive_from<G>(a.own, a.rank, first, senders, theirs, row * steps + k + 1)) return false;
#pragma unroll
            for (u32 g = 0; g < G; g++) {
                if (first + g >= a.ranks) break;
#pragma unroll
                for (u32 u = 0; u < P::UNITS; u++) {
                    float x[EACH];
                    unpack(first + g == a.rank ? mine[u] : theirs[g][u], x);
#pragma unroll
                    for (u32 i = 0; i < EACH; i++) all[u][i] = first + g == 0 ? x[i] : all[u][i] + x[i];
                }
            }
        }
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) v[u] = pack(all[u]);
        return true;
    }

    // The peers have sent their rows with number `row`, so they have emptied those before: all but the last where a row is sent
    // before the one before it is received.
    __device__ __forceinline__ void learn() {
        const u32 behind = STEPS == 1 ? 1 : 0;
        const u32 emptied = row > behind ? (row - behind) * steps : 0;
        if (lane.peer && steps > 0) lane.learn(thread, emptied);
    }

    // Adds the residual to step k, writes it back, and keeps the values. Returns the sum of a line's squares.
    __device__ __forceinline__ void add(u32 k, const u64 (&v)[P::UNITS], u64 (&residual)[P::UNITS], float (&squares)[LINES]) {
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) {
            float sum[EACH], before[EACH];
            unpack(v[u], sum), unpack(residual[u], before);
#pragma unroll
            for (u32 i = 0; i < EACH; i++) sum[i] += before[i];
            residual[u] = pack(sum);
            // A line's last eight bytes are its flag.
            unpack(P::has(u, thread) ? residual[u] : 0, values[k][u]);
#pragma unroll
            for (u32 i = 0; i < EACH; i++) squares[u / 2] += values[k][u][i] * values[k][u][i];
        }
    }

    __device__ __forceinline__ void store(const float (&y)[STEPS][P::UNITS][EACH], u32 number) const {
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) {
            u64 v[P::UNITS];
#pragma unroll
            for (u32 u = 0; u < P::UNITS; u++) v[u] = pack(y[k][u]);
            store_step<P>(v, a.output + (u64)number * bytes + start(k), (long long)bytes - start(k));
        }
    }

    template <u32 FORMAT>
    __device__ __forceinline__ void store_scaled(const float (&y)[STEPS][P::UNITS][EACH], u32 number, float reciprocal) const {
        u8* to = a.output + (u64)number * a.hidden;
#pragma unroll
        for (u32 k = 0; k < STEPS; k++)
#pragma unroll
            for (u32 u = 0; u < P::UNITS; u++) {
                const u32 place = start(k) + P::base(thread) + P::offset(u);
                if (P::has(u, thread) && place < bytes)
                    store_quantised(to + place / ELEMENT::SIZE, quantise<FORMAT>(y[k][u], reciprocal));
            }
    }
};

template <u32 STEPS, bool SUMS> static __device__ void normalise(const NormArguments& a) {
    __shared__ float squares[2][MAX_LINES], largest[2][MAX_WARPS];
    Rows<STEPS, SUMS> rows(a);
    u64 weight[STEPS][P::UNITS], next[STEPS][P::UNITS];
    rows.load(next, a.input, blockIdx.x);
    if (SUMS) rows.send(next, 0);
    rows.load(weight, a.weight, 0);
    const u32 lines = (rows.bytes + P::BYTES - 1) / P::BYTES * LINES;
#pragma unroll 1
    for (u32 number = blockIdx.x; number < a.rows; number += gridDim.x, rows.row++) {
        u64 mine[STEPS][P::UNITS], residual[STEPS][P::UNITS];
#pragma unroll
        for (u32 k = 0; k < STEPS; k++)
#pragma unroll
            for (u32 u = 0; u < P::UNITS; u++) mine[k][u] = next[k][u];
        const u32 following = number + gridDim.x;
        rows.load(residual, a.residual, number);
        if (following < a.rows) {
            rows.load(next, a.input, following);
            // With more steps than one, a lane has no slots for two rows.
            if (SUMS && STEPS == 1) rows.send(next, rows.row + 1);
        }
        const u32 turn = rows.row % 2;
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) {
            if (k >= rows.steps) break;
            u64 v[P::UNITS];
#pragma unroll
            for (u32 u = 0; u < P::UNITS; u++) v[u] = mine[k][u];
            if (SUMS && !rows.sum(k, mine[k], v)) return;
            float of_lines[LINES] = {};
            rows.add(k, v, residual[k], of_lines);
            u8* to = a.residual + (u64)number * rows.bytes + rows.start(k);
            store_step<P>(residual[k], to, (long long)rows.bytes - rows.start(k));
#pragma unroll
            for (u32 l = 0; l < LINES; l++) {
                const float sum = sum_of_warp(of_lines[l]);
                if (rows.thread == 0) squares[turn][(k * rows.warps + rows.warp) * LINES + l] = sum;
            }
        }
        if (SUMS) rows.learn();
        if (SUMS && STEPS > 1 && following < a.rows) rows.send(next, rows.row + 1);
        if (SUMS && rows.lane.aborted) return;
        __syncthreads();
        float all = 0;
#pragma unroll 1
        for (u32 l = rows.thread; l < lines; l += 32) all += squares[turn][l];
        const float scale = 1.0f / sqrtf(sum_of_warp(all) / (float)a.hidden + a.epsilon);
        float y[STEPS][P::UNITS][EACH];
#pragma unroll
        for (u32 k = 0; k < STEPS; k++)
#pragma unroll
            for (u32 u = 0; u < P::UNITS; u++) {
                float by[EACH];
                unpack(weight[k][u], by);
#pragma unroll
                for (u32 i = 0; i < EACH; i++) y[k][u][i] = k < rows.steps ? rows.values[k][u][i] * scale * by[i] : 0;
            }
        if (a.format == AS_INPUT) {
            rows.store(y, number);
            continue;
        }
        float most = 0;
#pragma unroll
        for (u32 k = 0; k < STEPS; k++)
#pragma unroll
            for (u32 u = 0; u < P::UNITS; u++)
#pragma unroll
                for (u32 i = 0; i < EACH; i++) most = fmaxf(most, fabsf(y[k][u][i]));
        most = largest_of_warp(most);
        if (rows.thread == 0) largest[turn][rows.warp] = most;
        __syncthreads();
        most = largest_of_warp(rows.thread < rows.warps ? largest[turn][rows.thread] : 0);
        const float unit = most == 0 ? 1.0f : most / (a.format == F8E4M3_ROWS ? 448.0f : 127.0f);
        if (threadIdx.x == 0) a.scales[number] = unit;
        if (a.format == F8E4M3_ROWS)
            rows.template store_scaled<F8E4M3_ROWS>(y, number, 1.0f / unit);
        else
            rows.template store_scaled<I8_ROWS>(y, number, 1.0f / unit);
    }
    if (SUMS) rows.lane.end(rows.row * rows.steps, rows.row * rows.steps);
}

#define NAMED(name, type) phalanx_##name##_##type
#define NAME(name, type) NAMED(name, type)
#define KERNEL(name, SUMS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS) NAME(name, TYPE)(const __grid_constant__ NormArguments a) { \
        come_after();                                                                                              \
        if (a.hidden * ELEMENT::SIZE <= blockDim.x / 32 * P::BYTES)                                                \
            normalise<1, SUMS>(a);                                                                                 \
        else                                                                                                       \
            normalise<MAX_STEPS, SUMS>(a);                                                                         \
    }
KERNEL(all_reduce_norm, true)
KERNEL(norm, false)
