import tests.pallas_kernels.cpu_lowerings  # noqa: F401  registers them
