// Collectives of the GPUs of a host. Every rank launches one kernel; a warp takes steps lane, lane + lanes, ... of each block.
//
// Compiled once for the operations that only move data, and once for each element type that is reduced (-D ELEMENT=F32
// -D TYPE=f32).
#include "element.cuh"

// `Peer` and `Arguments` in src/backend/nccl/direct/launch.rs. What is used together is in one place: a kernel's arguments are read
// through a cache that is empty when it begins.
struct Peer {
    Inbox* inbox;    // of this rank, in the peer's memory
    const u8* send;  // the block for the peer
    u8* recv;        // where the peer's block goes; in reductions the same for all
    u64 send_bytes, recv_bytes;
    u32 send_steps, recv_steps;  // of the blocks, in all lanes
};
struct Arguments {
    Inbox* own;             // of the peers, in this rank's memory
    const u32* abort;       // not 0: give up
    u32 rank, ranks;
    u32 op;
    u32 same;               // all ranks get the same block
    u64 factor;             // of a pre-multiplied sum: bits, or the address of the bits
    u32 factor_is_address;
    u32 steps;              // of the longest block
    Peer peers[MAX_RANKS];  // the peer of this rank's own place has its own block
};

// The part of a block that a lane has: of `total` steps those with the numbers lane, lane + stride, ...
template <class P> static __device__ __forceinline__ u32 steps_of(u32 total, u32 lane) {
    return lane >= total ? 0 : (total - lane + P::LANES - 1) / P::LANES;
}
template <class P> static __device__ __forceinline__ u64 start_of(u32 index, u32 lane) {
    return (u64)(index * P::LANES + lane) * P::BYTES;
}

// The rank that follows this one at a distance.
static __device__ __forceinline__ u32 at(const Arguments& a, u32 distance) {
    const u32 rank = a.rank + distance;
    return rank < a.ranks ? rank : rank - a.ranks;
}

static __device__ __forceinline__ u32 lane_of_warp() { return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; }

