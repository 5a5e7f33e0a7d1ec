// The instructions for tensor cores and asynchronous copies, as this GPU executes them, against plain loops.
//
//   run --capability 9.0 --check
//
// Kernels are compiled and launched through the same entry points as any.

#include <cstdio>
#include <cstdlib>

#include "check.h"

extern "C" {
int nvrtcCreateProgram(void**, const char*, const char*, int, const char* const*, const char* const*);
int nvrtcCompileProgram(void*, int, const char* const*);
int nvrtcGetPTXSize(void*, size_t*);
int nvrtcGetPTX(void*, char*);
int cuModuleLoadData(void**, const void*);
int cuModuleGetFunction(void**, void*, const char*);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                   void**);
}

namespace {

constexpr char TYPES[] = R"(
typedef unsigned int uint;
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long int uint64;
typedef signed int int32;
typedef struct CUtensorMap_st {
alignas(64) unsigned long long int opaque[16];
} CUtensorMap;
)";

int failures = 0;

}  // namespace

void expect(bool holds, const std::string& what) {
    if (!holds) {
        printf("WRONG %s\n", what.c_str());
        failures++;
    }
}

std::string replaced(std::string text, const std::string& what, const std::string& with) {
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size()) {
        text.replace(at, what.size(), with);
    }
    return text;
}

void launch(const std::string& preamble, const std::string& parameters, const std::string& body,
            std::vector<void*> arguments, unsigned threads) {
    const std::string source =
        TYPES + preamble + "\nextern \"C\" __global__ void __launch_bounds__(32)\nkernel (\n" + parameters +
        "\n) {\nextern __shared__ __align__(128) uint8 dynamic_shared_mem[];\nuint lane = threadIdx.x;\n" +
        body + "\n}";
    void *program, *module, *function;
    nvrtcCreateProgram(&program, source.c_str(), nullptr, 0, nullptr, nullptr);
    if (nvrtcCompileProgram(program, 0, nullptr) != 0) {
        exit(1);
    }
    size_t bytes;
    nvrtcGetPTXSize(program, &bytes);
    std::vector<char> image(bytes);
    nvrtcGetPTX(program, image.data());
    cuModuleLoadData(&module, image.data());
    cuModuleGetFunction(&function, module, "kernel");
    cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, SHARED_BYTES, nullptr, arguments.data(), nullptr);
}

int main() {
    check_matrices();
    check_copies();
    if (failures) {
        printf("%d wrong\n", failures);
        return 1;
    }
    printf("all as computed by plain loops\n");
    return 0;
}
