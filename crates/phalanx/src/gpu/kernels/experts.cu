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

// The expert of a choice; -1 if there is no such expert.
static __device__ __forceinline__ int expert_of(const Arguments& a, u32 choice) {
    const long long expert = a.index_bytes == 8 ? ((const long long*)a.routing)[choice] : ((const int*)a.routing)[choice];
    return expert >= 0 && expert < (long long)a.experts * a.ranks ? (int)expert : -1;
}

// Tells every rank how many tokens this one has, and how many rows for each expert. By one block.
static __device__ void tell_counts(const Arguments& a, u64 call) {
    __shared__ u32 rows[MAX_EXPERTS];
    const u32 all = a.experts * a.ranks;
    for (u32 e = threadIdx.x; e < all; e += blockDim.x) rows[e] = 0;
    __syncthreads();
    for (u32 token = threadIdx.x; token < a.tokens; token += blockDim.x)
        for (u32 k = 0; k < a.top_k; k++) {
            const int expert = expert_of(a, token * a.top_k + k);
            bool counts = expert >= 0;
            for (u32 before = 0; before < k; before++) counts &= expert_of(a, token * a.top_k + before) != expert;
            if (counts) atomicAdd(&rows[expert], 1);
        }
    __syncthreads();
    for (u32 e = threadIdx.x; e < all; e += blockDim.x)
        put_word(words_of(a, e / a.experts, a.rank, call) + 1 + e % a.experts, rows[e], call);
    for (u32 to = threadIdx.x; to < a.ranks; to += blockDim.x) put_word(words_of(a, to, a.rank, call), a.tokens, call);
}

