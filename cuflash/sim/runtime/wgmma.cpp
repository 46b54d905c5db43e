// wgmma: each warp of a warpgroup computes a quarter, 16 rows of d. Operands are read when the product is issued or when the
// kernel waits for it, as the schedule chooses. Results are in the kernel's registers only after the wait. The file also
// has setmaxnreg, which the four warps must execute in the same order too, and elect_one.
#include <cstdio>
#include <deque>
#include <list>

#include "eight.hpp"
#include "floats.hpp"
#include "memory.hpp"
#include "subnormals.hpp"

namespace cuflash::sim {

namespace {

constexpr int kProductEngines = 4;   // engines of one warp, which its groups use in rotation
void* product_engines[kMaxWarps][kProductEngines];
constexpr uint32_t kPoison = 0x7fc0dead;   // NaN in registers that a product will write

// The fields of a descriptor.
struct Matrix { uint32_t start, leading, stride, width; };

Matrix unpacked(uint64_t bits) {
  constexpr uint32_t kWidths[] = {16, 128, 64, 32};
  const auto field = [&](int place) { return static_cast<uint32_t>(bits >> place & 0x3fff) << 4; };
  return {field(0), field(16), field(32), kWidths[bits >> 62]};
}

// Returns the address of 8 elements along k from (row, k), for k a multiple of 8; for an MN-major matrix, of 8 elements
// along the rows, for row a multiple of 8.
uint32_t chunk_address(const Matrix& matrix, bool mn_major, int row, int k) {
  const uint32_t width = matrix.width, per_atom = width / 2;   // elements
  const auto r = static_cast<uint32_t>(row), c = static_cast<uint32_t>(k);
  uint32_t address = matrix.start;
  if (!mn_major)
    address += r / 8 * matrix.stride + r % 8 * width + (width == 16 ? c / 8 * matrix.leading : c * 2);
  else if (width == 16)
    address += r / 8 * matrix.stride + c / 8 * matrix.leading + c % 8 * 16;
  else
    address += r / per_atom * matrix.leading + c / 8 * matrix.stride + c % 8 * width + r % per_atom * 2;
  return swizzled(address, width);
}

}  // namespace

struct Chunk { uint16_t at[8]; };

struct Accumulator {
  float* d[32];
  int count = 0;
  int pending = 0;            // number of pending products
  std::vector<float> values;  // row after row
};

struct Product {
  WgmmaLane lane;              // operands of lane 0
  uint32_t a[32][4];
  Accumulator* accumulator;
  int group;
  bool is_done = false;
  std::vector<Chunk> seen;     // operands as they were when the product was issued
  Location where;
  void* caller;
  void* engine;
};

// Registers of a product: the next product may add to them without a fence if nothing else has written to them.
struct Written { float* d; int count; size_t fences; std::vector<float> values; };

struct Products {
  std::list<Accumulator> accumulators;  // accumulators of pending products
  std::deque<Product> queue;            // in order of issue
  std::vector<Written> written;
  int groups = 0;                        // committed so far
  size_t fences = 0;
};

namespace {

struct Issue { const WgmmaLane* lane; Location where; void* caller; };
struct Wait { int pending; Location where; };

Products& products_of(Warp& warp) {
  if (!warp.products) warp.products = std::make_unique<Products>();
  return *warp.products;
}

Text words_of(const Deed& deed) {
  const long long* x = deed.numbers;
  return text(deed.format, x[0], x[1], x[2], x[3]);
}

// The four warps of a warpgroup execute the same operations in the same order, each at a different time.
void step_together(const Deed& what, Location where) {
  const Warp& warp = *self().warp;
  Cta& cta = *self().cta;
  const int group = warp.index / kWarpgroup;
  if ((group + 1) * kWarpgroup * 32 > cta.thread_count)
    fail(where, "%s needs a warpgroup of four whole warps, and warp %d is in none", words_of(what).letters, warp.index);
  Warpgroup& together = cta.warpgroups[group];
  size_t& mine = together.done[warp.index % kWarpgroup];
  if (mine == together.steps.size()) together.steps.push_back({what, where});
  const Step& step = together.steps[mine];
  if (!(step.what == what) || step.where.line() != where.line() || step.where.column() != where.column())
    fail(where, "the warpgroup diverged: this warp does %s here, another %s at %s", words_of(what).letters,
         words_of(step.what).letters, place(step.where).letters);
  ++mine;
  for (const size_t done : together.done)
    if (done != together.steps.size()) return;
  together.steps.clear();
  for (size_t& done : together.done) done = 0;
}

// Returns the bytes of a, then of b, that this warp's rows of d need.
std::vector<Chunk> read_operands(const Product& product) {
  const WgmmaLane& lane = product.lane;
  std::vector<Chunk> chunks;
  chunks.reserve(static_cast<size_t>(32 + 4 * lane.count));
  const auto read = [&](uint64_t bits, bool mn_major, int first, int rows) {
    const Matrix matrix = unpacked(bits);
    const int row_step = mn_major ? 8 : 1, k_step = mn_major ? 1 : 8;
    for (int row = first; row < first + rows; row += row_step)
      for (int k = 0; k < 16; k += k_step) {
        const unsigned char* from =
            shared_bytes(chunk_address(matrix, mn_major, row, k), 16, 16, "wgmma", product.where);
        kernel_reads(from, 16);
        Unwatched unwatched;
        check_fenced(from, 16, "wgmma", product.where);
        memcpy(chunks.emplace_back().at, from, 16);
      }
  };
  if (!lane.a_in_registers) read(lane.a_matrix, lane.a_mn_major, self().warp->index % kWarpgroup * 16, 16);
  read(lane.b_matrix, lane.b_mn_major, 0, 2 * lane.count);
  return chunks;
}

// Assembles a matrix [rows, 16] from its chunks, with `pitch` elements from row to row.
CUFLASH_SIM_WITHIN void unpack(const Chunk* chunks, bool mn_major, int rows, bool is_bfloat16, float* to, int row_pitch,
                               int k_pitch) {
  const int pitch = mn_major ? row_pitch : k_pitch;
  for (int i = 0; i < 2 * rows; ++i) {
    const int row = mn_major ? i / 16 * 8 : i / 2, k = mn_major ? i % 16 : i % 2 * 8;
    const Eight numbers = to_floats(&chunks[i], is_bfloat16);
    for (int e = 0; e < 8; ++e) to[row * row_pitch + k * k_pitch + e * pitch] = numbers[e];
  }
}

// Returns the element of a lane's register among 16 rows of 2 * count columns: registers 0 and 1 are adjacent elements,
// 2 and 3 are eight rows below them, and so on.
size_t place_of(int lane, int element, int count) {
  const int row = lane / 4 + element / 2 % 2 * 8, column = element / 4 * 8 + lane % 4 * 2 + element % 2;
  return static_cast<size_t>(row * 2 * count + column);
}

std::vector<float> gathered(float* const* d, int count) {
  std::vector<float> values(static_cast<size_t>(32 * count));
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < count; ++e) values[place_of(lane, e, count)] = d[lane][e];
  return values;
}

// Sums of 32 FP8 products with the bits of an H100 (docs/fp8.md). Each product and the accumulator are truncated towards
// zero to multiples of 2^(e - 13), where e is the largest exponent of all terms. They are added exactly, and the sum is
// truncated to 13 mantissa bits. The exponent of a product is the sum of its factors' exponents, which are at least -6.
constexpr int kE4M3Bits = 13;
constexpr int kNoExponent = -100;  // the exponent of 0
constexpr int32_t kCutMantissa = ~((1 << (23 - kE4M3Bits)) - 1);

struct E4M3Row { float number[32]; int exponent[32]; };
struct E4M3Columns { Eight number[32]; EightBits exponent[32]; };

CUFLASH_SIM_WITHIN int e4m3_exponent(float x) {
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(x) >> 23 & 255) - 127;
  return x == 0 ? kNoExponent : exponent < -6 ? -6 : exponent;
}

