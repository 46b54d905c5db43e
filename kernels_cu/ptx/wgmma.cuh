// Products of the four warps of a warpgroup on tensor cores: d (64 x N) = a (64 x 16) * b (16 x N), plus d if `adds`.
// They run asynchronously: no thread may touch d, a and b from wgmma_fence to the wgmma_wait that ends their group.
// Warp w has rows 16w to 16w + 15. With g = lane / 4 and t = lane % 4 (16-bit elements are two to a register):
//   d[4j], d[4j + 1]: row g, columns 8j + 2t, 8j + 2t + 1;   d[4j + 2], d[4j + 3]: the same columns of row g + 8
//   a[0], a[1]: rows g, g + 8, columns 2t, 2t + 1;           a[2], a[3]: the same rows, columns 2t + 8, 2t + 9
// 8-bit elements are four to a register, and a product sums 32 of them: a[0] and a[1] have columns 4t to 4t + 3, a[2] and
// a[3] columns 4t + 16 to 4t + 19. Their operands in shared memory are K-major.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions (sm_90a)
#pragma once

#include <ptx/thread.cuh>

namespace cuflash::assembly {

// Parts of an instruction's text that depend on template parameters: operands with constraint "C", which NVRTC supports
// since 12.6.
template <class T>
struct TypeSuffix;
template <>
struct TypeSuffix<ptx::Half> { static constexpr const char text[] = "f16"; };
template <>
struct TypeSuffix<ptx::BFloat16> { static constexpr const char text[] = "bf16"; };
template <>
struct TypeSuffix<ptx::Float8E4M3> { static constexpr const char text[] = "e4m3"; };

template <bool kIsComment>
struct CommentBegin { static constexpr const char text[] = {kIsComment ? '/' : ' ', kIsComment ? '*' : ' ', 0}; };
template <bool kIsComment>
struct CommentEnd { static constexpr const char text[] = {kIsComment ? '*' : ' ', kIsComment ? '/' : ' ', 0}; };

// The registers of an accumulator, extended to the number that the widest product needs: `unused` stands in for the
// others.
template <int kCount>
struct Registers {
  float (&own)[kCount];
  float& unused;
  CUFLASH_DEVICE float& operator[](int i) const { return i < kCount ? own[i] : unused; }
};

// A template cannot generate a list of operands, so the list in the instruction has the length of the widest product.
// If there are fewer columns, a PTX comment hides the text after the last operand. Other comments hide the unused form
// of a (in registers or in memory) and, for 8-bit elements, the flags of the contiguous dimension, which their
// instructions do not have.
template <bool kInRegisters, int kTransA, int kTransB, class T, int kCount>
CUFLASH_DEVICE void wgmma(T, float (&d)[kCount], const uint32_t (&a)[4], uint64_t a_memory, uint64_t b, bool adds) {
  constexpr int kN = 2 * kCount, kDepth = 32 / static_cast<int>(sizeof(T));
  constexpr bool kHasMajor = kDepth == 16;
  static_assert(kHasMajor || (kTransA == 0 && kTransB == 0), "8-bit operands are K-major");
  static_assert((kN % 16 == 0 && 16 <= kN && kN <= 256) || kN == 40, "a product has a multiple of 16 columns, at most 256, or 40");
  float unused;
  const Registers<kCount> x{d, unused};
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %144, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n%145k%160.f32.%146.%146 {"
               "%0, %1, %2, %3, %4, %5, %6, %7 %128, %8, %9, %10, %11, %12, %13, %14, %15 %129, "
               "%16, %17, %18, %19 %159, %20, %21, %22, %23 %130, %24, %25, %26, %27, %28, %29, %30, %31 %131, "
               "%32, %33, %34, %35, %36, %37, %38, %39 %132, %40, %41, %42, %43, %44, %45, %46, %47 %133, "
               "%48, %49, %50, %51, %52, %53, %54, %55 %134, %56, %57, %58, %59, %60, %61, %62, %63 %135, "
               "%64, %65, %66, %67, %68, %69, %70, %71 %136, %72, %73, %74, %75, %76, %77, %78, %79 %137, "
               "%80, %81, %82, %83, %84, %85, %86, %87 %138, %88, %89, %90, %91, %92, %93, %94, %95 %139, "
               "%96, %97, %98, %99, %100, %101, %102, %103 %140, %104, %105, %106, %107, %108, %109, %110, %111 %141, "
               "%112, %113, %114, %115, %116, %117, %118, %119 %142, %120, %121, %122, %123, %124, %125, %126, %127 %143"
               "}, %147 {%151, %152, %153, %154} %148 %149 %155 %150, %156, p, 1, 1 %161, %163 %157, %164 %158 %162;\n}"
               : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                 "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]),
                 "+f"(x[16]), "+f"(x[17]), "+f"(x[18]), "+f"(x[19]), "+f"(x[20]), "+f"(x[21]), "+f"(x[22]), "+f"(x[23]),
                 "+f"(x[24]), "+f"(x[25]), "+f"(x[26]), "+f"(x[27]), "+f"(x[28]), "+f"(x[29]), "+f"(x[30]), "+f"(x[31]),
                 "+f"(x[32]), "+f"(x[33]), "+f"(x[34]), "+f"(x[35]), "+f"(x[36]), "+f"(x[37]), "+f"(x[38]), "+f"(x[39]),
                 "+f"(x[40]), "+f"(x[41]), "+f"(x[42]), "+f"(x[43]), "+f"(x[44]), "+f"(x[45]), "+f"(x[46]), "+f"(x[47]),
                 "+f"(x[48]), "+f"(x[49]), "+f"(x[50]), "+f"(x[51]), "+f"(x[52]), "+f"(x[53]), "+f"(x[54]), "+f"(x[55]),
                 "+f"(x[56]), "+f"(x[57]), "+f"(x[58]), "+f"(x[59]), "+f"(x[60]), "+f"(x[61]), "+f"(x[62]), "+f"(x[63]),
                 "+f"(x[64]), "+f"(x[65]), "+f"(x[66]), "+f"(x[67]), "+f"(x[68]), "+f"(x[69]), "+f"(x[70]), "+f"(x[71]),
                 "+f"(x[72]), "+f"(x[73]), "+f"(x[74]), "+f"(x[75]), "+f"(x[76]), "+f"(x[77]), "+f"(x[78]), "+f"(x[79]),
                 "+f"(x[80]), "+f"(x[81]), "+f"(x[82]), "+f"(x[83]), "+f"(x[84]), "+f"(x[85]), "+f"(x[86]), "+f"(x[87]),
                 "+f"(x[88]), "+f"(x[89]), "+f"(x[90]), "+f"(x[91]), "+f"(x[92]), "+f"(x[93]), "+f"(x[94]), "+f"(x[95]),
                 "+f"(x[96]), "+f"(x[97]), "+f"(x[98]), "+f"(x[99]), "+f"(x[100]), "+f"(x[101]), "+f"(x[102]),
                 "+f"(x[103]), "+f"(x[104]), "+f"(x[105]), "+f"(x[106]), "+f"(x[107]), "+f"(x[108]), "+f"(x[109]),
                 "+f"(x[110]), "+f"(x[111]), "+f"(x[112]), "+f"(x[113]), "+f"(x[114]), "+f"(x[115]), "+f"(x[116]),
                 "+f"(x[117]), "+f"(x[118]), "+f"(x[119]), "+f"(x[120]), "+f"(x[121]), "+f"(x[122]), "+f"(x[123]),
                 "+f"(x[124]), "+f"(x[125]), "+f"(x[126]), "+f"(x[127])
               : "C"(CommentBegin<kN == 16>::text), "C"(CommentBegin<kN == 32>::text),
                   "C"(CommentBegin<kN == 48>::text),
                 "C"(CommentBegin<kN == 64>::text), "C"(CommentBegin<kN == 80>::text),
                     "C"(CommentBegin<kN == 96>::text),
                 "C"(CommentBegin<kN == 112>::text), "C"(CommentBegin<kN == 128>::text),
                     "C"(CommentBegin<kN == 144>::text),
                 "C"(CommentBegin<kN == 160>::text), "C"(CommentBegin<kN == 176>::text),
                     "C"(CommentBegin<kN == 192>::text),
                 "C"(CommentBegin<kN == 208>::text), "C"(CommentBegin<kN == 224>::text),
                     "C"(CommentBegin<kN == 240>::text),
                 "C"(CommentEnd<kN != 256>::text),
                 "r"(static_cast<int>(adds)), "n"(kN), "C"(TypeSuffix<T>::text), "C"(CommentBegin<!kInRegisters>::text),
                 "C"(CommentEnd<!kInRegisters>::text), "C"(CommentBegin<kInRegisters>::text),
                     "C"(CommentEnd<kInRegisters>::text), "r"(a[0]),
                 "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(a_memory), "l"(b), "n"(kTransA), "n"(kTransB),
                 "C"(CommentBegin<kN == 40>::text), "n"(kDepth), "C"(CommentBegin<!kHasMajor>::text),
                     "C"(CommentEnd<!kHasMajor>::text),
                 "C"(CommentBegin<kHasMajor && kInRegisters>::text), "C"(CommentEnd<kHasMajor && kInRegisters>::text));
}

}  // namespace cuflash::assembly

