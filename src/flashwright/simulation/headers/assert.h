// NVRTC defines assert itself.
#pragma once
