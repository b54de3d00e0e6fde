// For kernels of programs that phalanx::jit compiles: what they send each other between the GPUs of a host, without NCCL and without the host.
// phalanx::nccl::Nccl::peers makes the memory for it. See docs/guide/own-kernels.md.
//
// A warp takes a lane, and the warps with the same lane on the other ranks are its partners. It sends and receives steps: BYTES bytes of a
// buffer, spread over the registers of its threads. Steps of a sender arrive in the order in which they were sent.
#pragma once
namespace phalanx {
#include <phalanx/fifo.cuh>

// A kernel's parameter, which jit::peers passes. `PeersArgument` in src/backend/nccl/direct/peers.rs.
struct Peers {
    Inbox* inboxes[MAX_RANKS];  // of this rank, in each peer's memory
    Inbox* own;                 // of the peers, in this rank's memory
    const u32* abort;
    u32 rank, ranks;
};

// A warp's end of a lane, by one of the protocols Ll and Ll128 of fifo.cuh. Blocks have one dimension, of whole warps, and all threads of a
// warp make the same calls. A lane belongs to one warp at a time, whatever the kernel. What returns false has found that the communicator
// has failed: leave the kernel then.
template <class P> class Warp {
    const Peers& peers;
    Lane<P> lane;
    u32 sends = 0, receives = 0;  // to and from peer `thread`

  public:
    // Of a step: bytes, and pieces of 8 bytes that a thread has.
    static constexpr u32 BYTES = P::BYTES, UNITS = P::UNITS;
    // Lanes that there are.
    static constexpr u32 LANES = P::LANES;

    __device__ __forceinline__ Warp(const Peers& peers, u32 number) : peers(peers) {
        const u32 thread = threadIdx.x % 32;
        const bool is_peer = thread < peers.ranks && thread != peers.rank;
        Inbox* const own = is_peer ? peers.own + (thread < peers.rank ? thread : thread - 1) : nullptr;
        lane.begin(is_peer ? peers.inboxes[thread] : nullptr, own, number, peers.abort);
    }
    Warp(const Warp&) = delete;

    // The next kernel goes on where this warp stops.
    __device__ __forceinline__ ~Warp() {
        if (!lane.aborted) lane.end(sends, receives);
    }

    // Sends a step to another rank. Waits while that rank has four that it has not received.
    __device__ __forceinline__ bool send(u32 peer, const u64 (&v)[P::UNITS]) {
        const u32 nth = __shfl_sync(ALL, sends, peer) + 1;
        lane.send(peers.inboxes[peer], peer, v, nth);
        if (lane.thread == peer) sends = nth;
        return !lane.aborted;
    }

    // Waits for another rank's next step.
    __device__ __forceinline__ bool receive(u32 peer, u64 (&v)[P::UNITS]) {
        const u32 nth = __shfl_sync(ALL, receives, peer) + 1;
        if (!lane.receive(peers.own, peers.rank, peer, v, nth)) return false;
        if (lane.thread == peer) receives = nth;
        // There may be more to come.
        if (nth % (DEPTH / 2) == 0) lane.tell(peers.inboxes[peer], peer, nth);
        return true;
    }

    // Waits until the partners on all ranks are here. What any of them has stored before, anywhere, is seen behind it.
    __device__ __forceinline__ bool barrier() {
        u64 v[P::UNITS] = {};
        __threadfence_system();
        __syncwarp();
        for (u32 peer = 0; peer < peers.ranks; peer++)
            if (peer != peers.rank && !send(peer, v)) return false;
        for (u32 peer = 0; peer < peers.ranks; peer++)
            if (peer != peers.rank && !receive(peer, v)) return false;
        __threadfence_system();
        return true;
    }

    // A step from a buffer of any alignment that ends after `left` bytes: zeroes behind that. And to one: what is behind the end is dropped.
    static __device__ __forceinline__ void load(u64 (&v)[P::UNITS], const void* from, long long left) {
        load_step<P>(v, (const u8*)from, left);
    }
    static __device__ __forceinline__ void store(const u64 (&v)[P::UNITS], void* to, long long left) {
        store_step<P>(v, (u8*)to, left);
    }

    // Where a piece of this thread is in the step, in bytes. Not all threads have all pieces.
    static __device__ __forceinline__ u32 place(u32 unit) { return P::base(threadIdx.x % 32) + P::offset(unit); }
    static __device__ __forceinline__ bool has(u32 unit) { return P::has(unit, threadIdx.x % 32); }
};
}  // namespace phalanx
