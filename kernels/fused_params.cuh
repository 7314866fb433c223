// What a launch of 11 needs besides AttentionParams: one more struct by value.
// helpers/attention/ladder/params.py builds it.

#pragma once

// Distances in elements; 0 where one element serves a whole axis, so that nothing is copied to
// broadcast it.
struct FusedParams {
  long long bias_batch, bias_head, bias_row, bias_key;
  long long alibi_batch;                           // from one batch's slopes to the next
  long long cos_row, sin_row;                      // of the rotary tables, rows contiguous
  long long q_positions_batch, k_positions_batch;  // positions of rows, and of keys, are neighbours
  int positions;                                   // rows of the rotary tables
};