// One rank's exchange with all peers, of which G at a time are read or sent to: what is read one after another costs.
//
// In round i, every rank sends step i + 1 to all before it receives step i from all. Where both ends of a pair send as much, a step that
// arrives thus says that the peer has emptied this rank's steps but two.
template <class P, u32 G> struct Exchange {
    const Arguments& a;
    Lane<P> lane;
    u32 sends, receives;     // steps to and from peer `thread`
    u32 before;              // steps to and from each before these
    u32 rounds;              // how often the warp goes round
    u64 next[G][P::UNITS];   // the data of the next steps to be sent

    __device__ __forceinline__ Exchange(const Arguments& a) : a(a), before(0) {
        const u32 thread = threadIdx.x % 32, lane_ = lane_of_warp();
        lane.lane = lane_;
        rounds = steps_of<P>(a.steps, lane_);
        // What is needed first is on its way before anything else is asked for.
        load(1, 0);
        const bool is_peer = thread < a.ranks && thread != a.rank;
        const Peer& peer = a.peers[thread % MAX_RANKS];
        sends = is_peer ? steps_of<P>(peer.send_steps, lane_) : 0;
        receives = is_peer ? steps_of<P>(peer.recv_steps, lane_) : 0;
        lane.begin(is_peer ? peer.inbox : nullptr, a.own + (thread < a.rank ? thread : thread - 1), lane_, a.abort);
    }

    // Reads step i for the peers from this distance on.
    __device__ __forceinline__ void load(u32 distance, u32 i) {
        const u64 start = start_of<P>(i, lane.lane);
#pragma unroll
        for (u32 g = 0; g < G; g++) {
            if (g > 0 && (a.same || distance + g >= a.ranks)) break;
            const Peer& peer = a.peers[at(a, distance + g)];
            load_step<P>(next[g], peer.send + start, (long long)(peer.send_bytes - start));
        }
    }

    // Sends step i to the peers that get one, as the `nth` of this call.
    __device__ __forceinline__ void send(u32 i, u32 nth) {
        const u32 readers = __ballot_sync(ALL, i < sends);
        if (readers == 0) return;
#pragma unroll 1
        for (u32 distance = 1; distance < a.ranks; distance += G) {
            if (distance == 1 ? i > 0 : !a.same) load(distance, i);
#pragma unroll
            for (u32 g = 0; g < G; g++) {
                if (distance + g >= a.ranks) break;
                const u32 to = at(a, distance + g);
                if (g > 0 && a.same) {
#pragma unroll
                    for (u32 u = 0; u < P::UNITS; u++) next[g][u] = next[0][u];
                }
                if (readers >> to & 1) lane.send(a.peers[to].inbox, to, next[g], nth);
            }
        }
    }

    // Sends all peers the same step.
    __device__ __forceinline__ void send_all(const u64 (&v)[P::UNITS], u32 nth) {
#pragma unroll 1
        for (u32 distance = 1; distance < a.ranks; distance++) lane.send(a.peers[at(a, distance)].inbox, at(a, distance), v, nth);
    }

    // Receives the `nth` step of each of these ranks, in their order; false if the call is aborted. With this rank among them, `use` is called
    // for it, too, with nothing.
    template <class F> __device__ __forceinline__ bool receive(u32 writers, u32 nth, F use) {
#pragma unroll 1
        for (u32 first = 0; first < a.ranks; first += G) {
            const u32 wanted = writers >> first & (1 << G) - 1;
            if (wanted == 0) continue;
            u64 theirs[G][P::UNITS];
            const u32 peers = wanted & ~(1 << a.rank >> first);
            if (!lane.template receive_from<G>(a.own, a.rank, first, peers, theirs, nth)) return false;
#pragma unroll
            for (u32 g = 0; g < G; g++)
                if (wanted >> g & 1) use(first + g, theirs[g]);
        }
        return true;
    }

    // Those that have a step i for this rank.
    __device__ __forceinline__ u32 writers(u32 i) const { return __ballot_sync(ALL, i < receives); }

    // Step i of all has arrived and been read.
    __device__ __forceinline__ void emptied(u32 i) {
        __syncwarp();
        if (i >= receives) return;
        // Who has sent has begun this call, so it has emptied what was before.
        learn(sends == receives ? before + (i > 1 ? i - 1 : 0) : 0);
        if (sends != receives && i + DEPTH < before + receives)
            store8_volatile(&fifos<P>(a.peers[lane.thread % MAX_RANKS].inbox)->numbers[lane.lane].credit, lane.received + before + i + 1);
    }

    // Every peer is known to have emptied so many steps of this call.
    __device__ __forceinline__ void learn(u32 count) {
        if (lane.acked < lane.sent + count) lane.acked = lane.sent + count;
    }

    __device__ __forceinline__ void end() {
        if (!lane.aborted) lane.end(sends > 0 ? before + sends : 0, receives > 0 ? before + receives : 0);
    }
};

// The same where every lane has at most one step: short operations, whose time is that of the instructions on their way.
template <class P> struct Once {
    const Arguments& a;
    Lane<P> lane;
    u64 start;

    __device__ __forceinline__ Once(const Arguments& a, u64 (&mine)[P::UNITS]) : a(a) {
        const u32 thread = threadIdx.x % 32, lane_ = lane_of_warp();
        start = start_of<P>(0, lane_);
        // What most need first is on its way before anything else is asked for.
        const Peer& first = a.peers[after(a.rank)];
        load_step<P>(mine, first.send + start, (long long)(first.send_bytes - start));
        const bool is_peer = thread < a.ranks && thread != a.rank;
        const Peer& peer = a.peers[thread % MAX_RANKS];
        lane.begin(is_peer ? peer.inbox : nullptr, a.own + (thread < a.rank ? thread : thread - 1), lane_, a.abort);
    }

    __device__ __forceinline__ u32 after(u32 rank) const { return rank + 1 == a.ranks ? 0 : rank + 1; }

    // Sends every peer its step, the first of which is in `v`.
    __device__ __forceinline__ void send(u64 (&v)[P::UNITS]) {
        u32 to = after(a.rank);
#pragma unroll 1
        for (u32 d = 1; d < a.ranks; d++, to = after(to)) {
            const Peer& peer = a.peers[to];
            if (d > 1 && !a.same) load_step<P>(v, peer.send + start, (long long)(peer.send_bytes - start));
            if (lane.lane < peer.send_steps) lane.send(peer.inbox, to, v, 1);
        }
    }

    // Which of G ranks from `first` on have a step for this lane, as bits.
    template <u32 G> __device__ __forceinline__ u32 senders(u32 first) const {
        u32 found = 0;
#pragma unroll
        for (u32 g = 0; g < G; g++) {
            const u32 peer = first + g;
            if (peer < a.ranks && peer != a.rank && lane.lane < a.peers[peer].recv_steps) found |= 1 << g;
        }
        return found;
    }

    __device__ __forceinline__ void end() {
        const Peer& peer = a.peers[lane.thread % MAX_RANKS];
        const u32 sends = lane.lane < peer.send_steps, receives = lane.lane < peer.recv_steps;
        // A peer that has sent has begun this call, so it has emptied what was before.
        if (receives && lane.acked < lane.sent) lane.acked = lane.sent;
        if (!lane.aborted) lane.end(sends, receives);
    }
};

