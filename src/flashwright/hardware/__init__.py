"""Facts about GPUs: kernels are designed for them, and the simulator obeys them."""
