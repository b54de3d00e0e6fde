// Mixture of experts on the GPUs of a host: tokens to the experts that a router chose (dispatch), and back (combine).
//
// Every rank has scratch that its peers write to. A rank's dispatch pushes each token once to every rank that has one of its
// experts. With it go words that say which experts, and the token's place among the sender's tokens for each of them. The receiver
// knows from the senders' counts where a sender's rows begin, and copies the token to a row of each expert. Combine pushes the rows
// back to a slot of each choice, and the token's rank adds them up in the order of its choices.
//
// Data and flag arrive together, as in fifo.cuh. The flag is the number of the dispatch. Nobody waits before it writes:
//   - A dispatch waits for the counts of all ranks. So all have begun it when it is over, and have ended the one before: what a peer
//     reads in dispatch n is in one of two halves of the scratch, by the lowest bit of n.
//   - A combine follows its dispatch. All ranks have then begun that dispatch, and have ended the combine before.
#include "element.cuh"

constexpr u32 WARPS = 8;  // of a block
constexpr u32 MAX_EXPERTS = 1024;
constexpr u32 NO_ROW = ALL;
constexpr u32 BIT_WORDS = 4096;
constexpr u32 AT_ONCE = 4;  // choices whose rows the registers hold

// `Arguments` in src/backend/nccl/direct/experts.rs. Of a dispatch, `input` are the tokens and `output` the experts' rows; of a
// combine the other way round.
struct Arguments {
    u8* scratch[MAX_RANKS];  // of each rank, its own too
    const u32* abort;        // not 0: give up
    const u8* input;
    const u8* scales;   // of each token
    const u8* routing;  // the numbers of each token's experts
    const float* weights;
    u8* output;
    u8* row_scales;
    u32* counts;  // rows of each local expert
    // Where in the scratch these are: words from each rank, and slots for its tokens, in two halves; slots for the rows of each choice; and
    // what only the rank itself uses.
    u64 words, slots, returns, own;
    u32 rank, ranks;
    u32 experts;  // of each rank
    u32 max_tokens, top_k;
    u32 tokens;  // of this call
    u32 row_bytes, scale_bytes;
    u32 index_bytes;  // of an expert's number
};

static __device__ __forceinline__ u32 thread_of_warp() { return threadIdx.x % 32; }
static __device__ __forceinline__ u32 warp_of_grid() { return blockIdx.x * WARPS + threadIdx.x / 32; }
template <class P> static __device__ __forceinline__ u32 steps_of(u32 bytes) { return (bytes + P::BYTES - 1) / P::BYTES; }

// What only the rank itself uses of its scratch.
struct Own {
    u64 calls[128];         // dispatches so far, of each block
    u32 tokens[MAX_RANKS];  // of each rank, in the last dispatch
    int places[1];          // of each choice: the place of the token's first choice of that expert; -1 if it counts as not routed

    // Of each rank's choices: its row among all local experts' rows; -1 if it went elsewhere.
    __device__ __forceinline__ int* rows(const Arguments& a, u32 rank) {
        return places + (u64)(rank + 1) * a.max_tokens * a.top_k;
    }
};
// SLOT and NUMBERS in src/backend/nccl/direct/experts.rs.
static_assert(Ll::SLOT == 1024 && Ll128::SLOT == 1024 && sizeof(Own) == 1096);
static __device__ __forceinline__ Own* own_of(const Arguments& a) { return (Own*)(a.scratch[a.rank] + a.own); }

// The words of a dispatch from `from` to `to`: the number of tokens, of rows for each expert, and for each choice the expert and the place
// among its rows.
static __device__ __forceinline__ u64* words_of(const Arguments& a, u32 to, u32 from, u64 call) {
    const u64 count = 1 + a.experts + a.max_tokens * a.top_k;
    return (u64*)(a.scratch[to] + a.words) + ((call & 1) * a.ranks + from) * count;
}

