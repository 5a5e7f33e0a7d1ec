// cuBLASLt's entry points, as far as they are called: libcublasLt.so.13.
//
// A product is done in the order of its stream, as kernels are: late if streams are. Sums are in float32, one
// term after the other; inputs of float32 are rounded to tf32 where that is allowed, as tensor cores do it.
// What the library demands of its caller is held against the call: alignment that was promised, the workspace
// that was named, memory that reaches as far as the matrices.
//
// It refuses what the real one would, as far as it is asked here: types that do not go together, and rows that
// are longer than the distance between them.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "counts.h"
#include "driver.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace gpu::cublaslt {

namespace {

// cublasStatus_t.
enum Status : int { DONE = 0, INVALID = 7, FAILED = 13, REFUSED = 15 };
// cudaDataType and cublasComputeType_t.
constexpr int F32 = 0, F16 = 2, BF16 = 14;
constexpr int SUMS_IN_F32 = 68, SUMS_OF_TF32 = 77;
// cublasLtMatmulDescAttributes_t and cublasLtEpilogue_t.
constexpr int TRANSPOSED_A = 3, TRANSPOSED_B = 4, EPILOGUE = 7, BIAS = 8, BIAS_TYPE = 26;
constexpr int PLAIN = 1, ADDS_BIAS = 4;
constexpr size_t VERSION = 130000;

struct Operation {
    int compute;
    bool transposed[2] = {};
    // A bias of float32, an element for each row of D.
    bool biased = false;
    const float* bias = nullptr;
};

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t apart;
    int32_t count = 1;
    int64_t offset = 0;

    size_t bytes() const { return type == F32 ? 4 : 2; }
    size_t reach() const {
        return ((count - 1) * offset + (columns - 1) * apart + rows) * bytes();
    }
};

struct Preference {
    uint64_t workspace_bytes = 0;
    uint32_t reductions = 7;
    // Of A, B, C and D.
    uint32_t aligned[4] = {256, 256, 256, 256};
};

// What this library puts where the real one has its own.
struct Algorithm {
    uint64_t mark;
    uint64_t workspace_bytes;
    uint32_t aligned[4];
    uint64_t unused[4];
};
static_assert(sizeof(Algorithm) == 64);
constexpr uint64_t MARK = 0x50524f4455435453;
// Something, so that a caller who has none is found out.
constexpr uint64_t WORKSPACE_BYTES = 1 << 16;

