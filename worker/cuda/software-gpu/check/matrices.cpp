// mma.sync, ldmatrix and stmatrix with the lanes' elements as the PTX ISA has them, and fragments of
// nvcuda::wmma.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "check.h"

namespace {

// A matrix of small whole numbers: products and sums of them are exact in every type.
std::vector<float> whole_numbers(int count, int seed) {
    std::vector<float> numbers(count);
    for (int i = 0; i < count; i++) {
        numbers[i] = float((i * 7 + seed * 13 + i / 5) % 17 - 8);
    }
    return numbers;
}

std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, int m, int n, int k) {
    std::vector<float> d(m * n);
    for (int i = 0; i < m * n; i++) {
        for (int at = 0; at < k; at++) {
            d[i] += a[i / n * k + at] * b[at * n + i % n];
        }
    }
    return d;
}

// mma.sync: the lanes' elements are laid out by the PTX ISA's own formulas, element by element.
void check_mma(const std::string& type, const std::string& element, int k) {
    const int packed = k / 8, registers_a = 4, registers_b = 2;
    const std::string preamble = replaced(R"(
inline __device__ void
__mma_test(uint32 const &a0, uint32 const &a1, uint32 const &a2, uint32 const &a3, uint32 const &b0,
uint32 const &b1, float const &c0, float const &c1, float const &c2, float const &c3, float &d0, float &d1,
float &d2, float &d3) {
  asm volatile("mma.sync.aligned.m16n8kDEPTH.row.col.f32.TYPE.TYPE.f32"
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
               : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
    }
)",
                                          "TYPE", type);
    const std::string body = replaced(R"(
ELEMENT a[8]; ELEMENT b[4]; float c[4]; float d[4];
for (int i = 0; i < AREGS; i++) { a[i] = ELEMENT(from[lane * AREGS + i]); }
for (int i = 0; i < BREGS; i++) { b[i] = ELEMENT(from[32 * AREGS + lane * BREGS + i]); }
for (int i = 0; i < 4; i++) { c[i] = 100 * i; }
const uint32* ra = reinterpret_cast<const uint32*>(a); const uint32* rb = reinterpret_cast<const uint32*>(b);
__mma_test(ra[0], ra[1], ra[2], ra[3], rb[0], rb[1], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]);
for (int i = 0; i < 4; i++) { to[lane * 4 + i] = d[i]; }
)",
                                      "ELEMENT", element);
    const int per_lane_a = registers_a * packed, per_lane_b = registers_b * packed;
    const std::vector<float> a = whole_numbers(16 * k, 1), b = whole_numbers(8 * k, 2);
    const std::vector<float> d = product(a, b, 16, 8, k);
    std::vector<float> from(LANES * (per_lane_a + per_lane_b)), to(LANES * 4);
    for (int lane = 0; lane < LANES; lane++) {
        const int group = lane >> 2, member = lane % 4;
        for (int i = 0; i < per_lane_a; i++) {
            int row, column;
            if (packed == 2) {
                row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
                column = i < 4 ? member * 2 + (i & 1) : member * 2 + (i & 1) + 8;
            } else {
                row = i == 0 || i == 2 ? group : group + 8;
                column = i < 2 ? member : member + 4;
            }
            from[lane * per_lane_a + i] = a[row * k + column];
        }
        for (int i = 0; i < per_lane_b; i++) {
            const int of_two = i < 2 ? member * 2 + (i & 1) : member * 2 + (i & 1) + 8;
            const int row = packed == 2 ? of_two : i == 0 ? member : member + 4;
            from[LANES * per_lane_a + lane * per_lane_b + i] = b[row * 8 + group];
        }
    }
    const float* in = from.data();
    float* out = to.data();
    std::string sized =
        replaced(replaced(body, "AREGS", std::to_string(per_lane_a)), "BREGS", std::to_string(per_lane_b));
    launch(replaced(preamble, "DEPTH", std::to_string(k)), "const float* from, float* to", sized,
           {&in, &out});
    for (int lane = 0; lane < LANES; lane++) {
        for (int i = 0; i < 4; i++) {
            const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
            expect(to[lane * 4 + i] == d[row * 8 + column] + 100 * i,
                   "mma.sync " + type + " lane " + std::to_string(lane) + " element " + std::to_string(i));
        }
    }
}

