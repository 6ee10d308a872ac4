// Rows per chunk under a byte budget: the table of a public implementation (its budget of 2 and of
// 8 GiB, its cap of 2^31 numbers, its alignment), and the three bounds one by one.
#include "winnow/chunks.h"

#include <gtest/gtest.h>

#include "tests/each.h"

namespace winnow::testing {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

struct Expected {
  std::int64_t columns, rows, rows_2_gib, count_2_gib, rows_8_gib, count_8_gib;
};

TEST(Chunks, TableOfLongContexts) {
  for (const Expected& e :
       {Expected{1048576, 16384, 256, 64, 1024, 16}, Expected{876544, 16384, 306, 54, 1224, 14},
        Expected{704512, 16384, 381, 44, 1524, 11}, Expected{532480, 16384, 504, 33, 2016, 9},
        Expected{131072, 4096, 2048, 2, 4096, 1}}) {
    const RowChunks two = row_chunks(e.rows, e.columns, DType::kF32, 2 * kGiB);
    EXPECT_EQ(two.rows, e.rows_2_gib) << e.columns;
    EXPECT_EQ(two.count, e.count_2_gib) << e.columns;
    EXPECT_EQ(two.bytes, two.rows * e.columns * 8);
    EXPECT_LE(two.bytes, 2 * kGiB);
    const RowChunks eight = row_chunks(e.rows, e.columns, DType::kF32, 8 * kGiB);
    EXPECT_EQ(eight.rows, e.rows_8_gib) << e.columns;
    EXPECT_EQ(eight.count, e.count_8_gib) << e.columns;
    // 2^31 numbers are reached at 8 GiB: a larger budget changes nothing.
    EXPECT_EQ(row_chunks(e.rows, e.columns, DType::kF32, 64 * kGiB).rows, eight.rows);
  }
}

TEST(Chunks, RowsBeginAligned) {
  EXPECT_EQ(row_chunks(16384, 1000001, DType::kF32, 2 * kGiB).rows, 264);  // 268 fit, groups of 8
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t columns : {1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 1000, 1001, 4099}) {
      for (const std::int64_t budget : {0, 1000, 77777, 1 << 20, 1 << 26}) {
        const RowChunks c = row_chunks(5000, columns, dtype, budget);
        const std::int64_t row_bytes = columns * dtype_bytes(dtype);
        if (c.count > 1) {
          EXPECT_EQ(c.rows * row_bytes % 32, 0);
        }
        EXPECT_GE(c.rows * c.count, 5000);
        EXPECT_LT(c.rows * (c.count - 1), 5000);
        // Over the budget only where a smaller chunk would not begin aligned.
        if (c.bytes > budget) {
          for (std::int64_t rows = 1; rows < c.rows; ++rows)
            EXPECT_NE(rows * row_bytes % 32, 0) << columns;
        } else if (c.count > 1) {  // and no larger chunk fits
          std::int64_t next = c.rows + 1;
          while (next * row_bytes % 32 != 0) ++next;
          EXPECT_GT(next * columns * 8, budget) << columns;
        }
      }
    }
  }
  EXPECT_EQ(row_chunks(100, 3, DType::kF32, 0).rows, 8);
  EXPECT_EQ(row_chunks(100, 3, DType::kBF16, 0).rows, 16);
}

TEST(Chunks, ExactlyTwoToThe31NumbersAreAllowed) {
  EXPECT_EQ(row_chunks(4096, 1 << 20, DType::kF32, 100 * kGiB).rows, 1024);
  EXPECT_EQ(row_chunks(4096, (1 << 20) + 8, DType::kF32, 100 * kGiB).rows, 1023);
  const std::int64_t most = (std::int64_t{1} << 31) - 1;
  EXPECT_EQ(row_chunks(most, most, DType::kF32, 100 * kGiB).rows, 8);  // one group, over the cap
}

TEST(Chunks, NoRowsNoColumnsAndErrors) {
  EXPECT_EQ(row_chunks(0, 10, DType::kF32, kGiB).count, 0);
  EXPECT_EQ(row_chunks(10, 0, DType::kF32, 0).count, 1);
  EXPECT_EQ(row_chunks(3, 10, DType::kF32, kGiB).rows, 3);
  EXPECT_EQ(error_of([] { row_chunks(-1, 1, DType::kF32, 1); }),
            "[row_chunks] rows must be from 0 to 2147483647, got -1");
  EXPECT_EQ(error_of([] { row_chunks(1, std::int64_t{1} << 31, DType::kF32, 1); }),
            "[row_chunks] columns must be from 0 to 2147483647, got 2147483648");
  EXPECT_EQ(error_of([] { row_chunks(1, 1, DType::kF32, -1); }),
            "[row_chunks] budget must not be negative, got -1");
}

}  // namespace
}  // namespace winnow::testing
