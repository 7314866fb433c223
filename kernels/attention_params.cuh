// What a launch needs besides its pointers, from 05 on: one struct by value. helpers/attention/ladder/params.py builds it.

#pragma once

constexpr int UNLIMITED = 1 << 29;  // a window without a limit; sequences are shorter, so sums of two stay below 2^31

// The distance from one batch, row or head to the next, in elements. The elements of a row are contiguous.
struct Strides {
  long long batch, row, head;
};

struct AttentionParams {
  Strides q, k, v, o;             // a batch's stride is 0 where sequences are packed
  int N, N_kv;                    // rows of Q and of K; of all sequences together where they are packed
  int heads, kv_heads;            // each heads / kv_heads consecutive heads of Q share one of K and V
  int window_left, window_right;  // keys that a row sees before and after its own position. Causal: right = 0
  float softmax_scale;            // S = softmax_scale * Q K^T
};
