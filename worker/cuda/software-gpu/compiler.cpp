// NVRTC without NVIDIA: libnvrtc.so, which compiles kernels for the host with g++.
//
//   source -> rewritten as a class (kernel/kernel.h) -> g++ -> a library in GPU_KERNELS -> its path as "PTX"
//
// Definitions before the kernel stay outside the class, and inline assembly becomes calls (assembly.h).
//
// A kernel is compiled once: libraries are named by a hash of the source. When calls are only counted,
// sources are kept there and not looked at. What g++ refuses is refused to cubecl too, and told on stderr:
// its autotuner would pass over it in silence.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>

#include "assembly.h"
#include "counts.h"
#include "driver.h"
#include "lockstep.h"
#include "settings.h"

namespace gpu {

namespace {

// nvrtcResult.
constexpr int COMPILED = 0;
constexpr int COMPILATION_FAILED = 6;
constexpr size_t TOLD_BYTES_OF_LOG = 3000;
constexpr uint64_t HASH_START = 14695981039346656037u;

struct Program {
    std::string source;
    std::string log;
    std::string image;
};

// 64-bit FNV-1a.
uint64_t hash(const std::string& text, uint64_t state = HASH_START) {
    for (unsigned char byte : text) {
        state = (state ^ byte) * 1099511628211u;
    }
    return state;
}

// cubecl writes the definitions before a kernel in the order of a hash table, another one in every process:
// they count as a set of lines.
std::string name_of(const std::string& source) {
    const size_t kernel = std::min(source.find("extern \"C\" __global__"), source.size());
    std::istringstream definitions(source.substr(0, kernel));
    uint64_t sum = 0;
    for (std::string line; std::getline(definitions, line);) {
        sum += hash(line) * 0x9e3779b97f4a7c15u;
    }
    char name[17];
    const uint64_t whole = hash(source.substr(kernel) + std::to_string(sum));
    snprintf(name, sizeof name, "%016llx", (unsigned long long)whole);
    return name;
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

void write_file(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    if (!file.flush()) {
        fprintf(stderr, "software GPU: cannot write %s\n", path.c_str());
    }
}

bool exists(const std::string& path) {
    struct stat found;
    return stat(path.c_str(), &found) == 0;
}

std::string quoted(const std::string& path) { return "'" + path + "'"; }

std::string without_includes(const std::string& source) {
    std::istringstream lines(source);
    std::string kept;
    for (std::string line; std::getline(lines, line);) {
        if (!line.starts_with("#include")) {
            kept += line + "\n";
        }
    }
    return kept;
}

// Whether threads of the kernel wait for each other. If not, they can run one after another, which is much
// faster.
bool waits(const std::string& kernel) {
    static const std::regex waiting("__sync|_sync\\(|__activemask|barrier|__mma_|matrix_|ptx::");
    return std::regex_search(kernel, waiting);
}

// Whether it uses tensor cores. Others wait for the lanes of a warp where they have to.
bool has_matrices(const std::string& kernel) {
    static const std::regex instruction("__mma_|wmma::mma_sync|__ldmatrix|__stmatrix");
    return std::regex_search(kernel, instruction);
}

// Blocks are executed one after another, so they cannot wait for each other.
bool has_cluster(const std::string& attribute) {
    static const std::regex alone("__cluster_dims__\\(1, 1, 1\\) ?");
    return !attribute.empty() && !std::regex_match(attribute, alone);
}

// The source as a class with the kernel as a member, and the function by which the driver calls it. Empty:
// there is no kernel, or one that needs a cluster of blocks.
std::string rewrite(const std::string& source) {
    static const std::regex signature("extern \"C\" __global__ void __launch_bounds__\\([0-9]+\\)"
                                      "(__cluster_dims__\\([^)]*\\) ?)?\\s*[A-Za-z_0-9]+ \\(");
    static const std::regex shared("extern __shared__ __align__\\([0-9]+\\) uint8 dynamic_shared_mem\\[\\];");
    const std::string text = without_assembly(without_includes(source));
    std::smatch found;
    if (!std::regex_search(text, found, signature) || has_cluster(found[1].str())) {
        return "";
    }
    const std::string pointer = "uint8* dynamic_shared_mem = shared;";
    const std::string body = std::regex_replace(found.suffix().str(), shared, pointer);
    const std::string kernel = has_matrices(body) ? with_lockstep(body) : body;
    const char* run = waits(body) ? "run_together" : "run_in_turn";
    std::ostringstream out;
    out << "namespace {\n" << found.prefix().str() << "struct Kernel : gpu::Base {\n";
    out << "__forceinline__ void kernel (" << kernel << "\n};\n}\n";
    out << "extern \"C\" __attribute__((visibility(\"default\")))\n";
    out << "void gpu_run(const gpu::Launch& launch) {\n";
    out << "    gpu::Entry<&Kernel::kernel>::" << run << "(launch);\n}\n";
    out << "extern \"C\" __attribute__((visibility(\"default\")))\n";
    out << "const uint32_t* gpu_argument_bytes() { return gpu::Entry<&Kernel::kernel>::argument_bytes; }\n";
    return out.str();
}

// The flags are those that the headers were precompiled with; g++ does without what was precompiled
// otherwise.
bool run_compiler(Program& program, const std::string& base) {
    const std::string log = base + ".log";
    const std::string unfinished = base + "." + std::to_string(getpid());
    std::string command = "env -u LD_LIBRARY_PATH -u LD_PRELOAD g++ " GPU_KERNEL_FLAGS " -shared";
    command += " -include " + quoted(settings().headers + "/kernel.h") + " " + quoted(base + ".cpp");
    command += " -o " + quoted(unfinished) + " 2> " + quoted(log);
    if (system(command.c_str()) != 0) {
        program.log = "g++ refuses " + base + ".cpp\n" + read_file(log);
        return false;
    }
    unlink(log.c_str());
    // Other processes compile too; a library is there whole or not at all.
    rename(unfinished.c_str(), (base + ".so").c_str());
    return true;
}

int compile(Program& program) {
    const std::string base = settings().kernels + "/" + name_of(program.source);
    const std::string library = base + ".so";
    if (!exists(library)) {
        const std::string rewritten = rewrite(program.source);
        write_file(base + ".cu", program.source);
        write_file(base + ".cpp", rewritten);
        if (rewritten.empty()) {
            program.log = "no kernel in " + base + ".cu as cubecl writes them, or one for a cluster";
            return COMPILATION_FAILED;
        }
        if (!run_compiler(program, base)) {
            return COMPILATION_FAILED;
        }
    }
    program.image = IMAGE_MARK + library;
    return COMPILED;
}

int keep_source(Program& program) {
    const std::string kept = settings().kernels + "/" + name_of(program.source) + ".cu";
    write_file(kept, program.source);
    // Not compiled: but who reads cubecl's records finds the program.
    program.image = IMAGE_MARK + kept;
    return COMPILED;
}

// Whether the user wants this program refused: to see what comes of a kernel that a compiler does not take.
bool is_refused(const std::string& source) {
    std::istringstream words(settings().refused);
    for (std::string word; std::getline(words, word, ',');) {
        if (!word.empty() && source.find(word) != std::string::npos) {
            return true;
        }
    }
    return false;
}

Program& program_of(void* handle) { return *static_cast<Program*>(handle); }

}  // namespace

extern "C" {

// cubecl writes __tanhf, which NVRTC knows since 12.8. NVIDIA has none of this version: what is kept of one is never
// taken for the other's.
int nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 99;
    return COMPILED;
}

int nvrtcCreateProgram(void** handle, const char* source, const char* /*name*/, int /*headers*/,
                       const char* const*, const char* const*) {
    *handle = new Program{source, "", ""};
    return COMPILED;
}

int nvrtcDestroyProgram(void** handle) {
    delete static_cast<Program*>(*handle);
    *handle = nullptr;
    return COMPILED;
}

int nvrtcCompileProgram(void* handle, int, const char* const*) {
    std::lock_guard turn(counts().lock);
    Program& program = program_of(handle);
    if (is_refused(program.source)) {
        program.log = "refused, as GPU_REFUSE asks for";
        return COMPILATION_FAILED;
    }
    const double before = now_seconds();
    const int result = settings().execute ? compile(program) : keep_source(program);
    counts().programs++;
    counts().compile_seconds += now_seconds() - before;
    if (result != COMPILED) {
        fprintf(stderr, "software GPU: %s\n", program.log.substr(0, TOLD_BYTES_OF_LOG).c_str());
    }
    return result;
}

int nvrtcGetPTXSize(void* handle, size_t* bytes) {
    *bytes = program_of(handle).image.size() + 1;
    return COMPILED;
}

int nvrtcGetPTX(void* handle, char* text) {
    strcpy(text, program_of(handle).image.c_str());
    return COMPILED;
}

int nvrtcGetProgramLogSize(void* handle, size_t* bytes) {
    *bytes = program_of(handle).log.size() + 1;
    return COMPILED;
}

int nvrtcGetProgramLog(void* handle, char* text) {
    strcpy(text, program_of(handle).log.c_str());
    return COMPILED;
}

const char* nvrtcGetErrorString(int code) {
    return code == COMPILED ? "NVRTC_SUCCESS" : "NVRTC_ERROR_COMPILATION";
}

}  // extern "C"

}  // namespace GPU
