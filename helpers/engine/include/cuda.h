// Of the driver's header a kernel's file needs the version alone, to choose a branch by it.
#pragma once
#define CUDA_VERSION 12090

// A map of a tensor, as the driver's header has it: one is a launch's argument, made by tensor_map.encode_tiled.
typedef struct CUtensorMap_st {
  alignas(64) unsigned long long opaque[16];
} CUtensorMap;
