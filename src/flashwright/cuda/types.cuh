// Short names for the types that device code is written in. No toolkit header is included anywhere.
#pragma once

using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

// Sixteen bytes: what one thread moves at a time between memories.
struct alignas(16) Vector16B {
    uint32 words[4];
};

#define DEVICE __device__ __forceinline__
