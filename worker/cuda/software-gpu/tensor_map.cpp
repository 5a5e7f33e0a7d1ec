// cuTensorMapEncodeTiled, with the demands that CUDA's manual makes, and copies of boxes from a tensor to
// shared memory.
//
//   outside the tensor   zeros or NaN; such bytes count as copied
//   swizzled             bits 4.. of an address in shared memory are flipped by its bits 7..:
//                        one of them for rows of 32 bytes, two for 64, three for 128
//
// Not here: strides between elements, interleaving, columns of images.

#include "tensor_map.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include "driver.h"
#include "kernel/matrices.h"
#include "settings.h"

namespace gpu {

namespace {

constexpr uint64_t MARK = 0x70616d20726f736e;
constexpr unsigned MOST_IN_BOX = 256;
constexpr unsigned TFLOAT32 = 11;

// CUtensorMapDataType: u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16, f32 flushed, tf32, tf32 flushed.
constexpr uint8_t ELEMENT_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

int refuse(const char* why) {
    fprintf(stderr, "software GPU: cuTensorMapEncodeTiled: %s\n", why);
    return INVALID_VALUE;
}

// Where the byte at `offset` of the box goes.
uint32_t swizzle(const TensorMap& map, uint32_t address) {
    const uint32_t flipped = map.swizzled_bytes ? map.swizzled_bytes / 16 - 1 : 0;
    return address ^ (((address >> 7) & flipped) << 4);
}

void fill_outside(const TensorMap& map, uint8_t* to) {
    memset(to, map.nan_outside ? 0xff : 0, map.element_bytes);
}

void copy_element(const TensorMap& map, uint8_t* to, const uint8_t* from) {
    memcpy(to, from, map.element_bytes);
    if (map.rounded_to_tf32) {
        float value;
        memcpy(&value, to, sizeof value);
        value = TensorFloat::nearest(value);
        memcpy(to, &value, sizeof value);
    }
}

}  // namespace

Box box_of(const Launch& launch, const void* map, const void* to, const int* at, int rank) {
    const auto demand = [&](bool kept, const char* otherwise) {
        if (!kept) {
            launch.services->stop(launch, otherwise);
        }
    };
    Box box{};
    memcpy(&box.map, map, sizeof box.map);
    demand(box.map.mark == MARK, "a box is copied through something that is no tensor map");
    demand(box.map.rank == rank, "a box is copied with another rank than its tensor map's");
    box.shared = launch.shared;
    box.address = uint32_t(static_cast<const uint8_t*>(to) - launch.shared);
    box.bytes = box.map.element_bytes;
    for (int axis = 0; axis < rank; axis++) {
        box.at[axis] = at[axis];
        box.bytes *= box.map.box[axis];
    }
    demand(box.address % 128 == 0, "a box is copied to an address that is no multiple of 128 bytes");
    demand(uint64_t(box.address) + box.bytes <= launch.shared_bytes, "a box leaves the shared memory");
    return box;
}

void load(const Box& box) {
    const TensorMap& map = box.map;
    unsigned within[MOST_AXES] = {};
    for (uint32_t offset = 0; offset < box.bytes; offset += map.element_bytes) {
        const uint8_t* from = map.start;
        bool inside = true;
        for (int axis = 0; axis < map.rank; axis++) {
            const int64_t index = box.at[axis] + within[axis];
            inside &= index >= 0 && uint64_t(index) < map.size[axis];
            from += index * int64_t(map.stride[axis]);
        }
        uint8_t* to = box.shared + swizzle(map, box.address + offset);
        if (inside) {
            copy_element(map, to, from);
        } else {
            fill_outside(map, to);
        }
        for (int axis = 0; axis < map.rank && ++within[axis] == map.box[axis]; axis++) {
            within[axis] = 0;
        }
    }
}

extern "C" {

int cuTensorMapEncodeTiled(void* encoded, unsigned type, unsigned rank, void* start, const uint64_t* size,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           unsigned interleave, unsigned swizzle, unsigned /*promotion*/, unsigned outside) {
    if (!settings().execute) {
        return SUCCESS;
    }
    if (type >= sizeof ELEMENT_BYTES || rank < 1 || rank > MOST_AXES) {
        return refuse("an unknown type, or more than five axes");
    }
    if (interleave || swizzle > 3) {
        return refuse("this interleaving or swizzling is not here");
    }
    if (uintptr_t(start) % 16) {
        return refuse("the tensor does not begin at a multiple of 16 bytes");
    }
    TensorMap map{};
    map.mark = MARK;
    map.start = static_cast<const uint8_t*>(start);
    map.rank = uint8_t(rank);
    map.element_bytes = ELEMENT_BYTES[type];
    map.swizzled_bytes = swizzle ? uint8_t(16 << swizzle) : 0;
    map.nan_outside = outside != 0;
    map.rounded_to_tf32 = type >= TFLOAT32;
    for (unsigned axis = 0; axis < rank; axis++) {
        map.size[axis] = size[axis];
        map.stride[axis] = axis ? strides[axis - 1] : map.element_bytes;
        map.box[axis] = uint16_t(box[axis]);
        if (size[axis] == 0 || size[axis] > 1ull << 32) {
            return refuse("an axis is empty, or too long");
        }
        if (axis && (map.stride[axis] % 16 || map.stride[axis] >= 1ull << 40)) {
            return refuse("a stride is no multiple of 16 bytes, or too long");
        }
        if (box[axis] == 0 || box[axis] > MOST_IN_BOX || element_strides[axis] != 1) {
            return refuse("a box is empty or longer than 256 elements, or elements are skipped");
        }
    }
    const unsigned row_bytes = box[0] * map.element_bytes;
    if (row_bytes % 16 || (map.swizzled_bytes && row_bytes > map.swizzled_bytes)) {
        return refuse("a row of the box is no multiple of 16 bytes, or longer than what is swizzled");
    }
    memcpy(encoded, &map, sizeof map);
    return SUCCESS;
}

// Convolutions; a counted GPU need not do them.
int cuTensorMapEncodeIm2col(void*) { return settings().execute ? NOT_SUPPORTED : SUCCESS; }
int cuTensorMapEncodeIm2colWide(void*) { return settings().execute ? NOT_SUPPORTED : SUCCESS; }

}  // extern "C"

}  // namespace GPU