struct Choice {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

float element(const char* start, const Layout& layout, size_t at) {
    if (layout.type == F32) {
        float value;
        memcpy(&value, start + 4 * at, sizeof value);
        return value;
    }
    uint16_t bits;
    memcpy(&bits, start + 2 * at, sizeof bits);
    if (layout.type == BF16) {
        return as_float(uint32_t(bits) << 16);
    }
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return float(half);
}

void put(char* start, const Layout& layout, size_t at, float value) {
    if (layout.type == F32) {
        memcpy(start + 4 * at, &value, sizeof value);
    } else if (layout.type == BF16) {
        const uint32_t bits = bits_of(value);
        // To the nearest, and to even between two; what is not a number stays so.
        const uint16_t rounded =
            value != value ? 0x7fff : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        memcpy(start + 2 * at, &rounded, sizeof rounded);
    } else {
        const auto half = _Float16(value);
        memcpy(start + 2 * at, &half, sizeof half);
    }
}

// One matrix, as rows of op(A) or columns of op(B): `vectors` of `inner` numbers each.
std::vector<float> read(const char* start, const Layout& layout, bool by_rows, bool as_tf32) {
    const size_t vectors = by_rows ? layout.rows : layout.columns;
    const size_t inner = by_rows ? layout.columns : layout.rows;
    std::vector<float> values(vectors * inner);
    for (size_t column = 0; column < layout.columns; column++) {
        for (size_t row = 0; row < layout.rows; row++) {
            float value = element(start, layout, column * layout.apart + row);
            if (as_tf32) {
                value = as_float(bits_of(value) & ~0x1fffu);
            }
            values[by_rows ? row * inner + column : column * inner + row] = value;
        }
    }
    return values;
}

struct Product {
    Operation operation;
    Layout a, b, d;
    const char* from_a;
    const char* from_b;
    // Lies as D does; none if nothing is added.
    const char* from_c;
    char* to;
};

Code compute(const Product& p) {
    const double before = now_seconds();
    const bool as_tf32 = p.operation.compute == SUMS_OF_TF32 && p.a.type == F32;
    const size_t inner = p.operation.transposed[0] ? p.a.rows : p.a.columns;
    for (int matrix = 0; matrix < p.d.count; matrix++) {
        const auto a = read(p.from_a + matrix * p.a.offset * p.a.bytes(), p.a, !p.operation.transposed[0], as_tf32);
        const auto b = read(p.from_b + matrix * p.b.offset * p.b.bytes(), p.b, p.operation.transposed[1], as_tf32);
        char* d = p.to + matrix * p.d.offset * p.d.bytes();
        const char* c = p.from_c ? p.from_c + matrix * p.d.offset * p.d.bytes() : nullptr;
        for (size_t column = 0; column < p.d.columns; column++) {
            for (size_t row = 0; row < p.d.rows; row++) {
                const float* left = &a[row * inner];
                const float* right = &b[column * inner];
                // Several sums, as a compiler makes vectors of.
                float sums[8] = {};
                size_t k = 0;
                for (; k + 8 <= inner; k += 8) {
                    for (size_t lane = 0; lane < 8; lane++) {
                        sums[lane] += left[k + lane] * right[k + lane];
                    }
                }
                for (; k < inner; k++) {
                    sums[0] += left[k] * right[k];
                }
                float sum = 0;
                for (const float part : sums) {
                    sum += part;
                }
                const size_t at = column * p.d.apart + row;
                sum += c ? element(c, p.d, at) : 0;
                sum += p.operation.biased ? p.operation.bias[row] : 0;
                put(d, p.d, at, sum);
            }
        }
    }
    const double seconds = now_seconds() - before;
    counts().kernels["cublasLtMatmul"].seconds += seconds;
    counts().launch_seconds += seconds;
    return SUCCESS;
}

bool tell(const char* why) {
    fprintf(stderr, "software GPU: cublasLtMatmul: %s\n", why);
    return false;
}

// Whether sizes and types go together.
bool fits(const Operation& operation, const Layout& a, const Layout& b, const Layout& d) {
    const uint64_t rows = operation.transposed[0] ? a.columns : a.rows;
    const uint64_t inner = operation.transposed[0] ? a.rows : a.columns;
    const uint64_t inner_of_b = operation.transposed[1] ? b.columns : b.rows;
    const uint64_t columns = operation.transposed[1] ? b.rows : b.columns;
    if (rows != d.rows || columns != d.columns || inner != inner_of_b || a.count != d.count || b.count != d.count) {
        return false;
    }
    for (const Layout* layout : {&a, &b, &d}) {
        if (layout->apart < int64_t(layout->rows) || layout->rows == 0 || layout->columns == 0) {
            return false;
        }
        if (layout->type != F32 && layout->type != F16 && layout->type != BF16) {
            return false;
        }
    }
    return a.type == b.type && (d.type == F32 || d.type == a.type) &&
           (operation.compute == SUMS_IN_F32 || (operation.compute == SUMS_OF_TF32 && a.type == F32));
}

// Whether the call keeps what was promised when the algorithm was chosen.
bool is_kept(const Algorithm& algorithm, const void* const places[4], void* workspace, size_t workspace_bytes) {
    if (algorithm.mark != MARK) {
        return tell("an algorithm that was not chosen here");
    }
    for (int i = 0; i < 4; i++) {
        if (reinterpret_cast<uintptr_t>(places[i]) % algorithm.aligned[i] != 0) {
            return tell("a matrix that is not aligned as was promised");
        }
    }
    if (workspace_bytes < algorithm.workspace_bytes) {
        return tell("less workspace than the algorithm takes");
    }
    return check("cublasLtMatmul, workspace", reinterpret_cast<Address>(workspace), workspace_bytes);
}

template <class T>
int make(void** made, T value) {
    *made = new T(value);
    return DONE;
}

template <class T>
int unmake(void* made) {
    delete static_cast<T*>(made);
    return DONE;
}

template <class T>
T read_as(const void* from, size_t bytes) {
    T value{};
    memcpy(&value, from, std::min(bytes, sizeof value));
    return value;
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return settings().old_cublas ? 110600 : VERSION; }

int cublasLtCreate(void** handle) { return make(handle, 0); }

int cublasLtMatmulDescCreate(void** made, int compute, int scale) {
    return scale == F32 ? make(made, Operation{compute}) : REFUSED;
}

int cublasLtMatmulDescSetAttribute(void* made, int attribute, const void* value, size_t bytes) {
    auto* operation = static_cast<Operation*>(made);
    if (attribute == BIAS && bytes == 8) {
        operation->bias = read_as<const float*>(value, bytes);
        return DONE;
    }
    const int said = read_as<int>(value, bytes);
    if (attribute == TRANSPOSED_A || attribute == TRANSPOSED_B) {
        operation->transposed[attribute - TRANSPOSED_A] = said == 1;
    } else if (attribute == EPILOGUE && (said == PLAIN || said == ADDS_BIAS)) {
        operation->biased = said == ADDS_BIAS;
    } else if (attribute != BIAS_TYPE || said != F32) {
        return INVALID;
    }
    return DONE;
}

int cublasLtMatmulDescDestroy(void* made) { return unmake<Operation>(made); }

int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns, int64_t apart) {
    return make(made, Layout{type, rows, columns, apart});
}

