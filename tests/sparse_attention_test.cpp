// What the shared problems of sparse_attention do not show: sentinels, masked tiles, extreme
// logits, equality of dense and listed keys, invariance, strides beyond 2^31 and the error
// messages.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "tests/attention_call.h"
#include "winnow/layout.h"

namespace winnow {
namespace {

constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The key space lies between rows of +inf: whoever takes an id outside for an address reads them.
TEST(SparseAttention, AnIdOutsideTheRangeIsNeverAnAddress) {
  AttentionCall call(1, 6, 3, 1, 24, 16);
  for (std::int64_t d = 0; d < 24; ++d) {
    call.key.as<float>()[d] = kInfinity;
    call.key.as<float>()[5 * 24 + d] = kInfinity;
  }
  SparseAttentionArgs args = call.forward_args();
  args.key = call.key.view().rows(1, 4);
  with_each(explain(args), [&](const std::string& name) {
    for (const bool masked : {true, false}) {
      call.list(8, masked ? std::vector<std::int32_t>{-1, 2, -1, kMin, 0, 4, kMax, -1}
                          : std::vector<std::int32_t>{2, 0, -1, -1, -1, -1, -1, -1});
      args.topk_indices = call.ids;
      const Array before = call.output.clone(), before_lse = call.lse.clone();
      AttentionCall::forward(args);
      if (!masked) {
        EXPECT_TRUE(same_bits(before, call.output)) << name;
        EXPECT_TRUE(same_bits(before_lse, call.lse)) << name;
        EXPECT_TRUE(std::isfinite(call.output.as<float>()[0])) << name;
      }
    }
  });
}

TEST(SparseAttention, LeadingMaskedTiles) {
  for (const int masked : {16, 32, 64, 130}) {
    AttentionCall call(1, 8, 5, 1, 16, 16, true);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(masked), -1);
    ids.push_back(5);
    call.list(masked + 1, ids);
    with_each(explain(call.forward_args()), [&](const std::string& name) {
      call.forward();
      for (int h = 0; h < 5; ++h) {
        double logit = 0;
        for (int d = 0; d < 16; ++d) {
          logit +=
              call.scale * call.query.as<float>()[h * 16 + d] * call.key.as<float>()[5 * 16 + d];
        }
        EXPECT_NEAR(call.lse.as<float>()[h], logit, 1e-5) << name;
        for (int c = 0; c < 16; ++c) {
          EXPECT_EQ(call.output.as<float>()[h * 16 + c], call.value.as<float>()[5 * 16 + c])
              << name;
        }
      }
    });
  }
}

TEST(SparseAttention, AVeryNegativeLogitIsALogit) {
  AttentionCall call(1, 1, 1, 1, 1, 3, true);
  call.scale = 1;
  call.query.as<float>()[0] = 512;
  call.key.as<float>()[0] = -1024;
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.forward();
    EXPECT_EQ(call.lse.as<float>()[0], -524288.f) << name;
    for (int c = 0; c < 3; ++c)
      EXPECT_EQ(call.output.as<float>()[c], call.value.as<float>()[c]) << name;
  });
}

TEST(SparseAttention, RowsWithoutSlots) {
  AttentionCall call(4, 9, 2, 1, 8, 8);
  call.list(2, {-1, -1, 3, 4, 3, 4, 0, 1});
  call.lengths = Array(DType::kI32, {4});
  const std::int32_t lengths[] = {2, 0, 2, 2};
  std::memcpy(call.lengths.as<void>(), lengths, sizeof lengths);
  call.see(2, 5, 5);  // its ids are no keys of its range
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.forward();
    for (int row = 0; row < 3; ++row) {
      EXPECT_EQ(call.lse.as<float>()[row * 2], -kInfinity) << name;
      for (int c = 0; c < 16; ++c) EXPECT_EQ(call.output.as<float>()[row * 16 + c], 0) << name;
    }
    EXPECT_TRUE(std::isfinite(call.lse.as<float>()[6])) << name;
  });
}

