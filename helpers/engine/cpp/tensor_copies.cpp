// Copies by TMA: a box of a tensor, or plain bytes, between global and shared memory, which no thread waits for unless it says so.
//
// A load's target is poison from the moment it is asked for until the phase of its mbarrier ends (mbarriers.cpp). A store
// reads shared memory when the thread that asked for it waits for its group, and not before: what was overwritten until
// then is what it writes. A store without a wait writes nothing.
#include "worker.h"

namespace {

using engine_tensor::Map;

// Where an instruction stands: in the source, and in the code.
struct Place {
  const char* file;
  int line;
  void* caller;
};

void fail_with(FailureReason reason, const Place& at, const char* format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
void fail_with(FailureReason reason, const Place& at, const char* format, ...) {
  EngineFailure failure = failure_from(here(), reason, at.file, at.line, at.caller);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure.message, sizeof failure.message, format, arguments);
  va_end(arguments);
  fail(here(), failure);
}

// Calls piece(where in the array, where in shared memory counted from the box, bytes, whether it is in the array) for
// each row of the box, in parts that are wholly inside or wholly outside.
template <typename F>
void for_rows(const TensorCopy& copy, F piece) {
  const Map& m = copy.map;
  const int64_t first = copy.at[0], width = (int64_t)m.last[0] + 1;
  const int64_t low = std::min<int64_t>(std::max<int64_t>(-first, 0), m.box[0]);
  const int64_t high = std::max<int64_t>(std::min<int64_t>(width - first, m.box[0]), low);
  for (unsigned row = 0; row < m.rows(); ++row) {
    unsigned rest = row;
    int64_t at = 0;
    bool inside = true;
    for (unsigned i = 1; i < 5; ++i) {
      const int64_t here = (i < m.rank ? copy.at[i] : 0) + (int64_t)(rest % m.box[i]);
      rest /= m.box[i];
      inside = inside && here >= 0 && here <= (int64_t)m.last[i];
      if (i < m.rank) at += here * (int64_t)m.strides[i - 1];
    }
    char* const begin = (char*)(m.address + (uint64_t)(at + first * m.itemsize));
    const unsigned place = row * m.pitch(), size = m.itemsize;
    if (!inside) {
      piece(begin, place, m.inner(), false);
      continue;
    }
    if (low) piece(begin, place, (unsigned)low * size, false);
    if (high > low) piece(begin + low * size, place + (unsigned)low * size, (unsigned)(high - low) * size, true);
    if (high < m.box[0]) piece(begin, place + (unsigned)high * size, (unsigned)(m.box[0] - high) * size, false);
  }
}

// Calls chunk(offset in the piece, its place in shared memory, bytes) for parts of a piece that the swizzle keeps whole.
template <typename F>
void for_chunks(const TensorCopy& copy, unsigned place, unsigned bytes, F chunk) {
  for (unsigned i = 0; i < bytes;) {
    const unsigned at = copy.offset + place + i, size = std::min(bytes - i, 16 - at % 16);
    chunk(i, copy.shared + (engine_tensor::swizzled(at, copy.map.swizzle) - copy.offset), size);
    i += size;
  }
}

// The data of a load are in shared memory from here on.
void land(TensorCopy& copy) {
  if (copy.global) {
    memcpy(copy.shared, copy.data.data(), copy.bytes);
    return;
  }
  for_rows(copy, [&](const char* from, unsigned place, unsigned bytes, bool inside) {
    for_chunks(copy, place, bytes, [&](unsigned i, char* to, unsigned size) {
      if (inside) memcpy(to, from + i, size);
      else memset(to, 0, size);
    });
  });
}

// A store reads shared memory and writes to the array what is inside of it.
void store(TensorCopy& copy) {
  if (copy.global) {
    if (checking()) check_tensor_global(copy.global, copy.bytes, true, copy.caller, copy.adds);
    float *const to = (float*)copy.global, *const from = (float*)copy.shared;
    if (!copy.adds) memcpy(to, from, copy.bytes);
    else
      for (unsigned i = 0; i < copy.bytes / sizeof(float); ++i) add_float(to + i, from[i]);
    return;
  }
  for_rows(copy, [&](char* to, unsigned place, unsigned bytes, bool inside) {
    if (!inside) return;
    if (checking()) check_tensor_global(to, bytes, true, copy.caller);
    for_chunks(copy, place, bytes, [&](unsigned i, const char* from, unsigned size) { memcpy(to + i, from, size); });
  });
}

// Calls piece(begin, bytes) for what a store has written.
template <typename F>
void for_written(const TensorCopy& copy, F piece) {
  if (copy.global) return piece(copy.global, copy.bytes);
  for_rows(copy, [&](char* to, unsigned, unsigned bytes, bool inside) {
    if (inside) piece(to, bytes);
  });
}

// A thread has ended and not waited for these.
void leave_stores(Fiber& f) {
  f.unseen.clear();
  if (checking())
    for (const TensorCopy& copy : f.stores)
      check_tensor_left(copy.shared, copy.room, false, copy.thread, here().rank, copy.caller);
  f.stores.clear();
}

// What both directions begin with. to: whose shared memory it is.
TensorCopy tensor_copy(
    Worker& w, const Block& to, const void* map, const int* at, unsigned rank, unsigned shared, bool stores,
    const Place& place) {
  constexpr const char* name = "cp.async.bulk.tensor";
  Map m;
  memcpy((void*)&m, map, sizeof m);  // a wild address faults here
  const EngineLaunch& l = pool->launch;
  bool known = false;
  for (uint64_t i = 0; i < l.n_maps && !known; ++i) known = memcmp(l.maps + i * sizeof m, &m, sizeof m) == 0;
  if (!known)
    fail_with(
        STATED, place,
        "%s: what the address points to is none of the launch's tensor maps. Give the kernel the map by value, as "
        "const __grid_constant__ TensorMap, and the instruction its address",
        name);
  if (m.rank != rank)
    fail_with(STATED, place, "%s takes a tensor of %u dimensions, and the map's has %u", name, rank, (unsigned)m.rank);
  TensorCopy copy = {};
  copy.map = m;
  for (unsigned i = 0; i < rank; ++i) copy.at[i] = at[i];
  // For a GPU these are illegal instructions: it names no line, and the context is lost. (The first was seen on an H200
  // and is in CUDA's programming guide; of the second Triton's tutorial of TMA warns.)
  for (unsigned i = 0; stores && i < rank; ++i)
    if (at[i] < 0)
      fail_with(
          STATED, place,
          "%s: coordinate %u of a store is %d. The box of a load may begin before the array, that of a "
          "store may not (both may end after it): a GPU calls this an illegal instruction",
          name, i, at[i]);
  if ((int64_t)at[0] * m.itemsize % 16 != 0)
    fail_with(
        STATED, place,
        "%s: the box begins at element %d of a row, %lld bytes from its start, and TMA takes multiples "
        "of 16 bytes: a GPU calls this an illegal instruction",
        name, at[0], (long long)at[0] * m.itemsize);
  // The swizzle goes by the address (measured on an H200): a tile need not begin where its pattern does.
  if (shared % 128 != 0 && shared % 16 == 0)
    fail_with(
        MISALIGNED, place, "%s takes a tile at a multiple of 128 bytes of shared memory, and 0x%x is %u past one", name,
        shared, shared % 128);
  copy.shared = (char*)engine_cluster_pointer(shared, 16, name, place.file, place.line);
  copy.offset = shared;
  copy.bytes = m.rows() * m.inner();
  copy.room = m.rows() * m.pitch();
  if (!to.dynamic || copy.shared < (char*)to.dynamic || copy.shared >= to.dynamic_limit) {
    const char *begin = to.static_base ? to.static_base + l.static_begin : nullptr,
               *end = to.static_base + l.static_end;
    if (!begin || copy.shared < begin || copy.shared + copy.room > end)
      fail_with(OUTSIDE_TILE, place, "%s takes a tile of %u bytes at 0x%x", name, copy.room, shared);
  } else if (copy.shared + copy.room > (char*)to.dynamic + l.dynamic_shared) {
    fail_with(
        OUTSIDE_TILE, place, "%s takes a tile of %u bytes at byte %u of dynamic shared memory, which has %u bytes",
        name, copy.room, (unsigned)(copy.shared - (char*)to.dynamic), (unsigned)l.dynamic_shared);
  }
  copy.thread = w.current->lane.linear;
  copy.rank = w.rank;
  return copy;
}

// The mbarrier of a load: initialised, and in the same block's shared memory as the target.
Block& block_of_load(Worker& w, const void* target, const void* word, const char* name, const Place& place) {
  Block *const to = owner_of(w, target), *const owner = owner_of(w, word);
  if (to != owner && to && owner)
    fail_with(
        STATED, place,
        "%s: the target is in the shared memory of block %u of the cluster, and the mbarrier in that of "
        "block %u",
        name, to->rank, owner->rank);
  return to ? *to : w;
}

void need_init(const void* word, const Place& place) {
  if (__atomic_load_n((const uint64_t*)word, __ATOMIC_RELAXED) == ~0ull)
    fail_with(STATED, place, "nobody has initialised this mbarrier");
}

// Sends a copy to one block. by_tma: through a tensor map (cuda::memcpy_async copies plain bytes with no fence after its
// barrier's initialisation).
void send_to(Worker& w, Block& to, TensorCopy&& copy, char* word, bool by_tma, const Place& place, void* frame) {
  if (to.ended)
    fail_with(
        STATED, place,
        "the copy goes to block %u of the cluster, which has ended: it must not end before others are "
        "done with its shared memory (cluster.sync())",
        to.rank);
  need_init(word, place);
  Mbarrier& b = mbarrier_at(to, word);
  if (checking()) {
    check_mbarrier_use(b.number, to.rank, copy.caller, by_tma);
    check_tensor_issue(copy.shared, copy.room, b.number, to.rank, copy.caller, frame);
    check_event(EVENT_LOAD, copy.thread, b.number, copy.bytes, copy.caller);
  }
  trace_mbarrier(to, b, TRACE_LOAD, copy.rank, copy.thread, copy.caller, copy.bytes);
  send(w, to, b, std::move(copy));
}

// To the block that has the target; or to all `blocks` of the cluster, by rank, each at the same place.
void begin_load(
    Worker& w, Block& to, TensorCopy& copy, void* word, unsigned blocks, bool by_tma, const Place& place, void* frame) {
  if (!blocks) return send_to(w, to, std::move(copy), (char*)word, by_tma, place, frame);
  if (blocks >> w.cluster.size)
    fail_with(
        STATED, place, ".multicast::cluster names the blocks 0x%x, and the cluster has %u", blocks, w.cluster.size);
  for (unsigned rank = 0; rank < w.cluster.size; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    Block& other = member(w, rank);
    TensorCopy one = copy;
    one.shared = other.shared + (copy.shared - to.shared);
    one.offset = (unsigned)(one.shared - w.space);
    send_to(w, other, std::move(one), other.shared + ((char*)word - to.shared), by_tma, place, frame);
  }
}

// So that a fault is the kernel's, with its line: later the engine's own code copies. A write is an atomic of nothing, as
// that of async_copies.cpp is.
void touch(const void* begin, unsigned bytes, bool writes) {
  const auto one = [&](unsigned i) {
    if (writes) __atomic_fetch_or((char*)begin + i, 0, __ATOMIC_RELAXED);
    else (void)((const volatile char*)begin)[i];
  };
  for (unsigned i = 0; i < bytes; i += 4096) one(i);
  if (bytes) one(bytes - 1);
}

// Of plain bytes; adds: of floats, which are added to those of the array.
void begin_store(void* target, const void* source, unsigned bytes, bool adds, void* caller) {
  Worker& w = here();
  touch(source, bytes, false);
  touch(target, bytes, true);
  TensorCopy copy = {};
  copy.caller = caller;
  copy.adds = adds;
  Critical guard(w);
  Fiber& f = *w.current;
  copy.shared = (char*)source;
  copy.global = (char*)target;
  copy.bytes = copy.room = bytes;
  copy.thread = f.lane.linear;
  copy.group = f.store_groups;
  if (checking()) {
    copy.epoch = check_store_issue();
    check_event(EVENT_STORE, copy.thread, 0, copy.bytes, copy.caller);
    check_store_read(copy.shared, bytes, copy.caller);
  }
  trace(w, TRACE_STORE, copy.thread, copy.caller, 0, copy.bytes);
  f.stores.push_back(std::move(copy));
}

}  // namespace

