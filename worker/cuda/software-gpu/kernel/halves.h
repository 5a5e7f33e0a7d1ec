// CUDA's 16-bit floats and pairs of them: computed in float32 and rounded to nearest even after every
// operation.
//
// A GPU does the same for single operations; a fused multiply-add is rounded once here too.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gpu {

struct Brain {
    static float widen(uint16_t bits) {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    static uint16_t narrow(float value) {
        uint32_t wide;
        memcpy(&wide, &value, sizeof wide);
        const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
        const uint32_t to_nearest_even = 0x7fff + ((wide >> 16) & 1);
        return is_nan ? 0x7fff : uint16_t((wide + to_nearest_even) >> 16);
    }
};

struct Ieee {
    static float widen(uint16_t bits) {
        _Float16 half;
        memcpy(&half, &bits, sizeof half);
        return float(half);
    }
    static uint16_t narrow(float value) {
        const _Float16 half = _Float16(value);
        uint16_t bits;
        memcpy(&bits, &half, sizeof bits);
        return bits;
    }
};

template <class T>
concept Number = std::is_arithmetic_v<T>;

template <class Format>
struct Half {
    uint16_t bits;

    Half() = default;
    template <Number T>
    inline Half(T value) : bits(Format::narrow(float(value))) {}
    template <class Other>
    inline Half(Half<Other> value) : bits(Format::narrow(float(value))) {}
    inline operator float() const { return Format::widen(bits); }

    static Half of_bits(unsigned bits) {
        Half half;
        half.bits = uint16_t(bits);
        return half;
    }

    friend Half operator+(Half a, Half b) { return float(a) + float(b); }
    friend Half operator-(Half a, Half b) { return float(a) - float(b); }
    friend Half operator*(Half a, Half b) { return float(a) * float(b); }
    friend Half operator/(Half a, Half b) { return float(a) / float(b); }
    friend Half operator-(Half a) { return of_bits(a.bits ^ 0x8000); }
    friend Half& operator+=(Half& a, Half b) { return a = a + b; }
    friend Half& operator-=(Half& a, Half b) { return a = a - b; }
    friend Half& operator*=(Half& a, Half b) { return a = a * b; }
    friend Half& operator/=(Half& a, Half b) { return a = a / b; }
    friend bool operator<(Half a, Half b) { return float(a) < float(b); }
    friend bool operator>(Half a, Half b) { return float(a) > float(b); }
    friend bool operator<=(Half a, Half b) { return float(a) <= float(b); }
    friend bool operator>=(Half a, Half b) { return float(a) >= float(b); }
    friend bool operator==(Half a, Half b) { return float(a) == float(b); }
    friend bool operator!=(Half a, Half b) { return float(a) != float(b); }

    friend Half __hmax(Half a, Half b) { return fmaxf(a, b); }
    friend Half __hmin(Half a, Half b) { return fminf(a, b); }
    friend Half __hfma(Half a, Half b, Half c) { return fmaf(a, b, c); }
    friend Half __habs(Half a) { return of_bits(a.bits & 0x7fff); }
    friend bool __hisnan(Half a) { return std::isnan(float(a)); }
    friend bool __hisinf(Half a) { return std::isinf(float(a)); }
    friend Half max(Half a, Half b) { return fmaxf(a, b); }
    friend Half min(Half a, Half b) { return fminf(a, b); }
    friend Half fma(Half a, Half b, Half c) { return fmaf(a, b, c); }
    friend Half abs(Half a) { return of_bits(a.bits & 0x7fff); }
    friend Half hlog(Half a) { return logf(a); }
    friend Half hexp(Half a) { return expf(a); }
    friend Half hsin(Half a) { return sinf(a); }
    friend Half hcos(Half a) { return cosf(a); }
    friend Half hsqrt(Half a) { return sqrtf(a); }
    friend Half hrsqrt(Half a) { return 1.0f / sqrtf(a); }
    friend Half hceil(Half a) { return ceilf(a); }
    friend Half hfloor(Half a) { return floorf(a); }
    friend Half htrunc(Half a) { return truncf(a); }
    friend Half hrint(Half a) { return rintf(a); }
};

template <class T>
struct alignas(4) Pair {
    T x;
    T y;

    Pair() = default;
    inline Pair(T first, T second) : x(first), y(second) {}
    inline Pair(T both) : x(both), y(both) {}
    template <Number N>
    inline Pair(N both) : x(both), y(both) {}

    friend Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }
    friend Pair operator-(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }
    friend Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }
    friend Pair operator/(Pair a, Pair b) { return {a.x / b.x, a.y / b.y}; }
    friend Pair operator-(Pair a) { return {-a.x, -a.y}; }
    friend Pair& operator+=(Pair& a, Pair b) { return a = a + b; }
    friend Pair& operator-=(Pair& a, Pair b) { return a = a - b; }
    friend Pair& operator*=(Pair& a, Pair b) { return a = a * b; }

    friend Pair __hmax2(Pair a, Pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
    friend Pair __hmin2(Pair a, Pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }
    friend Pair __habs2(Pair a) { return {__habs(a.x), __habs(a.y)}; }
    friend Pair fma(Pair a, Pair b, Pair c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
    friend Pair h2log(Pair a) { return {hlog(a.x), hlog(a.y)}; }
    friend Pair h2exp(Pair a) { return {hexp(a.x), hexp(a.y)}; }
    friend Pair h2sin(Pair a) { return {hsin(a.x), hsin(a.y)}; }
    friend Pair h2cos(Pair a) { return {hcos(a.x), hcos(a.y)}; }
    friend Pair h2sqrt(Pair a) { return {hsqrt(a.x), hsqrt(a.y)}; }
    friend Pair h2rsqrt(Pair a) { return {hrsqrt(a.x), hrsqrt(a.y)}; }
    friend Pair h2ceil(Pair a) { return {hceil(a.x), hceil(a.y)}; }
    friend Pair h2floor(Pair a) { return {hfloor(a.x), hfloor(a.y)}; }
    friend Pair h2trunc(Pair a) { return {htrunc(a.x), htrunc(a.y)}; }
    friend Pair h2rint(Pair a) { return {hrint(a.x), hrint(a.y)}; }
};

}  // namespace GPU

using __half = gpu::Half<gpu::Ieee>;
using __nv_bfloat16 = gpu::Half<gpu::Brain>;
using half = __half;
using nv_bfloat16 = __nv_bfloat16;
using __half2 = gpu::Pair<__half>;
using __nv_bfloat162 = gpu::Pair<__nv_bfloat16>;