TEST(SparseAttention, ALocalIdBeyondItsSequenceIsIgnored) {
  AttentionCall call(2, 16, 2, 1, 8, 8);
  call.see(0, 0, 8);
  call.see(1, 8, 16);
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.list(2, {1, 9, 8, 15});
    call.forward();
    const Array strict = call.output.clone();
    call.list(2, {1, -1, 8, 15});
    call.forward();
    EXPECT_TRUE(same_bits(strict, call.output)) << name;
  });
}

TEST(SparseAttention, RowsDoNotSeeEachOthersSelection) {
  AttentionCall call(2, 2, 1, 1, 4, 4, true);
  call.list(1, {0, 1});
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.value.as<float>()[4] = 1;
    call.forward();
    const Array before = call.output.clone();
    call.value.as<float>()[4] = std::nanf("");
    call.forward();
    EXPECT_TRUE(same_bits(before.view().rows(0, 1), call.output.view().rows(0, 1))) << name;
  });
}

TEST(SparseAttention, ADuplicateCountsTwice) {
  AttentionCall call(2, 8, 2, 1, 8, 8);
  call.list(2, {3, 3, 3, -1});
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.forward();
    const float* lse = call.lse.as<float>();
    const float* query = call.query.as<float>();
    double logit = 0;
    for (int d = 0; d < 8; ++d) logit += call.scale * query[d] * call.key.as<float>()[3 * 8 + d];
    EXPECT_NEAR(lse[0], logit + std::log(2.0), 1e-5) << name;
    for (int c = 0; c < 8; ++c)
      EXPECT_FLOAT_EQ(call.output.as<float>()[c], call.key.as<float>()[3 * 8 + c]) << name;
  });
}

// Without lists, with an ascending list of the whole range, and with one that is longer than it.
TEST(SparseAttention, DenseEqualsTheWholeRangeAsAList) {
  for (const std::int64_t heads : {1, 4, 6, 70}) {
    for (const int first : {0, 37}) {
      AttentionCall call(50, 240, heads, 1, 20, 12);
      const std::int64_t topk = 250;
      std::vector<std::int32_t> ids(static_cast<std::size_t>(50 * topk), -1);
      for (int i = 0; i < 50; ++i) {
        const int start = i < 30 ? first : 100, length = i == 7 ? 0 : i < 30 ? 3 * i + 2 : i + 60;
        call.see(i, start, start + length);
        std::iota(ids.begin() + i * topk, ids.begin() + i * topk + length, start);
      }
      with_each(explain(call.forward_args()), [&](const std::string& name) {
        if (name == "reference" && heads > 6) return;  // slow, and has no tiles
        call.ids = Array();
        call.forward();
        const Array dense = call.output.clone(), dense_lse = call.lse.clone();
        call.list(topk, ids);
        call.forward();
        EXPECT_TRUE(same_bits(dense, call.output)) << name;
        EXPECT_TRUE(same_bits(dense_lse, call.lse)) << name;
      });
    }
  }
}

TEST(SparseAttention, ARowDependsOnItselfOnly) {
  for (const bool dense : {true, false}) {
    AttentionCall call(23, 90, 3, 1, 18, 10);
    for (int i = 0; i < 23; ++i) call.see(i, 0, 68 + i);
    if (!dense) {
      bench::Random random(3);
      call.ids = Array(DType::kI32, {23, 40});
      bench::fill_indices("scattered", 90, call.starts, call.ends, call.ids, random);
    }
    with_each(explain(call.forward_args()), [&](const std::string& name) {
      call.forward();
      const Array together = call.output.clone();
      for (const std::int64_t row : {0, 11, 22}) {
        SparseAttentionArgs one = call.forward_args();
        for (Tensor* t : {&one.query, &one.starts, &one.ends, &one.output, &one.lse})
          *t = t->rows(row, 1);
        if (!dense) one.topk_indices = one.topk_indices.rows(row, 1);
        bench::fill_gauss(call.output, *std::make_unique<bench::Random>(9));
        AttentionCall::forward(one);
        EXPECT_TRUE(same_bits(together.view().rows(row, 1), one.output)) << name << row;
      }
    });
  }
}