CUFLASH_SIM_WITHIN Eight e4m3_sums(const E4M3Row& a, const E4M3Columns& b, Eight before) {
  constexpr int kLeast = -64;  // every product except 0 has a larger exponent
  EightBits largest = (reinterpret_cast<EightBits>(before) >> 23 & 255) - 127;
  for (int k = 0; k < 32; ++k) {
    const EightBits exponent = a.exponent[k] + b.exponent[k];
    largest = exponent > largest ? exponent : largest;
  }
  const EightBits is_alone = largest < kLeast;  // all products are 0
  largest = is_alone ? EightBits{} + kLeast : largest;
  const Eight up = reinterpret_cast<Eight>((127 + kE4M3Bits - largest) << 23);
  const Eight down = reinterpret_cast<Eight>((127 - kE4M3Bits + largest) << 23);
  const auto cut = [&](Eight x) { return __builtin_convertvector(x * up, EightBits); };
  EightBits sum = cut(before);
  Eight plain = before;
  for (int k = 0; k < 32; ++k) {
    const Eight term = a.number[k] * b.number[k];
    sum += cut(term);
    plain += term;
  }
  const EightBits plain_bits = reinterpret_cast<EightBits>(plain);
  const EightBits special = (plain_bits & 0x7fffffff) > 0x7f800000 ? EightBits{} + 0x7fffffff : plain_bits;
  const Eight summed = is_alone ? before : __builtin_convertvector(sum, Eight) * down;
  const EightBits finite = reinterpret_cast<EightBits>(summed) & kCutMantissa;
  return reinterpret_cast<Eight>((plain_bits & 0x7f800000) == 0x7f800000 ? special : finite);
}

