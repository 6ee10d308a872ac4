// The subcommands: one file each, which adds itself to the program. A callback throws to fail.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <stdexcept>
#include <string>

#include "winnow/communicator.h"
#include "winnow/tensor.h"

namespace winnow::app {

void add_info(CLI::App& app);
void add_why(CLI::App& app);
void add_check(CLI::App& app);
void add_bench(CLI::App& app);
void add_bench_train(CLI::App& bench);  // of "bench"
void add_train(CLI::App& app);
void add_generate(CLI::App& app);
void add_demo(CLI::App& app);
void add_plan(CLI::App& app);

// The command line asks for something that does not exist: exit status 2 instead of 1.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Ends the program with this status and no further message.
struct Exit {
  int status = 0;
};

// Runs the command on all processes that were started together (comm/launch.h). Those on the same
// processors share them, unless --threads or the environment says how many a process has. A status
// other than 0 is thrown as Exit.
void run_on_ranks(const CLI::App& command, const std::function<int(Communicator&)>& body);

// --threads N; takes effect while the command line is read.
void add_threads_option(CLI::App& command);

// --device cpu|cuda|cuda:N; `device` lives as long as the command.
void add_device_option(CLI::App& command, Device* device);

}  // namespace winnow::app
