// merge_attention on CPUs: the weights of the parts of one row and head, then their outputs, 16
// channels at a time.
//
// Order: maximum exact; weight = exp of the rounded difference; sum of the weights and each channel
// are chains over the parts ascending, the channel's of FMAs; then times 1 / sum.
// Every element is read once and takes part in one FMA, so memory bounds it.
#include "winnow/merge_attention.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/columns.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTaskHeads = 64;  // (row, head) pairs of a task
constexpr float kInfinity = __builtin_inff();

Refusal refuse(const MergeAttentionArgs& a) {
  if (a.part_output.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(a.part_output) || !has_unit_stride(a.output)) {
    return "channels must have stride 1";
  }
  return "";
}

struct Worker {
  float* weight;       // [parts]
  std::int32_t* part;  // [parts]: those that contribute, ascending
  Worker(Carve& carve, std::int64_t parts)
      : weight(carve.take<float>(parts)), part(carve.take<std::int32_t>(parts)) {}
};

std::int64_t worker_bytes(const MergeAttentionArgs& a) {
  Carve carve(nullptr);
  const Worker worker(carve, a.part_output.shape[0]);
  return carve.used();
}

std::int64_t workspace_bytes(const MergeAttentionArgs& a) {
  return worker_bytes(a) * num_threads() + 63;
}

template <class T, class Out>
void merge(const MergeAttentionArgs& a, std::int64_t i, std::int64_t h, const Worker& own) {
  const std::int64_t parts = a.part_output.shape[0], dim_v = a.part_output.shape[3];
  const Tensor& lses = a.part_lse;
  const float* part_lse = lses.as<float>() + i * lses.strides[1] + h * lses.strides[2];
  float maximum = -kInfinity;
  std::int64_t count = 0;
  for (std::int64_t p = 0; p < parts; ++p) {
    const float lse = part_lse[p * lses.strides[0]];
    own.weight[count] = lse;
    own.part[count] = static_cast<std::int32_t>(p);
    count += lse != -kInfinity ? 1 : 0;
    maximum = lse > maximum ? lse : maximum;
  }
  float sum = 0;
  if (count > 1) {
    for (std::int64_t n = 0; n < count; ++n) {
      own.weight[n] = exp8(splat(own.weight[n] - maximum))[0];
      sum += own.weight[n];
    }
  }
  float& lse = a.lse.as<float>()[i * a.lse.strides[0] + h * a.lse.strides[1]];
  lse = count == 0 ? -kInfinity : count == 1 ? own.weight[0] : maximum + __builtin_logf(sum);

  const T* row =
      a.part_output.as<T>() + i * a.part_output.strides[1] + h * a.part_output.strides[2];
  Out* out = a.output.as<Out>() + i * a.output.strides[0] + h * a.output.strides[1];
  const Wide inverse = splat16(1 / sum);
  auto columns_of = [&](std::int64_t n, std::int64_t c) {
    return load_columns(row + own.part[n] * a.part_output.strides[0] + c, dim_v - c);
  };
  for (std::int64_t c = 0; c < dim_v; c += kPanel) {
    Wide x = zero16();
    if (count == 1) {
      x = columns_of(0, c);
    } else if (count > 1) {
      for (std::int64_t n = 0; n < count; ++n) {
        x = fma(splat16(own.weight[n]), columns_of(n, c), x);
      }
      x = multiply(inverse, x);
    }
    store_columns(out + c, dim_v - c, x);
  }
}

template <class T, class Out>
void run_typed(const MergeAttentionArgs& a, Workspace workspace) {
  const std::int64_t heads = a.part_output.shape[2], pairs = a.part_output.shape[1] * heads;
  const std::int64_t own_bytes = worker_bytes(a);
  Carve carve(workspace.data);
  auto* memory = carve.take<unsigned char>(own_bytes * num_threads());
  parallel_for(ceil_div(pairs, kTaskHeads), [&](std::int64_t task, int worker) {
    Carve own_carve(memory + worker * own_bytes);
    const Worker own(own_carve, a.part_output.shape[0]);
    const std::int64_t end = min64(pairs, (task + 1) * kTaskHeads);
    for (std::int64_t n = task * kTaskHeads; n < end; ++n)
      merge<T, Out>(a, n / heads, n % heads, own);
  });
}

void run(const MergeAttentionArgs& a, Workspace workspace) {
  with_element(a.part_output.dtype, [&]<class T>(const T*) {
    if (a.output.dtype == DType::kF32) {
      run_typed<T, float>(a, workspace);
    } else {
      run_typed<T, T>(a, workspace);
    }
  });
}

}  // namespace

extern const Implementation<MergeAttentionArgs> merge_attention_implementation;
const Implementation<MergeAttentionArgs> merge_attention_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