// G ranks' steps are read at once.
template <class P, u32 G> static __device__ void move_once(const Arguments& a) {
    u64 v[P::UNITS];
    Once<P> once(a, v);
    once.send(v);
    const Peer& self = a.peers[a.rank];
    if (once.lane.lane < self.recv_steps && self.recv != self.send) {
        load_step<P>(v, self.send + once.start, (long long)(self.recv_bytes - once.start));
        store_step<P>(v, self.recv + once.start, (long long)(self.recv_bytes - once.start));
    }
#pragma unroll 1
    for (u32 first = 0; first < a.ranks; first += G) {
        const u32 senders = once.template senders<G>(first);
        if (senders == 0) continue;
        u64 theirs[G][P::UNITS];
        if (!once.lane.template receive_from<G>(a.own, a.rank, first, senders, theirs, 1)) return;
#pragma unroll
        for (u32 g = 0; g < G; g++) {
            const Peer& from = a.peers[(first + g) % MAX_RANKS];
            if (senders >> g & 1)
                store_step<P>(theirs[g], from.recv + once.start, (long long)(from.recv_bytes - once.start));
        }
    }
    once.end();
}

// Moves blocks: every rank gives each rank what is for it.
template <class P, u32 G> static __device__ void move(const Arguments& a) {
    Exchange<P, G> exchange(a);
    const Peer& self = a.peers[a.rank];
    const u32 own = self.recv != self.send ? steps_of<P>(self.recv_steps, exchange.lane.lane) : 0;
#pragma unroll 1
    for (int i = -1; i < (int)exchange.rounds; i++) {
        exchange.send(i + 1, i + 2);
        if (exchange.lane.aborted) return;
        if (i < 0) continue;
        const u64 start = start_of<P>(i, exchange.lane.lane);
        if (i < (int)own) {
            u64 v[P::UNITS];
            load_step<P>(v, self.send + start, (long long)(self.recv_bytes - start));
            store_step<P>(v, self.recv + start, (long long)(self.recv_bytes - start));
        }
        const bool there = exchange.receive(exchange.writers(i), i + 1, [&](u32 peer, const u64 (&v)[P::UNITS]) {
            const Peer& from = a.peers[peer];
            store_step<P>(v, from.recv + start, (long long)(from.recv_bytes - start));
        });
        if (!there) return;
        exchange.emptied(i);
    }
    exchange.end();
}

#ifndef ELEMENT

template <class P> static __device__ __forceinline__ void move_blocks(const Arguments& a) {
    come_after();
    if (a.steps <= P::LANES && a.ranks == 2)
        move_once<P, 1>(a);
    else if (a.steps <= P::LANES)
        move_once<P, 4>(a);
    else if (P::MOVES_AT_ONCE == 1 || a.ranks == 2)
        move<P, 1>(a);
    else
        move<P, P::MOVES_AT_ONCE>(a);
}
extern "C" __global__ void __launch_bounds__(256, 3) phalanx_move_ll(const __grid_constant__ Arguments a) { move_blocks<Ll>(a); }
extern "C" __global__ void __launch_bounds__(256, 3) phalanx_move_ll128(const __grid_constant__ Arguments a) { move_blocks<Ll128>(a); }

#else

