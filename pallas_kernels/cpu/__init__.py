"""Native ops for CPUs: C++ beside each op (`pallas_kernels/OP/cpu.cc`), called through jax.ffi.

`kernels.cc` has the micro-kernels, compiled for several instruction sets and chosen at run time;
`handlers.cc` is what XLA calls; `build.py` compiles everything into one library, `library.py` loads
it. `xla/ffi/api` are the headers of jaxlib 0.10.2, the oldest supported one, unchanged.
"""
