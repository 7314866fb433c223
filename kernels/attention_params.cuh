// What a launch needs besides its pointers, from 05 on: one struct by value.
// helpers/attention/ladder/params.py builds it.

#pragma once

constexpr int UNLIMITED =
    1 << 29;  // no limit; sequences are shorter, so sums of two stay below 2^31

// The distance from one batch, row or head to the next, in elements. A row is contiguous.
struct Strides {
  long long batch, row, head;
};

struct AttentionParams {
  Strides q, k, v, o;             // a batch's stride is 0 where sequences are packed
  int N, N_kv;                    // rows of Q and of K; where packed, of all sequences together
  int heads, kv_heads;            // heads / kv_heads consecutive heads of Q share one of K, V
  int window_left, window_right;  // keys seen before and after a row's position; causal: right = 0
  float softmax_scale;            // S = softmax_scale * Q K^T
  int sequences;                  // packed ones; 0 where there is no cu_seqlens
};
