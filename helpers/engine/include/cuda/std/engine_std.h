// The host's standard library under the name that device code uses for its own: cuda::std.
#pragma once
#include "../../cuda_runtime.h"

namespace std {}
namespace cuda {
namespace std {
using namespace ::std;
namespace engine = ::engine;  // cuda_runtime.h turns the end of cuda::std::fmax(a, b) into engine::max_of...
}  // namespace std
}  // namespace cuda