CUFLASH_SIM_WIDE void multiply_e4m3(Product& product) {
  const WgmmaLane& lane = product.lane;
  static_assert(sizeof(Chunk) == 16);
  E4M3Row a[16];
  const auto set = [&](int row, int k, uint8_t bits) {
    const float number = e4m3_to_float(bits);
    a[row].number[k] = number;
    a[row].exponent[k] = e4m3_exponent(number);
  };
  const auto* from = reinterpret_cast<const uint8_t*>(product.seen.data());
  if (lane.a_in_registers) {
    for (int i = 0; i < 32; ++i)
      for (int j = 0; j < 4; ++j)
        for (int byte = 0; byte < 4; ++byte)
          set(i / 4 + j % 2 * 8, i % 4 * 4 + j / 2 * 16 + byte, static_cast<uint8_t>(product.a[i][j] >> 8 * byte));
  } else {
    for (int i = 0; i < 512; ++i) set(i / 32, i % 32, from[i]);
    from += 512;
  }
  const int columns = 2 * lane.count;
  for (int column = 0; column < columns; column += 8, from += 256) {
    E4M3Columns b;
    for (int i = 0; i < 256; ++i) {
      const float number = e4m3_to_float(from[i]);
      b.number[i % 32][i / 32] = number;
      b.exponent[i % 32][i / 32] = e4m3_exponent(number);
    }
    for (int row = 0; row < 16; ++row) {
      Eight before = {};
      float* const values = &product.accumulator->values[static_cast<size_t>(row * columns + column)];
      if (lane.adds) memcpy(&before, values, sizeof before);
      const Eight sums = e4m3_sums(a[row], b, before);
      memcpy(values, &sums, sizeof sums);
    }
  }
  product.is_done = true;
}

