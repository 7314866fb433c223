// As CUDA spells it too.
#pragma once
#include "cuda_pipeline.h"
