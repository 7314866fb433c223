// Warpgroups: four warps, 128 threads, that multiply together (wgmma) and share registers out (setmaxnreg).
//
// A product is only asked for by wgmma.mma_async. It happens in the wait for its group, which is the latest a GPU may do
// it: A and B are read from shared memory then, and the sums are NaN until then. Where a kernel reads them too early,
// or lets a buffer be filled again too early, its result is NaN.
//
// All four warps meet in wgmma.wait_group and in setmaxnreg. (By the letter of the PTX ISA only a warp's own lanes do.)
#include "worker.h"

namespace {

constexpr unsigned IN_FLIGHT_BITS = 0x7FF0DEAD;  // of a sum that must not be touched: a NaN of its own

bool is_untouched(const float* place) {
  unsigned bits;
  memcpy(&bits, place, 4);
  return bits == IN_FLIGHT_BITS;
}
void hide(float* place) { memcpy((void*)place, &IN_FLIGHT_BITS, 4); }

void begin_warpgroups(Worker& w) {
  for (Warpgroup& g : w.warpgroups) {
    g.ops.clear();
    g.sums.clear();
    g.first = 0;
    g.arrived = 0;
    g.is_short = false;
    g.registers = (unsigned)pool->launch.registers;
  }
  w.pool = 0;
}

Warpgroup& need_warpgroup(Worker& w, const char* name, const char* file, int line, const void* caller) {
  const unsigned linear = w.current->lane.linear, group = linear / GROUP;
  if ((group + 1) * GROUP <= w.n_threads) return w.warpgroups[group];
  EngineFailure failure = failure_from(w, STATED, file, line, caller);
  snprintf(
      failure.message, sizeof failure.message,
      "%s needs a warpgroup, four warps whose first is a multiple of four, and of this one the block has %u threads",
      name, w.n_threads - group * GROUP);
  fail(w, failure);
}

[[noreturn]] void fail_disagreeing(Worker& w, const char* what, const char* file, int line, const void* caller) {
  EngineFailure failure = failure_from(w, STATED, file, line, caller);
  snprintf(failure.message, sizeof failure.message, "the threads of a warpgroup must agree, and do not: %s", what);
  fail(w, failure);
}

// The products of groups that may not be left in flight.
void finish_products(Worker& w, Warpgroup& g, unsigned pending) {
  const unsigned base = w.current->lane.linear / GROUP * GROUP;
  const Fiber& leader = w.fibers[base];
  for (unsigned t = 1; t < GROUP; ++t) {
    const Fiber& f = w.fibers[base + t];
    if (f.products != leader.products || f.product_groups != leader.product_groups)
      fail_disagreeing(
          w, "how many wgmma instructions or groups come before this wait", leader.file, leader.line, leader.caller);
  }
  uint64_t last = 0;
  unsigned done = 0;
  while (!g.ops.empty() && g.ops.front().group + (uint64_t)pending < leader.product_groups) {
    WarpgroupOp& op = g.ops.front();
    multiply_warpgroup(w, op);
    Sums& sums = *op.sums;
    if (--sums.in_flight == 0) {
      bool told = false;
      for (size_t i = 0; i < sums.places.size(); ++i) {
        if (!is_untouched(sums.places[i]) && !told && checking()) {
          told = true;
          check_sums_written(base + (unsigned)(i / sums.n), op.caller, leader.caller);
        }
        *sums.places[i] = sums.values[i];
      }
      auto mine = [&](const std::unique_ptr<Sums>& s) { return s.get() == &sums; };
      g.sums.erase(std::find_if(g.sums.begin(), g.sums.end(), mine));
    }
    last = op.epoch;
    ++done;
    ++g.first;
    g.ops.pop_front();
  }
  if (!done) return;
  trace(w, TRACE_PRODUCTS_DONE, base, leader.caller, (unsigned)g.first, done);
  for (unsigned t = 0; t < GROUP; ++t) w.fibers[base + t].product_fence = false;
  if (!checking()) return;
  check_products_done(base, last);
  check_event(EVENT_PRODUCTS_DONE, base, (unsigned)g.first, done, leader.caller);
}

// All threads of the warpgroup have come: 0 where they have to wait on, for registers.
bool complete_group(Worker& w, Warpgroup& g) {
  const unsigned base = w.current->lane.linear / GROUP * GROUP;
  const Fiber& leader = w.fibers[base];
  for (unsigned t = 1; t < GROUP; ++t) {
    const Fiber& f = w.fibers[base + t];
    if (strcmp(f.group_name, leader.group_name) != 0 || f.group_value != leader.group_value) {
      EngineFailure failure = failure_from(w, STATED, f.file, f.line, f.caller);
      failure.thread = f.lane.linear;
      snprintf(
          failure.message, sizeof failure.message,
          "the threads of a warpgroup must meet in the same instruction: thread %u is in %s %u here, thread %u in %s "
          "%u "
          "at line %d",
          base + t, f.group_name, f.group_value, base, leader.group_name, leader.group_value, leader.line);
      fail(w, failure);
    }
  }
  const unsigned value = leader.group_value;
  if (strcmp(leader.group_name, "wgmma.wait_group") == 0) {
    finish_products(w, g, value);
  } else {
    const bool more = strcmp(leader.group_name, "setmaxnreg.inc") == 0;
    if (more ? value < g.registers : value > g.registers) {
      EngineFailure failure = failure_from(w, STATED, leader.file, leader.line, leader.caller);
      snprintf(
          failure.message, sizeof failure.message, "%s to %u registers, and the threads of this warpgroup have %u: %s",
          leader.group_name, value, g.registers, more ? "it takes as many or more" : "it takes as many or fewer");
      fail(w, failure);
    }
    g.is_short = more && value - g.registers > w.pool;
    if (g.is_short) return false;
    if (more) w.pool -= value - g.registers;
    else w.pool += g.registers - value;
    g.registers = value;
  }
  ++w.progress;
  g.arrived = 0;
  for (unsigned t = 0; t < GROUP; ++t) {
    Fiber& f = w.fibers[base + t];
    f.group_name = nullptr;
    w.ready[(base + t) / WARP] |= 1u << ((base + t) % WARP);
  }
  w.idle = 0;
  return true;
}

void meet(Worker& w, const char* name, unsigned value, const char* file, int line, const void* caller) {
  Warpgroup& g = need_warpgroup(w, name, file, line, caller);
  Fiber& f = *w.current;
  f.group_name = name;
  f.group_value = value;
  f.file = file;
  f.line = line;
  f.caller = caller;
  set_waiting(w, f);
  const unsigned is_registers = strncmp(name, "setmaxnreg", 10) == 0;
  trace(w, TRACE_GROUP_WAIT, f.lane.linear, caller, is_registers, value);
  if (++g.arrived == GROUP && complete_group(w, g)) {
    for (unsigned i = 0; i < w.n_threads / GROUP; ++i) {  // others may have waited for registers
      Warpgroup& other = w.warpgroups[i];
      if (!other.is_short) continue;
      w.current = &w.fibers[i * GROUP];
      complete_group(w, other);
    }
    w.current = &f;
  }
  schedule(w);
  trace(w, TRACE_GROUP_WAITED, f.lane.linear, caller, is_registers, value);
}

// Where a descriptor's address is: it has 18 bits, and a block's dynamic shared memory and its static arrays are placed
// so that these distinguish them. Null: neither has all these bytes.
char* shared_of_descriptor(Worker& w, unsigned low, unsigned bytes) {
  constexpr unsigned MASK = 0x3FFFF;
  auto within = [&](const char* begin, const char* end) -> char* {
    const unsigned inside = (low - (unsigned)(begin - w.shared)) & MASK;
    return inside + bytes <= (size_t)(end - begin) ? const_cast<char*>(begin) + inside : nullptr;
  };
  const EngineLaunch& l = pool->launch;
  char* found = l.dynamic_shared ? within((char*)w.dynamic, (char*)w.dynamic + l.dynamic_shared) : nullptr;
  if (!found && w.static_base) found = within(w.static_base + l.static_begin, w.static_base + l.static_end);
  return found;
}

// The sums in flight that a thread names by its registers, or null.
Sums* sums_of(Warpgroup& g, unsigned thread, unsigned n, float* const* d) {
  for (const auto& known : g.sums)
    if (known->n == n && known->places[thread * n] == d[0]) return known.get();
  return nullptr;
}

// A thread has ended; the first one of a warpgroup reports products without a wait.
void leave_products(Worker& w, Fiber& f) {
  const Warpgroup& g = w.warpgroups[f.lane.linear / GROUP];
  if (checking() && f.lane.linear % GROUP == 0 && !g.ops.empty()) check_products_left(g.ops.front().caller);
}

// Each 16-byte chunk of an operand in shared memory, where it is and what of the matrix it holds: of row `row` of M or N
// the bytes from `at` on, along K; or where it is transposed, of column `at` along K eight rows from `row` on.
template <typename F>
void for_operand(uint64_t descriptor, unsigned rows, bool transposed, F chunk) {
  const unsigned start = (unsigned)(descriptor & 0x3FFF) << 4, leading = (unsigned)(descriptor >> 16 & 0x3FFF) << 4;
  const unsigned stride = (unsigned)(descriptor >> 32 & 0x3FFF) << 4, code = (unsigned)(descriptor >> 62);
  const unsigned mode = code ? 4 - code : 0, span = mode ? 16u << mode : 16;  // bytes of a row of the pattern
  auto place = [&](unsigned at) { return engine_tensor::swizzled(start + at, mode) & 0x3FFFF; };
  if (!transposed) {
    for (unsigned row = 0; row < rows; ++row)
      for (unsigned half = 0; half < 2; ++half)
        chunk(place(row / 8 * stride + row % 8 * span + half * (mode ? 16 : leading)), row, 16 * half);
    return;
  }
  const unsigned per = span / 2;  // columns side by side
  for (unsigned k = 0; k < 16; ++k)
    for (unsigned row = 0; row < rows; row += 8) {
      const unsigned far = mode ? row / per * leading + k / 8 * stride : row / 8 * stride + k / 8 * leading;
      chunk(place(far + k % 8 * span + row % per * 2), row, k);
    }
}

// What is wrong with a descriptor, before it is used.
void check_descriptor(
    Worker& w, const char* operand, uint64_t descriptor, unsigned rows, bool transposed, const char* file, int line,
    const void* caller) {
  EngineFailure failure = failure_from(w, STATED, file, line, caller);
  const unsigned code = (unsigned)(descriptor >> 62), start = (unsigned)(descriptor & 0x3FFF) << 4;
  const unsigned mode = code ? 4 - code : 0;
  const auto say = [&](FailureReason reason, const char* format, auto... values) {
    failure.reason = reason;
    snprintf(failure.message, sizeof failure.message, format, operand, values...);
    fail(w, failure);
  };
  if (descriptor >> 49 & 7)
    say(STATED, "wgmma: the descriptor of %s has a base offset, which the CPU engine does not have");
  if (mode && start >> 7 & ((1u << mode) - 1))
    say(MISALIGNED,
        "wgmma's descriptor of %s begins at 0x%x, in the midst of the %u-byte swizzle's pattern, "
        "which begins anew every %u bytes; its base offset is 0",
        start, 16u << mode, 128u << mode);
  unsigned worst = ~0u;
  for_operand(descriptor, rows, transposed, [&](unsigned low, unsigned, unsigned) {
    if (worst == ~0u && !shared_of_descriptor(w, low, 16)) worst = low;
  });
  if (worst == ~0u) return;
  const EngineLaunch& l = pool->launch;
  const char* const begin = l.dynamic_shared ? (char*)w.dynamic : w.static_base + l.static_begin;
  const unsigned first = (unsigned)(begin - w.shared);
  say(OUTSIDE_TILE,
      "wgmma's descriptor of %s reaches to byte %d of %s shared memory, which has %u bytes; it starts at byte %d, with "
      "a "
      "leading byte offset of %u and a stride byte offset of %u",
      (int)((worst - first) << 14) >> 14, l.dynamic_shared ? "dynamic" : "static",
      (unsigned)(l.dynamic_shared ? l.dynamic_shared : l.static_end - l.static_begin),
      (int)((start - first) << 14) >> 14, (unsigned)(descriptor >> 16 & 0x3FFF) << 4,
      (unsigned)(descriptor >> 32 & 0x3FFF) << 4);
}

template <typename F>
void for_operands(const WarpgroupOp& op, F chunk) {
  if (!op.form->a_in_registers) for_operand(op.a, 64, op.form->a_transposed, chunk);
  for_operand(op.b, (unsigned)op.form->n, op.form->b_transposed, chunk);
}

}  // namespace

