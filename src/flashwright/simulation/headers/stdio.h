// NVRTC declares printf itself; there are no files on a GPU.
#pragma once
