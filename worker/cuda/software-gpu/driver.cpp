// GPUs, modules and launches: libcuda.so.1 without its memory (memory.cpp) and its streams (streams.cpp).
//
// The entry points are those that cubecl-cuda and this repository call; cudarc names the one that is missing
// where another is asked for.

#include "driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "counts.h"
#include "execute.h"
#include "settings.h"
#include "streams.h"

namespace gpu {

namespace {

constexpr int DRIVER_VERSION = 13000;
constexpr unsigned MOST_GRID_YZ = 65535;
constexpr unsigned MOST_GRID_X = 0x7fffffff;
constexpr unsigned MOST_BLOCK_Z = 64;

// CUdevice_attribute, with the values of an H200 except for its capability. What is not here is 0.
int attribute_value(int attribute) {
    switch (attribute) {
        case 1: return MOST_THREADS;                        // threads per block
        case 2: return 1024;                                // block x
        case 3: return 1024;                                // block y
        case 4: return MOST_BLOCK_Z;                        // block z
        case 5: return MOST_GRID_X;                         // grid x
        case 6: return MOST_GRID_YZ;                        // grid y
        case 7: return MOST_GRID_YZ;                        // grid z
        case 8: return 49152;                               // shared memory per block
        case 10: return LANES;                              // lanes per warp
        case 12: return 65536;                              // registers per block
        case 13: return 1980000;                            // kHz
        case 16: return 132;                                // multiprocessors
        case 36: return 3201000;                            // kHz of the memory
        case 37: return 6144;                               // bits of the memory's bus
        case 38: return 60 << 20;                           // level 2 cache
        case 39: return 2048;                               // threads per multiprocessor
        case 41: return 1;                                  // unified addresses
        case 75: return settings().capability / 10;         // capability, major
        case 76: return settings().capability % 10;         // capability, minor
        case 81: return 233472;                             // shared memory per multiprocessor
        case 82: return 65536;                              // registers per multiprocessor
        case 97: return MOST_SHARED_BYTES;                  // shared memory per block, opted in
        case 106: return 32;                                // blocks per multiprocessor
        case 111: return 1024;                              // reserved shared memory per block
        case 115: return 1;                                 // memory pools
        default: return 0;
    }
}

thread_local void* current_context = nullptr;

// Handles of contexts are numbers of GPUs; 0 would be no context.
void* context_of(int gpu) { return reinterpret_cast<void*>(uintptr_t(gpu) + 1); }

bool is_legal(const Shape& shape) {
    for (int i = 0; i < 6; i++) {
        if (shape[i] == 0) {
            return false;
        }
    }
    const bool grid = shape[0] <= MOST_GRID_X && shape[1] <= MOST_GRID_YZ && shape[2] <= MOST_GRID_YZ;
    const uint64_t threads = uint64_t(shape[3]) * shape[4] * shape[5];
    const bool block = threads <= MOST_THREADS && shape[5] <= MOST_BLOCK_Z;
    return grid && block && shape[6] <= MOST_SHARED_BYTES;
}

// What a kernel is called with, as the driver keeps it: the caller's values may be gone when it runs.
struct Arguments {
    std::vector<std::vector<unsigned char>> values;
    std::vector<void*> pointers;

