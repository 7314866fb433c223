// Kernels need none of the host's functions: only the language.
#pragma once
#include "cuda_runtime.h"
