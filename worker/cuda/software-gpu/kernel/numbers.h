// CUDA's functions of plain numbers, and its atomics.
//
// Atomics are real ones, though one thread runs at a time: a kernel says nothing here about the order in
// which a GPU's threads meet.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"
#include "halves.h"

using std::abs;
using std::acos;
using std::acosh;
using std::asin;
using std::asinh;
using std::atan;
using std::atan2;
using std::atanh;
using std::ceil;
using std::cos;
using std::cosh;
using std::erf;
using std::exp;
using std::floor;
using std::fma;
using std::fmod;
using std::hypot;
using std::isinf;
using std::isnan;
using std::log;
using std::log1p;
using std::pow;
using std::rint;
using std::sin;
using std::sinh;
using std::sqrt;
using std::tan;
using std::tanh;
using std::trunc;

template <gpu::Number A, gpu::Number B>
inline auto max(A a, B b) {
    using Common = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<Common>) {
        return std::fmax(Common(a), Common(b));
    } else {
        return Common(a) > Common(b) ? Common(a) : Common(b);
    }
}
template <gpu::Number A, gpu::Number B>
inline auto min(A a, B b) {
    using Common = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<Common>) {
        return std::fmin(Common(a), Common(b));
    } else {
        return Common(a) < Common(b) ? Common(a) : Common(b);
    }
}

inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

inline float rsqrt(float value) { return 1.0f / sqrtf(value); }
inline double rsqrt(double value) { return 1.0 / std::sqrt(value); }
inline float rhypotf(float a, float b) { return 1.0f / hypotf(a, b); }

inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value ? __builtin_clz(value) : 32; }
inline int __clzll(long long value) { return value ? __builtin_clzll(value) : 64; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline unsigned __brev(unsigned value) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) {
        reversed |= (value >> bit & 1u) << (31 - bit);
    }
    return reversed;
}
inline unsigned long long __brevll(unsigned long long value) {
    return (unsigned long long)__brev(unsigned(value)) << 32 | __brev(unsigned(value >> 32));
}
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

namespace gpu {

template <size_t Bytes>
using Word = std::conditional_t<Bytes == 2, uint16_t, std::conditional_t<Bytes == 4, uint32_t, uint64_t>>;

// The old value; the new one is `change` of it.
template <class T, class Change>
inline T exchange(T* place, Change change) {
    auto* word = reinterpret_cast<Word<sizeof(T)>*>(place);
    Word<sizeof(T)> before = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (true) {
        T old;
        memcpy(&old, &before, sizeof old);
        const T changed = change(old);
        Word<sizeof(T)> after;
        memcpy(&after, &changed, sizeof after);
        if (__atomic_compare_exchange_n(word, &before, after, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
            return old;
        }
    }
}

}  // namespace GPU

// The second operand takes the type of the first, as CUDA's overloads do.
template <class T>
inline T atomicAdd(T* place, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T old) { return T(old + value); });
}
template <class T>
inline T atomicSub(T* place, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T old) { return T(old - value); });
}
template <class T>
inline T atomicMax(T* place, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T old) { return old > value ? old : value; });
}
template <class T>
inline T atomicMin(T* place, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T old) { return old < value ? old : value; });
}
template <class T>
inline T atomicAnd(T* place, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T old) { return T(old & value); });
}
template <class T>
inline T atomicOr(T* place, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T old) { return T(old | value); });
}
template <class T>
inline T atomicXor(T* place, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T old) { return T(old ^ value); });
}
template <class T>
inline T atomicExch(T* place, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T) { return value; });
}
template <class T>
inline T atomicCAS(T* place, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    return gpu::exchange(place, [&](T old) { return old == expected ? value : old; });
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
