// What this CPU and its system run. __builtin_cpu_supports says that they run nothing in what zig links.
#pragma once
#include <cpuid.h>

namespace moejax {

struct Features {
  bool sse42 = false, sha = false, avx2 = false, avx512 = false, bf16 = false;  // as the kernels use them
};

inline Features look_for_features() {
  Features found;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const auto all = [](unsigned word, unsigned bits) { return (word & bits) == bits; };
  const bool vectors = all(c, 1u << 12 | 1u << 27 | 1u << 29);  // FMA, OSXSAVE, F16C
  found.sse42 = all(c, 1u << 20);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.sha = all(b, 1u << 29);
  if (!vectors) return found;
  unsigned saved, high;  // registers that the system saves
  asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  found.avx2 = all(saved, 0x06) && all(b, 1u << 5);
  found.avx512 = found.avx2 && all(saved, 0xe0) && all(b, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31);
  const bool bytes = all(c, 1u << 1 | 1u << 11);  // VBMI, VNNI
  found.bf16 = found.avx512 && bytes && __get_cpuid_count(7, 1, &a, &b, &c, &d) && all(a, 1u << 5);
  return found;
}

inline const Features& features() {
  static const Features found = look_for_features();
  return found;
}

}  // namespace moejax