// A row alone is attended to by several threads, 512 slots each at a time; among other rows by one.
TEST(SparseAttention, ALongListHasTheSameBitsAloneAndAmongOthers) {
  const int before = num_threads();
  for (const bool dense : {true, false}) {
    for (const std::int64_t keys : {511, 512, 513, 1400, 3073}) {
      AttentionCall call(9, keys, 5, 1, 10, 7);
      for (int i = 0; i < 9; ++i) call.see(i, 0, static_cast<int>(keys) - i);
      if (!dense) {
        bench::Random random(3);
        call.ids = Array(DType::kI32, {9, keys});
        bench::fill_indices("scattered", keys, call.starts, call.ends, call.ids, random);
      }
      with_each(explain(call.forward_args()), [&](const std::string& name) {
        set_num_threads(1);
        call.forward();
        const Array output = call.output.clone(), lse = call.lse.clone();
        for (const int threads : {1, 2, 3, 16}) {
          set_num_threads(threads);
          for (const std::int64_t row : {0, 8}) {
            SparseAttentionArgs one = call.forward_args();
            for (Tensor* t :
                 {&one.query, &one.topk_indices, &one.starts, &one.ends, &one.output, &one.lse}) {
              if (!t->empty()) *t = t->rows(row, 1);
            }
            std::memset(one.output.data, 0xff, 35 * sizeof(float));
            AttentionCall::forward(one);
            EXPECT_TRUE(same_bits(one.output, output.view().rows(row, 1))) << name << keys;
            EXPECT_TRUE(same_bits(one.lse, lse.view().rows(row, 1))) << name << keys;
          }
        }
      });
    }
  }
  set_num_threads(before);
}

// Rows, keys and outputs more than 2^31 elements apart.
TEST(SparseAttention, StridesBeyond32Bits) {
  AttentionCall call(3, 3, 2, 1, 16, 16);
  call.list(2, {0, 2, 1, 2, 2, 0});
  const std::int64_t stride = (std::int64_t{1} << 30) + 96;
  const std::size_t bytes = static_cast<std::size_t>(2 * stride + 64) * 4;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 9 GB of addresses";
  auto far = [&](const Tensor& t, std::int64_t offset) {
    Tensor view = t;
    view.data = static_cast<float*>(memory) + offset;
    view.strides[0] = stride;
    return view;
  };
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.forward();
    SparseAttentionArgs args = call.forward_args();
    args.key = far(args.key.data, 0);
    for (std::int64_t j = 0; j < 3; ++j) {
      std::memcpy(args.key.data.rows(j, 1).data, call.key.view().rows(j, 1).data, 64);
    }
    Array far_output(DType::kF32, {3, 2, 16});
    args.output = far_output;
    AttentionCall::forward(args);
    EXPECT_TRUE(same_bits(far_output, call.output)) << name;
    args.key = call.key;
    args.output = far(args.output, 0);
    AttentionCall::forward(args);
    for (std::int64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(std::memcmp(args.output.rows(i, 1).data, call.output.view().rows(i, 1).data, 128),
                0)
          << name;
    }
  });
  munmap(memory, bytes);
}

// Every key lies in a page of its own, and only those that are listed may be touched.
TEST(SparseAttention, OnlyListedKeysAreRead) {
  const std::int64_t page = sysconf(_SC_PAGESIZE), keys = 4096, dim = page / 4;
  const auto bytes = static_cast<std::size_t>(keys * page);
  void* memory =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  AttentionCall call(4, 1, 2, 1, dim, dim);
  bench::Random random(2);
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 4; ++i) {
    call.see(i, 0, static_cast<int>(keys));
    for (int s = 0; s < 20; ++s) ids.push_back(static_cast<int>(random.below(keys / 20)) + s * 204);
  }
  call.list(20, ids);
  SparseAttentionArgs args = call.forward_args();
  args.key = make_tensor(memory, DType::kF32, {keys, 1, dim});
  for (const std::int32_t id : ids) {
    const Tensor row = args.key.data.rows(id, 1);
    ASSERT_EQ(mprotect(row.data, static_cast<std::size_t>(page), PROT_READ | PROT_WRITE), 0);
    bench::fill_gauss(row, random);
  }
  with_each(explain(args), [&](const std::string& name) {
    AttentionCall::forward(args);
    EXPECT_TRUE(std::isfinite(call.output.as<float>()[0])) << name;
  });
  munmap(memory, bytes);
}

