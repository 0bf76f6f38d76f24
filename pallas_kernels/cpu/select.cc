// Which instruction set's kernels run.
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels.h"
#ifdef MOEJAX_X86
#include "pallas_kernels/cpu/instruction_sets.h"
#endif
#if defined(MOEJAX_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moejax {

extern const Kernels kernels_portable;
#ifdef MOEJAX_X86

namespace {

// Whether this CPU multiplies tiles of bfloat16 and of bytes, and Linux gives this process their state (it asks
// once, for all threads).
bool has_tiles() {
#ifdef __linux__
  unsigned a, b, c, d;
  constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) != kTiles) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = !syscall(SYS_arch_prctl, kRequest, kTileData);
  return allowed;
#else
  return false;
#endif
}

}  // namespace
#endif

const Kernels* kernels_named(const char* name) {
  if (!strcmp(name, "portable")) return &kernels_portable;
#ifdef MOEJAX_X86
  const Features& has = features();
  if (!strcmp(name, "avx2") && has.avx2) return &kernels_avx2;
  if (!strcmp(name, "avx512") && has.avx512) return &kernels_avx512;
  if (!strcmp(name, "avx512bf16") && has.bf16) return &kernels_avx512bf16;
  if (!strcmp(name, "amx") && has.bf16 && has_tiles()) return &kernels_amx();
#endif
  return nullptr;
}

const Kernels* select_kernels() {
  static const Kernels* const selected = [] {
    const char* name = std::getenv("MOEJAX_CPU_ISA");
    if (name && *name) return kernels_named(name);
    for (const char* known : {"amx", "avx512bf16", "avx512", "avx2"}) {
      if (const Kernels* best = kernels_named(known)) return best;
    }
    return kernels_named("portable");
  }();
  return selected;
}

const char* select_error() {
  static const std::string text = [] {
    const char* name = std::getenv("MOEJAX_CPU_ISA");
    std::string have;
    for (const char* known : {"portable", "avx2", "avx512", "avx512bf16", "amx"}) {
      if (kernels_named(known)) have += (have.empty() ? "" : ", ") + std::string(known);
    }
    return std::string("MOEJAX_CPU_ISA is ") + (name ? name : "") + "; this machine runs " + have;
  }();
  return text.c_str();
}

}  // namespace moejax
