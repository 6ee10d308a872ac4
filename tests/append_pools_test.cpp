// append_pools: equal to pool_keys over the whole sequence, however the sequence is cut into calls.
#include "winnow/append_pools.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/array.h"
#include "bench/case.h"
#include "bench/data.h"
#include "tests/each.h"
#include "winnow/pools.h"
#include "winnow/validation.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;

std::size_t size_of(const Tensor& t) {
  return static_cast<std::size_t>(t.elements() * dtype_bytes(t.dtype));
}

// One sequence with its keys and gates, and its pooled keys by pool_keys.
struct Sequence {
  Array key, gate, ape, pooled;
  std::int64_t pool_size;
  PoolRounding rounding;

  Sequence(DType dtype, std::int64_t length, std::int64_t dim, std::int64_t size,
           std::uint64_t seed, PoolRounding how = PoolRounding::kOnce)
      : key(dtype, {length, dim}),
        gate(dtype, {length, dim}),
        ape(DType::kF32, {size, dim}),
        pooled(dtype, {length / size, dim}),
        pool_size(size),
        rounding(how) {
    bench::Random random(seed);
    bench::fill_gauss(key, random);
    bench::fill_gauss(gate, random, 2);
    bench::Random shared(1);  // ape is the model's
    bench::fill_gauss(ape, shared);
  }
  std::int64_t length() const { return key.view().shape[0]; }
  std::int64_t dim() const { return key.view().shape[1]; }
  // Fills `pooled` offline, by the implementation that is to be compared with.
  void pool(const std::string& implementation) const {
    const PoolLayout layout =
        pool_layout(packed_spans(Ids{0, static_cast<std::int32_t>(length())}), pool_size);
    const Tensor bases = make_tensor(layout.bases.data(), DType::kI32, {std::ssize(layout.bases)});
    pin_implementation("pool_keys", implementation);
    pool_keys({key, gate, ape, bases, rounding, pooled}, {});
    pin_implementation("pool_keys", "");
  }
};

// A cache of some requests: rings, and pooled keys in pages of its own.
struct Cache {
  Array open_key, open_gate, pooled;
  std::int64_t page_size;
  std::vector<Ids> table;  // per request

  // Pages of the requests lie in turn, backwards, so that no two neighbours are one request's.
  Cache(const Sequence& like, std::int64_t requests, std::int64_t pages_each, std::int64_t page)
      : open_key(like.key.view().dtype, {requests, like.pool_size - 1, like.dim()}),
        open_gate(like.key.view().dtype, {requests, like.pool_size - 1, like.dim()}),
        pooled(like.key.view().dtype,
               {requests * pages_each, pools_per_page(page, like.pool_size), like.dim()}),
        page_size(page) {
    for (const Array* array : {&open_key, &open_gate, &pooled}) bench::poison(*array);
    for (std::int64_t r = 0; r < requests; ++r) {
      table.emplace_back();
      for (std::int64_t p = 0; p < pages_each; ++p)
        table.back().push_back(static_cast<std::int32_t>((pages_each - 1 - p) * requests + r));
    }
  }
};

// New tokens of several requests, laid end to end.
struct Step {
  struct Part {
    const Sequence* sequence;
    std::int64_t request, first, count;
  };
  std::vector<Part> parts;

  void run(const Cache& cache) const {
    const Sequence& like = *parts.front().sequence;
    Ids cuts{0}, context, rings, slots;
    for (const Part& part : parts) {
      cuts.push_back(cuts.back() + static_cast<std::int32_t>(part.count));
      context.push_back(static_cast<std::int32_t>(part.first));
      rings.push_back(static_cast<std::int32_t>(part.request));
      const Ids own = pool_slots(cache.table[static_cast<std::size_t>(part.request)],
                                 cache.page_size, like.pool_size, part.first, part.count);
      slots.insert(slots.end(), own.begin(), own.end());
    }
    const Array key(like.key.view().dtype, {cuts.back(), like.dim()}),
        gate(like.key.view().dtype, {cuts.back(), like.dim()});
    for (std::size_t n = 0; n < parts.size(); ++n) {
      const Part& part = parts[n];
      if (part.count == 0) continue;
      const Tensor from_key = part.sequence->key.view().rows(part.first, part.count),
                   from_gate = part.sequence->gate.view().rows(part.first, part.count);
      std::memcpy(key.view().rows(cuts[n], part.count).data, from_key.data, size_of(from_key));
      std::memcpy(gate.view().rows(cuts[n], part.count).data, from_gate.data, size_of(from_gate));
    }
    const auto ids = [](const Ids& list) {
      return make_tensor(list.data(), DType::kI32, {std::ssize(list)});
    };
    append_pools({key, gate, like.ape, ids(cuts), ids(context), ids(rings), ids(slots),
                  cache.page_size, like.rounding, cache.open_key, cache.open_gate, cache.pooled},
                 {});
  }
};