extern "C" {

void engine_tensor_load(
    const void* map, const int* at, unsigned rank, unsigned shared, void* word, unsigned blocks, const char* file,
    int line) {
  Worker& w = here();
  const Place place = {file, line, __builtin_return_address(0)};
  constexpr const char* name = "cp.async.bulk.tensor";
  need_init(word, place);
  Block& to = block_of_load(w, engine_cluster_pointer(shared, 1, name, file, line), word, name, place);
  TensorCopy copy = tensor_copy(w, to, map, at, rank, shared, false, place);
  copy.caller = place.caller;
  Critical guard(w);
  if (checking())
    for_rows(copy, [&](char* from, unsigned, unsigned bytes, bool inside) {
      if (inside) check_tensor_global(from, bytes, false, copy.caller);
    });
  begin_load(w, to, copy, word, blocks, true, place, __builtin_frame_address(0));
}

void engine_tensor_store(const void* map, const int* at, unsigned rank, unsigned shared, const char* file, int line) {
  Worker& w = here();
  const Place place = {file, line, __builtin_return_address(0)};
  TensorCopy copy = tensor_copy(w, w, map, at, rank, shared, true, place);
  copy.caller = __builtin_return_address(0);
  Critical guard(w);
  Fiber& f = *w.current;
  copy.group = f.store_groups;
  if (checking()) {
    copy.epoch = check_store_issue();
    check_event(EVENT_STORE, copy.thread, 0, copy.bytes, copy.caller);
    for_rows(copy, [&](char*, unsigned place, unsigned bytes, bool inside) {
      if (inside)
        for_chunks(copy, place, bytes, [&](unsigned, char* from, unsigned size) {
          check_store_read(from, size, copy.caller);
        });
    });
  }
  trace(w, TRACE_STORE, copy.thread, copy.caller, 0, copy.bytes);
  f.stores.push_back(std::move(copy));
}

void engine_bulk_load(
    void* target, const void* source, unsigned bytes, void* word, unsigned blocks, const char* file, int line) {
  Worker& w = here();
  const Place place = {file, line, __builtin_return_address(0)};
  need_init(word, place);
  Block& to = block_of_load(w, target, word, "cp.async.bulk", place);
  touch(source, bytes, false);
  touch(target, bytes, true);
  TensorCopy copy = {};
  copy.caller = place.caller;
  Critical guard(w);
  copy.shared = (char*)target;
  copy.global = (char*)source;
  copy.bytes = copy.room = bytes;
  copy.thread = w.current->lane.linear;
  copy.rank = w.rank;
  copy.data.assign((const char*)source, (const char*)source + bytes);
  if (checking() && !engine_is_shared(source)) check_tensor_global((char*)source, bytes, false, copy.caller);
  else if (checking()) check_peer_read((char*)source, bytes, mbarrier_at(to, (char*)word).number, to.rank, copy.caller);
  begin_load(w, to, copy, word, blocks, false, place, __builtin_frame_address(0));
}

void engine_store_async(void* target, engine::Words data, unsigned bytes, void* word, const char* file, int line) {
  Worker& w = here();
  const Place place = {file, line, __builtin_return_address(0)};
  Block& to = block_of_load(w, target, word, "st.async", place);
  touch(target, bytes, true);
  TensorCopy copy = {};
  copy.caller = place.caller;
  Critical guard(w);
  copy.shared = copy.global = (char*)target;
  copy.bytes = copy.room = bytes;
  copy.thread = w.current->lane.linear;
  copy.rank = w.rank;
  copy.data.assign((const char*)&data, (const char*)&data + bytes);
  begin_load(w, to, copy, word, 0, false, place, __builtin_frame_address(0));
}

void engine_bulk_store(void* target, const void* source, unsigned bytes) {
  begin_store(target, source, bytes, false, __builtin_return_address(0));
}

void engine_bulk_add(void* target, const void* source, unsigned bytes) {
  begin_store(target, source, bytes, true, __builtin_return_address(0));
}

void engine_bulk_commit() { here().current->store_groups++; }

void engine_bulk_wait(unsigned pending, int reads) {
  Worker& w = here();
  Critical guard(w);
  Fiber& f = *w.current;
  const size_t before = f.stores.size();
  while (!f.stores.empty() && f.stores.front().group + (uint64_t)pending < f.store_groups) {
    TensorCopy& copy = f.stores.front();
    store(copy);
    if (checking() && reads) {
      for_written(copy, check_store_unseen);
      f.unseen.push_back(std::move(copy));
    }
    f.stores.pop_front();
  }
  while (!reads && !f.unseen.empty() && f.unseen.front().group + (uint64_t)pending < f.store_groups) {
    for_written(f.unseen.front(), check_store_seen);
    f.unseen.pop_front();
  }
  if (checking() && before > f.stores.size())
    check_event(EVENT_STORED, f.lane.linear, 0, before - f.stores.size(), __builtin_return_address(0));
  trace(w, TRACE_STORED, f.lane.linear, __builtin_return_address(0), 0, before - f.stores.size());
  if (checking()) check_store_wait(f.stores.empty() ? 0 : f.stores.front().epoch - 1);
}

void engine_proxy_fence(int of_mbarriers) {
  if (checking()) check_proxy_fence(of_mbarriers != 0);
}

}  // extern "C"
