// All index maps of tile/. `probe` defines the types and sizes: T, Element, kRows, kColumns, kDepth.
#include <ptx/shared.cuh>
#include <tile/copy.cuh>
#include <tile/gemm_simt.cuh>
using namespace cuflash;
using namespace cuflash::tile;
using probe::Element;
using probe::T;
using probe::kColumns;
using probe::kDepth;
using probe::kRows;

constexpr int kRun = Vector<T>::kLength;
using Shared = SharedTile<T, kRows, kColumns>;
using Plain = RegisterTile<T, kRows, kColumns>;
using InRuns = RegisterTile<T, kRows, kColumns, kRun>;

template <class Tile>
CUFLASH_DEVICE void number(Tile& tile) {
  for (int i = 0; i < Tile::kRows; ++i)
    for (int j = 0; j < Tile::kColumns; ++j) tile.at[i][j] = Tile::row(i) * 1000 + Tile::column(j);
}

template <class Tile>
CUFLASH_DEVICE void write_map(int* rows, int* columns) {
  for (int i = 0; i < Tile::kRows; ++i) rows[threadIdx.x * Tile::kRows + i] = Tile::row(i);
  for (int j = 0; j < Tile::kColumns; ++j) columns[threadIdx.x * Tile::kColumns + j] = Tile::column(j);
}

// Writes the rows and columns that a thread holds, offsets of elements and vectors in a shared tile, and sums of rows.
extern "C" __global__ void __launch_bounds__(kThreads)
maps(int* rows, int* columns, int* run_rows, int* run_columns, int* elements, int* vectors, T* sums, T* scaled) {
  write_map<Plain>(rows, columns);
  write_map<InRuns>(run_rows, run_columns);
  const Shared shared{ptx::dynamic_shared<T>()};
  for (int batch_head = threadIdx.x; batch_head < kRows * kColumns; batch_head += kThreads) {
    const int row = batch_head / kColumns, column = batch_head % kColumns;
    elements[batch_head] = &shared.at(row, column) - shared.data;
    vectors[batch_head] = column % kRun == 0 ? &shared.vector(row, column).at[0] - shared.data : -1;
  }
  sums[threadIdx.x] = row_sum(static_cast<T>(threadIdx.x * threadIdx.x));
  InRuns tile;
  tile.fill(3);
  tile.scale(2);
  tile.scale_row(1, 5);
  for (int i = 0; i < InRuns::kRows; ++i)
    for (int j = 0; j < InRuns::kColumns; ++j)
      scaled[(threadIdx.x * InRuns::kRows + i) * InRuns::kColumns + j] = tile.at[i][j];
}

// Divides each number by the divisor of its row.
extern "C" __global__ void __launch_bounds__(kThreads)
quotients(const T* numbers, const T* by, T* left) {
  Plain tile;
  for (int i = 0; i < Plain::kRows; ++i) {
    for (int j = 0; j < Plain::kColumns; ++j) tile.at[i][j] = numbers[Plain::row(i) * kColumns + Plain::column(j)];
    tile.divide_row(i, by[Plain::row(i)]);
    for (int j = 0; j < Plain::kColumns; ++j) left[Plain::row(i) * kColumns + Plain::column(j)] = tile.at[i][j];
  }
}

struct KeptBits {
  int64_t bits;
  CUFLASH_DEVICE bool operator()(int row) const { return bits >> row & 1; }
};

// Writes the contents of shared memory after a load, including its padding.
extern "C" __global__ void __launch_bounds__(kThreads)
loads(Element* from, int64_t row_stride, int64_t column_stride, int num_rows, int num_columns, int64_t kept, T* memory) {
  const Shared shared{ptx::dynamic_shared<T>()};
  for (int i = threadIdx.x; i < Shared::kElements; i += kThreads) shared.data[i] = -7;
  __syncthreads();
  const Matrix<Element> matrix{from, row_stride, column_stride, num_rows, num_columns};
  if (kept == -1) load(shared, matrix);
  else load(shared, matrix, KeptBits{kept});
  __syncthreads();
  for (int i = threadIdx.x; i < Shared::kElements; i += kThreads) memory[i] = shared.data[i];
}

