"""Kernels at work: compiled, loaded, planned and launched, on a GPU or on the simulated one."""
