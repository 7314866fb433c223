// What a launch of 14_split_kv.cu and of its steps needs besides its pointers. Call.params in
// helpers/attention/decoders.py builds it.

#pragma once
#include "attention_params.cuh"

struct DecodeParams {
  // k, v: of the caches, where batch is the stride of a page, or without a table of a sequence;
  // N: new tokens of each sequence; N_kv: the keys that a sequence has room for.
  AttentionParams attention;
  Strides k_new, v_new;  // of the new tokens
  int page_bits;         // a page has 1 << page_bits keys, or with PAGED 2 a multiple; 30: no table
  int table_row;         // entries of block_table for a sequence
  int num_splits;        // parts of each sequence; 0: equal stretches of all key tiles
  int min_tiles;         // of a stretch: fewer would not pay for the merge
  int page_size;         // keys of a page, where PAGED is 2
};
