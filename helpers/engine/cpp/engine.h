// What a compiled kernel and the engine say to each other. Kernels see it through cuda_runtime.h.
//
// A CUDA thread is a fiber: a stack of its own, on an OS thread that runs one block at a time. A fiber runs until
// it waits (barrier, warp collective) or ends, so a block needs no locks and its order of events is repeatable.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define ENGINE_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define ENGINE_INLINE static inline __attribute__((always_inline))  // so that a fault in it has the caller's line

// Variables of a thread at a fixed distance from its pointer, as those of programs have it: an access is two loads instead
// of a call. glibc keeps some room for such variables of libraries that are loaded later.
#if defined(__GLIBC__) && !defined(ENGINE_ANY_TLS)
#define ENGINE_HAS_TLS_ROOM 1
#define ENGINE_TLS __attribute__((tls_model("initial-exec")))
#else
#define ENGINE_TLS
#endif

struct uint3 {
  unsigned int x, y, z;
};
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};

namespace engine {

constexpr size_t SHARED_BYTES = (19 << 20) + (256 << 10);  // of the addresses that a block keeps for shared memory

// The data of one thread.
struct Lane {
  uint3 thread_index, block_index;
  dim3 block_size, grid_size;
  unsigned int linear;  // of the thread in its block, x fastest; its warp is linear / 32
  dim3 cluster_size;    // blocks; 1 without a cluster
};

// A warp-wide operation. Each lane brings one; the last lane of the mask to arrive runs it for all of them.
struct Collective {
  const char* name;                                      // what the source calls it, for messages
  void (*run)(Collective* const* lanes, unsigned mask);  // lanes[i] is null where lane i is not taking part
  unsigned mask;
  const char* file;
  int line;
  bool is_barrier = false;  // it orders the lanes' accesses to memory: a shuffle or a vote does not
};

// Registers of one lane that an instruction takes or gives; unused ones are 0.
typedef unsigned Words __attribute__((vector_size(16)));

// The products of tensor cores: K, then the type of the elements. HALF: accumulators of 16 bits.
enum Mma { K16_F16, K16_BF16, K16_HALF, K8_F16, K8_BF16, K8_HALF, K8_TF32, K4_TF32 };

// Other products of a warp, with n = 8: m x k numbers of so many bits; 64: of double.
struct Products {
  int m, k, bits;
  bool a_signed, b_signed, saturated;
  char how;  // '*', or of bits: '^' and '&', whose ones are counted
};

// The types of wgmma's factors. Of those of 16 bits A and B have the same one, and k is 16; of 8 bits k is 32.
enum class Factor { f16, bf16, e4m3, e5m2 };

// One wgmma.mma_async: n columns; A and B with rows along K or (of 16 bits) transposed; negated or not.
struct WarpgroupProduct {
  int n;
  Factor a, b;
  bool a_in_registers, a_transposed, b_transposed, a_negative, b_negative;

  constexpr bool of_eights() const { return a >= Factor::e4m3; }
};

enum class BarrierOp { none, count, all, any };

// Rounding modes, and the operations that have them.
enum class Toward { nearest, zero, up, down };
enum class Operation { add, multiply, divide, root, fma };

typedef float Floats __attribute__((vector_size(16)));  // up to four, as they are passed in registers

template <typename T>
struct Same {
  typedef T type;
};
template <typename T>
using Plain = typename Same<T>::type;  // no deduction: atomicAdd(&an_unsigned, 1) takes the 1 as unsigned

}  // namespace engine