// The first `pools` pooled keys of a request, byte for byte; all later ones still poison.
void expect_pools(const Cache& cache, std::int64_t request, const Sequence& sequence,
                  std::int64_t pools, const std::string& what) {
  const std::int64_t per_page = cache.page_size / sequence.pool_size, dim = sequence.dim();
  const Ids& table = cache.table[static_cast<std::size_t>(request)];
  for (std::int64_t m = 0; m < std::ssize(table) * per_page; ++m) {
    const std::int64_t row =
        table[static_cast<std::size_t>(m / per_page)] * per_page + m % per_page;
    const Tensor got =
        cache.pooled.view().reshape({cache.pooled.elements() / dim, dim}).rows(row, 1);
    if (m < pools) {
      const Tensor want = sequence.pooled.view().rows(m, 1);
      ASSERT_EQ(std::memcmp(got.data, want.data, size_of(got)), 0) << what << " pool " << m;
    } else {
      for (std::int64_t d = 0; d < dim; ++d)
        ASSERT_TRUE(bench::is_poison(got, d)) << what << " pool " << m;
    }
  }
}

AppendPoolsArgs any_args(DType dtype, std::int64_t pool_size) {
  const auto ids = [](std::int64_t n) { return make_tensor(nullptr, DType::kI32, {n}); };
  const Tensor keys = make_tensor(nullptr, dtype, {1, 8}),
               open = make_tensor(nullptr, dtype, {1, pool_size - 1, 8});
  return {keys,   keys,   make_tensor(nullptr, DType::kF32, {pool_size, 8}),
          ids(2), ids(1), {},
          ids(1), 0,      PoolRounding::kOnce,
          open,   open,   make_tensor(nullptr, dtype, {1, 8})};
}

TEST(AppendPools, EveryLengthInEveryCutEqualsPoolKeys) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t pool_size : {1, 2, 3, 4, 7}) {
      const std::int64_t most = 3 * pool_size + 1;
      for (const PoolRounding rounding : {PoolRounding::kOnce, PoolRounding::kKeyDtype}) {
        const Sequence sequence(dtype, most, 11, pool_size, 3, rounding);
        for_each_implementation(any_args(dtype, pool_size), [&](const std::string& name) {
          sequence.pool(name);
          for (std::int64_t step = 1; step <= most; ++step) {
            const Cache cache(sequence, 1, 4, pool_size);
            for (std::int64_t first = 0; first < most; first += step) {
              const std::int64_t count = std::min(step, most - first);
              Step{{{&sequence, 0, first, count}}}.run(cache);
              expect_pools(cache, 0, sequence, (first + count) / pool_size,
                           fmt::format("step {} length {}", step, first + count));
            }
          }
        });
      }
    }
  }
}

// Every way to cut a short sequence into calls.
TEST(AppendPools, EveryCompositionOfALengthEqualsPoolKeys) {
  const Sequence sequence(DType::kBF16, 10, 8, 4, 4);
  for_each_implementation(any_args(DType::kBF16, 4), [&](const std::string& name) {
    sequence.pool(name);
    for (unsigned cuts = 0; cuts < 1u << 9; ++cuts) {
      const Cache cache(sequence, 1, 3, 4);
      std::int64_t first = 0;
      for (std::int64_t t = 1; t <= 10; ++t) {
        if (t < 10 && (cuts >> (t - 1) & 1u) == 0) continue;
        Step{{{&sequence, 0, first, t - first}}}.run(cache);
        first = t;
      }
      expect_pools(cache, 0, sequence, 2, fmt::format("cuts {:b}", cuts));
    }
  });
}