namespace cuflash::ptx {

// The dimension along which an operand is contiguous in shared memory: the summed dimension (k), or the rows of a and
// the columns of b.
enum class Major { kK = 0, kMN = 1 };

// The permutation of 16-byte chunks within rows of 128, 64 or 32 bytes, the same as in tensor maps: bits 4 to 6 of an
// address are combined with bits 7 to 9 by exclusive or. With 64 bytes, only bits 4 and 5 are combined with bits 7 and
// 8; with 32 bytes, only bit 4 with bit 7.
enum class Swizzle { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// Return the descriptor of a matrix in shared memory, with which wgmma reads it. The matrix consists of atoms of 8
// rows, as wide as the swizzle, or 16 bytes wide without a swizzle.
// K-major: a row of an atom is a row of the matrix. Atoms are `stride_bytes` apart along rows and, without a swizzle,
// `leading_bytes` apart along k; with a swizzle, k stays within the atom.
// MN-major: a row of an atom is one value of k. Atoms are `stride_bytes` apart along k and `leading_bytes` apart along
// the other dimension; without a swizzle, the two are exchanged.
// Atoms start at multiples of their size. `address` may be a few chunks later, to advance along k of a K-major matrix.
constexpr CUFLASH_DEVICE uint64_t wgmma_descriptor(Swizzle swizzle, uint32_t address, int leading_bytes,
                                                   int stride_bytes) {
  return static_cast<uint64_t>(swizzle) << 62 | static_cast<uint64_t>(stride_bytes >> 4) << 32 |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Required before the first wgmma, and after any access to d, or to a in registers, other than by a wgmma of the same
// shape.
CUFLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Multiply a and b, both in shared memory.
template <Major kMajorA, Major kMajorB, class T, int kCount>
CUFLASH_DEVICE void wgmma(T tag, float (&d)[kCount], uint64_t a, uint64_t b, bool adds) {
  constexpr uint32_t unused[4] = {};
  assembly::wgmma<false, static_cast<int>(kMajorA), static_cast<int>(kMajorB)>(tag, d, unused, a, b, adds);
}

// Multiply a in registers by b in shared memory.
template <Major kMajorB, class T, int kCount>
CUFLASH_DEVICE void wgmma(T tag, float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool adds) {
  assembly::wgmma<true, 0, static_cast<int>(kMajorB)>(tag, d, a, 0, b, adds);
}

// Close the group of all products that this warpgroup has issued since its last commit.
CUFLASH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most kPending of this warpgroup's newest groups are still in flight.
template <int kPending>
CUFLASH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// End the lifetime of these registers' values, so that the compiler does not preserve them for a product that
// overwrites them.
template <int kCount>
CUFLASH_DEVICE void mark_undefined(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(registers[i]));
}

// Keep other accesses to these registers from moving across this line. The compiler does not know that products in
// flight use them.
template <int kCount>
CUFLASH_DEVICE void fence_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
CUFLASH_DEVICE void fence_registers(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

}  // namespace cuflash::ptx
