// threadIdx and its friends.
#pragma once
#include "cuda_runtime.h"