// Requests of one call do not see each other: any number of tokens each, in any order.
TEST(AppendPools, RequestsOfOneCallAreIndependent) {
  constexpr std::int64_t kRequests = 5;
  std::vector<Sequence> sequences;
  for (std::int64_t r = 0; r < kRequests; ++r)
    sequences.emplace_back(DType::kBF16, 60, 16, 4, static_cast<std::uint64_t>(10 + r));
  for_each_implementation(any_args(DType::kBF16, 4), [&](const std::string& name) {
    for (const Sequence& sequence : sequences) sequence.pool(name);
    const Cache cache(sequences.front(), kRequests, 5, 12);
    std::vector<std::int64_t> length(kRequests, 0);
    bench::Random random(2);
    for (int call = 0; call < 40; ++call) {
      Step step;
      for (std::int64_t n = 0; n < kRequests; ++n) {
        const std::int64_t r = (n * 2 + call) % kRequests;
        std::int64_t& own = length[static_cast<std::size_t>(r)];
        const std::int64_t count = std::min(60 - own, random.below(call % 3 == 0 ? 9 : 2));
        step.parts.push_back({&sequences[static_cast<std::size_t>(r)], r, own, count});
        own += count;
      }
      step.run(cache);
      for (std::int64_t r = 0; r < kRequests; ++r) {
        expect_pools(cache, r, sequences[static_cast<std::size_t>(r)],
                     length[static_cast<std::size_t>(r)] / 4, fmt::format("call {}", call));
      }
    }
  });
}

// A ring is addressed modulo the pool, not as a growing buffer: 10,000 tokens one by one, and what
// lies behind the ring stays as it was.
TEST(AppendPools, RingBufferIsNotAGrowingBuffer) {
  constexpr std::int64_t kTokens = 10000, kDim = 8, kCanary = 64;
  const Sequence sequence(DType::kF32, kTokens, kDim, 4, 6);
  for_each_implementation(any_args(DType::kF32, 4), [&](const std::string& name) {
    sequence.pool(name);
    const Array key(DType::kF32, {kCanary + 3 + kCanary, kDim}),
        gate = key.clone(), pooled(DType::kF32, {kTokens / 4, kDim});
    bench::poison(key);
    bench::poison(gate);
    for (std::int64_t position = 0; position < kTokens; ++position) {
      const Ids cuts{0, 1}, context{static_cast<std::int32_t>(position)},
          slots{static_cast<std::int32_t>(position / 4)};
      const auto ids = [](const Ids& list) {
        return make_tensor(list.data(), DType::kI32, {std::ssize(list)});
      };
      append_pools({sequence.key.view().rows(position, 1),
                    sequence.gate.view().rows(position, 1),
                    sequence.ape,
                    ids(cuts),
                    ids(context),
                    {},
                    ids(slots),
                    0,
                    PoolRounding::kOnce,
                    key.view().rows(kCanary, 3).reshape({1, 3, kDim}),
                    gate.view().rows(kCanary, 3).reshape({1, 3, kDim}),
                    pooled},
                   {});
      if (position % 4 < 3) {  // its slot is position % 4
        ASSERT_EQ(at(key, (kCanary + position % 4) * kDim), at(sequence.key, position * kDim));
        ASSERT_EQ(at(gate, (kCanary + position % 4) * kDim), at(sequence.gate, position * kDim));
      }
    }
    EXPECT_EQ(std::memcmp(pooled.view().data, sequence.pooled.view().data,
                          static_cast<std::size_t>(pooled.bytes())),
              0);
    for (const Array* open : {&key, &gate}) {
      for (std::int64_t n = 0; n < open->elements(); ++n) {
        const std::int64_t row = n / kDim;
        EXPECT_EQ(bench::is_poison(*open, n), row < kCanary || row >= kCanary + 3) << n;
      }
    }
  });
}

// Pages of 20 tokens and pools of 4 are 5 pools a page; a view of 2 pools a page is refused.
TEST(AppendPools, TokenUnitIsNotPoolUnit) {
  const Sequence sequence(DType::kBF16, 100, 8, 4, 7);
  for_each_implementation(any_args(DType::kBF16, 4), [&](const std::string& name) {
    sequence.pool(name);
    const Cache cache(sequence, 1, 5, 20);
    Step{{{&sequence, 0, 0, 100}}}.run(cache);
    expect_pools(cache, 0, sequence, 25, "one shot");
  });
  Cache stale(sequence, 1, 5, 20);
  stale.pooled = Array(DType::kBF16, {13, 2, 8});
  EXPECT_EQ(
      error_of([&] {
        (Step{{{&sequence, 0, 0, 100}}}.run(stale));
      }),
      "[append_pools] pooled_key must be [pages, page_size / pool_size, index_dim] = [any, 5, "
      "8], got bf16 [13, 2, 8]");
}

