"""Execute PTX on the CPU, exactly, with counters and hazard detection.

The simulator knows PTX and the CUDA execution model; what a kernel computes is of no concern to it. The public names
are exported here: `SimulatedGPU` holds memory and loads modules, `Module.launch` runs a kernel and returns a `Run`, and
a faulty kernel raises `SimulationError`.
"""

from .counters import InstructionCounts
from .errors import OtherParty, SimulationError
from .findings import Finding
from .gpu import SimulatedGPU
from .module import Module
from .ptx.lexer import PtxSyntaxError
from .run import LaunchCounters, Run

__all__ = [
    "Finding",
    "InstructionCounts",
    "LaunchCounters",
    "Module",
    "OtherParty",
    "PtxSyntaxError",
    "Run",
    "SimulatedGPU",
    "SimulationError",
]