// The factors of a pre-multiplied sum: every rank sends its own, since products are taken where they are summed.
template <class P> struct Factors {
    u64 bits = 0;  // of rank `thread`

    template <u32 G> __device__ bool exchange(Exchange<P, G>& exchange) {
        const Arguments& a = exchange.a;
        Lane<P>& lane = exchange.lane;
        const u64 own = a.factor_is_address ? load_bytes((const u8*)a.factor, ELEMENT::SIZE) : a.factor;
        u64 v[P::UNITS];
        v[0] = own;
#pragma unroll
        for (u32 u = 1; u < P::UNITS; u++) v[u] = 0;
#pragma unroll 1
        for (u32 peer = 0; peer < a.ranks; peer++)
            if (__shfl_sync(ALL, exchange.sends, peer) > 0) lane.send(a.peers[peer].inbox, peer, v, 1);
#pragma unroll 1
        for (u32 peer = 0; peer < a.ranks; peer++) {
            u64 theirs = own;
            if (peer != a.rank) {
                if (__shfl_sync(ALL, exchange.receives, peer) == 0) continue;
                if (!lane.receive(a.own, a.rank, peer, v, 1)) return false;
                theirs = __shfl_sync(ALL, v[0], 0);
            }
            if (lane.thread == peer) bits = theirs;
        }
        exchange.before = 1;
        return true;
    }
};

template <class P, class A> struct Reducer {
    Sum<P, ELEMENT, A> sum;
    u32 op;
    Factors<P> factors;

    __device__ __forceinline__ Reducer(u32 op) : op(op) {}

    // Combines the `nth` step of every rank; of this one, what is in `v`, where the result goes.
    template <u32 G> __device__ __forceinline__ bool receive(Exchange<P, G>& exchange, u64 (&v)[P::UNITS], u32 nth) {
        const Arguments& a = exchange.a;
        const bool there = exchange.receive((1 << a.ranks) - 1, nth, [&](u32 rank, u64 (&theirs)[P::UNITS]) {
            if (rank == a.rank) {
#pragma unroll
                for (u32 u = 0; u < P::UNITS; u++) theirs[u] = v[u];
            }
            put(rank, theirs);
        });
        if (there) sum.finish(v, op, a.ranks);
        return there;
    }

    __device__ __forceinline__ void put(u32 rank, const u64 (&v)[P::UNITS]) {
        if (op == PRE_MUL_SUM) {
            const A factor = ELEMENT::template up<A>(__shfl_sync(ALL, factors.bits, rank));
            Sum<P, ELEMENT, A> one;
            one.first(v);
#pragma unroll
            for (u32 u = 0; u < P::UNITS; u++)
#pragma unroll
                for (u32 i = 0; i < Sum<P, ELEMENT, A>::EACH; i++) {
                    const A x = multiply(one.acc[u][i], factor);
                    sum.acc[u][i] = rank == 0 ? x : combine<SUM, A>(sum.acc[u][i], x);
                }
        } else if (rank == 0) {
            sum.first(v);
        } else {
            sum.add(v, op);
        }
    }
};

// G ranks' steps are read at once.
template <class P, class A, u32 G> static __device__ void reduce_once(const Arguments& a) {
    u64 mine[P::UNITS], v[P::UNITS];
    Once<P> once(a, v);
    const Peer& self = a.peers[a.rank];
    const bool combines = once.lane.lane < self.recv_steps;
    if (a.same) {
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) mine[u] = v[u];
    } else if (combines) {
        load_step<P>(mine, self.send + once.start, (long long)(self.recv_bytes - once.start));
    }
    once.send(v);
    if (combines) {
        Sum<P, ELEMENT, A> sum;
#pragma unroll 1
        for (u32 first = 0; first < a.ranks; first += G) {
            u64 theirs[G][P::UNITS];
            if (!once.lane.template receive_from<G>(a.own, a.rank, first, once.template senders<G>(first), theirs, 1)) return;
#pragma unroll
            for (u32 g = 0; g < G; g++) {
                const u32 rank = first + g;
                if (rank >= a.ranks) break;
#pragma unroll
                for (u32 u = 0; u < P::UNITS; u++) v[u] = rank == a.rank ? mine[u] : theirs[g][u];
                if (rank == 0)
                    sum.first(v);
                else
                    sum.add(v, a.op);
            }
        }
        sum.finish(v, a.op, a.ranks);
        store_step<P>(v, self.recv + once.start, (long long)(self.recv_bytes - once.start));
    }
    once.end();
}

