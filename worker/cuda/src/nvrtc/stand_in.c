// A library under NVRTC's name that has every call answered by the program that loaded it (mod.rs beside
// this file). cubecl finds NVRTC by the name `libnvrtc.so`, and the system's loader gives it the library of
// that name which the process has already.
//
// Of NVRTC's functions it has those that cubecl 0.10 calls.

#include <stddef.h>

typedef void *nvrtcProgram;

struct answers {
    int (*create)(nvrtcProgram *, const char *, const char *, int, const char *const *, const char *const *);
    int (*compile)(nvrtcProgram, int, const char *const *);
    int (*code_size)(nvrtcProgram, size_t *);
    int (*code)(nvrtcProgram, char *);
    int (*log_size)(nvrtcProgram, size_t *);
    int (*log)(nvrtcProgram, char *);
};

static struct answers answers;

void coxswain_answers(const struct answers *given) { answers = *given; }

int nvrtcCreateProgram(nvrtcProgram *program, const char *text, const char *name, int headers,
                       const char *const *contents, const char *const *names) {
    return answers.create(program, text, name, headers, contents, names);
}

int nvrtcCompileProgram(nvrtcProgram program, int count, const char *const *options) {
    return answers.compile(program, count, options);
}

int nvrtcGetPTXSize(nvrtcProgram program, size_t *size) { return answers.code_size(program, size); }

int nvrtcGetPTX(nvrtcProgram program, char *code) { return answers.code(program, code); }

int nvrtcGetProgramLogSize(nvrtcProgram program, size_t *size) { return answers.log_size(program, size); }

int nvrtcGetProgramLog(nvrtcProgram program, char *log) { return answers.log(program, log); }
