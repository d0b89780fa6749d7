// The instruction that the assembler moves nothing across, and that does nothing else (PTX: pmevent).
//
// It triggers a counter that only profilers read. Loads and products before it stay before it, and those after it
// after it. Of the instructions that were found to be treated so, it adds the fewest to a loop.
#pragma once
#include "types.cuh"

DEVICE void keep_order_here() { asm volatile("pmevent 0;" ::: "memory"); }
