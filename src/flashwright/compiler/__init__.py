"""CUDA source to machine code: NVRTC, the cache of programs on disk, and what fits a multiprocessor."""
