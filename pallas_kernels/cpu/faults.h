// What tests put in the way of the queue and the arena: nothing here. A build for tests names a header
// that has it (tests/faults.py).
#pragma once

#ifdef MOEJAX_FAULTS
#include MOEJAX_FAULTS
#else

#include <cstdint>

namespace moejax::faults {

inline void delay(const void*, bool) {}  // before and after a chunk of a queue; ahead of need?
inline const char* error(const void*, bool) { return nullptr; }  // why that chunk fails
inline int64_t cut(const void*, int64_t got) { return got; }     // of bytes that were read
inline void hold(const void*) {}                                 // at the end of an op on an arena
inline void forget(const void*) {}                               // a queue or arena that ends

}  // namespace moejax::faults

#endif