// The slot of a token's step, from `from` to `to`.
template <class P>
static __device__ __forceinline__ u8* slot_of(const Arguments& a, u32 to, u32 from, u64 call, u32 token, u32 step, u32 steps) {
    const u64 sender = (call & 1) * (a.ranks - 1) + (from < to ? from : from - 1);
    return a.scratch[to] + a.slots + ((sender * a.max_tokens + token) * steps + step) * P::SLOT + thread_of_warp() * 16;
}

// The slot of a step of what a choice's expert gives back to `to`.
template <class P>
static __device__ __forceinline__ u8* return_of(const Arguments& a, u32 to, u32 choice, u32 step, u32 steps) {
    return a.scratch[to] + a.returns + ((u64)choice * steps + step) * P::SLOT + thread_of_warp() * 16;
}

static __device__ __forceinline__ void put(u8* slot, const u64 (&v)[Ll::UNITS], u64 call, Ll*) {
    const u64 flag = (u64)(u32)call << 32;
#pragma unroll
    for (u32 u = 0; u < Ll::UNITS; u++) store16(slot + u * 512, (u32)v[u] | flag, v[u] >> 32 | flag);
}

static __device__ __forceinline__ void put(u8* slot, const u64 (&v)[Ll128::UNITS], u64 call, Ll128*) {
#pragma unroll
    for (u32 u = 0; u < Ll128::UNITS; u += 2) store16(slot + u * 256, v[u], thread_of_warp() % 8 == 7 ? call : v[u + 1]);
}

static __device__ __forceinline__ bool get(const u8* slot, u64 (&v)[Ll::UNITS], u64 call, Ll*) {
    bool there = true;
#pragma unroll
    for (u32 u = 0; u < Ll::UNITS; u++) {
        u64 low, high;
        load16(slot + u * 512, low, high);
        there &= low >> 32 == (u32)call && high >> 32 == (u32)call;
        v[u] = (u32)low | high << 32;
    }
    return there;
}

static __device__ __forceinline__ bool get(const u8* slot, u64 (&v)[Ll128::UNITS], u64 call, Ll128*) {
    bool there = true;
#pragma unroll
    for (u32 u = 0; u < Ll128::UNITS; u += 2) load16(slot + u * 256, v[u], v[u + 1]);
#pragma unroll
    for (u32 u = 0; u < Ll128::UNITS; u += 2) there &= thread_of_warp() % 8 != 7 || v[u + 1] == call;
    return there;
}

static __device__ __forceinline__ void put_word(u64* to, u32 value, u64 call) {
    store8_volatile(to, value | (u64)(u32)call << 32);
}

// Counts polls, and looks at the abort word between them.
struct Wait {
    const u32* abort;
    u32 polls;
    __device__ __forceinline__ Wait(const Arguments& a) : abort(a.abort), polls(0) {}
    __device__ __forceinline__ bool is_over() { return ++polls % POLLS == 0 && *(volatile const u32*)abort != 0; }
};

// A word that a rank has put; false if the call is aborted. Threads wait each for their own.
static __device__ __forceinline__ bool get_word(const Arguments& a, const u64* from, u64 call, u32& value) {
    Wait wait(a);
    while (true) {
        const u64 word = load8_volatile(from);
        value = (u32)word;
        if (word >> 32 == (u32)call) return true;
        if (wait.is_over()) return false;
    }
}

// The expert of a choice; -1 if there is no such expert. Of a number of 8 bytes, the upper half is 0.
static __device__ __forceinline__ int expert_of(const Arguments& a, u32 choice) {
    const u32* const number = (const u32*)a.routing + choice * (a.index_bytes / 4);
    const u32 low = number[0], high = a.index_bytes == 8 ? number[1] : 0;
    return high == 0 && low < a.experts * a.ranks ? (int)low : -1;
}