// 8 pages of 16 tokens are 4 pools each: page 7 begins at row 28. A view whose geometry is older
// than the pool size, 16 rows a page, is refused instead of read 4 times too far.
TEST(AppendPools, StaleGeometryIsRefused) {
  const Sequence sequence(DType::kF32, 16, 8, 4, 8);
  for_each_implementation(any_args(DType::kF32, 4), [&](const std::string& name) {
    sequence.pool(name);
    Cache cache(sequence, 1, 8, 16);
    cache.table = {{7}};
    for (std::int64_t n = 0; n < cache.pooled.elements(); ++n)
      cache.pooled.as<float>()[n] = std::numeric_limits<float>::quiet_NaN();
    Step{{{&sequence, 0, 0, 16}}}.run(cache);
    EXPECT_EQ(std::memcmp(cache.pooled.as<float>() + 7 * 4 * 8, sequence.pooled.view().data,
                          static_cast<std::size_t>(sequence.pooled.bytes())),
              0);
    for (std::int64_t n = 0; n < cache.pooled.elements(); ++n)
      EXPECT_EQ(std::isnan(cache.pooled.as<float>()[n]), n < 7 * 4 * 8) << n;
    cache.pooled = Array(DType::kF32, {8, 16, 8});
    EXPECT_EQ(error_of([&] {
                (Step{{{&sequence, 0, 0, 16}}}.run(cache));
              }),
              "[append_pools] pooled_key must be [pages, page_size / pool_size, index_dim] = [any, "
              "4, 8], got f32 [8, 16, 8]");
  });
}

// Padding requests, tokens of nobody and slots outside: nothing is read or written for them.
TEST(AppendPools, PaddingTouchesNothing) {
  const Sequence sequence(DType::kF32, 12, 8, 2, 9);
  constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min(),
                         kMax = std::numeric_limits<std::int32_t>::max();
  const auto ids = [](const Ids& list) {
    return make_tensor(list.data(), DType::kI32, {std::ssize(list)});
  };
  // Two tokens each of: ring -1, ring past the end, context -1, slots outside, and of nobody.
  const Ids cuts{0, 2, 4, 6, 8, 10}, context{0, 0, -1, 1, 1}, rings{-1, 4, 0, 1, 2},
      slots{0, 1, 2, 3, 0, 1, kMin, kMax, 4, -1, 2, 3};
  for_each_implementation(any_args(DType::kF32, 2), [&](const std::string&) {
    const Array open_key(DType::kF32, {4, 1, 8}), open_gate(DType::kF32, {4, 1, 8}),
        pooled(DType::kF32, {4, 8});
    for (const Array* array : {&open_key, &open_gate, &pooled}) bench::poison(*array);
    append_pools({sequence.key, sequence.gate, sequence.ape, ids(cuts), ids(context), ids(rings),
                  ids(slots), 0, PoolRounding::kOnce, open_key, open_gate, pooled},
                 {});
    for (std::int64_t n = 0; n < 32; ++n) {
      EXPECT_TRUE(bench::is_poison(pooled, n));
      // Requests 3 and 4 keep their second token, whose position is 2.
      const bool kept = n / 8 == 1 || n / 8 == 2;
      EXPECT_EQ(bench::is_poison(open_key, n), !kept);
      EXPECT_EQ(bench::is_poison(open_gate, n), !kept);
      if (kept) {
        EXPECT_EQ(at(open_key, n), at(sequence.key, (n / 8 == 1 ? 7 : 9) * 8 + n % 8));
      }
    }
  });
}