// Tells every rank the places of a token among its experts' rows. By one warp, whose threads have a choice each.
static __device__ void tell_places(const Arguments& a, u64 call, u32 token) {
    const u32 thread = thread_of_warp();
    const int expert = thread < a.top_k ? expert_of(a, token * a.top_k + thread) : -1;
    const u32 first = __ffs(__match_any_sync(ALL, expert)) - 1;
    u32 place = 0;
    for (u32 start = 0; start < token; start += 32) {
        u32 hits = 0;  // which of the experts the token `start + thread` has, too
        for (u32 j = 0; j < a.top_k; j++) {
            const int other = start + thread < token ? expert_of(a, (start + thread) * a.top_k + j) : -2;
            for (u32 k = 0; k < a.top_k; k++) hits |= (u32)(__shfl_sync(ALL, expert, k) == other) << k;
        }
        for (u32 k = 0; k < a.top_k; k++) {
            const u32 before = __popc(__ballot_sync(ALL, hits >> k & 1));
            if (thread == k) place += before;
        }
    }
    if (thread >= a.top_k) return;
    const u32 choice = token * a.top_k + thread;
    const bool is_first = expert >= 0 && first == thread;
    own_of(a)->places[choice] = expert >= 0 ? (int)first : -1;
    for (u32 to = 0; to < a.ranks; to++) {
        const bool goes = is_first && expert / a.experts == to;
        put_word(words_of(a, to, a.rank, call) + 1 + a.experts + choice, goes ? expert % a.experts << 16 | place : NO_ROW, call);
    }
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

// What a block of the receiver knows of all senders.
struct Senders {
    u32 first_rows[MAX_EXPERTS];  // of each sender and local expert: where the sender's rows begin among the expert's
    u32 tokens[MAX_RANKS];
};

// Waits for the counts of all ranks; false if the call is aborted.
static __device__ bool hear_counts(const Arguments& a, u64 call, Senders& senders) {
    bool aborted = false;
    for (u32 i = threadIdx.x; i < a.ranks * (1 + a.experts); i += blockDim.x) {
        const u32 from = i / (1 + a.experts), at = i % (1 + a.experts);
        u32* const to = at == 0 ? &senders.tokens[from] : &senders.first_rows[from * a.experts + at - 1];
        aborted |= !get_word(a, words_of(a, a.rank, from, call) + at, call, *to);
    }
    if (__syncthreads_or(aborted)) return false;
    for (u32 e = threadIdx.x; e < a.experts; e += blockDim.x) {
        u32 rows = 0;
        for (u32 from = 0; from < a.ranks; from++) {
            u32& first = senders.first_rows[from * a.experts + e];
            const u32 count = first;
            first = rows;
            rows += count;
        }
        if (blockIdx.x == 0) a.counts[e] = rows;
    }
    if (blockIdx.x == 0 && threadIdx.x < a.ranks) own_of(a)->tokens[threadIdx.x] = senders.tokens[threadIdx.x];
    __syncthreads();
    return true;
}

// Copies a step of a sender's token to a row of each of its experts here; false if the call is aborted.
template <class P>
static __device__ __forceinline__ bool take(
    const Arguments& a, u64 call, const Senders& senders, u32 from, u32 token, u32 step, u32 steps, u32 all_steps) {
    const u32 thread = thread_of_warp();
    u32 word = NO_ROW;
    const u64* const words = words_of(a, a.rank, from, call) + 1 + a.experts + token * a.top_k;
    if (__any_sync(ALL, thread < a.top_k && !get_word(a, words + thread, call, word))) return false;
    const u32 expert = word >> 16, place = word & 0xffff;
    const bool is_here = word != NO_ROW;
    const u32 row = is_here ? expert * a.ranks * a.max_tokens + senders.first_rows[from * a.experts + expert] + place : NO_ROW;
    if (step == 0 && thread < a.top_k) own_of(a)->rows(a, from)[token * a.top_k + thread] = (int)row;
    u32 here = __ballot_sync(ALL, is_here);
    if (here == 0) return true;
    u64 v[1][P::UNITS];
    if (from == a.rank) {
        load_part<P>(a, v[0], token, step, steps);
    } else {
        u8* const slots[1] = {slot_of<P>(a, a.rank, from, call, token, step, all_steps)};
        if (!get_all<P, 1>(a, slots, 1, v, call)) return false;
    }
#pragma unroll 1
    for (; here != 0; here &= here - 1) store_part<P>(a, v[0], __shfl_sync(ALL, row, __ffs(here) - 1), step, steps);
    return true;
}

template <class P> static __device__ void dispatch(const Arguments& a) {
    __shared__ Senders senders;
    Own* const own = own_of(a);
    const u64 call = own->calls[blockIdx.x] + 1;
    const u32 steps = steps_of<P>(a.row_bytes), all_steps = steps + steps_of<P>(a.scale_bytes);
    const u32 warps = gridDim.x * WARPS, pushers = warps - WARPS;
    if (blockIdx.x == gridDim.x - 1) {
        tell_counts(a, call);
    } else {
        // First the places, which all steps of a token need.
        for (u32 i = warp_of_grid(); i < a.tokens * (1 + all_steps); i += pushers) {
            const u32 part = i - a.tokens;
            if (i < a.tokens)
                tell_places(a, call, i);
            else
                push<P>(a, call, part / all_steps, part % all_steps, steps, all_steps);
            __syncwarp();
        }
    }
    bool aborted = !hear_counts(a, call, senders);
    u32 most = 0;
    for (u32 from = 0; from < a.ranks && !aborted; from++) most = max(most, senders.tokens[from]);
    for (u32 i = warp_of_grid(); i < a.ranks * most * all_steps && !aborted; i += warps) {
        const u32 step = i % all_steps, part = i / all_steps;
        const u32 from = (a.rank + part % a.ranks) % a.ranks, token = part / a.ranks;
        if (token < senders.tokens[from]) aborted = !take<P>(a, call, senders, from, token, step, steps, all_steps);
    }
    // All warps of the block have read the number.
    if (!__syncthreads_or(aborted) && threadIdx.x == 0) own->calls[blockIdx.x] = call;
}

// Pushes a step of the rows that a rank's token has here back to that rank.
template <class P> static __device__ __forceinline__ void give_back(const Arguments& a, u64 call, u32 to, u32 token, u32 step, u32 steps) {
    const u32 thread = thread_of_warp();
    const int row = thread < a.top_k ? own_of(a)->rows(a, to)[token * a.top_k + thread] : -1;
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

// Adds up a step of what a token's experts have made of it, in the order of its choices; false if the call is aborted.
template <class P> static __device__ __forceinline__ bool add_up(const Arguments& a, u64 call, u32 token, u32 step, u32 steps) {
    const u32 thread = thread_of_warp(), choice = token * a.top_k + thread;
    const bool was_sent = thread < a.top_k && token < own_of(a)->tokens[a.rank];
    const int place = was_sent ? own_of(a)->places[choice] : -1;
    const int row = place >= 0 ? own_of(a)->rows(a, a.rank)[token * a.top_k + place] : -1;
    const float weight = place >= 0 ? a.weights[choice] : 0;
    float sum[P::UNITS][4] = {};
#pragma unroll 1
    for (u32 k = 0; k < a.top_k; k += AT_ONCE) {
        u64 v[AT_ONCE][P::UNITS];
        u8* slots[AT_ONCE];
        u32 wanted = 0, there = 0;
#pragma unroll
        for (u32 g = 0; g < AT_ONCE; g++) {
            // Threads from top_k on have no choice: their place is -1.
            const int from = __shfl_sync(ALL, place, (k + g) % 32), here = __shfl_sync(ALL, row, (k + g) % 32);
            slots[g] = return_of<P>(a, a.rank, token * a.top_k + (from < 0 ? 0 : from), step, steps);
            there |= (u32)(from >= 0) << g;
            if (here >= 0)
                load_part<P>(a, v[g], here, step, steps);
            else
                wanted |= (u32)(from >= 0) << g;
        }
        if (!get_all<P, AT_ONCE>(a, slots, wanted, v, call)) return false;
#pragma unroll
        for (u32 g = 0; g < AT_ONCE; g++) {
            const float factor = __shfl_sync(ALL, weight, (k + g) % 32);
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
    const u32 steps = steps_of<P>(a.row_bytes), warps = gridDim.x * WARPS, peers = a.ranks - 1;
    u32 most = 0;
    for (u32 from = 0; from < a.ranks; from++) most = max(most, own->tokens[from]);
    for (u32 i = warp_of_grid(); i < peers * most * steps; i += warps) {
        const u32 step = i % steps, part = i / steps;
        const u32 to = (a.rank + 1 + part % peers) % a.ranks, token = part / peers;
        if (token < own->tokens[to]) give_back<P>(a, call, to, token, step, steps);
    }
    for (u32 i = warp_of_grid(); i < a.tokens * steps; i += warps)
        if (!add_up<P>(a, call, i / steps, i % steps, steps)) return;
}

#define KERNEL(name, P, body)                                           \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)         \
    phalanx_##name(const __grid_constant__ Arguments a) { body<P>(a); }
KERNEL(expert_dispatch_ll, Ll, dispatch)
KERNEL(expert_dispatch_ll128, Ll128, dispatch)
KERNEL(expert_combine_ll, Ll, combine_rows)
KERNEL(expert_combine_ll128, Ll128, combine_rows)