// Every rank gives each reader the block that is for it, and combines what it gets, in rank order.
template <class P, class A, u32 G> static __device__ void reduce(const Arguments& a) {
    Exchange<P, G> exchange(a);
    Reducer<P, A> reducer(a.op);
    if (a.op == PRE_MUL_SUM && !reducer.factors.exchange(exchange)) return;
    const Peer& self = a.peers[a.rank];
    const u32 own = steps_of<P>(self.recv_steps, exchange.lane.lane);
#pragma unroll 1
    for (int i = -1; i < (int)exchange.rounds; i++) {
        exchange.send(i + 1, exchange.before + i + 2);
        if (exchange.lane.aborted) return;
        if (i < 0 || i >= (int)own) continue;
        const u64 start = start_of<P>(i, exchange.lane.lane);
        u64 v[P::UNITS];
        load_step<P>(v, self.send + start, (long long)(self.recv_bytes - start));
        if (!reducer.receive(exchange, v, exchange.before + i + 1)) return;
        store_step<P>(v, self.recv + start, (long long)(self.recv_bytes - start));
        exchange.emptied(i);
    }
    exchange.end();
}

template <class P, class A> static __device__ __forceinline__ void reduce_blocks(const Arguments& a) {
    if (a.steps > P::LANES || a.op == PRE_MUL_SUM)
        reduce<P, A, P::SUMS_AT_ONCE>(a);
    else if (P::AT_ONCE > 2 && a.ranks > 2)
        reduce_once<P, A, P::AT_ONCE>(a);
    else
        reduce_once<P, A, 2>(a);
}

// An all_reduce in two hops: every rank combines one block, and gives it to all. A peer's `send` and `recv` are its block.
template <class P, class A> static __device__ void two_hops(const Arguments& a) {
    Exchange<P, P::SUMS_AT_ONCE> exchange(a);
    Lane<P>& lane = exchange.lane;
    Reducer<P, A> reducer(a.op);
    // As many steps for all, those of the longest block.
    const u32 steps = exchange.rounds;
    if (a.op == PRE_MUL_SUM && !reducer.factors.exchange(exchange)) return;
    const Peer& self = a.peers[a.rank];
    // Step i to be combined has number 2i, its result 2i + 1. Step i + 1 is sent before the result of step i, so that it travels
    // meanwhile.
    const u32 first = exchange.before + 1;
#pragma unroll 1
    for (int i = -1; i < (int)steps; i++) {
        exchange.send(i + 1, first + 2 * (i + 1));
        if (i < 0) continue;
        const u64 start = start_of<P>(i, lane.lane);
        u64 v[P::UNITS];
        load_step<P>(v, self.send + start, (long long)(self.send_bytes - start));
        if (!reducer.receive(exchange, v, first + 2 * i)) return;
        if (i == 0) exchange.learn(exchange.before);
        store_step<P>(v, self.recv + start, (long long)(self.recv_bytes - start));
        exchange.send_all(v, first + 2 * i + 1);
        const bool there = exchange.receive(exchange.writers(i), first + 2 * i + 1, [&](u32 peer, const u64 (&v)[P::UNITS]) {
            const Peer& from = a.peers[peer];
            store_step<P>(v, from.recv + start, (long long)(from.recv_bytes - start));
        });
        if (!there || lane.aborted) return;
        exchange.learn(exchange.before + 2 * i + 1);
    }
    if (exchange.sends > 0) exchange.sends = exchange.receives = 2 * steps;
    exchange.end();
}

#define NAMED(name, type) phalanx_##name##_##type
#define NAME(name, type) NAMED(name, type)
// `body` takes a protocol and the type that is combined in.
#define KERNEL(name, P, body)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 3)                                            \
    NAME(name, TYPE)(const __grid_constant__ Arguments a) {                                         \
        come_after();                                                                               \
        if (sizeof(ELEMENT::Wide) > sizeof(ELEMENT::Acc) && a.op == AVG)                            \
            body<P, ELEMENT::Wide>(a);                                                              \
        else                                                                                        \
            body<P, ELEMENT::Acc>(a);                                                               \
    }
KERNEL(reduce_ll, Ll, reduce_blocks)
KERNEL(reduce_ll128, Ll128, reduce_blocks)
KERNEL(two_hops_ll, Ll, two_hops)
KERNEL(two_hops_ll128, Ll128, two_hops)

#endif
