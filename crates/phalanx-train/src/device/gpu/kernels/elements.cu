// The arithmetic of a device (device/host.rs).
#include "number.cuh"

template <class A, class B> static __device__ void convert(const A* from, B* to, size_t len) {
    typedef typename Real<A>::Type R;
    each_four(len, [&](size_t i) {
        const Four<A> x = load(from, i, len);
        Four<B> y;
        for (u32 k = 0; k < 4; k++) y.at[k] = down<B>(up<R>(x.at[k]));
        store(to, i, len, y);
    });
}

template <class A, class B> static __device__ void add(f64 factor, const A* from, B* to, size_t len) {
    typedef typename Real<A, B>::Type R;
    each_four(len, [&](size_t i) {
        const Four<A> x = load(from, i, len);
        Four<B> y = load(to, i, len);
        for (u32 k = 0; k < 4; k++) y.at[k] = down<B>(up<R>(y.at[k]) + (R)factor * up<R>(x.at[k]));
        store(to, i, len, y);
    });
}

template <class T> static __device__ void scale(T* data, f64 factor, size_t len) {
    typedef typename Real<T>::Type R;
    each_four(len, [&](size_t i) {
        Four<T> x = load(data, i, len);
        for (u32 k = 0; k < 4; k++) x.at[k] = down<T>(up<R>(x.at[k]) * (R)factor);
        store(data, i, len, x);
    });
}

template <class T> static __device__ void fill(T* to, f64 value, size_t len) {
    const T one = down<T>(value);
    each_four(len, [&](size_t i) { store(to, i, len, Four<T>{{one, one, one, one}}); });
}

#define OF_TWO(A, B) \
    KERNEL phalanx_train_convert_##A##_##B(const A* from, B* to, size_t len) { convert(from, to, len); } \
    KERNEL phalanx_train_add_##A##_##B(f64 factor, const A* from, B* to, size_t len) { add(factor, from, to, len); }
PAIRS(OF_TWO)

#define OF_ONE(T) \
    KERNEL phalanx_train_scale_##T(T* data, f64 factor, size_t len) { scale(data, factor, len); } \
    KERNEL phalanx_train_fill_##T(T* to, f64 value, size_t len) { fill(to, value, len); }
EACH(OF_ONE)
