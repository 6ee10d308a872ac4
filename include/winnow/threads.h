// How many threads the CPU implementations use. Results are bit for bit the same for every number.
#pragma once

namespace winnow {

// Default: WINNOW_NUM_THREADS, else the CPUs this process may run on.
int num_threads();

// For the next operation; not while one runs. Workspace sizes depend on it: ask again after it.
void set_num_threads(int threads);

}  // namespace winnow
