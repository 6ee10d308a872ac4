// Where an implementation of select_topk or index_topk notes how its call went.
#pragma once

#include "winnow/selection_statistics.h"

namespace winnow {

void note_selection(const SelectionStatistics& statistics);

}  // namespace winnow
