// Messages between the GPUs of a host: what NCCL's groups of sends and receives are. Nothing that is sent waits for what is received, nor
// the other way round, and no peer for another: each direction of each pair has warps of its own.
#include "fifo.cuh"

constexpr u32 MOST = 32;

// In src/backend/nccl/direct/messages.rs.
struct Message {
    u8* buffer;
    u64 bytes;
};
// The messages to a peer, or from it, in their order.
struct Part {
    Inbox* remote;  // of this rank, in the peer's memory
    Inbox* own;     // of the peer, in this rank's memory
    u32 first, count;
    u32 sends, unused;
};
struct Arguments {
    const u32* abort;  // not 0: give up
    u64 lanes;         // of a part: the same on both sides of a pair
    Part parts[MOST];  // first those that send, so that they run where not all blocks do
    Message messages[MOST];
};

// A warp's share of a part: of each message the steps lane, lane + lanes, ... The lanes of all parts that a launch may have are at most as
// many as a collective's, so that all of them run at once.
template <class P> struct Share {
    const Arguments& a;
    const Part& part;
    Lane<P> lane;
    const u32 lanes;

    // The one peer has the number 0.
    __device__ __forceinline__ Share(const Arguments& a) : a(a), part(a.parts[blockIdx.y]), lanes((u32)a.lanes) {
        const u32 number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
        lane.open(threadIdx.x % 32 == 0 ? part.own : nullptr, number, a.abort, MESSAGE);
    }

    __device__ __forceinline__ u32 steps(const Message& message) const {
        const u32 total = (u32)((message.bytes + P::BYTES - 1) / P::BYTES);
        if (total <= lanes) return lane.lane < total;
        return lane.lane >= total ? 0 : (total - lane.lane + lanes - 1) / lanes;
    }

    __device__ __forceinline__ u64 start(u32 index) const { return (u64)(index * lanes + lane.lane) * P::BYTES; }

    __device__ __forceinline__ void send() {
        u32 nth = 0;
#pragma unroll 1
        for (u32 m = 0; m < part.count; m++) {
            const Message& message = a.messages[part.first + m];
            const u32 count = steps(message);
            u64 v[P::UNITS], next[P::UNITS];
            if (count > 0) load_step<P>(next, message.buffer + start(0), (long long)(message.bytes - start(0)));
#pragma unroll 1
            for (u32 i = 0; i < count; i++) {
#pragma unroll
                for (u32 u = 0; u < P::UNITS; u++) v[u] = next[u];
                const u64 following = start(i + 1);
                if (i + 1 < count) load_step<P>(next, message.buffer + following, (long long)(message.bytes - following));
                lane.send(part.remote, 0, v, ++nth);
                if (lane.aborted) return;
            }
        }
        if (lane.peer) lane.end_sends(nth);
    }

    __device__ __forceinline__ void receive() {
        u32 nth = 0, rest = 0;
#pragma unroll 1
        for (u32 m = 0; m < part.count; m++) rest += steps(a.messages[part.first + m]);
        lane.tell(part.remote, 0, 0);
#pragma unroll 1
        for (u32 m = 0; m < part.count; m++) {
            const Message& message = a.messages[part.first + m];
            const u32 count = steps(message);
#pragma unroll 1
            for (u32 i = 0; i < count; i++) {
                u64 v[P::UNITS];
                if (!lane.receive(part.own, 1, 0, v, ++nth)) return;
                // The next call tells of the last ones.
                if (nth + DEPTH <= rest) lane.tell(part.remote, 0, nth);
                store_step<P>(v, message.buffer + start(i), (long long)(message.bytes - start(i)));
            }
        }
        if (lane.peer) lane.end_receives(nth);
    }
};

template <class P> static __device__ __forceinline__ void exchange(const Arguments& a) {
    come_after();
    Share<P> share(a);
    if (share.part.sends)
        share.send();
    else
        share.receive();
}
extern "C" __global__ void __launch_bounds__(256, 3) phalanx_messages_ll(const __grid_constant__ Arguments a) { exchange<Ll>(a); }
extern "C" __global__ void __launch_bounds__(256, 3) phalanx_messages_ll128(const __grid_constant__ Arguments a) { exchange<Ll128>(a); }