// Tells every rank how many tokens this one has, how many rows for each expert, and each choice's place among its expert's rows. By
// one block. It has a bit for each expert and token of a window: a place is the number of bits before.
static __device__ void tell(const Arguments& a, u64 call) {
    __shared__ u32 bits[BIT_WORDS];  // by 32 tokens, and then by expert
    __shared__ u32 rows[MAX_EXPERTS];  // of the windows before
    const u32 all = a.experts * a.ranks, window = BIT_WORDS / all * 32;
    for (u32 e = threadIdx.x; e < all; e += blockDim.x) rows[e] = 0;
    for (u32 start = 0;; start += window) {
        const u32 count = min(window, a.tokens - start), words = (count + 31) / 32;
        for (u32 i = threadIdx.x; i < words * all; i += blockDim.x) bits[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < count * a.top_k; i += blockDim.x) {
            const int expert = expert_of(a, start * a.top_k + i);
            const u32 token = i / a.top_k;
            if (expert >= 0) atomicOr(&bits[token / 32 * all + expert], 1u << token % 32);
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < count * a.top_k; i += blockDim.x) {
            const u32 choice = start * a.top_k + i, token = i / a.top_k, k = i % a.top_k;
            const int expert = expert_of(a, choice);
            u32 first = k;  // of the token's choices with this expert
#pragma unroll 4
            for (u32 j = 0; j < k; j++)
                if (expert_of(a, choice - k + j) == expert) first = min(first, j);
            u32 place = expert >= 0 ? rows[expert] + __popc(bits[token / 32 * all + expert] & (1u << token % 32) - 1) : 0;
            for (u32 w = 0; expert >= 0 && w < token / 32; w++) place += __popc(bits[w * all + expert]);
            own_of(a)->places[choice] = expert >= 0 ? (int)first : -1;
            for (u32 to = 0; to < a.ranks; to++) {
                const bool goes = expert >= 0 && first == k && expert / a.experts == to;
                const u32 word = goes ? expert % a.experts << 16 | place : NO_ROW;
                put_word(words_of(a, to, a.rank, call) + 1 + a.experts + choice, word, call);
            }
        }
        const bool is_last = a.tokens - start <= window;
        if (!is_last) __syncthreads();
        for (u32 e = threadIdx.x; e < all; e += blockDim.x) {
            u32 sum = rows[e];
            for (u32 w = 0; w < words; w++) sum += __popc(bits[w * all + e]);
            if (is_last)
                put_word(words_of(a, e / a.experts, a.rank, call) + 1 + e % a.experts, sum, call);
            else
                rows[e] = sum;
        }
        if (is_last) break;
        __syncthreads();
    }
    for (u32 to = threadIdx.x; to < a.ranks; to += blockDim.x) put_word(words_of(a, to, a.rank, call), a.tokens, call);
}

// Reads a step of a token or of a row, whose steps are followed by those of its scales.
template <class P>
static __device__ __forceinline__ void load_part(const Arguments& a, u64 (&v)[P::UNITS], u32 number, u32 step, u32 steps) {
    const bool is_scale = step >= steps;
    const u32 bytes = is_scale ? a.scale_bytes : a.row_bytes, start = (is_scale ? step - steps : step) * P::BYTES;
    load_step<P>(v, (is_scale ? a.scales : a.input) + (u64)number * bytes + start, (long long)bytes - start);
}

template <class P>
static __device__ __forceinline__ void store_part(const Arguments& a, const u64 (&v)[P::UNITS], u32 number, u32 step, u32 steps) {
    const bool is_scale = step >= steps;
    const u32 bytes = is_scale ? a.scale_bytes : a.row_bytes, start = (is_scale ? step - steps : step) * P::BYTES;
    store_step<P>(v, (is_scale ? a.row_scales : a.output) + (u64)number * bytes + start, (long long)bytes - start);
}

// Pushes a step of a token to every other rank that has one of its experts.
template <class P>
static __device__ __forceinline__ void push(const Arguments& a, u64 call, u32 token, u32 step, u32 steps, u32 all_steps) {
    const u32 thread = thread_of_warp();
    u64 v[P::UNITS];
    load_part<P>(a, v, token, step, steps);
    const int expert = thread < a.top_k ? expert_of(a, token * a.top_k + thread) : -1;
    const u32 goes_to = expert < 0 ? a.rank : expert / a.experts;
    u32 to = a.rank;
#pragma unroll 1
    for (u32 d = 1; d < a.ranks; d++) {
        if (++to == a.ranks) to = 0;
        if (__any_sync(ALL, goes_to == to)) put(slot_of<P>(a, to, a.rank, call, token, step, all_steps), v, call, (P*)nullptr);
    }
}

