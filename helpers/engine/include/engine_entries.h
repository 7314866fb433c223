// What Python reads from a compiled module: its kernels, how to call them, the types of their parameters.
#pragma once
#include "vector_types.h"

namespace engine {

template <typename T>
struct Name {  // any other type: only its size is known
  static constexpr char kind = 'S';
  static constexpr const char* text = "struct";
};
#define ENGINE_NAME(T, TEXT)                  \
  template <>                                 \
  struct Name<T> {                            \
    static constexpr char kind = 's';         \
    static constexpr const char* text = TEXT; \
  };
ENGINE_NAME(float, "float32")
ENGINE_NAME(double, "float64")
ENGINE_NAME(bool, "bool")
ENGINE_NAME(char, "int8")
ENGINE_NAME(signed char, "int8")
ENGINE_NAME(unsigned char, "uint8")
ENGINE_NAME(short, "int16")
ENGINE_NAME(unsigned short, "uint16")
ENGINE_NAME(int, "int32")
ENGINE_NAME(unsigned int, "uint32")
ENGINE_NAME(long, "int64")
ENGINE_NAME(unsigned long, "uint64")
ENGINE_NAME(long long, "int64")
ENGINE_NAME(unsigned long long, "uint64")
#define ENGINE_NAMES(NAME, TEXT) \
  ENGINE_NAME(NAME##1, TEXT)     \
  ENGINE_NAME(NAME##2, TEXT)     \
  ENGINE_NAME(NAME##3, TEXT)     \
  ENGINE_NAME(NAME##4, TEXT)
ENGINE_NAMES(char, "int8")
ENGINE_NAMES(uchar, "uint8")
ENGINE_NAMES(short, "int16")
ENGINE_NAMES(ushort, "uint16")
ENGINE_NAMES(int, "int32")
ENGINE_NAMES(uint, "uint32")
ENGINE_NAMES(long, "int64")
ENGINE_NAMES(ulong, "uint64")
ENGINE_NAMES(longlong, "int64")
ENGINE_NAMES(ulonglong, "uint64")
ENGINE_NAMES(float, "float32")
ENGINE_NAMES(double, "float64")
#undef ENGINE_NAMES

template <typename T>
struct Unqualified {
  typedef T type;
  static constexpr bool is_const = false;
};
template <typename T>
struct Unqualified<const T> {
  typedef T type;
  static constexpr bool is_const = true;
};
template <typename T>
struct Unqualified<volatile T> {
  typedef T type;
  static constexpr bool is_const = false;
};

// kind: 'p' pointer, 's' scalar, 'S' struct by value
struct Parameter {
  char kind;
  const char* text;
  bool is_const;
  unsigned size;
};

template <typename T>
struct Describe {
  static constexpr Parameter value = {Name<T>::kind, Name<T>::text, false, (unsigned)sizeof(T)};
};
template <typename T>
struct Describe<T*> {
  typedef typename Unqualified<T>::type E;
  static constexpr Parameter value = {'p', Name<E>::text, Unqualified<T>::is_const, (unsigned)sizeof(E)};
};
template <>
struct Describe<void*> {
  static constexpr Parameter value = {'p', "void", false, 1};
};
template <>
struct Describe<const void*> {
  static constexpr Parameter value = {'p', "void", true, 1};
};

template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <size_t... I>
struct MakeIndices<0, I...> {
  typedef Indices<I...> type;
};

template <auto Function, typename Type = decltype(Function)>
struct Kernel;
template <auto Function, typename... A>
struct Kernel<Function, void (*)(A...)> {
  template <size_t... I>
  static void call(void** args, Indices<I...>) {
    (void)args;
    // Called through a pointer that the compiler cannot follow: inlined here, an endless loop would lose its line.
    void (*volatile function)(A...) = Function;
    function(*static_cast<typename Unqualified<A>::type*>(args[I])...);
  }
  static void run(void** args) { call(args, typename MakeIndices<sizeof...(A)>::type()); }
  static constexpr void (*function)(A...) = Function;
  static constexpr int count = sizeof...(A);
  static constexpr Parameter parameters[sizeof...(A) + 1] = {
      Describe<typename Unqualified<A>::type>::value..., {0, "", false, 0}};
};

// By __cluster_dims__; x is 0 without it. No constructors: the table of entries would be filled at run time.
struct Cluster {
  unsigned x, y, z;
};
constexpr Cluster cluster(unsigned x = 0, unsigned y = 1, unsigned z = 1) { return {x, y, z}; }

struct Entry {
  const char* name;
  void* function;
  void (*run)(void**);
  int count;
  const Parameter* parameters;
  Cluster cluster;
};

}  // namespace engine
