// Which instruction set's kernels run.
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels.h"

namespace moejax {

extern const Kernels kernels_portable;
#ifdef MOEJAX_X86
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512bf16;
#endif

const Kernels* kernels_named(const char* name) {
  if (!strcmp(name, "portable")) return &kernels_portable;
#ifdef MOEJAX_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (!strcmp(name, "avx2") && avx2) return &kernels_avx2;
  if (!strcmp(name, "avx512") && avx512) return &kernels_avx512;
  if (!strcmp(name, "avx512bf16") && avx512 && __builtin_cpu_supports("avx512bf16") &&
      __builtin_cpu_supports("avx512vbmi")) {
    return &kernels_avx512bf16;
  }
#endif
  return nullptr;
}

const Kernels* select_kernels() {
  static const Kernels* const selected = [] {
    const char* name = std::getenv("MOEJAX_CPU_ISA");
    if (name && *name) return kernels_named(name);
    // The AVX-512 kernels have run on no machine yet, so they are only run by name.
    const Kernels* best = kernels_named("avx2");
    return best ? best : kernels_named("portable");
  }();
  return selected;
}

const char* select_error() {
  static const std::string text = [] {
    const char* name = std::getenv("MOEJAX_CPU_ISA");
    std::string have;
    for (const char* known : {"portable", "avx2", "avx512", "avx512bf16"}) {
      if (kernels_named(known)) have += (have.empty() ? "" : ", ") + std::string(known);
    }
    return std::string("MOEJAX_CPU_ISA is ") + (name ? name : "") + "; this machine runs " + have;
  }();
  return text.c_str();
}

}  // namespace moejax
