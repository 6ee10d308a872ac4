// The subcommands: one file each, which adds itself to the program. A callback throws to fail.
#pragma once

#include <CLI/CLI.hpp>
#include <stdexcept>
#include <string>

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

// A line on standard error, after all that was printed before.
void print_error(const std::string& message);

// --threads N; takes effect while the command line is read.
void add_threads_option(CLI::App& command);

// --device cpu|cuda|cuda:N; `device` lives as long as the command.
void add_device_option(CLI::App& command, Device* device);

}  // namespace winnow::app