// Computes a product from the operands that it has read.
CUFLASH_SIM_WIDE void multiply(Product& product) {
  const Subnormals of_tensor_cores(false);
  const WgmmaLane& lane = product.lane;
  if (lane.element == WgmmaElement::kFloat8E4M3) return multiply_e4m3(product);
  const bool is_bfloat16 = lane.element == WgmmaElement::kBFloat16;
  float a[16][16];
  const Chunk* from = product.seen.data();
  if (lane.a_in_registers) {
    for (int i = 0; i < 32; ++i) {
      const Eight numbers = to_floats(product.a[i], is_bfloat16);
      for (int j = 0; j < 8; ++j) a[i / 4 + j / 2 % 2 * 8][i % 4 * 2 + j / 4 * 8 + j % 2] = numbers[j];
    }
  } else {
    unpack(from, lane.a_mn_major, 16, is_bfloat16, a[0], 16, 1);
    from += 32;
  }
  const int columns = 2 * lane.count;
  for (int column = 0; column < columns; column += 8, from += 16) {
    Eight b[16];
    unpack(from, lane.b_mn_major, 8, is_bfloat16, &b[0][0], 1, 8);
    for (int row = 0; row < 16; ++row) {
      Eight sum = {}, before = {};
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k];
      float* const values = &product.accumulator->values[static_cast<size_t>(row * columns + column)];
      if (lane.adds) memcpy(&before, values, sizeof before);
      before += sum;
      memcpy(values, &before, sizeof before);
    }
  }
  product.is_done = true;
}

void read_again(const Product& product) {
  as_engine(product.engine, product.caller, [&] {
    const std::vector<Chunk> operands = read_operands(product);
    Unwatched unwatched;
    if (memcmp(operands.data(), product.seen.data(), operands.size() * sizeof(Chunk)) != 0)
      fail(product.where, "an operand of this wgmma changed before the product was waited for");
    release(product.engine);
  });
}

Accumulator& accumulator_of(Products& products, void* const* arguments, const Issue& issue) {
  const WgmmaLane& lane = *issue.lane;
  for (Accumulator& known : products.accumulators) {
    if (known.d[0] == lane.d && known.count == lane.count) return known;
    if (known.d[0] < lane.d + lane.count && lane.d < known.d[0] + known.count)
      fail(issue.where, "a pending wgmma of a different width has some of the registers of this wgmma");
  }
  const Written* written = nullptr;
  for (const Written& each : products.written)
    if (each.d == lane.d && each.count == lane.count) written = &each;
  Accumulator& made = products.accumulators.emplace_back();
  made.count = lane.count;
  for (int i = 0; i < 32; ++i) made.d[i] = static_cast<Issue*>(arguments[i])->lane->d;
  made.values = gathered(made.d, made.count);
  const bool is_as_left = written &&
                          memcmp(made.values.data(), written->values.data(), made.values.size() * sizeof(float)) == 0;
  const size_t fences_before = written ? written->fences : 0;
  if (!is_as_left && products.fences == fences_before)
    fail(issue.where, "there is no wgmma_fence between this wgmma and other accesses to its registers");
  if (launch->request.schedule.poison)
    for (float* d : made.d)
      for (int i = 0; i < lane.count; ++i) memcpy(d + i, &kPoison, sizeof kPoison);
  return made;
}

void execute_wgmma(void* const* arguments, uint32_t) {
  const Issue& issue = *static_cast<Issue*>(arguments[0]);
  const WgmmaLane& first = *issue.lane;
  Warp& warp = *self().warp;
  Products& products = products_of(warp);
  for (int i = 1; i < 32; ++i) {
    const WgmmaLane& lane = *static_cast<Issue*>(arguments[i])->lane;
    if (lane.a_matrix != first.a_matrix || lane.b_matrix != first.b_matrix || lane.adds != first.adds)
      fail(issue.where, "wgmma: matrices or `adds` of lane %d are not those of lane 0", i);
  }
  step_together({"wgmma of a %llx, b %llx, %lld columns, adds %lld",
                 {static_cast<long long>(first.a_matrix), static_cast<long long>(first.b_matrix), 2 * first.count,
                  first.adds}},
                issue.where);
  Product& product = products.queue.emplace_back();
  product.lane = first;
  for (int i = 0; i < 32; ++i) memcpy(product.a[i], static_cast<Issue*>(arguments[i])->lane->a, sizeof product.a[i]);
  product.group = products.groups;
  product.where = issue.where;
  product.caller = issue.caller;
  product.engine = product_engines[warp.index][products.groups % kProductEngines];
  product.accumulator = &accumulator_of(products, arguments, issue);
  ++product.accumulator->pending;
  for (int i = 0; i < 32; ++i) {
    void* proxy = thread_of(*self().cta, warp, i).proxy;
    as_engine(proxy, nullptr, [&] { release(proxy); });
    as_engine(product.engine, nullptr, [&] { acquire(proxy); });
  }
  as_engine(product.engine, product.caller, [&] {
    product.seen = read_operands(product);
    release(product.engine);
  });
  const Copies when = launch->request.schedule.copies;
  bool is_first = true;   // products of one accumulator are consecutive
  for (const Product& other : products.queue)
    is_first &= &other == &product || other.accumulator != product.accumulator || other.is_done;
  if (is_first && (when == Copies::eager || (when == Copies::random && launch->random.one_in(2)))) multiply(product);
}

