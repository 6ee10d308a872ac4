#include "base/selection_statistics.h"

namespace winnow {
namespace {
thread_local SelectionStatistics last;
}  // namespace

void note_selection(const SelectionStatistics& statistics) { last = statistics; }
SelectionStatistics last_selection_statistics() { return last; }

}  // namespace winnow
