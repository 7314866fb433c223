// From one fiber's stack to another's: in assembly where that is written, by ucontext elsewhere.
//
// A switch is what each wait of each thread costs, so it keeps only what the ABI says that a call keeps: some 10 ns,
// against 230 ns for swapcontext, which makes a system call for the signal mask each time. On x86-64 it is a jump that is
// inlined where a thread waits: a `ret` into another stack is one that the processor cannot predict, and the compiler
// keeps those registers alone that are in use there.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

namespace {

#if defined(__x86_64__) && !defined(ENGINE_UCONTEXT)
struct Context {
  void *sp = nullptr, *bp = nullptr, *ip = nullptr;
};
__attribute__((always_inline)) inline void switch_to(Context& from, Context& to) {
  Context *saved = &from, *target = &to;
  asm volatile(
      "leaq 1f(%%rip), %%rax\n movq %%rsp, (%0)\n movq %%rbp, 8(%0)\n movq %%rax, 16(%0)\n"
      "movq (%1), %%rsp\n movq 8(%1), %%rbp\n jmpq *16(%1)\n"
      "1:\n"
      : "+D"(saved), "+S"(target)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
        "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
        "cc", "memory");
}
void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** sp = (void**)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
  *--sp = nullptr;  // so that `entry` starts with the alignment of a called function, and returns nowhere
  context = {sp, nullptr, (void*)entry};
}
#elif defined(__aarch64__) && !defined(ENGINE_UCONTEXT)
// engine_switch(&saved, target): keep what the ABI says a call must keep, and continue on another stack.
extern "C" void engine_switch(void** saved, void* target);
#ifdef __APPLE__
#define SYMBOL "_engine_switch"
#else
#define SYMBOL "engine_switch"
#endif
// clang-format off: a line for each group of registers
asm(".text\n.globl " SYMBOL "\n.p2align 2\n" SYMBOL ":\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n ret\n");
// clang-format on
#undef SYMBOL
struct Context {
  void* sp = nullptr;
};
void switch_to(Context& from, Context& to) { engine_switch(&from.sp, to.sp); }
void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  uintptr_t top = (uintptr_t)(stack + bytes) & ~(uintptr_t)15;
  void** sp = (void**)(top - 160);
  memset(sp, 0, 160);
  sp[11] = (void*)entry;  // x30
  context.sp = sp;
}
#else
// Any other ABI: slower (two system calls a switch), but POSIX.
struct Context {
  ucontext_t state;
};
void switch_to(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = bytes;
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}
#endif

}  // namespace
