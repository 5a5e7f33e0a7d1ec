// Tensor maps, and the boxes that are copied through them (TMA).
#pragma once

#include <cstdint>

#include "execute.h"

namespace gpu {

constexpr int MOST_AXES = 5;

// In the 128 bytes of a CUtensorMap, of which a GPU says nothing. Axis 0 is the one without gaps.
struct TensorMap {
    uint64_t mark;
    const uint8_t* start;
    uint64_t size[MOST_AXES];
    uint64_t stride[MOST_AXES];
    uint16_t box[MOST_AXES];
    uint8_t rank;
    uint8_t element_bytes;
    // Groups of 16 bytes are swapped within rows of this many bytes; 0 for none.
    uint8_t swizzled_bytes;
    // Outside the tensor: NaN instead of zeros. Then elements are floats.
    uint8_t nan_outside;
    uint8_t rounded_to_tf32;
};
static_assert(sizeof(TensorMap) <= 128);

// A copy that was asked for.
struct Box {
    TensorMap map;
    uint8_t* shared;
    uint32_t address;
    int64_t at[MOST_AXES];
    unsigned bytes;
};

// Stops the launch if a GPU would.
Box box_of(const Launch& launch, const void* map, const void* to, const int* at, int rank);

void load(const Box& box);

}  // namespace GPU