// The slots of the choices in `wanted`, read at once: one after another, each would take a third of a microsecond. False if the call is aborted.
template <class P, u32 G>
static __device__ __forceinline__ bool get_all(const Arguments& a, u8* const (&slots)[G], u32 wanted, u64 (&v)[G][P::UNITS], u64 call) {
    Wait wait(a);
    while (true) {
        bool there = true;
#pragma unroll
        for (u32 g = 0; g < G; g++)
            if (wanted >> g & 1) there &= get(slots[g], v[g], call, (P*)nullptr);
        if (__all_sync(ALL, there)) return true;
        if (__any_sync(ALL, wait.is_over())) return false;
    }
}

// Hears from all ranks how many rows the experts here have, and how many tokens the ranks; false if the call is aborted. By one block.
static __device__ bool hear_counts(const Arguments& a, u64 call) {
    __shared__ u32 rows[MAX_EXPERTS];
    for (u32 e = threadIdx.x; e < a.experts; e += blockDim.x) rows[e] = 0;
    __syncthreads();
    bool aborted = false;
    for (u32 i = threadIdx.x; i < a.ranks * (1 + a.experts); i += blockDim.x) {
        const u32 from = i / (1 + a.experts), at = i % (1 + a.experts);
        u32 value = 0;
        aborted |= !get_word(a, words_of(a, a.rank, from, call) + at, call, value);
        if (at == 0)
            own_of(a)->tokens[from] = value;
        else
            atomicAdd(&rows[at - 1], value);
    }
    if (__syncthreads_or(aborted)) return false;
    for (u32 e = threadIdx.x; e < a.experts; e += blockDim.x) a.counts[e] = rows[e];
    return true;
}

// The largest of a warp's numbers.
static __device__ __forceinline__ u32 largest(u32 value) {
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2) value = max(value, __shfl_xor_sync(ALL, value, d));
    return value;
}

// Copies a step of a sender's token to a row of each of its experts here, if it has this token; false if the call is aborted. All
// that has to arrive is read at once.
template <class P>
static __device__ __forceinline__ bool take(const Arguments& a, u64 call, u32 from, u32 token, u32 step, u32 steps, u32 all_steps) {
    const u32 thread = thread_of_warp();
    const bool is_own = from == a.rank, fits = a.experts <= 32;
    const u64* const words = words_of(a, a.rank, from, call);
    u64 v[P::UNITS], word = 0;
    u32 before = 0;  // rows of the ranks before, for local expert `thread`
    u32 here = 0;
    if (is_own) {
        if (token >= a.tokens) return true;
        load_part<P>(a, v, token, step, steps);
    }
    Wait wait(a);
    while (true) {
        const u64 told = load8_volatile(words);
        if (thread < a.top_k) word = load8_volatile(words + 1 + a.experts + token * a.top_k + thread);
        bool there = is_own || get(slot_of<P>(a, a.rank, from, call, token, step, all_steps), v, call, (P*)nullptr);
        before = 0;
        if (fits && thread < a.experts) {
#pragma unroll 4
            for (u32 rank = 0; rank < from; rank++) {
                const u64 count = load8_volatile(words_of(a, a.rank, rank, call) + 1 + thread);
                there &= count >> 32 == (u32)call;
                before += (u32)count;
            }
        }
        if (__all_sync(ALL, told >> 32 == (u32)call)) {
            if (token >= (u32)told) return true;
            if (__all_sync(ALL, thread >= a.top_k || word >> 32 == (u32)call)) {
                here = __ballot_sync(ALL, thread < a.top_k && (u32)word != NO_ROW);
                if (here == 0 || __all_sync(ALL, there)) break;
            }
        }
        if (__any_sync(ALL, wait.is_over())) return false;
    }
    const bool is_here = here >> thread & 1;
    const u32 expert = is_here ? (u32)word >> 16 : 0;
    u32 first = __shfl_sync(ALL, before, expert % 32);
    bool aborted = false;
    if (!fits && is_here) {
        first = 0;
        for (u32 rank = 0; rank < from; rank++) {
            u32 count = 0;
            aborted |= !get_word(a, words_of(a, a.rank, rank, call) + 1 + expert, call, count);
            first += count;
        }
    }
    if (__any_sync(ALL, aborted)) return false;
    const u32 row = is_here ? expert * a.ranks * a.max_tokens + first + ((u32)word & 0xffff) : NO_ROW;
    if (step == 0 && thread < a.top_k) own_of(a)->rows(a, from)[token * a.top_k + thread] = (int)row;
#pragma unroll 1
    for (; here != 0; here &= here - 1) store_part<P>(a, v, __shfl_sync(ALL, row, __ffs(here) - 1), step, steps);
    return true;
}