// Rings and pages more than 2^31 elements apart.
TEST(AppendPools, OffsetsBeyond32Bits) {
  constexpr std::int64_t kStride = (1ll << 31) + 4096, kDim = 8;
  const std::size_t bytes = static_cast<std::size_t>(kStride + 64) * sizeof(float);
  float* memory[3];
  for (float*& m : memory) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
    m = static_cast<float*>(p);
  }
  const Sequence sequence(DType::kF32, 2, kDim, 2, 9);
  const auto ids = [](const Ids& list) {
    return make_tensor(list.data(), DType::kI32, {std::ssize(list)});
  };
  const Ids cuts{0, 1}, rings{1}, slots{3};
  AppendPoolsArgs args = any_args(DType::kF32, 2);
  args.ape = sequence.ape;
  args.cu_seqlens = ids(cuts);
  args.rings = ids(rings);
  args.pool_slots = ids(slots);
  args.page_size = 4;
  args.open_key = make_tensor(memory[0], DType::kF32, {2, 1, kDim});
  args.open_gate = make_tensor(memory[1], DType::kF32, {2, 1, kDim});
  args.pooled_key = make_tensor(memory[2], DType::kF32, {2, 2, kDim});
  for (Tensor* t : {&args.open_key, &args.open_gate, &args.pooled_key}) t->strides[0] = kStride;
  for_each_implementation(args, [&](const std::string& name) {
    sequence.pool(name);
    for (std::int32_t position = 0; position < 2; ++position) {
      const Ids context{position};
      args.context = ids(context);
      args.index_key = sequence.key.view().rows(position, 1);
      args.gate = sequence.gate.view().rows(position, 1);
      append_pools(args, {});
    }
    EXPECT_EQ(
        std::memcmp(memory[2] + kStride + kDim, sequence.pooled.view().data, kDim * sizeof(float)),
        0);
    std::fill_n(memory[2] + kStride + kDim, kDim, 0.f);
  });
  for (float* m : memory) munmap(m, bytes);
}

TEST(AppendPools, ValidationNamesTheValue) {
  struct Guard {
    Guard() { set_validation(true); }
    ~Guard() { set_validation(false); }
  } const on;
  const Sequence sequence(DType::kF32, 8, 8, 2, 9);
  const Array open_key(DType::kF32, {4, 1, 8}), open_gate(DType::kF32, {4, 1, 8}),
      pooled(DType::kF32, {4, 8});
  const auto error = [&](const Ids& cuts, const Ids& rings, const Ids& slots) {
    const Ids context{0, 0};
    const auto ids = [](const Ids& list) {
      return make_tensor(list.data(), DType::kI32, {std::ssize(list)});
    };
    return error_of([&] {
      append_pools({sequence.key, sequence.gate, sequence.ape, ids(cuts), ids(context), ids(rings),
                    ids(slots), 0, PoolRounding::kOnce, open_key, open_gate, pooled},
                   {});
    });
  };
  const Ids slots{3, 0, 3, 1, 3, 2, -1, -1};  // of tokens that complete no pool any
  EXPECT_EQ(error({0, 4, 8}, {0, 1}, slots), "");
  EXPECT_EQ(error({0, 4, 8}, {1, 1}, slots),
            "[append_pools] requests must have rings of their own, got 1 twice");
  EXPECT_EQ(error({0, 4, 8}, {0, 1}, {3, 0, 3, 1, 3, 1, -1, -1}),
            "[append_pools] pools must have slots of their own, got 1 twice");
  EXPECT_EQ(error({0, 4, 9}, {0, 1}, slots),
            "[append_pools] cu_seqlens must ascend within 8 tokens, got 9 after 4 at request 1");
}

TEST(AppendPools, ErrorsNameTheRule) {
  auto message = [&](auto&& change) {
    AppendPoolsArgs args = any_args(DType::kF32, 4);
    change(args);
    return error_of([&] { explain(args); });
  };
  EXPECT_EQ(message([](AppendPoolsArgs&) {}), "");
  EXPECT_EQ(message([](AppendPoolsArgs& a) { a.open_key.shape[1] = 4; }),
            "[append_pools] open_key must be [rings, pool_size - 1, index_dim] = [any, 3, 8], got "
            "f32 [1, 4, 8]");
  EXPECT_EQ(message([](AppendPoolsArgs& a) { a.cu_seqlens.shape[0] = 1; }),
            "[append_pools] cu_seqlens must be [requests + 1] = [2], got i32 [1]");
  EXPECT_EQ(message([](AppendPoolsArgs& a) { a.pool_slots.shape[0] = 2; }),
            "[append_pools] pool_slots must be [tokens] = [1], got i32 [2]");
  EXPECT_EQ(message([](AppendPoolsArgs& a) { a.page_size = 16; }),
            "[append_pools] page_size must be 0 where pooled_key has no pages, got 16");
  EXPECT_EQ(message([](AppendPoolsArgs& a) {
              a.pooled_key = make_tensor(nullptr, DType::kF32, {1, 4, 8});
              a.page_size = 18;
            }),
            "[append_pools] page_size must be a positive multiple of pool_size 4, got 18");
}

}  // namespace
}  // namespace winnow::testing
