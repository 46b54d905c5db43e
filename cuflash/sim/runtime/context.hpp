// The switch from one stack to another, which saves the registers that the ABI preserves and the stack pointer. It is
// written in assembly for x86-64 (a few nanoseconds) and aarch64. Other hosts use ucontext, which is 40 times slower.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) || defined(__aarch64__)

namespace cuflash::sim {
struct Context { void* stack_pointer = nullptr; };
}  // namespace cuflash::sim

extern "C" void cuflash_sim_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.globl cuflash_sim_switch
.hidden cuflash_sim_switch
.type cuflash_sim_switch, @function
cuflash_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuflash_sim_switch, .-cuflash_sim_switch
)");

namespace cuflash::sim {
// The first switch pops six registers and returns into `entry`, whose own return address is null.
inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15));
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
}  // namespace cuflash::sim
#else
asm(R"(
.text
.globl cuflash_sim_switch
.hidden cuflash_sim_switch
.type cuflash_sim_switch, %function
cuflash_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size cuflash_sim_switch, .-cuflash_sim_switch
)");

namespace cuflash::sim {
// The first switch loads 20 registers, of which the twelfth, x30, is the address to return to.
inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  auto** frame = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15)) - 20;
  for (int i = 0; i < 20; ++i) frame[i] = nullptr;
  frame[11] = reinterpret_cast<void*>(entry);
  context.stack_pointer = frame;
}
}  // namespace cuflash::sim
#endif

namespace cuflash::sim {
inline void switch_context(Context& from, Context& to) { cuflash_sim_switch(&from.stack_pointer, to.stack_pointer); }
}  // namespace cuflash::sim

#else
#include <ucontext.h>

namespace cuflash::sim {
struct Context { ucontext_t registers; };
inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack;
  context.registers.uc_stack.ss_size = bytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}
inline void switch_context(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }
}  // namespace cuflash::sim
#endif
