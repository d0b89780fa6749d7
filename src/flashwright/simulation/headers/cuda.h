// Of the driver's interface device code uses one type; the toolkit's header declares host functions, which NVRTC
// refuses.
#pragma once

typedef unsigned int cuuint32_t;
typedef unsigned long long cuuint64_t;

#define CU_TENSOR_MAP_NUM_QWORDS 16

typedef struct CUtensorMap_st {
    alignas(128) cuuint64_t opaque[CU_TENSOR_MAP_NUM_QWORDS];
} CUtensorMap;
