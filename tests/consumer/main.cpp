// A program that uses an installed winnow: the two best of five scores.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "winnow/communicator.h"
#include "winnow/select_topk.h"
using namespace winnow;

int main() {
  const float scores[] = {0.5f, 3, -1, 2, 1};
  const std::int32_t start = 0, end = 5;
  std::int32_t ids[2], length = 0;
  SelectTopkArgs args;
  args.scores = make_tensor(scores, DType::kF32, {1, 5});
  args.starts = make_tensor(&start, DType::kI32, {1});
  args.ends = make_tensor(&end, DType::kI32, {1});
  args.topk_indices = make_tensor(ids, DType::kI32, {1, 2});
  args.topk_lengths = make_tensor(&length, DType::kI32, {1});
  std::vector<char> scratch(static_cast<std::size_t>(select_topk_workspace_bytes(args)));
  select_topk(args, {scratch.data(), std::ssize(scratch)});
  std::printf("%d keys: %d %d, by %s\n", length, ids[0], ids[1],
              last_implementation("select_topk").c_str());
  return ids[0] == 1 && ids[1] == 3 && single_communicator()->size() == 1 ? 0 : 1;
}
