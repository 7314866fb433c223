// Of the driver's header a kernel's file needs the version alone, to choose a branch by it.
#pragma once
#define CUDA_VERSION 12090
