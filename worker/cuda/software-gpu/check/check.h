// What the checks share: launches of kernels that are written here as cubecl writes them.
#pragma once

#include <string>
#include <vector>

constexpr int LANES = 32;
constexpr unsigned SHARED_BYTES = 32 << 10;

void expect(bool holds, const std::string& what);

// One block of `threads`. The kernel has `lane`, and `dynamic_shared_mem`. What is refused ends the program.
void launch(const std::string& preamble, const std::string& parameters, const std::string& body,
            std::vector<void*> arguments, unsigned threads = LANES);

std::string replaced(std::string text, const std::string& what, const std::string& with);

void check_matrices();
void check_copies();