int cublasLtMatrixLayoutSetAttribute(void* made, int attribute, const void* value, size_t bytes) {
    auto* layout = static_cast<Layout*>(made);
    if (attribute == 5 && bytes == 4) {
        layout->count = read_as<int32_t>(value, bytes);
    } else if (attribute == 6 && bytes == 8) {
        layout->offset = read_as<int64_t>(value, bytes);
    } else {
        return INVALID;
    }
    return DONE;
}

int cublasLtMatrixLayoutDestroy(void* made) { return unmake<Layout>(made); }

int cublasLtMatmulPreferenceCreate(void** made) { return make(made, Preference{}); }

int cublasLtMatmulPreferenceSetAttribute(void* made, int attribute, const void* value, size_t bytes) {
    auto* preference = static_cast<Preference*>(made);
    if (attribute == 1 && bytes == 8) {
        preference->workspace_bytes = read_as<uint64_t>(value, bytes);
    } else if (attribute == 3 && bytes == 4) {
        preference->reductions = read_as<uint32_t>(value, bytes);
    } else if (attribute >= 5 && attribute <= 8 && bytes == 4) {
        preference->aligned[attribute - 5] = read_as<uint32_t>(value, bytes);
    } else {
        return INVALID;
    }
    return DONE;
}

int cublasLtMatmulPreferenceDestroy(void* made) { return unmake<Preference>(made); }

int cublasLtMatmulAlgoGetHeuristic(void*, void* operation, void* a, void* b, void*, void* d, void* asked, int count,
                                   Choice* choices, int* found) {
    *found = 0;
    const auto& preference = *static_cast<Preference*>(asked);
    if (!fits(*static_cast<Operation*>(operation), *static_cast<Layout*>(a), *static_cast<Layout*>(b),
              *static_cast<Layout*>(d)) ||
        preference.workspace_bytes < WORKSPACE_BYTES || count < 1) {
        return REFUSED;
    }
    // A caller who wants the same bits again must not allow sums in the order in which they arrive.
    if (preference.reductions & 1) {
        tell("sums in place were allowed: on a GPU bits would not repeat");
    }
    Choice choice{};
    choice.algorithm = Algorithm{MARK, WORKSPACE_BYTES, {}, {}};
    memcpy(choice.algorithm.aligned, preference.aligned, sizeof preference.aligned);
    choice.workspace_bytes = WORKSPACE_BYTES;
    choice.waves = 1;
    choices[0] = choice;
    *found = 1;
    return DONE;
}

int cublasLtMatmul(void*, void* operation, const float* alpha, const void* a, void* of_a, const void* b, void* of_b,
                   const float* beta, const void* c, void* of_c, void* d, void* of_d, const Algorithm* algorithm,
                   void* workspace, size_t workspace_bytes, void* stream) {
    std::lock_guard turn(counts().lock);
    const auto& asked = *static_cast<Operation*>(operation);
    const auto& layout_a = *static_cast<Layout*>(of_a);
    const auto& layout_b = *static_cast<Layout*>(of_b);
    const auto& layout_d = *static_cast<Layout*>(of_d);
    const bool adds = *beta == 1;
    if (*alpha != 1 || !(adds || *beta == 0) || of_c != of_d || !fits(asked, layout_a, layout_b, layout_d) ||
        (asked.biased && layout_d.type != F32)) {
        return INVALID;
    }
    const void* const places[4] = {a, b, c, d};
    if (!is_kept(*algorithm, places, workspace, workspace_bytes) ||
        !check("cublasLtMatmul, A", reinterpret_cast<Address>(a), layout_a.reach()) ||
        !check("cublasLtMatmul, B", reinterpret_cast<Address>(b), layout_b.reach()) ||
        !check("cublasLtMatmul, D", reinterpret_cast<Address>(d), layout_d.reach()) ||
        (adds && !check("cublasLtMatmul, C", reinterpret_cast<Address>(c), layout_d.reach())) ||
        (asked.biased && !check("cublasLtMatmul, bias", reinterpret_cast<Address>(asked.bias), 4 * layout_d.rows))) {
        return FAILED;
    }
    KernelCounts& kernel = counts().kernels["cublasLtMatmul"];
    counts().launches++;
    kernel.launches++;
    // Sizes instead of a grid.
    const Shape sizes{unsigned(layout_d.rows), unsigned(layout_d.columns),
                      unsigned(asked.transposed[0] ? layout_a.rows : layout_a.columns), unsigned(layout_d.count),
                      asked.transposed[0], asked.transposed[1], 0};
    kernel.launches_by_shape[sizes]++;
    if (!settings().execute) {
        return DONE;
    }
    const Product product{asked, layout_a, layout_b, layout_d, static_cast<const char*>(a), static_cast<const char*>(b),
                          adds ? static_cast<const char*>(c) : nullptr, static_cast<char*>(d)};
    return give(stream, [product] { return compute(product); }) == SUCCESS ? DONE : FAILED;
}

}  // extern "C"

}  // namespace gpu::cublaslt