    Arguments(const uint32_t* bytes, void** given) {
        for (; *bytes; bytes++, given++) {
            const auto* start = static_cast<const unsigned char*>(*given);
            values.emplace_back(start, start + *bytes);
            pointers.push_back(values.back().data());
        }
    }
};

Code run(const Function& function, const Shape& shape, Arguments& arguments) {
    const double before = now_seconds();
    Launch launch{};
    launch.grid = {shape[0], shape[1], shape[2]};
    launch.block = {shape[3], shape[4], shape[5]};
    launch.name = function.name.c_str();
    launch.arguments = arguments.pointers.data();
    launch.shared_bytes = shape[6];
    const bool done = execute(launch, function.run);
    const double seconds = now_seconds() - before;
    counts().kernels[function.name].seconds += seconds;
    counts().launch_seconds += seconds;
    return done ? SUCCESS : LAUNCH_FAILED;
}

void tell(const char* what, const Function& function, const Shape& shape) {
    fprintf(stderr, "software GPU: %s %s grid %u,%u,%u block %u,%u,%u shared %u\n", what, function.name.c_str(),
            shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]);
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return settings().gpus ? SUCCESS : NO_DEVICE; }

int cuDriverGetVersion(int* version) {
    *version = DRIVER_VERSION;
    return SUCCESS;
}

int cuGetErrorName(int, const char** name) {
    *name = "CUDA_ERROR";
    return SUCCESS;
}

int cuGetErrorString(int code, const char** text) {
    switch (code) {
        case SUCCESS: *text = "no error"; break;
        case INVALID_VALUE: *text = "invalid argument"; break;
        case OUT_OF_MEMORY: *text = "out of memory"; break;
        case NO_DEVICE: *text = "no CUDA-capable device is detected"; break;
        case INVALID_DEVICE: *text = "invalid device ordinal"; break;
        case INVALID_IMAGE: *text = "device kernel image is invalid"; break;
        default: *text = "an error of the software GPU, told on stderr"; break;
    }
    return SUCCESS;
}

// ---- GPUs and contexts

int cuDeviceGetCount(int* count) {
    *count = settings().gpus;
    return SUCCESS;
}

int cuDeviceGet(int* device, int number) {
    if (number < 0 || number >= settings().gpus) {
        return INVALID_DEVICE;
    }
    *device = number;
    return SUCCESS;
}

int cuDeviceGetName(char* name, int bytes, int) {
    const int capability = settings().capability;
    snprintf(name, bytes, "Software GPU, capability %d.%d", capability / 10, capability % 10);
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = settings().memory_bytes;
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute_value(attribute);
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = context_of(device);
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

// The bytes of a CUuuid. All processes of a machine see the same GPUs.
int cuDeviceGetUuid_v2(char* uuid, int device) {
    snprintf(uuid, 16, "GPU number %d", device % 100);
    return SUCCESS;
}

int cuCtxSetCurrent(void* context) {
    current_context = context;
    return SUCCESS;
}

int cuCtxGetCurrent(void** context) {
    *context = current_context;
    return SUCCESS;
}

// ---- Modules

int cuModuleLoadData(void** handle, const void* image) {
    std::lock_guard turn(counts().lock);
    counts().modules++;
    auto* module = new Module{nullptr};
    *handle = module;
    if (!settings().execute) {
        return SUCCESS;
    }
    const char* text = static_cast<const char*>(image);
    const size_t mark = strlen(IMAGE_MARK);
    if (strncmp(text, IMAGE_MARK, mark) != 0) {
        fprintf(stderr, "software GPU: this image was not made by the software GPU's compiler\n");
        return INVALID_IMAGE;
    }
    module->library = dlopen(text + mark, RTLD_NOW | RTLD_LOCAL);
    if (!module->library) {
        fprintf(stderr, "software GPU: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    return SUCCESS;
}

// Compiled kernels stay loaded: they are few, and launches of them are counted until the end.
int cuModuleUnload(void*) { return SUCCESS; }

int cuModuleGetFunction(void** handle, void* module, const char* name) {
    std::lock_guard turn(counts().lock);
    Run run = nullptr;
    const uint32_t* argument_bytes = nullptr;
    if (settings().execute) {
        void* library = static_cast<Module*>(module)->library;
        run = reinterpret_cast<Run>(dlsym(library, "gpu_run"));
        const auto argument_bytes_of = reinterpret_cast<const uint32_t* (*)()>(dlsym(library, "gpu_argument_bytes"));
        if (!run || !argument_bytes_of) {
            return NOT_FOUND;
        }
        argument_bytes = argument_bytes_of();
    }
    counts().kernels[name].variants++;
    *handle = new Function{name, run, argument_bytes};
    return SUCCESS;
}

int cuFuncSetAttribute(void*, int attribute, int value) {
    constexpr int DYNAMIC_SHARED_BYTES = 8;
    const bool too_much = attribute == DYNAMIC_SHARED_BYTES && unsigned(value) > MOST_SHARED_BYTES;
    return too_much ? INVALID_VALUE : SUCCESS;
}

// ---- Launches

int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** arguments,
                   void** /*extra*/) {
    std::lock_guard turn(counts().lock);
    const Function& function = *static_cast<Function*>(handle);
    const Shape shape{grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes};
    if (!is_legal(shape)) {
        tell("refused", function, shape);
        return INVALID_VALUE;
    }
    if (settings().verbose) {
        tell("launch", function, shape);
    }
    KernelCounts& kernel = counts().kernels[function.name];
    counts().launches++;
    kernel.launches++;
    kernel.launches_by_shape[shape]++;
    if (!settings().execute) {
        return SUCCESS;
    }
    auto given = std::make_shared<Arguments>(function.argument_bytes, arguments);
    return give(stream, [&function, shape, given] { return run(function, shape, *given); });
}

}  // extern "C"

}  // namespace GPU
