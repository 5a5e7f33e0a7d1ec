// Preloaded into the program under test: wherever it looks for a cubecl.toml, it finds the one of the
// software GPU.
//
// cubecl keeps compiled kernels and the autotuner's choices in `target` of the crate it is started in, and
// knows them again by the kernel alone, not by the GPU they were made for. What the software GPU leaves
// there, a real GPU would be given to execute. No variable of the environment moves these caches, and a file
// in the repository would move them for everybody.

#include <dlfcn.h>
#include <fcntl.h>

#include <cstdarg>
#include <cstdlib>
#include <cstring>

namespace {

bool is_wanted(const char* path) {
    constexpr char NAME[] = "/cubecl.toml";
    const size_t length = strlen(path);
    const size_t name = strlen(NAME);
    return length >= name && strcmp(path + length - name, NAME) == 0;
}

}  // namespace

extern "C" int open64(const char* path, int flags, ...) {
    using Open = int (*)(const char*, int, ...);
    static const Open next = reinterpret_cast<Open>(dlsym(RTLD_NEXT, "open64"));
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    const char* ours = getenv("GPU_CUBECL_TOML");
    return next(ours && is_wanted(path) ? ours : path, flags, mode);
}
