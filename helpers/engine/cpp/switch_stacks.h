// From one fiber's stack to another's: in assembly where that is written, by ucontext elsewhere.
//
// A switch is what each wait of each thread costs, so it keeps only what the ABI says that a call keeps: some 10 ns,
// against 230 ns for swapcontext, which makes a system call for the signal mask each time.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

namespace {

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(ENGINE_UCONTEXT)
#define ENGINE_ASSEMBLY 1
// engine_switch(&saved, target): keep what the ABI says a call must keep, and continue on another stack.
extern "C" void engine_switch(void** saved, void* target);
#ifdef __APPLE__
#define SYMBOL "_engine_switch"
#else
#define SYMBOL "engine_switch"
#endif
// clang-format off: a line for each group of registers
#ifdef __x86_64__
#define PUSH(R) "pushq %" R "\n.cfi_adjust_cfa_offset 8\n"  // where the stack is full, the line is still found
#define POP(R) "popq %" R "\n.cfi_adjust_cfa_offset -8\n"
asm(".text\n.globl " SYMBOL "\n" SYMBOL ":\n.cfi_startproc\n"
    PUSH("rbp") PUSH("rbx") PUSH("r12") PUSH("r13") PUSH("r14") PUSH("r15")
    "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    POP("r15") POP("r14") POP("r13") POP("r12") POP("rbx") POP("rbp")
    "ret\n.cfi_endproc\n");
#undef PUSH
#undef POP
#else
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
#endif
// clang-format on
#undef SYMBOL
struct Context {
  void* sp = nullptr;
};
void switch_to(Context& from, Context& to) { engine_switch(&from.sp, to.sp); }
void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  uintptr_t top = (uintptr_t)(stack + bytes) & ~(uintptr_t)15;
#ifdef __x86_64__
  void** sp = (void**)top;
  *--sp = nullptr;       // so that `entry` starts with the alignment of a called function
  *--sp = (void*)entry;  // where the first switch returns to
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
#else
  void** sp = (void**)(top - 160);
  memset(sp, 0, 160);
  sp[11] = (void*)entry;  // x30
#endif
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
