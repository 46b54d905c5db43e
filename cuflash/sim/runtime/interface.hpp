// The interface of the simulator to kernels: the running thread, and the operations that implement CUDA words and ptx/.
// Every operation takes the source location of its call, so that a report can name the kernel's line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>
#include <utility>

#include "vector_types.hpp"

namespace cuflash::sim {

using Location = std::source_location;

struct Block { uint3 index; dim3 grid_dim, block_dim; };
struct Identity { uint3 index; int lane; const Block* block; };
extern Identity* current;   // the CUDA thread that runs now

[[noreturn]] void fail(Location where, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- warp operations: the last lane to arrive runs `execute` for all ----
using Execute = void (*)(void* const* arguments, uint32_t mask);
struct Operation {
  const char* name;
  Execute execute = nullptr;
  bool whole_warp = false;     // needs all 32 lanes
  bool orders_memory = false;  // afterwards all lanes see earlier writes of all lanes
};
void collective(const Operation& operation, uint32_t mask, void* argument, Location where);

// Operands are passed by value in these records: the instrumented kernel copies them, so that sanitizers see the copies.
struct ShuffleLane { uint64_t in, out; int source; };
struct GatherLane { uint32_t value; uint32_t participants; uint32_t values[32]; };
struct MatrixLane { uint16_t row[8]; uint32_t matrices[4]; };
struct MmaLane { float d[4]; uint32_t a[4], b[2]; };
struct MmaDoubleLane { double d[4], a[2], b; };   // products with 8 rows use the first halves of d and a
void execute_shuffle(void* const* arguments, uint32_t mask);
void execute_gather(void* const* arguments, uint32_t mask);

extern const Operation kLdmatrix[2][3], kStmatrix[2][3];   // [transposed][1, 2 or 4 matrices, halved]
extern const Operation kMmaHalf, kMmaBFloat16, kMmaTf32, kMmaDouble[2];   // [8 or 16 rows, over 8, halved]
void load_row(uint32_t address, MatrixLane& lane, const char* name, Location where);
void store_row(uint32_t address, const MatrixLane& lane, const char* name, Location where);

// ---- shared memory ----
unsigned char* dynamic_shared();
uint32_t shared_address(const void* pointer, Location where);

// ---- block and grid ----
void barrier(int id, int threads, bool wait, Location where);
int block_threads();
void fence();                         // orders the memory operations of this thread, for other threads that fence too
void fence_device();                  // orders them for all blocks, which may then see earlier stores
bool are_blocks_together();           // true if blocks run concurrently
void release_counter(int* counter);   // blocks that acquire the counter later see earlier stores
void acquire_counter(const int* counter);
void wait_for_change(const int* counter, int seen, Location where);
void spin(Location where);     // lets other threads run, because this thread may wait for one of them
void check_aligned(const void* pointer, size_t alignment, const char* name, Location where);

// ---- asynchronous copies ----
void cp_async(uint32_t destination, const void* source, int bytes, int source_bytes, const char* name,
              Location where);
void cp_async_commit(Location where);
void cp_async_wait(int pending, Location where);
void cp_async_wait_all(Location where);

// ---- barriers in shared memory ----
void mbarrier_init(uint32_t address, int count, Location where);
void fence_mbarrier_init(Location where);
void mbarrier_arrive(uint32_t address, int bytes, const char* name, Location where);   // arrives and announces bytes
bool mbarrier_wait(uint32_t address, int parity, bool persists, const char* name, Location where);

// ---- copies of tiles ----
struct Box { int rank; int start[5]; };   // start: coordinates of the box's first element
void check_tensor_map(const void* map, Location where);
void fence_proxy_async(Location where);
void tma_load(uint32_t destination, const void* map, uint32_t barrier, Box box, const char* name, Location where);
void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier, Location where);
void tma_store(const void* map, uint32_t source, Box box, bool adds, const char* name, Location where);
void bulk_store(void* destination, uint32_t source, int bytes, bool adds, const char* name, Location where);
void bulk_commit(Location where);
void bulk_wait(int pending, bool only_read, Location where);

// ---- warpgroups ----
enum class WgmmaElement { kHalf, kBFloat16, kFloat8E4M3 };
struct WgmmaLane {
  float* d;            // registers of the kernel, which get the results when the kernel waits for them
  int count;
  bool adds;
  WgmmaElement element;
  bool a_in_registers, a_mn_major, b_mn_major;
  uint32_t a[4];
  uint64_t a_matrix, b_matrix;
};
uint64_t wgmma_descriptor(int swizzle, uint32_t address, int leading_bytes, int stride_bytes, Location where);
void wgmma_fence(Location where);
void wgmma(const WgmmaLane& lane, Location where);
void wgmma_commit(Location where);
void wgmma_wait(int pending, Location where);
void setmaxnreg(int registers, bool is_more, Location where);
bool elect_one(Location where);

// ---- launch: calls a kernel of any signature with the addresses of its arguments ----
template <class... Args>
void call(void (*kernel)(Args...), void** arguments) {
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Args>>*>(arguments[kIndex])...);
  }(std::index_sequence_for<Args...>{});
}

// Returns the sizes of the parameters, terminated by 0, with which launches check their arguments.
template <class... Args>
const size_t* parameter_sizes(void (*)(Args...)) {
  static_assert((std::is_trivially_copyable_v<Args> && ...), "a kernel's parameters are copied as bytes");
  static const size_t sizes[] = {sizeof(Args)..., 0};
  return sizes;
}

}  // namespace cuflash::sim
