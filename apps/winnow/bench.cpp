// winnow bench: how fast, and how far from what the machine can do.
#include "apps/winnow/commands.h"

namespace winnow::app {

void add_bench(CLI::App& app) {
  app.add_subcommand("bench", "time, GFLOP/s, GB/s and share of the machine's peak");
}

}  // namespace winnow::app