// Rows of eight 16-bit numbers, 48 bytes apart; what is loaded is stored again elsewhere.
void check_ldmatrix(int matrices, bool transposed) {
    const std::string count = std::to_string(matrices), trans = transposed ? ".trans" : "";
    std::string parameters, places, outputs, inputs, registers;
    for (int i = 0; i < matrices; i++) {
        const std::string n = std::to_string(i), comma = i ? ", " : "";
        parameters += "uint32 &reg_" + n + ", ";
        places += comma + "%" + n;
        outputs += comma + "\"=r\"(reg_" + n + ")";
        inputs += comma + "\"r\"(reg_" + n + ")";
        registers += "r[" + n + "], ";
    }
    std::string shifted;
    for (int i = 0; i < matrices; i++) {
        shifted += (i ? ", %" : "%") + std::to_string(i + 1);
    }
    const std::string preamble =
        "inline __device__ void\n__ldmatrix_test(" + parameters + "void const *row_addr) {\n" +
        "  uint32 addr = static_cast<uint32>(__cvta_generic_to_shared(row_addr));\n" +
        "  asm volatile(\"ldmatrix.sync.aligned.m8n8.x" + count + trans + ".shared::cta.b16\"\n" +
        "               \" {" + places + "}, [%" + count + "];\"\n : " + outputs + "\n : \"r\"(addr));\n}\n" +
        "inline __device__ void\n__stmatrix_test(" + parameters + "void const *row_addr) {\n" +
        "  uint32 addr = static_cast<uint32>(__cvta_generic_to_shared(row_addr));\n" +
        "  asm volatile(\"stmatrix.sync.aligned.m8n8.x" + count + trans + ".shared::cta.b16\"\n" +
        "               \" [%0], {" + shifted + "};\"\n :: \"r\"(addr), " + inputs + ");\n}\n";
    const std::string body = R"(
uint16* shared_in = reinterpret_cast<uint16*>(dynamic_shared_mem);
uint16* shared_out = reinterpret_cast<uint16*>(dynamic_shared_mem + 8192);
for (int i = 0; i < 8; i++) { shared_in[lane * 24 + i] = lane * 8 + i; }
__syncwarp();
uint32 r[4];
__ldmatrix_test()" + registers +
                             R"(shared_in + lane * 24);
__stmatrix_test()" + registers +
                             R"(shared_out + lane * 24);
for (int i = 0; i < 4; i++) { to[lane * 4 + i] = r[i]; }
__syncwarp();
for (int i = 0; i < 8; i++) { back[lane * 8 + i] = shared_out[lane * 24 + i]; }
)";
    std::vector<uint32_t> to(LANES * 4), back(LANES * 8);
    uint32_t *out = to.data(), *again = back.data();
    launch(preamble, "uint32* to, uint32* back", body, {&out, &again});
    for (int lane = 0; lane < LANES; lane++) {
        for (int m = 0; m < matrices; m++) {
            const int major = lane / 4, minor = lane % 4 * 2;
            const uint32_t low = transposed ? minor * 8 + major : major * 8 + minor;
            const uint32_t high = transposed ? (minor + 1) * 8 + major : major * 8 + minor + 1;
            const uint32_t wanted = (m * 64 + low) | (m * 64 + high) << 16;
            expect(to[lane * 4 + m] == wanted, "ldmatrix x" + count + trans);
        }
    }
    for (int i = 0; i < matrices * 64; i++) {
        expect(back[i] == uint32_t(i), "stmatrix x" + count + trans);
    }
}