extern "C" {
// The same fiber always gets the same answer, so the compiler may keep it over barriers.
const engine::Lane* engine_lane() __attribute__((const));
void engine_collective(engine::Collective* mine);
void engine_no_such_lane(const engine::Collective* mine, unsigned lane, unsigned source);  // as it takes no part
int engine_barrier(engine::BarrierOp op, int predicate, const char* file, int line);
void engine_named_barrier(unsigned number, unsigned n_threads, int waits, const char* file, int line);
unsigned engine_activemask(const char* file, int line);
void engine_yield();
void engine_exit() __attribute__((noreturn));  // of this thread
unsigned engine_carry(int set);                // the thread's carry flag; set: 0 or 1, or -1 to leave it
void engine_look(const void* address);         // by a thread that may be waiting for another one
void engine_grid_sync(const char* file, int line);
int engine_cooperative();
// Clusters. orders: .release or .acquire, and not .relaxed
void engine_cluster_arrive(int orders, const char* file, int line);
void engine_cluster_wait(int orders, const char* file, int line);
// An address in a block of the cluster's shared memory as another block has it, and the rank of the block that has it.
void* engine_map_shared(const void* pointer, unsigned rank, const char* name, const char* file, int line);
unsigned engine_shared_rank(const void* pointer, const char* name, const char* file, int line);
int engine_is_cluster_shared(const void* pointer);
// Of 32 bits, in any of its blocks.
void* engine_cluster_pointer(unsigned offset, unsigned bytes, const char* name, const char* file, int line);
char* engine_static_shared();  // of the running block
extern __thread char* engine_static_base ENGINE_TLS;
extern __thread char* engine_own_shared ENGINE_TLS;  // the running block's: SHARED_BYTES of addresses
void* engine_dynamic_shared();
unsigned engine_dynamic_shared_size();
long long engine_clock();
double engine_rounded(engine::Operation operation, engine::Toward mode, double a, double b, double c);
void engine_whole_warp(const char* name, const char* file, int line);  // returns when all 32 lanes have come
engine::Words engine_mma(
    engine::Mma kind, engine::Words a, engine::Words b, engine::Words c, const char* file, int line);
engine::Words engine_mma_other(
    const engine::Products* form, engine::Words a, engine::Words b, engine::Words c, const char* file, int line);
// How many 8 x 8 matrices, 8 more where they are transposed; the row that this lane has read. Back: a word of each.
engine::Words engine_ldmatrix(const char* name, int kind, engine::Words row, const char* file, int line);
// The same backwards: words in, the row that this lane has to write out.
engine::Words engine_stmatrix(const char* name, int kind, engine::Words words, const char* file, int line);
unsigned engine_shared_offset(const void* pointer, const char* file, int line);
int engine_is_shared(const void* pointer);
// Adds n floats, each atomically, in one access of n * 4 bytes. name: of the function or instruction
engine::Floats engine_add_floats(
    float* address, engine::Floats values, unsigned n, const char* name, const char* file, int line);
void* engine_shared_pointer(unsigned offset, unsigned bytes, const char* name, const char* file, int line);
// cp.async: the data wait in a queue of the thread until it waits for their group.
void engine_async_copy(void* target, engine::Words data, unsigned bytes);
void engine_async_commit();
void engine_async_wait(unsigned pending);  // groups that may be left; ~0: none, and what is not committed lands as well
// mbarriers. An arrival returns the state before it. phase: bit 63. bytes: that the phase is to wait for, negative where
// they have come. may_block: of try_wait, which may return 0 all the same.
void engine_mbarrier_init(void* word, unsigned count, const char* file, int line);
void engine_mbarrier_inval(void* word);
unsigned long long engine_mbarrier_arrive(
    void* word, unsigned count, unsigned bytes, int drop, const char* file, int line);
void engine_mbarrier_bytes(void* word, long long bytes, const char* file, int line);
int engine_mbarrier_wait(void* word, unsigned long long phase, int may_block, const char* file, int line);
// Copies by TMA: of a box of a tensor, at its first coordinates, or of plain bytes. shared: an address of 32 bits. blocks:
// of the cluster, by rank, which all get it at the same place; 0: it goes to the address alone.
void engine_tensor_load(
    const void* map, const int* at, unsigned rank, unsigned shared, void* word, unsigned blocks, const char* file,
    int line);
void engine_tensor_store(const void* map, const int* at, unsigned rank, unsigned shared, const char* file, int line);
void engine_bulk_load(
    void* target, const void* source, unsigned bytes, void* word, unsigned blocks, const char* file, int line);
// st.async: a store to a block of the cluster that sends its bytes to an mbarrier there.
void engine_store_async(void* target, engine::Words data, unsigned bytes, void* word, const char* file, int line);
void engine_bulk_store(void* target, const void* source, unsigned bytes);
void engine_bulk_add(void* target, const void* source, unsigned bytes);  // of floats
void engine_bulk_commit();
void engine_bulk_wait(unsigned pending, int reads);  // reads: .read, which waits until shared memory has been read
void engine_proxy_fence(int of_mbarriers);           // 1: fence.mbarrier_init, which is for those alone
// Warpgroups. d: where the sums are, n / 2 of them; a: the registers of A, or its descriptor in the first two words.
void engine_wgmma(
    const engine::WarpgroupProduct* form, float* const* d, engine::Words a, unsigned long long b, int accumulate,
    const char* file, int line);
void engine_wgmma_fence();
void engine_wgmma_commit();
void engine_wgmma_wait(unsigned pending, const char* file, int line);
void engine_setmaxnreg(unsigned registers, int increase, const char* file, int line);
void engine_show(const void* value);        // to the other threads of the block,
const void* engine_shown(unsigned thread);  // which see what each has shown last
int engine_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Of a checked run; elsewhere it does nothing. what, value: checker.h
void engine_note(int what, unsigned long long value);
void engine_tensor_flop(int m, int n, int k);  // a product of real numbers
void engine_fail(const char* message, const char* file, int line) __attribute__((noreturn));
// returns_to: in the kernel, which gives the line
void engine_stop(const char* message, const void* returns_to) __attribute__((noreturn));
void* engine_malloc(size_t bytes);
void engine_free(void* pointer, const char* name, const void* returns_to);
// rule: what is to be at a multiple of what
void engine_misaligned(const char* rule, const char* file, int line) __attribute__((noreturn));
}