void execute_fence(void* const* arguments, uint32_t) {
  step_together({"wgmma_fence"}, *static_cast<Location*>(arguments[0]));
  ++products_of(*self().warp).fences;
}

void execute_commit(void* const* arguments, uint32_t) {
  step_together({"wgmma_commit"}, *static_cast<Location*>(arguments[0]));
  ++products_of(*self().warp).groups;
}

// Writes results to the kernel's registers once no product on these is pending.
void publish(Products& products, Accumulator& done, Location where) {
  for (int i = 0; i < 32; ++i) {
    for (int e = 0; e < done.count && launch->request.schedule.poison; ++e)
      if (memcmp(done.d[i] + e, &kPoison, sizeof kPoison) != 0)
        fail(where, "register %d of lane %d was written to while a wgmma on it was pending", e, i);
    for (int e = 0; e < done.count; ++e) done.d[i][e] = done.values[place_of(i, e, done.count)];
  }
  std::erase_if(products.written, [&](const Written& each) {
    return each.d < done.d[0] + done.count && done.d[0] < each.d + each.count;
  });
  products.written.push_back({done.d[0], done.count, products.fences, std::move(done.values)});
}

void execute_wait(void* const* arguments, uint32_t) {
  const Wait& wait = *static_cast<Wait*>(arguments[0]);
  step_together({"wgmma_wait<%lld>", {wait.pending}}, wait.where);
  Products& products = products_of(*self().warp);
  while (!products.queue.empty() && products.queue.front().group < products.groups - wait.pending) {
    Product& product = products.queue.front();
    if (!product.is_done) {
      read_again(product);
      multiply(product);
    }
    Accumulator& accumulator = *product.accumulator;
    if (--accumulator.pending == 0) {
      publish(products, accumulator, product.where);
      products.accumulators.remove_if([&](const Accumulator& each) { return &each == &accumulator; });
    }
    products.queue.pop_front();
  }
}

struct Registers { int registers; bool is_more; Location where; };

void execute_setmaxnreg(void* const* arguments, uint32_t) {
  const Registers& asked = *static_cast<Registers*>(arguments[0]);
  const Deed what{asked.is_more ? "setmaxnreg_inc<%lld>" : "setmaxnreg_dec<%lld>", {asked.registers}};
  step_together(what, asked.where);
  int& has = self().cta->warpgroups[self().warp->index / kWarpgroup].registers;
  if (self().warp->index % kWarpgroup) return;
  if (has && (asked.is_more ? asked.registers < has : asked.registers > has))
    fail(asked.where, "%s: the warpgroup has %d registers a thread already", words_of(what).letters, has);
  has = asked.registers;
}

void execute_elect(void* const* arguments, uint32_t) {
  // PTX does not specify which lane is elected, only that it is the same each time.
  const Schedule& schedule = launch->request.schedule;
  const int chosen = schedule.shuffle_lanes ? static_cast<int>(schedule.seed % 32) : 0;
  for (int i = 0; i < 32; ++i) *static_cast<bool*>(arguments[i]) = i == chosen;
}

constexpr Operation kWgmma{"wgmma", execute_wgmma, true}, kFence{"wgmma_fence", execute_fence, true},
    kCommit{"wgmma_commit", execute_commit, true}, kWait{"wgmma_wait", execute_wait, true},
    kSetmaxnreg{"setmaxnreg", execute_setmaxnreg, true}, kElect{"elect_one", execute_elect, true};

}  // namespace

