// What a launch is told besides its pointers, from 05 on: one struct, passed by value. helpers/ladder/params.py builds it.

#pragma once

// The distance from one batch, row or head to the next, in elements. The elements of a row are neighbours.
struct Strides {
  long long batch, row, head;
};

struct AttentionParams {
  Strides q, k, v, o;              // a batch's stride is 0 where sequences are packed
  int N, N_kv;                     // rows of Q and of K; of all sequences together where they are packed
  int heads, kv_heads;             // heads / kv_heads heads of Q in a row share one of K and V
  int window_left, window_right;   // keys before and after the diagonal that a row sees; -1: no limit. Causal: right = 0
  float softmax_scale;             // S = softmax_scale * Q K^T
};
