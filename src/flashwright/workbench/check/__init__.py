"""Checking a user's kernels: launches on the simulated GPU, and reports of what is wrong, for people and code hosts."""
