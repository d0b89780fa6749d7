"""Where each state space lies in the generic address space.

Global addresses are generic addresses. The other spaces have windows far above any global allocation, so that
a generic address tells its space by its upper bits, and ``cvta`` is an addition.
"""

from __future__ import annotations

WINDOW_BITS = 40
WINDOW_BASE = {
    "global": 0,
    "shared": 0x71 << WINDOW_BITS,
    "local": 0x72 << WINDOW_BITS,
    "const": 0x73 << WINDOW_BITS,
    "param": 0x74 << WINDOW_BITS,
}
# The part of a space that is one more: generic addresses in the window of shared memory are of the cluster's.
CLUSTER_SHARED = "shared::cluster"
SPACE_OF_WINDOW = {base >> WINDOW_BITS: space for space, base in WINDOW_BASE.items() if base}
# Parameters of device functions are kept in local memory. In the param space their addresses start here, above
# those of any kernel parameter.
CALL_PARAMETER_BASE = 1 << 30
# Addresses of device functions, for calls through a pointer; nothing can be loaded from there.
FUNCTION_BASE = 0x75 << WINDOW_BITS
FUNCTION_STEP = 16
# First address of global allocations.
GLOBAL_BASE = 0x10_0000_0000
