// FIFOs between GPUs that write to each other's memory. The flag travels with the data, so no fence is needed.
//
// A *pair* is a sender and a receiver. Each pair has lanes, and a lane is a FIFO of DEPTH slots that one warp of the
// sender fills and one warp of the receiver, with the same number, empties. The slots are in the receiver's memory. Steps of a
// lane are numbered from 1 for as long as the communicator lives; a slot holds the step's number beside its data, and whoever
// reads it polls until it finds that number.
//
// A sender may fill the slot of step n when the receiver has emptied step n - DEPTH. It knows that from a *credit*: the number
// of steps that the receiver has emptied, which the receiver writes into the sender's memory when a call begins and, in long
// calls of one direction, while it reads.
//
// Messages and collectives use the same FIFOs, and their flags differ in one bit (MESSAGE): a rank that is at a message does not take a
// collective's data for it, and waits until the deadline.
//
// Two protocols say how data and flags share a slot:
//   LL     16 bytes: 4 of data, 4 of flag, 4 of data, 4 of flag. Needs that 8 bytes arrive whole, which holds everywhere.
//   LL128  lines of 128 bytes, 120 of data and 8 of flag. Needs that a line arrives whole, which holds over NVLink.
// Both are NCCL's.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 MAX_RANKS = 16;
constexpr u32 DEPTH = 4;
constexpr u32 ALL = 0xffffffff;
// Of a flag: the step is one of a message.
constexpr u64 MESSAGE = (u64)1 << 63;
// Polls between two looks at the abort word, which is in the host's memory.
constexpr u32 POLLS = 1 << 12;

struct Ll {
    static constexpr u32 LANES = 128;
    static constexpr u32 UNITS = 2;                  // pieces of 8 bytes that a thread has of a step
    static constexpr u32 BYTES = UNITS * 32 * 8;     // of data in a step
    static constexpr u32 SLOT = 2 * BYTES;
    // Ranks whose steps the registers hold: in a short reduction, a long one, and a long move. Long ones by LL are rare.
    static constexpr u32 AT_ONCE = 4, SUMS_AT_ONCE = 1, MOVES_AT_ONCE = 1;
    // A thread's piece is at base(thread) + offset(unit) in the step's data.
    static __device__ __forceinline__ u32 base(u32 thread) { return thread * 8; }
    static __device__ __forceinline__ u32 offset(u32 unit) { return unit * 256; }
    static __device__ __forceinline__ bool has(u32, u32) { return true; }
};

struct Ll128 {
    static constexpr u32 LANES = 1024;
    static constexpr u32 UNITS = 4;
    static constexpr u32 BYTES = UNITS / 2 * 480;
    static constexpr u32 SLOT = UNITS / 2 * 512;
    static constexpr u32 AT_ONCE = 2, SUMS_AT_ONCE = 2, MOVES_AT_ONCE = 4;
    static __device__ __forceinline__ u32 base(u32 thread) { return thread / 8 * 120 + thread % 8 * 16; }
    static __device__ __forceinline__ u32 offset(u32 unit) { return unit / 2 * 480 + unit % 2 * 8; }
    // The last eight bytes of a line are its flag.
    static __device__ __forceinline__ bool has(u32 unit, u32 thread) { return unit % 2 == 0 || thread % 8 != 7; }
};

// What a rank has of one peer and protocol, in its own memory.
template <class P> struct Fifos {
    struct {
        u64 sent, received;  // steps to the peer, and from it
        u64 acked;           // sent steps that the peer is known to have emptied
        u64 credit;          // the same, as the peer has written it
    } numbers[P::LANES];
    u8 slots[P::LANES][DEPTH][P::SLOT];  // that the peer fills
};

// What a rank's memory holds for one peer.
struct Inbox {
    Fifos<Ll> ll;
    Fifos<Ll128> ll128;
};
// INBOX_BYTES in src/backend/nccl/direct/tunables.rs.
static_assert(sizeof(Inbox) == 4755456);

