// Instructions of PTX for small matrices that lie spread over the registers of a warp: mma.sync, ldmatrix,
// stmatrix, and elect.sync. Which lane holds which element is as in the PTX ISA: cubek computes with it.
//
//   mma m16n8kK, with P elements in a register of 32 bits, K = 8 P, lane = 4 g + t:
//     a  register r, element e   row g + 8 (r & 1), column t P + e + 4 P (r >> 1)
//     b  register r, element e   row t P + e + 4 P r, column g
//     c  register r              row g + 8 (r >> 1), column 2 t + (r & 1)
//   ldmatrix, stmatrix: of matrix m, row i begins at lane 8 m + i's address, and lane = 4 g + t holds
//     row g, columns 2 t and 2 t + 1; with .trans column g, rows 2 t and 2 t + 1
//
// compiler.cpp turns inline assembly into calls of functions named after the instruction, so one that is not
// here is refused by g++.
#pragma once

#include <cstdint>
#include <cstring>

#include "halves.h"
#include "here.h"

namespace gpu {

// 10 bits of mantissa. Tensor cores do not look at the others, `nearest` rounds.
struct TensorFloat {
    static constexpr uint32_t UNUSED = 0x1fff;

    static float cut(uint32_t bits) {
        bits &= ~UNUSED;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    // To nearest, ties away from zero, as cvt.rna does.
    static float nearest(float value) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        const bool finite = (bits & 0x7f800000) != 0x7f800000;
        return finite ? cut(bits + 0x1000) : value;
    }
};

template <class Number>
inline float element_of(uint32_t bits, int position) {
    return float(Number::of_bits(bits >> 16 * position & 0xffff));
}
template <>
inline float element_of<TensorFloat>(uint32_t bits, int) {
    return TensorFloat::cut(bits);
}

struct Multiplied {
    uint32_t a[4];
    uint32_t b[2];
    float c[4];
    float d[4];
};

template <class Number>
inline void multiply(Multiplied* const* lanes) {
    constexpr int PACKED = sizeof(Number) == 2 ? 2 : 1;
    constexpr int DEPTH = 8 * PACKED;
    float a[16][DEPTH], b[DEPTH][8], d[16][8];
    for (int lane = 0; lane < LANES; lane++) {
        const Multiplied& from = *lanes[lane];
        const int group = lane / 4, member = lane % 4;
        for (int e = 0; e < PACKED; e++) {
            for (int r = 0; r < 4; r++) {
                const int column = member * PACKED + e + 4 * PACKED * (r >> 1);
                a[group + 8 * (r & 1)][column] = element_of<Number>(from.a[r], e);
            }
            for (int r = 0; r < 2; r++) {
                b[member * PACKED + e + 4 * PACKED * r][group] = element_of<Number>(from.b[r], e);
            }
        }
        for (int r = 0; r < 4; r++) {
            d[group + 8 * (r >> 1)][2 * member + (r & 1)] = from.c[r];
        }
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < DEPTH; k++) {
            for (int column = 0; column < 8; column++) {
                d[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        for (int r = 0; r < 4; r++) {
            lanes[lane]->d[r] = d[lane / 4 + 8 * (r >> 1)][2 * (lane % 4) + (r & 1)];
        }
    }
}

struct Spread {
    uint32_t registers[4];
    uint32_t row;
    int matrices;
    bool transposed;
};

// Whether registers are filled from memory or the other way round.
enum class Direction { load, store };

template <Direction DIRECTION>
inline void spread(Spread* const* lanes) {
    for (int m = 0; m < lanes[0]->matrices; m++) {
        uint16_t* rows[8];
        for (int i = 0; i < 8; i++) {
            const uint32_t address = lanes[8 * m + i]->row;
            require(address % 16 == 0, "ldmatrix, stmatrix: a row is not at a multiple of 16 bytes");
            rows[i] = static_cast<uint16_t*>(shared_place(address, 16));
        }
        for (int lane = 0; lane < LANES; lane++) {
            uint16_t halves[2];
            uint32_t& whole = lanes[lane]->registers[m];
            memcpy(halves, &whole, sizeof halves);
            for (int e = 0; e < 2; e++) {
                const int major = lane / 4, minor = 2 * (lane % 4) + e;
                uint16_t& place = lanes[lane]->transposed ? rows[minor][major] : rows[major][minor];
                if (DIRECTION == Direction::load) {
                    halves[e] = place;
                } else {
                    place = halves[e];
                }
            }
            memcpy(&whole, halves, sizeof whole);
        }
    }
}

template <class... Registers>
inline void load_spread(bool transposed, uint32_t row, Registers&... registers) {
    Spread mine{{}, row, int(sizeof...(registers)), transposed};
    together<spread<Direction::load>>(mine);
    int next = 0;
    ((registers = mine.registers[next++]), ...);
}

template <class... Registers>
inline void store_spread(bool transposed, uint32_t row, Registers... registers) {
    Spread mine{{registers...}, row, int(sizeof...(registers)), transposed};
    together<spread<Direction::store>>(mine);
}

}  // namespace GPU

// Operands in the order in which the instruction has them.
namespace ptx {

using u32 = uint32_t;

template <class Number>
inline void mma(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                float c0, float c1, float c2, float c3) {
    gpu::Multiplied mine{{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}, {}};
    gpu::together<gpu::multiply<Number>>(mine);
    d0 = mine.d[0];
    d1 = mine.d[1];
    d2 = mine.d[2];
    d3 = mine.d[3];
}

template <class... Operands>
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(Operands&... operands) {
    mma<__half>(operands...);
}
template <class... Operands>
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(Operands&... operands) {
    mma<__nv_bfloat16>(operands...);
}
template <class... Operands>
inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(Operands&... operands) {
    mma<gpu::TensorFloat>(operands...);
}

inline void ldmatrix_sync_aligned_m8n8_x1_shared__cta_b16(u32& r0, u32 row) {
    gpu::load_spread(false, row, r0);
}
inline void ldmatrix_sync_aligned_m8n8_x2_shared__cta_b16(u32& r0, u32& r1, u32 row) {
    gpu::load_spread(false, row, r0, r1);
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared__cta_b16(u32& r0, u32& r1, u32& r2, u32& r3, u32 row) {
    gpu::load_spread(false, row, r0, r1, r2, r3);
}
inline void ldmatrix_sync_aligned_m8n8_x1_trans_shared__cta_b16(u32& r0, u32 row) {
    gpu::load_spread(true, row, r0);
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared__cta_b16(u32& r0, u32& r1, u32 row) {
    gpu::load_spread(true, row, r0, r1);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared__cta_b16(u32& r0, u32& r1, u32& r2, u32& r3, u32 row) {
    gpu::load_spread(true, row, r0, r1, r2, r3);
}

template <class... Registers>
inline void stmatrix_sync_aligned_m8n8_x1_shared__cta_b16(u32 row, Registers... registers) {
    gpu::store_spread(false, row, registers...);
}
template <class... Registers>
inline void stmatrix_sync_aligned_m8n8_x2_shared__cta_b16(u32 row, Registers... registers) {
    gpu::store_spread(false, row, registers...);
}
template <class... Registers>
inline void stmatrix_sync_aligned_m8n8_x4_shared__cta_b16(u32 row, Registers... registers) {
    gpu::store_spread(false, row, registers...);
}
template <class... Registers>
inline void stmatrix_sync_aligned_m8n8_x1_trans_shared__cta_b16(u32 row, Registers... registers) {
    gpu::store_spread(true, row, registers...);
}
template <class... Registers>
inline void stmatrix_sync_aligned_m8n8_x2_trans_shared__cta_b16(u32 row, Registers... registers) {
    gpu::store_spread(true, row, registers...);
}
template <class... Registers>
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared__cta_b16(u32 row, Registers... registers) {
    gpu::store_spread(true, row, registers...);
}

// Waits for the lanes that are still there. Which one is chosen is the GPU's affair; here it is the first.
inline void elect_sync__selp_b32(u32 /*lanes*/, u32& chosen, u32 if_chosen, u32 otherwise) {
    const int parity = gpu::here()->parity;
    gpu::here()->parity ^= 1;
    gpu::services().wait_for_warp(gpu::here(), parity);
    const gpu::Thread& thread = *gpu::here();
    chosen = thread.lane == __builtin_ctz(thread.warp->mask[parity]) ? if_chosen : otherwise;
}

inline int clamp(int64_t wide) {
    return wide > INT32_MAX ? INT32_MAX : wide < INT32_MIN ? INT32_MIN : int(wide);
}
inline void add_sat_s32(int& sum, int a, int b) { sum = clamp(int64_t(a) + b); }
inline void sub_sat_s32(int& difference, int a, int b) { difference = clamp(int64_t(a) - b); }

}  // namespace ptx