template <class P> static __device__ void dispatch(const Arguments& a) {
    Own* const own = own_of(a);
    const u64 call = own->calls[blockIdx.x] + 1;
    const u32 steps = steps_of<P>(a.row_bytes), all_steps = steps + steps_of<P>(a.scale_bytes);
    const u32 warps = gridDim.x * WARPS;
    bool aborted = false;
    if (blockIdx.x == gridDim.x - 1) {
        tell(a, call);
        aborted = !hear_counts(a, call);
    } else {
        for (u32 i = warp_of_grid(); i < a.tokens * all_steps; i += warps - WARPS)
            push<P>(a, call, i / all_steps, i % all_steps, steps, all_steps);
    }
    u32 all = a.ranks * a.max_tokens * all_steps;
    for (u32 i = warp_of_grid(); i < all && !aborted; i += warps) {
        const u32 step = i % all_steps, part = i / all_steps;
        u32 from = a.rank + part % a.ranks;
        if (from >= a.ranks) from -= a.ranks;
        aborted = !take<P>(a, call, from, part / a.ranks, step, steps, all_steps);
        if (i == warp_of_grid() && i + warps < all && !aborted) {
            // How many tokens there are at most is known by now.
            u32 tokens = 0;
            const u32 thread = thread_of_warp();
            if (thread < a.ranks) aborted = !get_word(a, words_of(a, a.rank, thread, call), call, tokens);
            aborted = __any_sync(ALL, aborted);
            all = a.ranks * largest(tokens) * all_steps;
        }
    }
    // All warps of the block have read the number.
    if (!__syncthreads_or(aborted) && threadIdx.x == 0) own->calls[blockIdx.x] = call;
}

// Pushes a step of a token's rows here back to its rank. A thread has the row of its choice.
template <class P>
static __device__ __forceinline__ void give_back(const Arguments& a, u64 call, int row, u32 to, u32 token, u32 step, u32 steps) {
    u32 here = __ballot_sync(ALL, row >= 0);
#pragma unroll 1
    while (here != 0) {
        u64 v[AT_ONCE][P::UNITS];
        u32 rest = here;
#pragma unroll
        for (u32 g = 0; g < AT_ONCE; g++, rest &= rest - 1)
            if (rest != 0) load_part<P>(a, v[g], __shfl_sync(ALL, row, __ffs(rest) - 1), step, steps);
#pragma unroll
        for (u32 g = 0; g < AT_ONCE; g++, here &= here - 1)
            if (here != 0) put(return_of<P>(a, to, token * a.top_k + __ffs(here) - 1, step, steps), v[g], call, (P*)nullptr);
    }
}

// What a thread knows of its choice of a token.
struct Choice {
    int place, row;
    float weight;

    __device__ __forceinline__ void load(const Arguments& a, u32 token) {
        place = row = -1, weight = 0;
        const u32 thread = thread_of_warp(), choice = token * a.top_k + thread;
        if (token < a.tokens && thread < a.top_k) {
            place = own_of(a)->places[choice];
            row = own_of(a)->rows(a, a.rank)[choice];
            weight = a.weights[choice];
        }
    }
};

