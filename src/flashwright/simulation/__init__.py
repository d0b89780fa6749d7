"""Kernels on the simulated GPU, by the names that the README introduces: the package's own, and the user's."""

from flashwright.problem.reference import random_inputs, reference_forward, relative_error
from flashwright.runtime.simulated import ForwardSimulation, simulate_forward
from flashwright.simulation.kernel import KernelSimulation, Uninitialised, simulate_kernel

__all__ = [
    "ForwardSimulation",
    "KernelSimulation",
    "Uninitialised",
    "random_inputs",
    "reference_forward",
    "relative_error",
    "simulate_forward",
    "simulate_kernel",
]
