// In place of PyTorch's header: FlashAttention-2 keeps the state of a random generator in its arguments.
#pragma once
#include <cstdint>
namespace at {
struct PhiloxCudaState { uint64_t seed, offset; };
}
