// NVRTC declares memcpy and memset itself.
#pragma once
#include "stddef.h"
