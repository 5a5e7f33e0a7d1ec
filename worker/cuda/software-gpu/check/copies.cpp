// cp.async and boxes of tensors: what arrives, and when.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "check.h"

extern "C" int cuTensorMapEncodeTiled(void*, unsigned, unsigned, void*, const uint64_t*, const uint64_t*,
                                      const uint32_t*, const uint32_t*, unsigned, unsigned, unsigned,
                                      unsigned);

namespace {

// As cubecl's copy_async.cuh.
constexpr char WRAPPERS[] = R"(
inline __device__ void
__cp_async_arrive(::cuda::barrier<::cuda::thread_scope_block> &__bar) {
  uint64 *mbar_ptr = ::cuda::device::barrier_native_handle(__bar);
  uint32 smem_int_mbar =
      static_cast<uint32>(__cvta_generic_to_shared(mbar_ptr));
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];\n"
               :: "r"(smem_int_mbar));
}
template <size_t _Copy_size>
inline __device__ void
__cp_async_shared_global(void const *src_ptr, void *smem_ptr, int32 const &src_size) {
  uint64 gmem_int_desc = reinterpret_cast<uint64>(src_ptr);
  uint32 smem_int_ptr = static_cast<uint32>(__cvta_generic_to_shared(smem_ptr));
  asm volatile("cp.async.ca.shared::cta.global [%0], [%1], %2, %3;\n"
               :: "r"(smem_int_ptr), "l"(gmem_int_desc), "n"(_Copy_size), "r"(src_size) : "memory");
}
template <>
inline __device__ void
__cp_async_shared_global<16>(void const *src_ptr, void *smem_ptr, int32 const &src_size) {
  uint64 gmem_int_desc = reinterpret_cast<uint64>(src_ptr);
  uint32 smem_int_ptr = static_cast<uint32>(__cvta_generic_to_shared(smem_ptr));
  asm volatile("cp.async.cg.shared::cta.global [%0], [%1], %2, %3;\n"
               :: "r"(smem_int_ptr), "l"(gmem_int_desc), "n"(16), "r"(src_size) : "memory");
}
)";

constexpr char BARRIER[] = R"(
cuda::barrier<cuda::thread_scope_block>& barrier_0 =
    reinterpret_cast<cuda::barrier<cuda::thread_scope_block>&>(dynamic_shared_mem[0]);
if (lane == 0) { init(&barrier_0, blockDim.x); }
__syncthreads();
)";

// Two warps; thread i copies 4 words, of which i % 5 are read. One looks at another's before and after
// waiting.
void check_partial_copies() {
    const std::string body = std::string(BARRIER) + R"(
uint32* shared_words = reinterpret_cast<uint32*>(dynamic_shared_mem + 1024);
for (int i = 0; i < 4; i++) { shared_words[lane * 4 + i] = 7; }
__syncthreads();
for (int round = 0; round < 3; round++) {
    __cp_async_shared_global<16>(from + lane * 4, shared_words + lane * 4, lane % 5 * 4);
    __cp_async_arrive(barrier_0);
    uint other = blockDim.x - 1 - lane;
    if (round == 0) { early[lane] = shared_words[lane * 4]; }
    barrier_0.arrive_and_wait();
    for (int i = 0; i < 4; i++) { late[lane * 4 + i] = shared_words[other * 4 + i]; }
    __syncthreads();
}
)";
    constexpr int THREADS = 64;
    alignas(16) uint32_t from[THREADS * 4], early[THREADS], late[THREADS * 4];
    for (int i = 0; i < THREADS * 4; i++) {
        from[i] = 1000 + i;
    }
    uint32_t *in = from, *soon = early, *then = late;
    launch(WRAPPERS, "const uint32* from, uint32* early, uint32* late", body, {&in, &soon, &then}, THREADS);
    const char* eager = getenv("GPU_EAGER_COPIES");
    const bool at_once = eager && strcmp(eager, "0") != 0;
    for (int i = 0; i < THREADS; i++) {
        const uint32_t first = i % 5 ? from[i * 4] : 0;
        expect(early[i] == (at_once ? first : 7), "cp.async before it is waited for");
        for (int word = 0; word < 4; word++) {
            const int other = THREADS - 1 - i;
            const uint32_t wanted = word < other % 5 ? from[other * 4 + word] : 0;
            expect(late[i * 4 + word] == wanted, "cp.async after it was waited for");
        }
    }
}

// Where a byte of a row lies within its 16-byte groups, as CUDA's manual draws it: rows of 128 bytes are
// swapped by all eight, of 64 bytes by every second, of 32 bytes by every fourth.
int swapped_group(int row, int group, int row_bytes) {
    switch (row_bytes) {
        case 128: return group ^ row % 8;
        case 64: return group ^ row / 2 % 4;
        case 32: return group ^ row / 4 % 2;
        default: return group;
    }
}

