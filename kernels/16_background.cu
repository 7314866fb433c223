// 16 background: 16_fp8.cu, which transposes V itself, by the warp of each block that has nothing to do.
// Under a causal mask, what the first tiles of rows need of V is transposed before the launch.
//
// Launch   once clear_counts of 16_transpose.cu; then transpose_v of the first heads, if `transposed` is not
//          0; then as 16_fp8.cu
// Shapes   as 16_fp8.cu; V as 16_transpose.cu reads it. counts: see v_background.cuh. heads: of V, of
//          all sequences; together: those whose tiles are needed at the same time; transposed: so many of
//          the first ones are in V_image before the launch, 0 or a multiple of `together`
#define BACKGROUND 1
#define BACKGROUND_PARAMETERS \
  , const unsigned char *V, int *counts, int heads, int together, int transposed
#define BACKGROUND_ARGUMENTS , V, counts, heads, together, transposed
#include "16_fp8.cu"
