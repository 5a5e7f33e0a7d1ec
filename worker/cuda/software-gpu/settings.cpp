// The environment, read.

#include "settings.h"

#include <cstdio>
#include <cstdlib>

namespace gpu {

namespace {

std::string variable(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

uint64_t number(const char* name, uint64_t otherwise) {
    const std::string value = variable(name);
    return value.empty() ? otherwise : strtoull(value.c_str(), nullptr, 10);
}

Settings read_settings() {
    Settings settings;
    settings.execute = variable("GPU_MODE") != "count";
    settings.capability = int(number("GPU_CAPABILITY", 60));
    settings.memory_bytes = number("GPU_MEMORY_MIB", 141 << 10) << 20;
    settings.gpus = int(number("GPU_GPUS", 1));
    settings.poison = number("GPU_POISON", 0) != 0;
    settings.eager_copies = number("GPU_EAGER_COPIES", 0) != 0;
    settings.late = settings.execute && number("GPU_LATE", 0) != 0;
    settings.old_driver = number("GPU_OLD_DRIVER", 0) != 0;
    settings.old_cublas = number("GPU_OLD_CUBLAS", 0) != 0;
    settings.refused = variable("GPU_REFUSE");
    settings.lockstep = number("GPU_FREE_LANES", 0) == 0;
    settings.backwards = number("GPU_BACKWARDS", 0) != 0;
    settings.verbose = number("GPU_VERBOSE", 0) != 0;
    settings.trace = variable("GPU_TRACE");
    settings.headers = variable("GPU_HEADERS");
    settings.kernels = variable("GPU_KERNELS");
    if (settings.headers.empty() || settings.kernels.empty()) {
        fprintf(stderr, "software GPU: the software GPU is started by worker/cuda/software-gpu/run\n");
        exit(1);
    }
    return settings;
}

}  // namespace

// Never destroyed: the report is written when the process exits.
const Settings& settings() {
    static const Settings* read = new Settings(read_settings());
    return *read;
}

}  // namespace GPU