template <class Tile>
CUFLASH_DEVICE void store_both(const Matrix<Element>& matrix, T* memory) {
  Tile tile;
  number(tile);
  store_vectorized(matrix, tile);
  const Shared shared{ptx::dynamic_shared<T>()};
  for (int i = threadIdx.x; i < Shared::kElements; i += kThreads) shared.data[i] = -7;
  __syncthreads();
  store(shared, tile);
  __syncthreads();
  for (int i = threadIdx.x; i < Shared::kElements; i += kThreads) memory[i] = shared.data[i];
  __syncthreads();
}

// Writes rows first <= x < last of a matrix, and shared memory, after a store of 1000 row + column, for both kinds of
// tiles.
extern "C" __global__ void __launch_bounds__(kThreads)
stores(Element* plain, Element* in_runs, int64_t start, int64_t row_stride, int64_t column_stride, int first, int last,
       int num_columns, T* memory, T* run_memory) {
  const Matrix<Element> to{plain + start, row_stride, column_stride, last, num_columns};
  const Matrix<Element> runs_to{in_runs + start, row_stride, column_stride, last, num_columns};
  store_both<Plain>(to.rows(first, last), memory);
  store_both<InRuns>(runs_to.rows(first, last), run_memory);
}

// Computes c + a b^T with b [kColumns, kDepth], and c + a b with b [kDepth, kColumns], where c is 1000 row + column.
extern "C" __global__ void __launch_bounds__(kThreads) products(T* a, T* b_nt, T* b_nn, T* c_nt, T* c_nn) {
  const SharedTile<T, kRows, kDepth> a_smem{ptx::dynamic_shared<T>()};
  const SharedTile<T, kColumns, kDepth> b_nt_smem{a_smem.data + a_smem.kElements};
  const SharedTile<T, kDepth, kColumns> b_nn_smem{b_nt_smem.data + b_nt_smem.kElements};
  load(a_smem, Matrix<T>{a, kDepth, 1, kRows, kDepth});
  load(b_nt_smem, Matrix<T>{b_nt, kDepth, 1, kColumns, kDepth});
  load(b_nn_smem, Matrix<T>{b_nn, kColumns, 1, kDepth, kColumns});
  __syncthreads();
  Plain nt;
  number(nt);
  gemm_add_nt(nt, a_smem, b_nt_smem);
  store(Matrix<T>{c_nt, kColumns, 1, kRows, kColumns}, nt);
  InRuns nn;
  number(nn);
  gemm_add_nn(nn, a_smem, b_nn_smem);
  store(Matrix<T>{c_nn, kColumns, 1, kRows, kColumns}, nn);
}

// Adds a^T b over the rows first <= k < last to every other column of a matrix, starting with the second.
extern "C" __global__ void __launch_bounds__(kThreads)
transposed_products(T* a, T* b, T* to, int64_t row_stride, int first, int last, int num_rows, int num_columns) {
  const SharedTile<T, kDepth, kRows, kRows> a_smem{ptx::dynamic_shared<T>()};
  const SharedTile<T, kDepth, kColumns, kColumns> b_smem{a_smem.data + a_smem.kElements};
  const Shared sum_smem{b_smem.data + b_smem.kElements};
  load(a_smem, Matrix<T>{a, kRows, 1, kDepth, kRows});
  load(b_smem, Matrix<T>{b, kColumns, 1, kDepth, kColumns});
  __syncthreads();
  for (int column = 0; column < kColumns; column += 32) {
    RegisterTile<T, kRows, 32, kRun> sum;
    sum.fill(0);
    gemm_add_tn(sum, a_smem, b_smem.template columns<32>(column), first, last);
    store(sum_smem.template columns<32>(column), sum);
  }
  __syncthreads();
  add(Matrix<T>{to + 1, row_stride, 2, num_rows, num_columns}, sum_smem);
}
