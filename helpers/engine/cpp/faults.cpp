// Signals: a kernel's fault (SIGSEGV and kin) becomes a failure of its block, and a cancelled launch is torn out of its
// kernels. All code that depends on a processor's registers and a system's frames is here.
//
// A handler notes what happened in memory of the worker's own and returns onto another stack. There rescue_main does as
// ordinary code what a handler may not: lock the pool's mutex, and leave the block.
#include "worker.h"

namespace {

void rescue_main() {
  Worker& w = here();
  w.critical++;  // a fault from here on is the engine's own
  if (w.fault.reason != NONE) record(w.fault);
  leave_block(w);
}

// Let the handler return into rescue_main on a stack that is known to be good.
void redirect(Worker& w, ucontext_t* u) {
  uintptr_t top = ((uintptr_t)(w.rescue + STACK_BYTES) & ~(uintptr_t)15) - 64;
#if defined(__linux__) && defined(__x86_64__)
  u->uc_mcontext.gregs[REG_RSP] = (greg_t)(top - 8);  // as if rescue_main had been called
  u->uc_mcontext.gregs[REG_RIP] = (greg_t)rescue_main;
#elif defined(__linux__) && defined(__aarch64__)
  u->uc_mcontext.sp = top;
  u->uc_mcontext.pc = (uintptr_t)rescue_main;
#elif defined(__APPLE__) && defined(__x86_64__)
  u->uc_mcontext->__ss.__rsp = top - 8;
  u->uc_mcontext->__ss.__rip = (uintptr_t)rescue_main;
#elif defined(__APPLE__) && defined(__aarch64__)
  u->uc_mcontext->__ss.__sp = top;
  u->uc_mcontext->__ss.__pc = (uintptr_t)rescue_main;
#else
  rescue_main();  // leaves the handler by switching stacks; unblocks nothing it needs
#endif
}

uintptr_t pc_of(const ucontext_t* u) {
#if defined(__linux__) && defined(__x86_64__)
  return (uintptr_t)u->uc_mcontext.gregs[REG_RIP];
#elif defined(__linux__) && defined(__aarch64__)
  return u->uc_mcontext.pc;
#elif defined(__APPLE__) && defined(__x86_64__)
  return u->uc_mcontext->__ss.__rip;
#elif defined(__APPLE__) && defined(__aarch64__)
  return u->uc_mcontext->__ss.__pc;
#else
  (void)u;
  return 0;
#endif
}

uintptr_t sp_of(const ucontext_t* u) {
#if defined(__linux__) && defined(__x86_64__)
  return (uintptr_t)u->uc_mcontext.gregs[REG_RSP];
#elif defined(__linux__) && defined(__aarch64__)
  return u->uc_mcontext.sp;
#else
  (void)u;
  return 0;
#endif
}

#ifdef SI_KERNEL
constexpr int SI_KERNEL_CODE = SI_KERNEL;  // the system says of no address, as where it finds no room for a handler
#else
constexpr int SI_KERNEL_CODE = -1000;
#endif

uintptr_t base_of(uintptr_t code) {
  Dl_info where;
  return code && dladdr((void*)code, &where) ? (uintptr_t)where.dli_fbase : 0;
}

// The place in the kernel's own library: the fault's, or where the kernel called the function it happened in, such as
// the memset that a compiler makes of a loop. 0 where it is not found.
uintptr_t place_in_kernel(uintptr_t pc) {
  struct Search {
    uintptr_t kernel, found;
  } search = {base_of((uintptr_t)pool->launch.run), 0};
  if (base_of(pc) == search.kernel) return pc - search.kernel;
  auto look = [](_Unwind_Context* frame, void* data) {
    Search* s = (Search*)data;
    int is_signal = 0;  // its frame holds the instruction itself, a call's frame the one behind it
    uintptr_t returns_to = _Unwind_GetIPInfo(frame, &is_signal);
    if (base_of(returns_to) != s->kernel) return _URC_NO_REASON;
    s->found = returns_to - (is_signal ? 0 : 1) - s->kernel;
    return _URC_END_OF_STACK;
  };
  _Unwind_Backtrace(look, &search);
  return search.found;
}

// A frame of this many bytes may step over the guard page of a stack, and so many above it are too few for a handler.
constexpr uintptr_t LARGE_FRAME = 65536, LAST_BYTES = 16384;

// Of the thread that runs; or of the one that has just switched away, when its registers found no room: it is the thread
// that runs then.
bool stack_is_full(Worker& w, uintptr_t at) {
  uintptr_t stack = (uintptr_t)w.current->stack;
  if (at >= stack - LARGE_FRAME && at < stack + LAST_BYTES) return true;
  for (Fiber& f : w.fibers) {
    if (at < (uintptr_t)f.stack || at >= (uintptr_t)f.stack + LAST_BYTES) continue;
    w.current = &f;
    return true;
  }
  return false;
}

// The code of the kernel that runs, so that a handler need not call the system's loader, which has a lock.
void find_code() {
#ifdef __linux__
  auto look = [](dl_phdr_info* object, size_t, void*) {
    const uintptr_t at = (uintptr_t)pool->launch.run;
    for (int i = 0; i < object->dlpi_phnum; ++i) {
      const auto& segment = object->dlpi_phdr[i];
      const uintptr_t begin = object->dlpi_addr + segment.p_vaddr, end = begin + segment.p_memsz;
      if (segment.p_type != PT_LOAD || at < begin || at >= end) continue;
      pool->code_begin = begin;
      pool->code_end = end;
      return 1;
    }
    return 0;
  };
  dl_iterate_phdr(look, nullptr);
#else
  Dl_info where;  // the functions of one source follow each other
  if (dladdr((void*)pool->launch.run, &where)) pool->code_begin = (uintptr_t)where.dli_fbase;
  pool->code_end = pool->code_begin + (16 << 20);
#endif
}

struct sigaction previous[64];  // by signal: whose handlers were there before

void on_fault(int signal, siginfo_t* info, void* context) {
  Worker* w = this_worker();
  ucontext_t* u = (ucontext_t*)context;
  if (w && w->unwinding) {  // a thread that wrote over its stack left nothing to go back on: its fault has no place
    w->unwinding = false;
    redirect(*w, u);
    return;
  }
  // A kernel that has used up its stack may notice it in the engine's own code, which holds no lock there.
  const uintptr_t at = info->si_code == SI_KERNEL_CODE ? sp_of(u) : (uintptr_t)info->si_addr;
  const bool full = w && w->in_fiber && signal != SIGABRT && stack_is_full(*w, at);
  if (!w || !w->in_fiber || (w->critical > 0 && !full)) {  // not a kernel's: whoever was asked before us is asked
    const struct sigaction theirs = previous[signal];
    memset(&previous[signal], 0, sizeof theirs);  // the default: faulthandler hands a signal back, and once is enough
    sigaction(signal, &theirs, nullptr);
    if (signal == SIGABRT) raise(signal);  // abort() does not call a handler twice
    return;
  }
  if (signal == SIGFPE && divide_as_a_gpu(u)) return;
  EngineFailure& f = w->fault;
  memset(&f, 0, sizeof f);
  f.reason = signal == SIGFPE    ? WRONG_DIVISION
             : signal == SIGILL  ? TRAPPED
             : signal == SIGABRT ? ABORTED
                                 : ILLEGAL_ACCESS;
  f.signal = signal;
  f.address = (uint64_t)info->si_addr;
  f.block = w->block;
  f.thread = w->current->lane.linear;
  f.static_base = (uint64_t)w->static_base;
  f.dynamic_base = (uint64_t)w->dynamic;
  f.dynamic_size = pool->launch.dynamic_shared;
#if defined(__linux__) && defined(__x86_64__)
  f.is_write = (u->uc_mcontext.gregs[REG_ERR] & 2) ? 1 : 0;
  // Not canonical, or a misaligned vector access: the processor does not say which address.
  if (info->si_code == SI_KERNEL && f.reason == ILLEGAL_ACCESS) f.reason = MISALIGNED_ACCESS;
#else
  f.is_write = -1;
#endif
  if (full) f.reason = STACK_OVERFLOW;
  w->unwinding = true;
  f.place = place_in_kernel(pc_of(u));
  w->unwinding = false;
  redirect(*w, u);
}

// SIGURG, which the system itself never sends unasked: a cancelled launch is torn out of its kernels, and a thread that
// runs for long lets others run. It is handled on the fiber's own stack, where all its registers wait meanwhile.
void on_interrupt(int, siginfo_t*, void* context) {
  Worker* w = this_worker();
  if (!w || !w->in_fiber || w->critical > 0 || w->interrupted) return;
  w->interrupted = true;  // the next signal may come while this one is looked at: else handlers would fill the stack
  const uintptr_t pc = pc_of((ucontext_t*)context);
  if (!pool->cancelled.load()) {
    // A library's function may hold a lock, and in a checked run the order of threads is the same every time.
    if (pc >= pool->code_begin && pc < pool->code_end && !checking()) {
      w->current->preempted = pc;
      preempt(*w);
    }
  } else if (!checking() || base_of(pc) == base_of((uintptr_t)pool->launch.run)) {
    // (The hooks of a checked run allocate memory: they are asked again when they are done.)
    w->fault.reason = NONE;
    if (pool->expired.load()) note_expired(*w, w->fault, pc);
    // A thread that is just about to begin has no line yet: it is sampled again.
    if (w->fault.reason == NONE || w->fault.place || ++w->unplaced > 20) redirect(*w, (ucontext_t*)context);
  }
  w->interrupted = false;
}

// Faults on a stack of the handlers' own: the fiber's may be what is full.
void install_handlers() {
  struct sigaction action, now;
  memset(&action, 0, sizeof action);
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  action.sa_sigaction = on_fault;
  for (int signal : FAULTS) {  // looked at before every launch: others (faulthandler) install theirs at any time
    sigaction(signal, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) continue;
    previous[signal] = now;
    sigaction(signal, &action, nullptr);
  }
  sigaction(SIGURG, nullptr, &now);
  if (!((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_interrupt)) {
    action.sa_sigaction = on_interrupt;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    sigaction(SIGURG, &action, nullptr);
  }
}

}  // namespace
