// NVRTC declares malloc, free and abs itself.
#pragma once
#include "stddef.h"
