// What device code uses of this header (vectors, built-in variables, mathematics) NVRTC declares itself.
#pragma once
