// Inline assembly of a kernel, rewritten as calls of C++ functions.
#pragma once

#include <string>

namespace gpu {

// Every `asm(...)` becomes a call of a function in namespace `ptx`, named after the instruction, with what it
// is given, in its order:
//
//   asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared::cta.b16 {%0}, [%1];" : "=r"(reg_0) : "r"(addr));
//   ptx::ldmatrix_sync_aligned_m8n8_x1_shared__cta_b16(reg_0, addr);
//
// Several instructions in one have their names joined by two underscores, and their operands in a row.
std::string without_assembly(const std::string& source);

}  // namespace GPU
