"""Planted faults in the tiles of kernels: products, copies and layouts."""

from __future__ import annotations

from mutations import kernel_guards, sm90_guards
from mutations.planting import Edit

FAULTS = {
    kernel_guards.tensor_cores_are_right: {
        "sums of dQ are one sum": Edit(
            "tile/accumulator_layout.cuh", "AccumulatorLayout.load", "[e + x] = sums.at[x];", "[e + x] = sums.at[0];"
        ),
        "whole rows lie too close": Edit(
            "tile/copy_async.cuh", "FullTileCopy.start", "* row_stride_)", "* (row_stride_ - 8))"
        ),
        "whole rows lack their last chunks": Edit(
            "tile/copy_async.cuh", "FullTileCopy.start",
            "chunk < Tile::kChunks; chunk += Partition::kThreadsPerRow) ptx",
            "chunk < Tile::kChunks - 4; chunk += Partition::kThreadsPerRow) ptx",
        ),
        "four sums of dQ go where others are": Edit(
            "tile/accumulator_layout.cuh", "AccumulatorLayout.thread_offset", "Run * ptx::lane(", "4 * (ptx::lane() / 2"
        ),
        "a result is written past its last row": Edit(
            "tile/copy_async.cuh", "store", "to.num_rows >= Rows &&", "to.num_rows >= Rows - 8 &&"
        ),
        "rows of a result lie too close": Edit(
            "tile/copy_async.cuh", "store", "::kRowsPerPass * to.row_stride;", "::kRowsPerPass * (to.row_stride - 8);"
        ),
    },
    kernel_guards.tiles_are_right: {
        "the last column is the first": Edit(
            "tile/copy.cuh", "load", "(*element)", "(column + 1 < from.num_columns ? *element : from.at(row, 0))"
        ),
        "a vector past the last column is loaded": Edit(
            "tile/copy.cuh", "has_aligned_vectors", "&& matrix.num_columns % kVector == 0", ""
        ),
        "one column too many is stored": Edit(
            "tile/copy.cuh", "store", "Tile::column(j + e) < to.num_columns", "Tile::column(j + e) <= to.num_columns"
        ),
        "a vector past the last column is stored": Edit(
            "tile/copy.cuh", "store_vectorized", "if (Tile::column(j) < to.num_columns) *", "*"
        ),
        "columns apart are stored as vectors": Edit(
            "tile/copy.cuh", "has_aligned_vectors", "matrix.column_stride == 1 &&", ""
        ),
        "a vector is stored in reverse": Edit(
            "tile/copy.cuh", "store_vectorized", "(from.at[i][j + e], x.at[e]", "(from.at[i][j + e], x.at[Run - 1 - e]"
        ),
        "the last row is not stored": Edit(
            "tile/copy.cuh", "store", "(Tile::row(i) >= to.num_rows)", "(Tile::row(i) + 1 >= to.num_rows)"
        ),
        "the last row is not stored in vectors": Edit(
            "tile/copy.cuh", "store_vectorized", "(Tile::row(i) >= to.num_rows)", "(Tile::row(i) + 1 >= to.num_rows)"
        ),
        "rows of a thread are neighbours": Edit(
            "tile/register_tile.cuh", "RegisterTile.row", "row_lane() + kRowLanes * i;", "row_lane() * kRows + i;"
        ),
        "runs of a thread overlap": Edit(
            "tile/register_tile.cuh", "RegisterTile.column",
            "(j / Run * kColumnLanes + column_lane()) * Run + j % Run",
            "j / Run * kColumnLanes * Run + column_lane() + j % Run",
        ),
        "half a row is summed": Edit(
            "tile/register_tile.cuh", "row_sum", "+= __shfl_xor_sync(", "+= lane_offset > 2 ? T(0) : __shfl_xor_sync("
        ),
        "elements lie closer than vectors": Edit(
            "tile/shared_tile.cuh", "SharedTile.at", "data[row * kPitch + column]", "data[row * Columns + column]"
        ),
        "a vector is multiplied backwards": Edit(
            "tile/gemm_simt.cuh", "gemm_add_nt", "b_frag[j].at[e]", "b_frag[j].at[kVector - 1 - e]"
        ),
        "what is added misses the last column": Edit(
            "tile/copy.cuh", "add", "if (column < to.num_columns) ptx::", "if (column < to.num_columns - 1) ptx::"
        ),
        "a^T b starts a row late": Edit(
            "tile/gemm_simt.cuh", "gemm_add_tn", "for (int k = first; k < last", "for (int k = first + 1; k < last"
        ),
        "a row of b is multiplied again and again": Edit(
            "tile/gemm_simt.cuh", "gemm_add_nn", "b.vector(k + e,", "b.vector(k,"
        ),
        "a fragment of a is another lane's": Edit(
            "tile/gemm_simt.cuh", "gemm_add_mma", "a += column_lane() * AStride;", "a += (column_lane() ^ 1) * AStride;"
        ),
        "a fragment of b is transposed": Edit(
            "tile/gemm_simt.cuh", "gemm_add_mma",
            "column_lane() * BStride + row_lane() % 8 * ColumnStride",
            "column_lane() * ColumnStride + row_lane() % 8 * BStride",
        ),
        "a fragment of b is its neighbour's": Edit(
            "tile/gemm_simt.cuh", "gemm_add_mma", "j * kColumnLanes *", "(j ^ 2) * kColumnLanes *"
        ),
        "fragments take a row too many": Edit(
            "tile/gemm_simt.cuh", "gemm_add_mma", "k + column_lane() < last;", "k + column_lane() <= last;"
        ),
        "fragments of a^T miss the first row": Edit(
            "tile/gemm_simt.cuh", "gemm_add_mma", "= first <= k + column_lane()", "= first < k + column_lane()"
        ),
        "two fragments of a change places": Edit(
            "tile/gemm_simt.cuh", "gemm_add_mma", "a_frag[i], a_frag[i + 1], b_frag", "a_frag[i + 1], a_frag[i], b_frag"
        ),
        "a quotient is not corrected": Edit(
            "tile/register_tile.cuh", "RegisterTile.divide_row",
            "= ptx::fma(ptx::fma(-quotient, factor, at[i][j]), reciprocal, quotient);",
            "= quotient;",
        ),
        "what is not finite is corrected": Edit(
            "tile/register_tile.cuh", "RegisterTile.divide_row", "rounded == rounded ? rounded : quotient;", "rounded;"
        ),
        "two rows of fragments are summed": Edit(
            "tile/register_tile.cuh", "row_sum", "< kColumnLanes; lane_offset *= 2) x +=", "< 8; lane_offset *= 2) x +="
        ),
        "rows of fragments meet in the banks": Edit(
            "tile/shared_tile.cuh", None, "(Config::kMmaRows > 0 ? 2 : 1) * Vector<T>::kLength", "Vector<T>::kLength"
        ),
    },
    kernel_guards.floats_on_tensor_cores_are_right: {
        "the lower half of a left operand is lost": Edit(
            "tile/tf32.cuh", "multiply_add", "ptx::mma_m16n8k8_tf32(d, a.lo, b.hi);", ""
        ),
        "the lower half of a right operand is lost": Edit(
            "tile/tf32.cuh", "multiply_add", "ptx::mma_m16n8k8_tf32(d, a.hi, b.lo);", ""
        ),
        "a NaN is rounded to -0": Edit(
            "tile/tf32.cuh", "Tf32.Tf32", "= ptx::to_tf32(__uint_as_float(x[e]));", "= (x[e] + 0x1000u) & 0xffffe000u;"
        ),
        "words come from the other four rows": Edit(
            "tile/tf32.cuh", "TransposedWords.at", "which_row * (Adjacent ? 1 :", "(1 - which_row) * (Adjacent ? 1 :"
        ),
        "words of the second column are the first's": Edit(
            "tile/tf32.cuh", "TransposedWords.at", "4 * tile + 2 * which_column", "4 * tile"
        ),
        "words are their neighbours'": Edit(
            "tile/tf32.cuh", "TransposedWords.at", "ptx::lane() / 4 % 4 * 4;", "(ptx::lane() / 4 + 1) % 4 * 4;"
        ),
        "a left fragment is transposed": Edit(
            "tile/tf32.cuh", "load", "IsLeft ? e / 2 : e % 2, IsLeft", "e % 2, IsLeft"
        ),
        "columns of a product are not neighbours": Edit("tile/tf32.cuh", "load", "[e % 2 * 2 + e / 2]);", "[e]);"),
        "a product is not added to what there was": Edit(
            "tile/tf32.cuh", "multiply_tf32", "sum = kSumsApart ? sum +", "sum = kSumsApart ?"
        ),
        "one product starts from 0": Edit(
            "tile/tf32.cuh", "multiply_tf32", "Accumulates && !kSumsApart ? c.tiles", "false ? c.tiles"
        ),
        "every group of columns is the first": Edit(
            "tile/tf32.cuh", "multiply_tf32", "load(b_frag, b, (first + j) / 2, k);", "load(b_frag, b, j / 2, k);"
        ),
        "a pair is stored at the start of its chunk": Edit(
            "tile/tf32.cuh", "store", "+ from.first_column() % kChunkOf<float> * 4;", ";"
        ),
        "rows of floats meet in the banks": Edit(
            "tile/swizzled_tile.cuh", "SwizzledTile.swizzle", "% 2 * 2 ^ row / 2 % 2 * 7 ^ row / 4 % 2 * 4", "% 8"
        ),
    },
    kernel_guards.parts_are_right: {
        "packed rows are all the first head's": Edit(
            "tile/copy_async.cuh", "StackedRows.row", "i / first.num_rows * stride +", ""
        ),
        "packed rows are of 16-bit elements": Edit(
            "tile/copy_async.cuh", "load_async",
            "source, min(max(remaining, 0), kChunk) * sizeof(T));",
            "source, min(max(remaining, 0), kChunk) * 2);",
        ),
    },
    sm90_guards.forward_is_right: {
        "copied rows are not fenced": Edit("tile/pipeline.cuh", "copy", "ptx::fence_proxy_async();", ""),
        "copied rows are not waited for": Edit("tile/pipeline.cuh", "copy", "ptx::cp_async_wait_all();", ""),
        "copied chunks are not permuted": Edit(
            "tile/pipeline.cuh", "TmaBoxes.at",
            "chunk % chunks_per_panel ^ row * chunks_per_panel / kChunkOf<uint16_t>",
            "chunk",
        ),
        "the last column is not copied": Edit(
            "tile/pipeline.cuh", "copy_chunk", "int e = remaining - 1; e >= 0", "int e = remaining - 2; e >= 0"
        ),
        "only the first panel is brought": Edit(
            "tile/pipeline.cuh", "start_tma_boxes", "< to.columns; column += to.width", "< to.width; column += to.width"
        ),
        "a room counts as empty in the wrong phase": Edit(
            "tile/pipeline.cuh", "wait_empty", "&slot.empty), phase ^ 1);", "&slot.empty), phase);"
        ),
        "a room counts as full in the wrong phase": Edit(
            "tile/pipeline.cuh", "wait_full", "(&slot.full), phase);", "(&slot.full), phase ^ 1);"
        ),
        "all panels of O are the first": Edit(
            "tile/wgmma_tile.cuh", "store", "+ k / kNumFragments * Panel::kBytes, from", ", from"
        ),
        "panels of V lie too close": Edit(
            "tile/wgmma_tile.cuh", "MnMajor", "kSwizzle, Tile::Panel::kBytes, 8", "kSwizzle, 1024, 8"
        ),
        "the second panel of K is the first": Edit(
            "tile/wgmma_tile.cuh", "KMajor.at", "at(panel * Tile::Panel::kBytes +", "at(0 * panel +"
        ),
        "rows of a fragment change places": Edit(
            "tile/wgmma_tile.cuh", "PackedOperand.pack", "fragments[k][e] = ptx::", "fragments[k][e ^ 1] = ptx::"
        ),
        "a chunk of O is another's": Edit(
            "tile/epilogue.cuh", "transpose_in_quad", "is_upper ? first : second,", "is_upper ? second : first,"
        ),
        "a row too many of O is stored": Edit(
            "tile/epilogue.cuh", "store", ">= to.num_rows) continue; Bits128", "> to.num_rows) continue; Bits128"
        ),
        "chunks past the last column are stored": Edit(
            "tile/epilogue.cuh", "store", "from.warp_column() + 8 * Tile::kColumnTiles <= num_columns", "true"
        ),
        "the last element of a short chunk is lost": Edit(
            "tile/epilogue.cuh", "store", "+ kChunkOf<T>, num_columns); ++", "+ kChunkOf<T>, num_columns - 1); ++"
        ),
    },
    sm90_guards.gradients_are_right: {
        "copied tiles are not fenced": Edit("tile/pipeline.cuh", "copy", "ptx::fence_proxy_async();", ""),
        "a panel of dO is not brought": Edit(
            "tile/pipeline.cuh", "start_tma_boxes", "< to.columns; column += to.width", "< to.width; column += to.width"
        ),
        "half of the bits change places": Edit(
            "tile/pipeline.cuh", "transpose_bits_in_warp", "low ^= low << lane_offset / 2;", ""
        ),
        "dS is not transposed": Edit(
            "tile/wgmma_tile.cuh", "store_transposed", "stmatrix_x4_trans(Tile", "stmatrix_x4(Tile"
        ),
    },
    sm90_guards.wide_gradients_are_right: {
        "the second part of dQ is added to the first": Edit(
            "tile/accumulator_layout.cuh", "AccumulatorLayout.atomic_add", "at(i, first + j, 0)", "at(i, j, 0)"
        ),
        "the last column of a gradient is not copied": Edit(
            "tile/pipeline.cuh", "copy", "e < min(to.num_columns - column,", "e + 1 < min(to.num_columns - column,"
        ),
        "copied columns repeat": Edit(
            "tile/pipeline.cuh", "copy", "words.at[0] = words.at[0] >> 16 | words.at[1] << 48;", "words.at[0] >>= 16;"
        ),
        "a place in a panel is not permuted": Edit(
            "tile/pipeline.cuh", "TmaBoxes.at", "chunk % chunks_per_panel ^ row", "chunk % chunks_per_panel ^ 0 * row"
        ),
        "the last eight keys of P are not transposed": Edit(
            "tile/wgmma_tile.cuh", "store_transposed", "stmatrix_x2_trans(Panel", "stmatrix_x2(Panel"
        ),
        "rows of scores start with the first": Edit(
            "tile/wgmma_tile.cuh", "transposed_address", "first_row + lane / 16 * 8", "lane / 16 * 8"
        ),
    },
    sm90_guards.finished_gradients_are_right: {
        "sums may not be stored when that is signalled": Edit(
            "tile/counter.cuh", "wait_bulk_copies", "ptx::bulk_wait<0>();", ""
        ),
        "a signal may precede the result": Edit("tile/counter.cuh", "wait_bulk_copies", "ptx::bulk_wait<0>();", ""),
        "dQ does not have its own keys'": Edit(
            "tile/accumulator_layout.cuh", "AccumulatorLayout.add_shared", "[i][j][e] += sums.at", "[i][j][e] = sums.at"
        ),
        "columns stand on each other": Edit(
            "tile/epilogue.cuh", "store_full_rows", "() + 8 * first + ptx::lane()", "() + ptx::lane()"
        ),
        "dQ is written past the end": Edit(
            "tile/epilogue.cuh", "store_full_rows", "if (row < to.num_rows) ptx::store_aligned", "ptx::store_aligned"
        ),
    },
}  # fmt: skip
