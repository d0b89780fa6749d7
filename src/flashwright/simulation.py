"""Kernels on the simulated GPU, by the names that the README introduces."""

from flashwright.problem.reference import random_inputs, reference_forward, relative_error
from flashwright.runtime.simulated import ForwardSimulation, simulate_forward

__all__ = ["ForwardSimulation", "random_inputs", "reference_forward", "relative_error", "simulate_forward"]