// A box of 16 rows of a tensor [2, 21, 40] of 16-bit numbers whose rows are 48 apart.
void check_box(int row_bytes, bool swizzled, int x, int y, int z) {
    constexpr uint64_t SIZE[] = {40, 21, 2}, STRIDES[] = {96, 96 * 21};
    const uint32_t box[] = {uint32_t(row_bytes / 2), 16, 1}, steps[] = {1, 1, 1};
    alignas(64) uint64_t map[16];
    alignas(16) static uint16_t from[2 * 21 * 48];
    for (int i = 0; i < 2 * 21 * 48; i++) {
        from[i] = uint16_t(i + 1);
    }
    const unsigned swizzle = !swizzled ? 0 : row_bytes == 32 ? 1 : row_bytes == 64 ? 2 : 3;
    const int bf16 = 9;
    const int code = cuTensorMapEncodeTiled(map, bf16, 3, from, SIZE, STRIDES, box, steps, 0, swizzle, 0, 0);
    expect(code == 0, "cuTensorMapEncodeTiled");
    const std::string body = std::string(BARRIER) + R"(
uint16* shared_words = reinterpret_cast<uint16*>(dynamic_shared_mem + 1024);
cuda::device::experimental::fence_proxy_async_shared_cta();
if (lane == 0) {
    cuda::device::experimental::cp_async_bulk_tensor_3d_global_to_shared(shared_words, &tensor_map_0, X, Y, Z,
        barrier_0);
}
cuda::barrier<cuda::thread_scope_block>::arrival_token token;
token = cuda::device::barrier_arrive_tx(barrier_0, 1, lane == 0 ? BYTES : 0);
barrier_0.wait(std::move(token));
for (int i = lane; i < COUNT; i += 32) { to[i] = shared_words[i]; }
)";
    std::string sized = replaced(replaced(body, "BYTES", std::to_string(row_bytes * 16)), "COUNT",
                                 std::to_string(row_bytes * 8));
    sized = replaced(replaced(replaced(sized, "X,", std::to_string(x) + ","), "Y,", std::to_string(y) + ","),
                     "Z,", std::to_string(z) + ",");
    uint16_t to[128 * 8], *out = to;
    launch("", "const __grid_constant__ CUtensorMap tensor_map_0, uint16* to", sized, {map, &out});
    for (int row = 0; row < 16; row++) {
        for (int column = 0; column < row_bytes / 2; column++) {
            const bool inside = x + column >= 0 && x + column < 40 && y + row >= 0 && y + row < 21 && z < 2;
            const uint16_t wanted = inside ? from[(z * 21 + y + row) * 48 + x + column] : 0;
            const int group = swizzled ? swapped_group(row, column / 8, row_bytes) : column / 8;
            expect(to[row * row_bytes / 2 + group * 8 + column % 8] == wanted,
                   "a box with rows of " + std::to_string(row_bytes) + " bytes");
        }
    }
}

// What CUDA's manual forbids is refused.
void check_refused_maps() {
    const uint64_t size[] = {40, 20}, strides[] = {96}, odd_strides[] = {100};
    const uint32_t box[] = {32, 16}, wide[] = {128, 16}, steps[] = {1, 1};
    alignas(64) uint64_t map[16];
    alignas(16) static uint16_t from[64];
    const auto code = [&](void* start, const uint64_t* apart, const uint32_t* of, unsigned swizzle) {
        return cuTensorMapEncodeTiled(map, 9, 2, start, size, apart, of, steps, 0, swizzle, 0, 0);
    };
    expect(code(from, strides, box, 2) == 0, "a map that is allowed");
    fprintf(stderr, "refusals are expected here:\n");
    expect(code(from + 1, strides, box, 0) != 0, "a tensor that is not aligned");
    expect(code(from, odd_strides, box, 0) != 0, "rows that are not aligned");
    expect(code(from, strides, box, 1) != 0, "rows longer than what is swizzled");
    expect(code(from, strides, wide, 3) != 0, "rows longer than what is swizzled");
}

}  // namespace

void check_copies() {
    check_partial_copies();
    for (const int row_bytes : {32, 64, 128}) {
        for (const bool swizzled : {false, true}) {
            check_box(row_bytes, swizzled, 0, 0, 1);
            check_box(row_bytes, swizzled, 16, 10, 0);
            check_box(row_bytes, swizzled, -8, -3, 1);
            check_box(row_bytes, swizzled, 0, 0, 2);
        }
    }
    check_refused_maps();
}