// Padding rows and rows behind an empty sequence: three sequences of 128, 0 and 128 tokens are two
// of 128, and the rows of padding get 0, not what their outputs held.
TEST(SparseAttention, AnEmptySequenceBetweenFullOnesAndPaddingBehindThem) {
  const std::int32_t with_empty[] = {0, 128, 128, 256}, without[] = {0, 128, 256};
  const RowRanges ranges = packed_ranges(with_empty, 260);
  EXPECT_EQ(ranges.starts, packed_ranges(without, 260).starts);
  EXPECT_EQ(ranges.ends, packed_ranges(without, 260).ends);
  AttentionCall call(260, 256, 2, 1, 8, 8);
  for (int i = 0; i < 260; ++i)
    call.see(i, ranges.starts[static_cast<std::size_t>(i)],
             ranges.ends[static_cast<std::size_t>(i)]);
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    std::memset(call.output.as<void>(), 0xff, static_cast<std::size_t>(call.output.bytes()));
    call.forward();
    const Array packed = call.output.clone();
    for (int e = 256 * 16; e < 260 * 16; ++e) EXPECT_EQ(packed.as<float>()[e], 0) << name;
    for (const std::int64_t first : {0, 128}) {  // each sequence on its own
      SparseAttentionArgs one = call.forward_args();
      for (Tensor* t : {&one.query, &one.output, &one.lse}) *t = t->rows(first, 128);
      one.key = one.key.data.rows(first, 128);
      one.starts = one.starts.rows(0, 128);
      one.ends = one.ends.rows(0, 128);
      AttentionCall::forward(one);
      EXPECT_TRUE(same_bits(one.output, packed.view().rows(first, 128))) << name << first;
    }
  });
}

// Samples of 4, 9 and 2 keys, each with a query of its own.
TEST(SparseAttention, ABatchOfUnequalSamples) {
  AttentionCall call(3, 15, 4, 1, 12, 8);
  const int first[] = {0, 4, 13, 15};
  for (int b = 0; b < 3; ++b) call.see(b, first[b], first[b + 1]);
  call.list(5, {0, 1, 2, 3, -1, 5, 7, 8, 11, 12, 13, 14, -1, -1, -1});
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.forward();
    const Array together = call.output.clone();
    for (int b = 0; b < 3; ++b) {
      SparseAttentionArgs one = call.forward_args();
      for (Tensor* t : {&one.query, &one.output, &one.lse}) *t = t->rows(b, 1);
      one.key = one.key.data.rows(first[b], first[b + 1] - first[b]);
      Array ids(DType::kI32, {1, 5}), starts(DType::kI32, {1}), ends(DType::kI32, {1});
      for (int s = 0; s < 5; ++s) {
        const std::int32_t id = call.ids.as<std::int32_t>()[b * 5 + s];
        ids.as<std::int32_t>()[s] = id < 0 ? id : id - first[b];
      }
      ends.as<std::int32_t>()[0] = first[b + 1] - first[b];
      one.topk_indices = ids;
      one.starts = starts;
      one.ends = ends;
      AttentionCall::forward(one);
      EXPECT_TRUE(same_bits(one.output, together.view().rows(b, 1))) << name << b;
    }
  });
}

// The tail behind topk_lengths looks valid.
TEST(SparseAttention, LengthsEndAList) {
  AttentionCall call(2, 9, 2, 1, 8, 8);
  call.lengths = Array(DType::kI32, {2});
  call.lengths.as<std::int32_t>()[0] = 3;
  call.lengths.as<std::int32_t>()[1] = 1;
  call.list(5, {1, 8, 3, 4, 5, 7, 6, 5, 4, 3});
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.forward();
    const Array with_lengths = call.output.clone();
    SparseAttentionArgs args = call.forward_args();
    args.topk_lengths = {};
    Array ids(DType::kI32, {2, 5});
    const std::int32_t cut[] = {1, 8, 3, -1, -1, 7, -1, -1, -1, -1};
    std::memcpy(ids.as<void>(), cut, sizeof cut);
    args.topk_indices = ids;
    AttentionCall::forward(args);
    EXPECT_TRUE(same_bits(with_lengths, call.output)) << name;
  });
}

