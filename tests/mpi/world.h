// All ranks of a test that mpirun started.
#pragma once

#include "winnow/communicator.h"

namespace winnow {

Communicator& world();

}  // namespace winnow
