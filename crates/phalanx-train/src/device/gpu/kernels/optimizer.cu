// Steps of the optimizers (optimizer/host.rs).
#include "number.cuh"

// The factors of optimizer/gpu.rs.
struct AdamW { f64 decay, length, root, beta1, beta2, rest1, rest2, epsilon; };
struct Sgd { f64 length, part, decay, nesterov; };

static __device__ __forceinline__ f32 root_of(f32 x) { return __fsqrt_rn(x); }
static __device__ __forceinline__ f64 root_of(f64 x) { return __dsqrt_rn(x); }

template <class T> static __device__ void adamw(const AdamW& step, const T* gradient, T* parameters, T* first, T* second, size_t len) {
    typedef typename Real<T>::Type R;
    const R decay = (R)step.decay, length = (R)step.length, root = (R)step.root, epsilon = (R)step.epsilon;
    const R beta1 = (R)step.beta1, beta2 = (R)step.beta2, rest1 = (R)step.rest1, rest2 = (R)step.rest2;
    each_four(len, [&](size_t i) {
        const Four<T> gradients = load(gradient, i, len);
        Four<T> p = load(parameters, i, len), ms = load(first, i, len), vs = load(second, i, len);
        for (u32 k = 0; k < 4; k++) {
            const R g = up<R>(gradients.at[k]);
            const R m = beta1 * up<R>(ms.at[k]) + rest1 * g;
            const R v = beta2 * up<R>(vs.at[k]) + rest2 * g * g;
            ms.at[k] = down<T>(m);
            vs.at[k] = down<T>(v);
            p.at[k] = down<T>(up<R>(p.at[k]) * decay - length * m / (root_of(v) / root + epsilon));
        }
        store(first, i, len, ms);
        store(second, i, len, vs);
        store(parameters, i, len, p);
    });
}

template <class T> static __device__ void sgd(const Sgd& step, const T* gradient, T* parameters, T* momentum, size_t len) {
    typedef typename Real<T>::Type R;
    const R length = (R)step.length, part = (R)step.part, decay = (R)step.decay;
    each_four(len, [&](size_t i) {
        const Four<T> gradients = load(gradient, i, len);
        Four<T> ps = load(parameters, i, len), bs = load(momentum, i, len);
        for (u32 k = 0; k < 4; k++) {
            const R p = up<R>(ps.at[k]);
            const R g = up<R>(gradients.at[k]) + decay * p;
            const R b = part * up<R>(bs.at[k]) + g;
            bs.at[k] = down<T>(b);
            ps.at[k] = down<T>(p - length * (step.nesterov != 0 ? g + part * b : b));
        }
        store(momentum, i, len, bs);
        store(parameters, i, len, ps);
    });
}

#define OF_ONE(T) \
    KERNEL phalanx_train_adamw_##T(AdamW step, const T* gradient, T* parameters, T* first, T* second, size_t len) { \
        adamw(step, gradient, parameters, first, second, len); \
    } \
    KERNEL phalanx_train_sgd_##T(Sgd step, const T* gradient, T* parameters, T* momentum, size_t len) { \
        sgd(step, gradient, parameters, momentum, len); \
    }
EACH(OF_ONE)
