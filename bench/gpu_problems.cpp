// The shared benchmark list of `winnow bench --device cuda`, at the sizes that GPUs are for.
#include "bench/case.h"

namespace winnow::bench {
namespace {

constexpr const char* kProblems[] = {
    "index_scores rows=4096 keys=32768 dtype=bf16",
    "index_scores rows=4096 keys=32768 dtype=e4m3",
    "index_scores rows=4096 keys=32768 dtype=mxfp8",
    "index_scores rows=4096 keys=32768 index_heads=32 dtype=e4m3",
    "index_scores rows=64 keys=32768 page=64 dtype=bf16",
    "select_topk rows=4096 width=32768 topk=2048",
    "select_topk rows=4096 width=32768 topk=2048 dtype=bf16",
    "select_topk rows=4096 width=32768 topk=2048 data=zeros",
    "select_topk rows=64 width=32768 topk=2048",
    "select_topk rows=8 width=1048576 topk=2048",
    "index_topk rows=4096 keys=32768 topk=2048 dtype=bf16",
    "index_topk rows=4096 keys=32768 topk=2048 dtype=e4m3",
    "index_topk rows=64 keys=32768 topk=2048 page=64 dtype=bf16",
    "sparse_attention rows=4096 keys=32768 topk=2048 dtype=bf16",
    "sparse_attention rows=4096 keys=32768 heads=128 topk=2048 dtype=bf16",
    "sparse_attention rows=64 keys=32768 topk=2048 page=64 dtype=bf16",
    "sparse_attention_backward rows=4096 keys=4096 topk=2048 dtype=bf16",
    "attention_target rows=4096 keys=32768 dtype=bf16",
    "index_loss rows=4096 keys=32768",
    "index_scores_at rows=4096 keys=32768 dtype=bf16",
    "index_scores_at_backward rows=4096 keys=32768 dtype=bf16",
    "dense_index_loss rows=4096 keys=4096 dtype=bf16",
    "merge_attention parts=8 rows=4096 heads=64 dtype=bf16",
    "pool_keys keys=1048576 dtype=bf16",
    "append_pools requests=256 tokens=1 dtype=bf16 page_size=64",
    "append_pools requests=1 tokens=131072 context=0 dtype=bf16 page_size=64",
    "expand_pools rows=4096 keys=131072 range=causal phase=-1",
    "hadamard rows=65536 heads=64 dtype=bf16 output=bf16",
    "quantise rows=65536 heads=64 dtype=bf16",
    "quantise rows=65536 heads=64 dtype=bf16 groups=4 scale=e8m0 power_of_two=1",
    "dequantise rows=65536 heads=64 groups=4 scale=e8m0",
    "tile_scales tokens=65536 heads=64 sequences=4",
};

}  // namespace

std::vector<std::string> gpu_bench_problems(const std::string& operation) {
  std::vector<std::string> problems;
  for (const std::string problem : kProblems) {
    if (Problem::parse(problem).operation() == operation) problems.push_back(problem);
  }
  return problems;
}

}  // namespace winnow::bench