// ThreadSanitizer's fibers start with everything that their creator has seen, so they are created before kernel code runs.
void make_product_engines(int warp) {
  for (void*& engine : product_engines[warp])
    if (!engine) engine = new_fiber("wgmma");
}

void check_products_done(const Warp& warp) {
  if (warp.products && !warp.products->queue.empty())
    fail(warp.products->queue.front().where, "the thread exits with pending products that it never waited for");
}

void check_warpgroups(const Cta& cta) {
  int registers = 0;
  for (const Warpgroup& group : cta.warpgroups) {
    registers += 128 * group.registers;
    if (group.steps.empty() || launch->failed) continue;
    launch->failed = true;
    size_t fewest = group.done[0];
    for (const size_t done : group.done) fewest = done < fewest ? done : fewest;
    const Step& step = group.steps[fewest];
    snprintf(launch->message, sizeof launch->message,
             "%s: the block (%u, %u, %u) ends, but not all four warps of a warpgroup did this %s",
             place(step.where).letters, cta.index.x, cta.index.y, cta.index.z, words_of(step.what).letters);
  }
  // Each thread starts with a multiple of eight registers, of a multiprocessor's 65536; setmaxnreg redistributes them.
  const int threads = cta.thread_count, most = 65536 / threads / 8 * 8 * threads;
  if (registers <= most || launch->failed) return;
  launch->failed = true;
  snprintf(launch->message, sizeof launch->message,
           "setmaxnreg: the warpgroups of the block request %d registers in total; a multiprocessor has %d", registers, most);
}

uint64_t wgmma_descriptor(int swizzle, uint32_t address, int leading_bytes, int stride_bytes, Location where) {
  constexpr uint32_t kPatterns[] = {16, 1024, 512, 256};
  Entry entry("wgmma_matrix", where);
  if (address % 16 || leading_bytes % 16 || stride_bytes % 16)
    fail(where, "wgmma_matrix: address and distances must be multiples of 16; got shared offset %u, %d and %d",
         address - kSharedBase, leading_bytes, stride_bytes);
  if (leading_bytes < 0 || leading_bytes >= 1 << 18 || stride_bytes < 0 || stride_bytes >= 1 << 18)
    fail(where, "wgmma_matrix: distances are from 0 to %d; got %d and %d", (1 << 18) - 16, leading_bytes, stride_bytes);
  if (address % kPatterns[swizzle] / 128)
    fail(where, "wgmma_matrix: the pattern of this swizzle starts at multiples of %u; got shared offset %u",
         kPatterns[swizzle], address - kSharedBase);
  return static_cast<uint64_t>(swizzle) << 62 | static_cast<uint64_t>(stride_bytes >> 4) << 32 |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

void wgmma_fence(Location where) { collective(kFence, 0xffffffffu, &where, where); }

void wgmma(const WgmmaLane& lane, Location where) {
  Issue issue{&lane, where, __builtin_return_address(0)};
  collective(kWgmma, 0xffffffffu, &issue, where);
}

void wgmma_commit(Location where) { collective(kCommit, 0xffffffffu, &where, where); }

void wgmma_wait(int pending, Location where) {
  Wait wait{pending, where};
  collective(kWait, 0xffffffffu, &wait, where);
  const Thread& me = self();
  // Engines of groups that are still pending or not committed are left out, because more products may follow on them.
  for (int group = me.warp->products->groups - kProductEngines + 1; group <= me.warp->products->groups - pending - 1; ++group)
    if (group >= 0) acquire(product_engines[me.warp->index][group % kProductEngines]);
}

void setmaxnreg(int registers, bool is_more, Location where) {
  if (registers < 24 || registers > 256 || registers % 8)
    fail(where, "setmaxnreg: a multiple of 8 from 24 to 256; got %d", registers);
  Registers asked{registers, is_more, where};
  collective(kSetmaxnreg, 0xffffffffu, &asked, where);
}

bool elect_one(Location where) {
  bool is_elected = false;
  collective(kElect, 0xffffffffu, &is_elected, where);
  return is_elected;
}

}  // namespace cuflash::sim