extern "C" {

void engine_wgmma(
    const engine::WarpgroupProduct* form, float* const* d, engine::Words a, unsigned long long b, int accumulate,
    const char* file, int line) {
  Worker& w = here();
  void* const caller = __builtin_return_address(0);
  Critical guard(w);
  Warpgroup& g = need_warpgroup(w, "wgmma.mma_async", file, line, caller);
  Fiber& f = *w.current;
  const unsigned thread = f.lane.linear % GROUP, n = (unsigned)form->n / 2;
  const size_t number = f.products - g.first;
  const uint64_t a_descriptor = form->a_in_registers ? 0 : a[0] | (uint64_t)a[1] << 32;
  ++f.products;
  const bool first = number == g.ops.size();
  if (first) {
    if (!form->a_in_registers) check_descriptor(w, "A", a_descriptor, 64, form->a_transposed, file, line, caller);
    check_descriptor(w, "B", b, (unsigned)form->n, form->b_transposed, file, line, caller);
    g.ops.push_back({form, a_descriptor, b, accumulate != 0, f.product_groups, nullptr, {}, file, line, caller, 0});
    WarpgroupOp& op = g.ops.back();
    if (form->a_in_registers) op.registers.resize(GROUP);
    op.sums = sums_of(g, thread, n, d);
    if (!op.sums) {
      g.sums.emplace_back(new Sums);
      op.sums = g.sums.back().get();
      op.sums->n = n;
      op.sums->places.resize(GROUP * n);
      op.sums->values.resize(GROUP * n);
    }
    ++op.sums->in_flight;
    op.sums->callers.push_back(caller);
    trace(w, TRACE_PRODUCT, f.lane.linear - thread, caller, (unsigned)(f.products - 1), form->n);
    if (checking()) {
      check_event(EVENT_PRODUCT, f.lane.linear - thread, (unsigned)(f.products - 1), (unsigned)form->n, caller);
      op.epoch = check_product_issue(f.lane.linear - thread, caller, f.product_fence);
      for_operands(op, [&](unsigned low, unsigned, unsigned) {
        check_product_read(shared_of_descriptor(w, low, 16), f.lane.linear - thread, caller);
      });
    }
  } else if (number > g.ops.size()) {
    fail_disagreeing(w, "how many wgmma instructions come before this one", file, line, caller);
  }
  WarpgroupOp& op = g.ops[number];
  if (checking()) check_product_part(op.epoch);
  if (memcmp(op.form, form, sizeof *form) != 0) fail_disagreeing(w, "which wgmma comes next", file, line, caller);
  if (op.a != a_descriptor || op.b != b) fail_disagreeing(w, "the descriptors of wgmma", file, line, caller);
  if (op.accumulate != (accumulate != 0)) fail_disagreeing(w, "whether wgmma adds to its sums", file, line, caller);
  if (form->a_in_registers) op.registers[thread] = a;
  float** const mine = &op.sums->places[thread * n];
  if (mine[0] == d[0]) return;  // in flight already: their value is what the products before this one make of them
  if (mine[0]) fail_disagreeing(w, "the sums of wgmma", file, line, caller);
  for (unsigned i = 0; i < n; ++i) {
    mine[i] = d[i];
    op.sums->values[thread * n + i] = *d[i];
    hide(d[i]);
  }
}

void engine_wgmma_fence() { here().current->product_fence = true; }

void engine_wgmma_commit() {
  Fiber& f = *here().current;
  trace(here(), TRACE_PRODUCT_COMMIT, f.lane.linear, __builtin_return_address(0), (unsigned)f.product_groups);
  f.product_groups++;
}

void engine_wgmma_wait(unsigned pending, const char* file, int line) {
  Worker& w = here();
  Critical guard(w);
  meet(w, "wgmma.wait_group", pending, file, line, __builtin_return_address(0));
}

void engine_setmaxnreg(unsigned registers, int increase, const char* file, int line) {
  Worker& w = here();
  // Without __launch_bounds__ ptxas does not know how many registers the kernel begins with, and ignores it (C7508).
  if (!pool->launch.registers) return;
  Critical guard(w);
  meet(w, increase ? "setmaxnreg.inc" : "setmaxnreg.dec", registers, file, line, __builtin_return_address(0));
}

}  // extern "C"