static __device__ __forceinline__ Fifos<Ll>* fifos(Inbox* inbox, Ll*) { return &inbox->ll; }
static __device__ __forceinline__ Fifos<Ll128>* fifos(Inbox* inbox, Ll128*) { return &inbox->ll128; }
template <class P> static __device__ __forceinline__ Fifos<P>* fifos(Inbox* inbox) { return fifos(inbox, (P*)nullptr); }

// Most warps of a kernel that is launched while the one before it in the stream still runs: four communicators' kernels, two of each, fit
// on a GPU at once. OVERLAPPED in src/backend/nccl/direct/tunables.rs.
constexpr u32 OVERLAPPED = 512;

// Waits for the work before this kernel in its stream, and lets the next one be launched. The first thing that a kernel does.
static __device__ __forceinline__ void come_after() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (gridDim.x * gridDim.y * (blockDim.x / 32) <= OVERLAPPED) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ __forceinline__ void store16(void* to, u64 a, u64 b) {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

static __device__ __forceinline__ void load16(const void* from, u64& a, u64& b) {
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}

static __device__ __forceinline__ u64 load8_volatile(const void* from) {
    u64 value;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

static __device__ __forceinline__ void store8_volatile(void* to, u64 value) {
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Eight bytes of a buffer of any alignment, of which `left` are there; zeroes after that.
static __device__ __noinline__ u64 load_bytes(const u8* from, int left) {
    if (left >= 8 && ((u64)from & 7) == 0) return *(const u64*)from;
    if (left >= 8 && ((u64)from & 3) == 0) return *(const u32*)from | (u64)((const u32*)from)[1] << 32;
    u64 value = 0;
    if (((u64)from & 1) == 0 && left % 2 == 0) {
#pragma unroll 1
        for (int i = 0; i < 4; i++)
            if (2 * i < left) value |= (u64)((const u16*)from)[i] << 16 * i;
    } else {
#pragma unroll 1
        for (int i = 0; i < 8; i++)
            if (i < left) value |= (u64)from[i] << 8 * i;
    }
    return value;
}

static __device__ __noinline__ void store_bytes(u8* to, u64 value, int left) {
    if (left >= 8 && ((u64)to & 7) == 0) {
        *(u64*)to = value;
    } else if (left >= 8 && ((u64)to & 3) == 0) {
        ((u32*)to)[0] = (u32)value;
        ((u32*)to)[1] = (u32)(value >> 32);
    } else if (((u64)to & 1) == 0 && left % 2 == 0) {
#pragma unroll 1
        for (int i = 0; i < 4; i++)
            if (2 * i < left) ((u16*)to)[i] = (u16)(value >> 16 * i);
    } else {
#pragma unroll 1
        for (int i = 0; i < 8; i++)
            if (i < left) to[i] = (u8)(value >> 8 * i);
    }
}

// A step's data between a buffer and a warp's registers. `left` counts the bytes from `from` to the buffer's end; more than
// that is zero. Pieces that are whole and aligned take one instruction, others a function.
template <class P>
static __device__ __forceinline__ void load_step(u64 (&v)[P::UNITS], const u8* from, long long left) {
    const u32 thread = threadIdx.x % 32, base = P::base(thread);
    const int mine = (left < 0 ? 0 : left < P::BYTES ? (int)left : (int)P::BYTES) - (int)base;
    from += base;
    const bool aligned = ((u64)from & 7) == 0;
    bool whole = aligned || mine <= 0;
#pragma unroll
    for (u32 u = 0; u < P::UNITS; u++) {
        const int rest = mine - (int)P::offset(u);
        v[u] = 0;
        if (P::has(u, thread) && aligned && rest >= 8) v[u] = *(const u64*)(from + P::offset(u));
        whole = whole && (rest <= 0 || rest >= 8);
    }
    if (__builtin_expect(!whole, 0)) {
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) {
            const int rest = mine - (int)P::offset(u);
            if (P::has(u, thread) && rest > 0) v[u] = load_bytes(from + P::offset(u), rest);
        }
    }
}

template <class P>
static __device__ __forceinline__ void store_step(const u64 (&v)[P::UNITS], u8* to, long long left) {
    const u32 thread = threadIdx.x % 32, base = P::base(thread);
    const int mine = (left < 0 ? 0 : left < P::BYTES ? (int)left : (int)P::BYTES) - (int)base;
    to += base;
    const bool aligned = ((u64)to & 7) == 0;
    bool whole = aligned || mine <= 0;
#pragma unroll
    for (u32 u = 0; u < P::UNITS; u++) {
        const int rest = mine - (int)P::offset(u);
        if (P::has(u, thread) && aligned && rest >= 8) *(u64*)(to + P::offset(u)) = v[u];
        whole = whole && (rest <= 0 || rest >= 8);
    }
    if (__builtin_expect(!whole, 0)) {
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) {
            const int rest = mine - (int)P::offset(u);
            if (P::has(u, thread) && rest > 0) store_bytes(to + P::offset(u), v[u], rest);
        }
    }
}

// One warp's end of its lane to and from every peer. Thread p of the warp keeps the numbers of peer p.
template <class P> struct Lane {
    u32 thread, lane;
    const u32* abort;
    bool aborted;
    Fifos<P>* peer;  // what this rank's memory holds for peer `thread`; null for itself
    u64 sent, received, acked;  // `sent` and `received` count the calls before
    u64 kind;                   // 0, or MESSAGE

    // `remote` is what the memory of peer `thread` holds for this rank, and `own` the other way round; null if there is no such peer.
    __device__ __forceinline__ void begin(Inbox* remote, Inbox* own, u32 lane_, const u32* abort_) {
        open(remote ? own : nullptr, lane_, abort_, 0);
        // What the calls before have emptied.
        if (remote) store8_volatile(&fifos<P>(remote)->numbers[lane].credit, received);
    }

    // Reads the numbers; null if there is no such peer.
    __device__ __forceinline__ void open(Inbox* own, u32 lane_, const u32* abort_, u64 kind_) {
        thread = threadIdx.x % 32, lane = lane_, abort = abort_, aborted = false;
        sent = received = acked = 0, peer = nullptr, kind = kind_;
        if (own) {
            peer = fifos<P>(own);
            u64 told;
            load16(&peer->numbers[lane].sent, sent, received);
            load16(&peer->numbers[lane].acked, acked, told);
            if (acked < told) acked = told;
        }
    }

    // Of the peer with this thread's number, so many steps were sent and received.
    __device__ __forceinline__ void end(u32 sends, u32 receives) {
        if (peer) {
            store16(&peer->numbers[lane].sent, sent + sends, received + receives);
            peer->numbers[lane].acked = acked;
        }
    }

    // The same for one direction.
    __device__ __forceinline__ void end_sends(u32 sends) {
        store8_volatile(&peer->numbers[lane].sent, sent + sends);
        peer->numbers[lane].acked = acked;
    }
    __device__ __forceinline__ void end_receives(u32 receives) { store8_volatile(&peer->numbers[lane].received, received + receives); }

    __device__ __forceinline__ bool is_aborted(u32& polls) {
        if (++polls % POLLS == 0 && *(volatile const u32*)abort != 0) aborted = true;
        return aborted;
    }

    // Sends a peer the `nth` step of this call, counted from 1.
    __device__ __forceinline__ void send(Inbox* inbox, u32 other, const u64 (&v)[P::UNITS], u32 nth) {
        const u64 step = __shfl_sync(ALL, sent, other) + nth;
        if (__shfl_sync(ALL, acked, other) + DEPTH < step) wait_for_credit(other, step - DEPTH);
        put(fifos<P>(inbox)->slots[lane][step % DEPTH] + thread * 16, v, step, (P*)nullptr);
    }

    // Receives a peer's `nth` step of this call, counted from 1; false if the call is aborted.
    __device__ __forceinline__ bool receive(Inbox* own, u32 rank, u32 other, u64 (&v)[P::UNITS], u32 nth) {
        const u64 step = __shfl_sync(ALL, received, other) + nth;
        const u8* slot = fifos<P>(own + (other < rank ? other : other - 1))->slots[lane][step % DEPTH] + thread * 16;
        u32 polls = 0;
        while (!__all_sync(ALL, get(slot, v, step, (P*)nullptr)))
            if (__any_sync(ALL, is_aborted(polls))) {
                aborted = true;
                return false;
            }
        return true;
    }

    // The same of G ranks from `first` on, as far as bits of `wanted` say so. Their slots are read at once: one after another, each
    // would take a third of a microsecond.
    template <u32 G>
    __device__ __forceinline__ bool receive_from(Inbox* own, u32 rank, u32 first, u32 wanted, u64 (&v)[G][P::UNITS], u32 nth) {
        const u8* slots[G];
        u64 steps[G];
#pragma unroll
        for (u32 g = 0; g < G; g++) {
            const u32 other = first + g;
            // Of the others, some slot is read for nothing.
            const u32 place = (wanted >> g & 1) == 0 ? 0 : other < rank ? other : other - 1;
            steps[g] = __shfl_sync(ALL, received, other) + nth;
            slots[g] = fifos<P>(own + place)->slots[lane][steps[g] % DEPTH] + thread * 16;
        }
        u32 polls = 0;
        while (true) {
            bool there = true;
#pragma unroll
            for (u32 g = 0; g < G; g++) there &= get(slots[g], v[g], steps[g], (P*)nullptr) | (wanted >> g & 1) == 0;
            if (__all_sync(ALL, there)) return true;
            if (__any_sync(ALL, is_aborted(polls))) {
                aborted = true;
                return false;
            }
        }
    }

    // The peer is known to have emptied so many of this call's steps, and all before.
    __device__ __forceinline__ void learn(u32 other, u32 count) {
        if (thread == other && acked < sent + count) acked = sent + count;
    }

    // Tells a peer that so many of its steps in this call have been emptied.
    __device__ __forceinline__ void tell(Inbox* inbox, u32 other, u32 count) {
        __syncwarp();
        if (thread == other) store8_volatile(&fifos<P>(inbox)->numbers[lane].credit, received + count);
    }

    __device__ __forceinline__ void wait_for_credit(u32 other, u64 needed) {
        u32 polls = 0;
        while (true) {
            if (thread == other) {
                const u64 told = load8_volatile(&peer->numbers[lane].credit);
                if (acked < told) acked = told;
            }
            if (__shfl_sync(ALL, acked, other) >= needed) return;
            if (__any_sync(ALL, is_aborted(polls))) {
                aborted = true;
                return;
            }
        }
    }

  private:
    __device__ __forceinline__ void put(u8* slot, const u64 (&v)[P::UNITS], u64 step, Ll*) {
        const u64 flag = step << 32 ^ kind;
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) store16(slot + u * 512, (u32)v[u] | flag, v[u] >> 32 | flag);
    }
    __device__ __forceinline__ void put(u8* slot, const u64 (&v)[P::UNITS], u64 step, Ll128*) {
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u += 2) store16(slot + u * 256, v[u], thread % 8 == 7 ? step ^ kind : v[u + 1]);
    }
    __device__ __forceinline__ bool get(const u8* slot, u64 (&v)[P::UNITS], u64 step, Ll*) {
        bool there = true;
        u64 a[P::UNITS], b[P::UNITS];
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) load16(slot + u * 512, a[u], b[u]);
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) {
            there &= (a[u] ^ kind) >> 32 == (u32)step && (b[u] ^ kind) >> 32 == (u32)step;
            v[u] = (u32)a[u] | b[u] << 32;
        }
        return there;
    }
    __device__ __forceinline__ bool get(const u8* slot, u64 (&v)[P::UNITS], u64 step, Ll128*) {
        bool there = true;
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u += 2) load16(slot + u * 256, v[u], v[u + 1]);
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u += 2) there &= thread % 8 != 7 || v[u + 1] == (step ^ kind);
        return there;
    }
};