// Two requests in the pages of one pool, their rows mixed: each row has the bits of its request
// alone in one piece. What no request owns is NaN, and a page holds other things beside its keys.
TEST(SparseAttention, PagesGiveTheBitsOfOnePiece) {
  const std::int64_t lengths[] = {37, 90}, dim_qk = 20, dim_v = 12;
  const std::int32_t requests[] = {1, 0, 0, 1, 1, 0, 2, -1};
  for (const std::int64_t page : {1, 7, 16, 64}) {
    for (const bool separate : {true, false}) {
      for (const bool dense : {true, false}) {
        std::vector<AttentionCall> alone;
        for (const std::int64_t length : lengths)
          alone.emplace_back(8, length, 6, 2, dim_qk, dim_v, separate);
        bench::Random other(11);  // no key of one request is one of the other's
        bench::fill_gauss(alone[0].key, other);
        if (separate) bench::fill_gauss(alone[0].value, other);
        const std::int64_t columns = (90 + page - 1) / page + 1, pages = 2 * columns;
        Array pool(DType::kF32, {pages, page + 1, 2, dim_qk + 3}),
            values(DType::kF32, {pages, page, 2, dim_v}), table(DType::kI32, {2, columns}),
            request(DType::kI32, {8});
        for (const Array* x : {&pool, &values}) {
          for (std::int64_t e = 0; e < x->elements(); ++e) x->as<float>()[e] = std::nanf("");
        }
        for (std::int64_t q = 0; q < 2; ++q) {
          const AttentionCall& one = alone[static_cast<std::size_t>(q)];
          for (std::int64_t n = 0; n < columns; ++n)
            table.as<std::int32_t>()[q * columns + n] =
                n * page < one.keys ? static_cast<int>(2 * (columns - 1 - n) + q) : -1;
          for (std::int64_t j = 0; j < one.keys; ++j) {
            const std::int64_t id = table.as<std::int32_t>()[q * columns + j / page], at = j % page;
            for (std::int64_t g = 0; g < 2; ++g) {
              std::memcpy(pool.as<float>() + ((id * (page + 1) + at) * 2 + g) * (dim_qk + 3),
                          one.key.as<float>() + (j * 2 + g) * dim_qk, 4 * dim_qk);
              if (!separate) continue;
              std::memcpy(values.as<float>() + ((id * page + at) * 2 + g) * dim_v,
                          one.value.as<float>() + (j * 2 + g) * dim_v, 4 * dim_v);
            }
          }
        }
        std::memcpy(request.as<void>(), requests, sizeof requests);
        AttentionCall call(8, 90, 6, 2, dim_qk, dim_v, separate);
        for (int i = 0; i < 8; ++i)
          call.see(i, i, static_cast<int>(requests[i] == 0 ? 37 - i : 90 - 2 * i));
        if (!dense) {
          bench::Random random(6);
          call.ids = Array(DType::kI32, {8, 30});
          bench::fill_indices("scattered", 90, call.starts, call.ends, call.ids, random);
        }
        Tensor data = pool.view().channels(0, dim_qk);
        data.shape[1] = page;
        SparseAttentionArgs args = call.forward_args();
        args.key = KeyView(data, table, request);
        if (separate) args.value = values;
        with_each(explain(args), [&](const std::string& name) {
          AttentionCall::forward(args);
          const Array output = call.output.clone(), lse = call.lse.clone();
          for (std::int64_t i = 0; i < 8; ++i) {
            const std::int64_t q = requests[i];
            if (q < 0 || q > 1) {
              for (int e = 0; e < 6; ++e) EXPECT_EQ(lse.as<float>()[i * 6 + e], -kInfinity) << name;
              continue;
            }
            const AttentionCall& owner = alone[static_cast<std::size_t>(q)];
            SparseAttentionArgs one = call.forward_args();
            one.key = owner.key;
            one.value = owner.value;
            for (Tensor* t :
                 {&one.query, &one.topk_indices, &one.starts, &one.ends, &one.output, &one.lse}) {
              if (!t->empty()) *t = t->rows(i, 1);
            }
            AttentionCall::forward(one);
            EXPECT_TRUE(same_bits(one.output, output.view().rows(i, 1))) << name << page << i;
            EXPECT_TRUE(same_bits(one.lse, lse.view().rows(i, 1))) << name << page << i;
          }
        });
      }
    }
  }
}

