"""Tools around the kernels: measuring, tuning, the ladder, explanations, and what this machine has."""
