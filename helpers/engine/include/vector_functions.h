// The make_ functions of the vector types.
#pragma once
#include "vector_types.h"
