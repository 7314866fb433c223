// 16 background: 16_fp8.cu, which transposes V itself, by the warp of each block that has nothing to do.
//
// On an H200, without a mask, it is 1.01 to 1.02 times as fast at 4096 keys and 128 or 256 columns; under a
// causal mask it gained at 64 columns alone.
//
// Launch   once clear_counts of 16_transpose.cu; then as 16_fp8.cu
// Shapes   as 16_fp8.cu; V as 16_transpose.cu reads it. counts: see v_background.cuh. heads_of_v: of all
//          sequences; together: heads of V whose tiles are needed at the same time
#define BACKGROUND 1
#define BACKGROUND_PARAMETERS , const unsigned char *V, int *counts, int heads_of_v, int together
#define BACKGROUND_ARGUMENTS , V, counts, heads_of_v, together
#include "16_fp8.cu"
