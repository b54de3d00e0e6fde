// Element types and how they are combined: the arithmetic of phalanx's host memory (src/reduce/arithmetic.rs), so that results
// are the same bits. Compile without fused multiply-add.
#pragma once
#include "fifo.cuh"

// ReductionCode in src/types/op.rs.
enum Op : u32 { SUM, PROD, MIN, MAX, AVG, PRE_MUL_SUM };

static __device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
static __device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }

static __device__ __forceinline__ float widen_f16(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
}

static __device__ __forceinline__ u32 narrow_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

static __device__ __forceinline__ float widen_bf16(u32 bits) { return float_of(bits << 16); }

static __device__ __forceinline__ u32 narrow_bf16(float x) {
    const u32 bits = bits_of(x);
    return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// An 8-bit float with so many bits of mantissa, this bias, the largest number's bits, and the bits of NaN.
template <u32 MANTISSA, u32 BIAS, u32 LARGEST, u32 NOT_A_NUMBER> struct Float8 {
    static __device__ __forceinline__ float widen(u32 bits) {
        const u32 magnitude = bits & 0x7f, sign = (bits & 0x80) << 24;
        const u32 placed = magnitude << (23 - MANTISSA);
        const float scaled = float_of(placed) * float_of((254 - BIAS) << 23);
        u32 wide = bits_of(scaled);
        if (MANTISSA == 3 ? magnitude == 0x7f : magnitude > 0x7c) wide = 0x7fc00000;
        if (MANTISSA == 2 && magnitude == 0x7c) wide = 0x7f800000;
        return float_of(wide | sign);
    }
    static __device__ __forceinline__ u32 narrow(float x) {
        const u32 bits = bits_of(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
        const u32 shift = 23 - MANTISSA, half = (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
        const u32 normal = (magnitude - ((127 - BIAS) << 23) + half) >> shift;
        const u32 place = (127 + 24 - BIAS - MANTISSA) << 23;
        const u32 subnormal = bits_of(float_of(magnitude) + float_of(place)) - place;
        const u32 finite = magnitude < (128 - BIAS) << 23 ? subnormal : normal;
        return sign | (magnitude > 0x7f800000 ? NOT_A_NUMBER : finite < LARGEST ? finite : LARGEST);
    }
};
typedef Float8<3, 7, 0x7e, 0x7f> E4m3;
typedef Float8<2, 15, 0x7b, 0x7e> E5m2;

// An element: its bits, the type `Acc` in which it is combined, and the type `Wide` of sums that are averaged.
struct F32 {
    typedef float Acc; typedef float Wide; static constexpr u32 SIZE = 4;
    template <class A> static __device__ A up(u64 bits) { return float_of((u32)bits); }
    static __device__ u64 down(float x) { return bits_of(x); }
};
struct F64 {
    typedef double Acc; typedef double Wide; static constexpr u32 SIZE = 8;
    template <class A> static __device__ A up(u64 bits) { return __longlong_as_double((long long)bits); }
    static __device__ u64 down(double x) { return (u64)__double_as_longlong(x); }
};
struct F16 {
    typedef float Acc; typedef float Wide; static constexpr u32 SIZE = 2;
    template <class A> static __device__ A up(u64 bits) { return widen_f16((u32)bits); }
    static __device__ u64 down(float x) { return narrow_f16(x); }
};
struct Bf16 {
    typedef float Acc; typedef float Wide; static constexpr u32 SIZE = 2;
    template <class A> static __device__ A up(u64 bits) { return widen_bf16((u32)bits); }
    static __device__ u64 down(float x) { return narrow_bf16(x) & 0xffff; }
};
struct F8E4M3 {
    typedef float Acc; typedef float Wide; static constexpr u32 SIZE = 1;
    template <class A> static __device__ A up(u64 bits) { return E4m3::widen((u32)bits); }
    static __device__ u64 down(float x) { return E4m3::narrow(x); }
};
struct F8E5M2 {
    typedef float Acc; typedef float Wide; static constexpr u32 SIZE = 1;
    template <class A> static __device__ A up(u64 bits) { return E5m2::widen((u32)bits); }
    static __device__ u64 down(float x) { return E5m2::narrow(x); }
};
template <class Int, class WideInt> struct Integer {
    typedef Int Acc; typedef WideInt Wide; static constexpr u32 SIZE = sizeof(Int);
    template <class A> static __device__ A up(u64 bits) { return (A)(Int)bits; }
    template <class A> static __device__ u64 down(A x) {
        return SIZE == 8 ? (u64)x : (u64)x & ((u64)1 << SIZE % 8 * 8) - 1;
    }
};
typedef Integer<signed char, int> I8;
typedef Integer<u8, int> U8;
typedef Integer<short, int> I16;
typedef Integer<u16, int> U16;
typedef Integer<int, long long> I32;
typedef Integer<u32, long long> U32;
typedef Integer<long long, __int128> I64;
typedef Integer<u64, __int128> U64;

// Integers wrap, which C++ defines for unsigned ones.
template <class A> struct Unsigned { typedef A Type; };
template <> struct Unsigned<signed char> { typedef u32 Type; };
template <> struct Unsigned<u8> { typedef u32 Type; };
template <> struct Unsigned<short> { typedef u32 Type; };
template <> struct Unsigned<u16> { typedef u32 Type; };
template <> struct Unsigned<int> { typedef u32 Type; };
template <> struct Unsigned<long long> { typedef u64 Type; };

template <class A> static __device__ __forceinline__ A multiply(A a, A b) {
    typedef typename Unsigned<A>::Type U;
    return (A)((U)a * (U)b);
}

template <u32 OP, class A> static __device__ __forceinline__ A combine(A a, A b) {
    typedef typename Unsigned<A>::Type U;
    // Not a number wins.
    if (OP == MIN) return a < b || a != a ? a : b;
    if (OP == MAX) return a > b || a != a ? a : b;
    return OP == PROD ? multiply(a, b) : (A)((U)a + (U)b);
}

// The elements of a step that a thread has, as they are combined.
template <class P, class T, class A> struct Sum {
    static constexpr u32 EACH = 8 / T::SIZE;
    A acc[P::UNITS][EACH];

    static __device__ __forceinline__ u64 element(u64 unit, u32 i) {
        return T::SIZE == 8 ? unit : unit >> i * T::SIZE * 8 & ((u64)1 << T::SIZE % 8 * 8) - 1;
    }

    __device__ __forceinline__ void first(const u64 (&v)[P::UNITS]) {
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++)
#pragma unroll
            for (u32 i = 0; i < EACH; i++) acc[u][i] = T::template up<A>(element(v[u], i));
    }

    template <u32 OP> __device__ __forceinline__ void add_by(const u64 (&v)[P::UNITS]) {
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++)
#pragma unroll
            for (u32 i = 0; i < EACH; i++) acc[u][i] = combine<OP, A>(acc[u][i], T::template up<A>(element(v[u], i)));
    }

    __device__ __forceinline__ void add(const u64 (&v)[P::UNITS], u32 op) {
        // Not a switch: its table would be one more thing to wait for.
        if (op == SUM || op == AVG) return add_by<SUM>(v);
        if (op == MAX) return add_by<MAX>(v);
        if (op == MIN) return add_by<MIN>(v);
        add_by<PROD>(v);
    }

    __device__ __forceinline__ void finish(u64 (&v)[P::UNITS], u32 op, u32 ranks) {
        if (op == AVG) divide(ranks);
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++) {
            v[u] = 0;
#pragma unroll
            for (u32 i = 0; i < EACH; i++) v[u] |= T::down(acc[u][i]) << (T::SIZE % 8 * i * 8);
        }
    }

    __device__ __forceinline__ void divide(u32 ranks) {
#pragma unroll
        for (u32 u = 0; u < P::UNITS; u++)
#pragma unroll
            for (u32 i = 0; i < EACH; i++) acc[u][i] = acc[u][i] / (A)ranks;
    }
};
