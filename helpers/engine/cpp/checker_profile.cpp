// The profile of a checked run: fibers run one after the other, and this finds out what the lanes of a warp would have
// done together on a GPU, and what each such request costs in sectors of global memory or wavefronts of shared memory.
//
// Apart from the other books, as only a profiled run comes here: it costs as much again as all of them.
#include "books.h"

namespace {

// How many 32-byte sectors of global memory, or wavefronts of shared memory, a request of these lanes takes.
void count_pieces(
    EngineSite& site, const Region& region, const uintptr_t* addresses, const unsigned char* lanes, unsigned n) {
  const unsigned size = site.size;
  bool one_word = size <= 4, row = size == 4;  // the two usual patterns need no sorting
  for (unsigned i = 1; i < n; ++i) {
    one_word = one_word && addresses[i] == addresses[0];
    row = row && addresses[i] == addresses[0] + 4 * i;
  }
  if (!region.is_shared()) {
    if (one_word || row) {
      site.sectors += (addresses[n - 1] + size - 1) / 32 - addresses[0] / 32 + 1;
      return;
    }
    uintptr_t sectors[2 * 32], last = addresses[0] / 32;
    unsigned found = 0, rising = 1;  // the lanes' addresses seldom fall, and then nothing needs sorting
    for (unsigned i = 0; i < n && rising; ++i) {
      const uintptr_t begin = addresses[i] / 32, end = (addresses[i] + size - 1) / 32;
      if (begin < last) rising = 0;
      else rising += (begin > last) + (end > begin), last = end;
    }
    if (rising) {
      site.sectors += rising;
      return;
    }
    for (unsigned i = 0; i < n; ++i)
      for (uintptr_t s = addresses[i] / 32; s <= (addresses[i] + size - 1) / 32; ++s) sectors[found++] = s;
    std::sort(sectors, sectors + found);
    site.sectors += (uint64_t)(std::unique(sectors, sectors + found) - sectors);
    return;
  }
  if (one_word || row) {
    site.wavefronts++;
    return;
  }
  // Shared memory: 32 banks of 4 bytes. A bank delivers one word in a wavefront, to all lanes that read it. Lanes with 8 or 16 bytes
  // each are served in groups of 16 or 8; of 32 or 16 where every lane i shares its address with lane i ^ 1, or every
  // one with lane i ^ 2, or that lane takes no part (measured on an H200: helpers/bench/studies/xray_vs_ncu.py).
  // helpers/engine/banks.py has the same rule, and a test compares them.
  unsigned group = size <= 4 ? 32 : 128 / size;
  if (size > 4) {
    uintptr_t of[32] = {};
    bool paired[2] = {true, true};
    for (unsigned i = 0; i < n; ++i) of[lanes[i]] = addresses[i];
    for (unsigned i = 0; i < n; ++i)
      for (unsigned k = 0; k < 2; ++k) {
        const uintptr_t other = of[lanes[i] ^ (1 << k)];
        paired[k] = paired[k] && (other == 0 || other == addresses[i]);
      }
    if (paired[0] || paired[1]) group *= 2;
  }
  for (unsigned first = 0; first < n;) {
    uintptr_t words[32 * 4], of_bank[32];
    unsigned found = 0, per_bank[32] = {}, wavefronts = 1, i = first;
    uint32_t used = 0;
    bool conflict = false;
    for (; i < n && lanes[i] / group == lanes[first] / group; ++i)
      for (uintptr_t word = addresses[i] / 4; word <= (addresses[i] + size - 1) / 4; ++word) {
        const unsigned bank = word % 32;
        conflict = conflict || ((used >> bank & 1) && of_bank[bank] != word);
        used |= 1u << bank;
        of_bank[bank] = word;
        words[found++] = word;
      }
    first = i;
    if (!conflict) {  // no bank has two words: nothing needs sorting
      site.wavefronts++;
      continue;
    }
    std::sort(words, words + found);
    found = (unsigned)(std::unique(words, words + found) - words);
    for (unsigned k = 0; k < found; ++k) wavefronts = std::max(wavefronts, ++per_bank[words[k] % 32]);
    site.wavefronts += wavefronts;
  }
}

// A warp's step at a site. The same lanes again before the next barrier, as in a loop, only count.
void remember_step(uint32_t site, uint32_t warp, uint32_t lanes) {
  const size_t place = (size_t)site * 32 + warp;
  if (place >= books.last_step.size()) books.last_step.resize(std::max(2 * books.last_step.size(), place + 32));
  uint32_t& last = books.last_step[place];
  if (last) {
    EngineStep& step = books.steps[last - 1];
    if (step.interval == books.interval && step.lanes == lanes && step.block == books.block) {
      step.count++;
      return;
    }
  }
  if (books.steps.size() == MOST_STEPS) {
    books.whole = std::min(books.whole, books.block);
    return;
  }
  books.steps.push_back({books.block, books.interval, warp, site, lanes, 1});
  last = (uint32_t)books.steps.size();
}

// One instruction of a warp: the lanes that execute it together, and where each of them reads or writes.
void count_request(
    uintptr_t pc, const uintptr_t* addresses, const unsigned char* lanes, unsigned n, uint32_t mask, unsigned warp) {
  Cached& hint = slot_of(requests_cache, pc);
  if (hint.pc != pc || addresses[0] < hint.begin || addresses[0] - hint.begin > hint.span) {
    uint32_t i = 0;  // an instruction has a site in each region it touches
    for (; i < books.sites.size(); ++i) {
      const Region& r = books.regions[books.sites[i].region];
      if (books.sites[i].pc == pc && addresses[0] >= r.begin && addresses[0] < r.end) break;
    }
    if (i == books.sites.size()) return;
    hint.pc = pc;
    hint.site = i;
    hint.region = &books.regions[books.sites[i].region];
    hint.begin = hint.region->begin;
    hint.span = hint.region->end - hint.begin - 1;
  }
  EngineSite& site = books.sites[hint.site];
  site.requests++;
  remember_step(hint.site, warp, mask);
  const uint64_t before = site.sectors + site.wavefronts;
  count_pieces(site, *hint.region, addresses, lanes, n);
  const uint64_t cost = site.sectors + site.wavefronts - before;
  if (cost > site.worst) {  // kept as an example, to draw
    site.worst = cost;
    site.worst_lanes = 0;
    for (unsigned i = 0; i < n; ++i) {
      site.worst_lanes |= 1u << lanes[i];
      site.worst_offsets[lanes[i]] = (uint32_t)(addresses[i] - hint.region->begin);
    }
  }
}

// The usual part: as long as all lanes of the warp have the same next instruction. Returns how many events of each.
unsigned merge_together(unsigned first, unsigned n, const Event* const* at, const Event* const* end) {
  static const unsigned char every[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  const uint32_t mask = n == 32 ? ~0u : (1u << n) - 1;
  ptrdiff_t most = FULL;
  for (unsigned i = 0; i < n; ++i) most = std::min(most, end[i] - at[i]);
  uintptr_t addresses[32];
  unsigned k = 0;
  for (; k < (unsigned)most; ++k) {
    const uint64_t key = at[0][k].key;
    uint64_t different = 0;
    for (unsigned i = 0; i < n; ++i) {
      different |= at[i][k].key ^ key;
      addresses[i] = at[i][k].address;
    }
    if (different) break;
    if (addresses[0]) count_request(profile.base + (uint32_t)key, addresses, every, n, mask, first / 32);
  }
  return k;
}

// Replay what the lanes of a warp did as a GPU would have: the lanes whose next instruction comes first in the code go
// first, together, and the others wait for them. Lanes that left a loop early wait behind it for those still in it.
// The lanes in `unfinished` will go on: if one of them has no more events, what comes next is not known yet.
void merge_warp(unsigned first, unsigned n, unsigned unfinished) {
  LaneTrace* lanes = &profile.lanes[first];
  const Event *at[32], *end[32];
  unsigned there = 0;  // lanes with events left
  const unsigned everyone = n == 32 ? ~0u : (1u << n) - 1;
  for (unsigned i = 0; i < n; ++i) {
    at[i] = lanes[i].events;
    end[i] = at[i] + lanes[i].n;
    if (lanes[i].n) there |= 1u << i;
  }
  uintptr_t addresses[32];
  unsigned char who[32];
  while (there && !(unfinished & ~there)) {
    const uint64_t guess = at[__builtin_ctz(there)]->key;
    uint64_t next = guess, different = 0;
    unsigned together = 0;
    if (there == everyone) {
      const unsigned done = merge_together(first, n, at, end);
      for (unsigned i = 0; i < n; ++i)
        if ((at[i] += done) == end[i]) there &= ~(1u << i);
      if (done) continue;
    }
    for (unsigned i = 0; i < n; ++i) {
      if (!(there >> i & 1)) continue;
      const Event& e = *at[i];
      different |= e.key ^ guess;
      next = std::min(next, e.key);
      who[together] = (unsigned char)i;
      addresses[together++] = e.address;
    }
    if (different) {  // the warp has diverged: only the lanes that come first
      together = 0;
      for (unsigned i = 0; i < n; ++i) {
        if (!(there >> i & 1) || at[i]->key != next) continue;
        who[together] = (unsigned char)i;
        addresses[together++] = at[i]->address;
      }
    }
    uint32_t mask = 0;
    for (unsigned k = 0; k < together; ++k) {
      mask |= 1u << who[k];
      if (++at[who[k]] == end[who[k]]) there &= ~(1u << who[k]);
    }
    if (addresses[0]) count_request(profile.base + (uint32_t)next, addresses, who, together, mask, first / 32);
  }
  for (unsigned i = 0; i < n; ++i) {
    lanes[i].n = (unsigned)(end[i] - at[i]);
    if (lanes[i].n) memmove(lanes[i].events, at[i], lanes[i].n * sizeof(Event));
  }
}

}  // namespace

void check_merge(unsigned n_threads) {
  if (!profile.running) return;
  for (unsigned first = 0; first < n_threads; first += 32) merge_warp(first, std::min(32u, n_threads - first), 0);
}

void check_merge_warp(unsigned warp, unsigned n_threads, unsigned unfinished) {
  if (profile.running) merge_warp(warp * 32, std::min(32u, n_threads - warp * 32), unfinished);
}