// Adds up a step of what a token's experts have made of it, in the order of its choices; false if the call is aborted.
template <class P>
static __device__ __forceinline__ bool add_up(const Arguments& a, u64 call, const Choice& own, u32 token, u32 step, u32 steps) {
    // Of an expert that was chosen twice there is one row.
    const int row = __shfl_sync(ALL, own.row, own.place < 0 ? 0 : own.place);
    float sum[P::UNITS][4] = {};
#pragma unroll 1
    for (u32 k = 0; k < a.top_k; k += AT_ONCE) {
        u64 v[AT_ONCE][P::UNITS];
        u8* slots[AT_ONCE];
        u32 wanted = 0, there = 0;
#pragma unroll
        for (u32 g = 0; g < AT_ONCE; g++) {
            // Threads from top_k on have no choice: their place is -1.
            const int from = __shfl_sync(ALL, own.place, (k + g) % 32), here = __shfl_sync(ALL, row, (k + g) % 32);
            slots[g] = return_of<P>(a, a.rank, token * a.top_k + (from < 0 ? 0 : from), step, steps);
            if (from < 0) continue;
            there |= 1u << g;
            if (here >= 0)
                load_part<P>(a, v[g], here, step, steps);
            else
                wanted |= 1u << g;
        }
        if (!get_all<P, AT_ONCE>(a, slots, wanted, v, call)) return false;
#pragma unroll
        for (u32 g = 0; g < AT_ONCE; g++) {
            const float factor = __shfl_sync(ALL, own.weight, (k + g) % 32);
            if ((there >> g & 1) == 0) continue;
#pragma unroll
            for (u32 u = 0; u < P::UNITS; u++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) sum[u][i] += factor * widen_bf16((u32)(v[g][u] >> 16 * i) & 0xffff);
        }
    }
    u64 v[P::UNITS];
#pragma unroll
    for (u32 u = 0; u < P::UNITS; u++) {
        v[u] = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[u] |= Bf16::down(sum[u][i]) << 16 * i;
    }
    store_part<P>(a, v, token, step, steps);
    return true;
}

template <class P> static __device__ void combine_rows(const Arguments& a) {
    Own* const own = own_of(a);
    const u64 call = own->calls[0];
    const u32 thread = thread_of_warp(), warps = gridDim.x * WARPS, peers = a.ranks - 1, steps = steps_of<P>(a.row_bytes);
    const u32 tokens = thread < a.ranks ? own->tokens[thread] : 0;
    // What is needed first is on its way before anything is waited for.
    Choice next;
    next.load(a, warp_of_grid() / steps);
    u32 all = peers * a.max_tokens * steps;
    for (u32 i = warp_of_grid(); i < all; i += warps) {
        const u32 step = i % steps, part = i / steps, token = part / peers;
        u32 to = a.rank + 1 + part % peers;
        if (to >= a.ranks) to -= a.ranks;
        const int row = thread < a.top_k ? own->rows(a, to)[token * a.top_k + thread] : -1;
        if (token < __shfl_sync(ALL, tokens, to)) give_back<P>(a, call, row, to, token, step, steps);
        all = peers * largest(tokens) * steps;
    }
    for (u32 i = warp_of_grid(); i < a.tokens * steps; i += warps) {
        Choice choice = next;
        next.load(a, (i + warps) / steps);
        if (i / steps >= __shfl_sync(ALL, tokens, a.rank)) choice.place = -1;
        if (!add_up<P>(a, call, choice, i / steps, i % steps, steps)) return;
    }
}

#define KERNEL(name, P, body)                                           \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)         \
    phalanx_##name(const __grid_constant__ Arguments a) {               \
        come_after();                                                   \
        body<P>(a);                                                     \
    }
KERNEL(expert_dispatch_ll, Ll, dispatch)
KERNEL(expert_dispatch_ll128, Ll128, dispatch)
KERNEL(expert_combine_ll, Ll, combine_rows)
KERNEL(expert_combine_ll128, Ll128, combine_rows)
