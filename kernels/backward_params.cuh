// What a launch of the backward needs besides its pointers: one struct by value.
// helpers/attention/ladder/params.py builds it.

#pragma once

#include "attention_params.cuh"

struct BackwardParams {
  AttentionParams forward;     // of the call whose gradients these are
  Strides d_o, d_q, d_k, d_v;  // of dO and of the gradients
};
