// In place of PyTorch's header.
#pragma once
#include <tuple>
#include <ATen/cuda/CUDAGeneratorImpl.h>
namespace at::cuda::philox {
__host__ __device__ inline std::tuple<uint64_t, uint64_t> unpack(at::PhiloxCudaState s) {
  return std::make_tuple(s.seed, s.offset);
}
}
