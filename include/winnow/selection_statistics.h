// How a selection went, beside what it gave.
#pragma once

#include <cstdint>

namespace winnow {

struct SelectionStatistics {
  std::int64_t rows = 0;
  std::int64_t spans = 1;    // pieces that every row was cut into
  std::int64_t repairs = 0;  // pieces streamed once more, since a sample had misled; of CPUs alone
};

// Of the last call of select_topk or index_topk on this thread.
SelectionStatistics last_selection_statistics();

}  // namespace winnow