// A page id times a page's stride beyond 2^31 elements.
TEST(SparseAttention, PagesBeyond32Bits) {
  constexpr std::int64_t kStride = 8448, kPages = 254202, kPage = 4;
  AttentionCall call(1, 2 * kPage, 2, 1, 16, 16);
  const std::size_t bytes = static_cast<std::size_t>(kPages * kStride) * 4;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 9 GB of addresses";
  Tensor pool = make_tensor(memory, DType::kF32, {kPages, kPage, 1, 16});
  pool.strides[0] = kStride;
  Array table(DType::kI32, {1, 2}), request(DType::kI32, {1});
  table.as<std::int32_t>()[0] = 254200;
  table.as<std::int32_t>()[1] = 254201;
  for (std::int64_t j = 0; j < 2 * kPage; ++j)
    std::memcpy(static_cast<float*>(memory) + (254200 + j / kPage) * kStride + j % kPage * 16,
                call.key.as<float>() + j * 16, 64);
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.forward();
    const Array near = call.output.clone();
    SparseAttentionArgs args = call.forward_args();
    args.key = KeyView(pool, table, request);
    AttentionCall::forward(args);
    EXPECT_TRUE(same_bits(near, call.output)) << name;
  });
  munmap(memory, bytes);
}

TEST(SparseAttention, ChannelsWithAStrideGoToTheReference) {
  AttentionCall call(2, 4, 1, 1, 4, 4);
  SparseAttentionArgs args = call.forward_args();
  args.query.shape[2] = 2;
  args.key.data.shape[2] = 2;
  args.query.strides[2] = 2;
  args.output.shape[2] = 2;
  const Explanation explanation = explain(args);
  EXPECT_EQ(explanation.chosen(), "reference");
  const Verdict& portable = explanation.verdicts[explanation.verdicts.size() - 2];
  EXPECT_EQ(portable.implementation, "cpu.portable");
  EXPECT_EQ(portable.refusal, "channels must have stride 1");
}

TEST(SparseAttention, Errors) {
  AttentionCall call(2, 4, 4, 2, 8, 8, true);
  auto error = [&](const std::function<void(SparseAttentionArgs&)>& change) {
    SparseAttentionArgs args = call.forward_args();
    change(args);
    return message_of([&] { AttentionCall::forward(args); });
  };
  EXPECT_EQ(error([](auto&) {}), "no error");
  EXPECT_EQ(error([](auto& a) { a.softmax_scale = 0; }),
            "[sparse_attention] softmax_scale must be positive and finite, got 0");
  EXPECT_EQ(error([](auto& a) { a.softmax_scale = 1e-60; }),
            "[sparse_attention] softmax_scale must be positive and finite, got 1e-60 (0 as f32)");
  EXPECT_EQ(error([](auto& a) { a.softmax_scale = 1e60; }),
            "[sparse_attention] softmax_scale must be positive and finite, got 1e+60 (inf as f32)");
  EXPECT_EQ(error([](auto& a) {
              a.value = {};
              a.output.shape[2] = 9;
              a.output.strides = {36, 9, 1};
            }),
            "[sparse_attention] without a value, dim_v must be at most dim_qk, got 9 and 8");
  EXPECT_EQ(error([](auto& a) { a.value.shape[1] = 1; }),
            "[sparse_attention] value must be [keys, kv_heads, dim_v] = [4, 2, 8], got f32 [4, 1, "
            "8]");
  EXPECT_EQ(error([](auto& a) { a.topk_lengths = a.starts; }),
            "[sparse_attention] topk_lengths must be left out where topk_indices is, got i32 [2]");
  EXPECT_EQ(error([](auto& a) { a.lse.dtype = DType::kBF16; }),
            "[sparse_attention] lse must be of dtype f32, got bf16");
  EXPECT_EQ(error([](auto& a) { a.output = a.query; }),
            "[sparse_attention] output must not share memory with query, but they overlap");
  EXPECT_EQ(error([](auto& a) { a.key.data.shape[1] = 3; }),
            "[sparse_attention] heads must be a multiple of kv_heads, got 4 and 3");
}

}  // namespace
}  // namespace winnow