// A fragment of every shape, from and to memory with rows further apart than they are long.
void check_wmma(const std::string& type, const std::string& element, int m, int n, int k, bool a_by_rows,
                bool b_by_rows) {
    const int step_a = (a_by_rows ? k : m) + 16, step_b = (b_by_rows ? n : k) + 16, step_d = n + 8;
    const auto layout = [](bool by_rows) { return by_rows ? "row_major" : "col_major"; };
    const std::string shape = std::to_string(m) + ", " + std::to_string(n) + ", " + std::to_string(k);
    const std::string w = "nvcuda::wmma::";
    const std::string of_type = type == "tf32" ? w + "precision::tf32" : element;
    const std::string body =
        "ELEMENT* a = reinterpret_cast<ELEMENT*>(dynamic_shared_mem);\n"
        "ELEMENT* b = reinterpret_cast<ELEMENT*>(dynamic_shared_mem + 8192);\n"
        "for (int i = lane; i < 2048; i += 32) { a[i] = ELEMENT(from[i]); b[i] = ELEMENT(from[2048 + i]); }\n"
        "__syncwarp();\n" +
        w + "fragment<" + w + "matrix_a, " + shape + ", " + of_type + ", " + w + layout(a_by_rows) +
        "> fa;\n" + w + "fragment<" + w + "matrix_b, " + shape + ", " + of_type + ", " + w +
        layout(b_by_rows) + "> fb;\n" + w + "fragment<" + w + "accumulator, " + shape + ", float> fc;\n" + w +
        "fill_fragment(fc, float(3));\n" + w + "load_matrix_sync(fa, a, " + std::to_string(step_a) + ");\n" +
        w + "load_matrix_sync(fb, b, " + std::to_string(step_b) + ");\n" + w + "mma_sync(fc, fa, fb, fc);\n" +
        w + "store_matrix_sync(to, fc, " + std::to_string(step_d) + ", " + w + "mem_row_major);";
    const std::vector<float> a = whole_numbers(m * k, 3), b = whole_numbers(k * n, 4);
    const std::vector<float> d = product(a, b, m, n, k);
    std::vector<float> from(4096, NAN);
    for (int i = 0; i < m * k; i++) {
        from[a_by_rows ? i / k * step_a + i % k : i % k * step_a + i / k] = a[i];
    }
    for (int i = 0; i < k * n; i++) {
        from[2048 + (b_by_rows ? i / n * step_b + i % n : i % n * step_b + i / n)] = b[i];
    }
    auto* to = static_cast<float*>(aligned_alloc(32, m * step_d * sizeof(float)));
    const float* in = from.data();
    launch("", "const float* from, float* to", replaced(body, "ELEMENT", element), {&in, &to});
    for (int i = 0; i < m * n; i++) {
        expect(to[i / n * step_d + i % n] == d[i] + 3, "wmma " + type + " " + shape);
    }
    free(to);
}

// A value that needs more than 10 bits: cut off by the multiplication, rounded by the conversion.
void check_tensor_floats() {
    const std::string body = "to[lane] = nvcuda::wmma::__float_to_tf32(1.0f + lane * 0.0001220703125f);";
    std::vector<float> to(LANES);
    float* out = to.data();
    launch("", "float* to", body, {&out});
    for (int lane = 0; lane < LANES; lane++) {
        const float wanted = 1.0f + std::floor(lane * 0.125f + 0.5f) / 1024;
        expect(to[lane] == wanted, "__float_to_tf32");
    }
}

// One lane is chosen, and lanes that write what others read are in step (lockstep.h), which is seen to in
// kernels for tensor cores only.
void check_lanes() {
    const std::string body = R"(
bool elected = bool([&]() -> uint32 {
    uint32 pred = 0;
    asm volatile(
        "{\n"
        "     .reg .pred %%px;\n"
        "     elect.sync _|%%px, 0xffffffff;\n"
        "     selp.b32 %0, 1, 0, %%px;\n"
        "}\n"
        : "+r"(pred));
    return pred;
        }());
to[lane] = elected;
uint32 *shared_memory_1 = reinterpret_cast<uint32*>(&dynamic_shared_mem[0]);
for (uint32 i = uint32(0); i < uint32(3); ++i) {
shared_memory_1[lane] = lane + i;
const uint32 l_1 = shared_memory_1[31 - lane];
back[i * 32 + lane] = l_1;
}
if (lane > 31) {
nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, __half, nvcuda::wmma::row_major> a;
nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, __half, nvcuda::wmma::row_major> b;
nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> c;
nvcuda::wmma::mma_sync(c, a, b, c);
}
)";
    std::vector<uint32_t> to(LANES), back(LANES * 3);
    uint32_t *out = to.data(), *again = back.data();
    launch("", "uint32* to, uint32* back", body, {&out, &again});
    expect(std::accumulate(to.begin(), to.end(), 0) == 1, "elect.sync");
    for (int i = 0; i < LANES * 3; i++) {
        expect(back[i] == uint32_t(31 - i % LANES + i / LANES), "lanes in step");
    }
}

}  // namespace

void check_matrices() {
    check_mma("f16", "__half", 16);
    check_mma("bf16", "__nv_bfloat16", 16);
    check_mma("tf32", "float", 8);
    for (const int matrices : {1, 2, 4}) {
        check_ldmatrix(matrices, false);
        check_ldmatrix(matrices, true);
    }
    for (const int layouts : {0, 1, 2, 3}) {
        for (const auto& [m, n] : {std::pair(16, 16), std::pair(32, 8), std::pair(8, 32)}) {
            check_wmma("f16", "__half", m, n, 16, layouts & 1, layouts & 2);
            check_wmma("bf16", "__nv_bfloat16", m, n, 16, layouts & 1, layouts & 2);
        }
        check_wmma("tf32", "float", 16, 16, 8, layouts & 1, layouts & 2);
    }
    check_tensor_floats();
    check_lanes();
}
