// The winnow program: reads the command line, runs one subcommand, turns every failure into one
// line on standard error. Exit status: 0 well, 1 failed, 2 wrong use, 130 interrupted.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

#include "apps/winnow/commands.h"
#include "base/run_first.h"
#include "base/text.h"
#include "bench/case.h"
#include "comm/launch.h"
#include "winnow/error.h"
#include "winnow/implementations.h"
#include "winnow/threads.h"

namespace winnow::app {

namespace {

// After all that was printed before.
void print_error(const std::string& message) {
  std::fflush(stdout);
  fmt::print(stderr, "winnow: {}\n", message);
}

}  // namespace

void run_on_ranks(const CLI::App& command, const std::function<int(Communicator&)>& body) {
  const bool threads_given =
      command.count("--threads") > 0 || std::getenv("WINNOW_NUM_THREADS") != nullptr;
  const int status = comm::run_ranks(
      [&](Communicator& world) {
        if (!threads_given) comm::share_threads(world);
        return body(world);
      },
      print_error);
  if (status != 0) throw Exit{status};
}

void add_threads_option(CLI::App& command) {
  command
      .add_option_function<int>(
          "--threads", [](const int& n) { set_num_threads(n); },
          "threads to use; results do not depend on it (default: WINNOW_NUM_THREADS, else all "
          "CPUs)")
      ->type_name("N")
      ->check(CLI::Range(1, 1024).description(""));
}

void add_device_option(CLI::App& command, Device* device) {
  command
      .add_option_function<std::string>(
          "--device",
          [device](const std::string& text) {
            if (text == "cpu") return;
            int index = text == "cuda" ? 0 : -1;
            const std::string number = text.starts_with("cuda:") ? text.substr(5) : "";
            const char* end = number.data() + number.size();
            const auto [read, error] = std::from_chars(number.data(), end, index);
            if (index < 0 || read != end)
              throw UsageError("--device must be cpu, cuda or cuda:N, got " + text);
            *device = {Device::Kind::kCuda, index};
          },
          "where the operations run: cpu, cuda or cuda:N (default: cpu)")
      ->type_name("DEVICE");
}

namespace {

constexpr const char* kFooter = R"(Examples:
  winnow demo                                   trains a small model, compares sparse and dense
  winnow train examples/demo.json --resume      goes on with a run
  winnow generate build/demo/run --prompt "In the beginning"
  winnow plan examples/plan_78_layers.json      checks a configuration, says what it costs
  winnow info                                   this machine, as winnow sees it
  winnow why "index_topk rows=16 keys=4096"     who runs this call, and why others do not
  winnow check                                  every implementation against the reference
  winnow bench "sparse_attention rows=64"       time, GFLOP/s, share of the machine's peak

Environment:
  WINNOW_NUM_THREADS=N          threads of every operation
  WINNOW_CPU=portable|avx2|avx512|amx  limits the instruction sets
  WINNOW_PIN=OPERATION=IMPLEMENTATION,...
                                only this implementation may run the operation
  WINNOW_FORBID=OPERATION=IMPLEMENTATION,...
                                this one may not; the operation * is any
  WINNOW_LOG=1                  says once for each reason why a faster implementation did not run

Exit status: 0 well, 1 failed (one line on standard error says why), 2 wrong use.
winnow COMMAND --help explains a command, with examples.)";

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands(nullptr)) names.push_back(command->get_name());
  return names;
}

// Every long option of the program and of the subcommand that was chosen.
std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  auto add = [&](const CLI::App& from) {
    for (const CLI::Option* option : from.get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  };
  add(app);
  for (const CLI::App* command : app.get_subcommands()) add(*command);
  return names;
}

// What is wrong with a command line that CLI11 refused, in one line.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> rest = app.remaining(true);
  if (rest.empty()) return error.what();
  const std::string& word = rest.front();
  if (word.starts_with('-')) {
    const std::string name = word.substr(0, word.find('='));
    return fmt::format("there is no option {}; did you mean {}?", name,
                       nearest_name(name, option_names(app)));
  }
  if (app.get_subcommands().empty()) {
    return fmt::format("there is no command \"{}\"; {}", word,
                       name_hint(word, subcommand_names(app)));
  }
  return fmt::format("\"{}\" was not expected here", word);
}

int fail_usage(const CLI::App& app, const std::string& message) {
  std::string help = "winnow";
  for (const CLI::App* command : app.get_subcommands()) help += " " + command->get_name();
  print_error(fmt::format("{} ({} --help explains)", message, help));
  return 2;
}

// The implementations that an operation has in this build; none for a training step, which has no
// list.
std::vector<std::string> implementation_names(const bench::Operation& operation) {
  std::vector<std::string> names;
  const auto shapes = bench::make_shapes(bench::Problem::parse(operation.name));
  if (!shapes->parts().empty()) return names;
  for (const Verdict& v : shapes->explain().verdicts) names.push_back(v.implementation);
  return names;
}

// A name that nobody has would pin or forbid nothing, or everything, silently.
void check_name(const char* variable, const std::string& operation, const std::string& name) {
  std::vector<std::string> names;
  for (const bench::Operation& candidate : bench::operations()) {
    if (operation != "*" && operation != candidate.name) continue;
    const std::vector<std::string> more = implementation_names(candidate);
    if (more.empty() && operation != "*") return;
    for (const std::string& n : more) {
      if (std::find(names.begin(), names.end(), n) == names.end()) names.push_back(n);
    }
  }
  if (std::find(names.begin(), names.end(), name) != names.end()) return;
  throw UsageError(fmt::format("{}: {} implementation \"{}\" in this build; there are {}", variable,
                               operation == "*" ? "no operation has an" : operation + " has no",
                               name, choice_text(names, " and ")));
}

// What the environment says, before a command begins to answer.
void check_environment() {
  num_threads();
  auto check = [](const char* variable, const std::string& operation, const std::string& name) {
    try {
      if (operation != "*") bench::find_operation(operation);
    } catch (const Error& e) {
      throw UsageError(fmt::format("{}: {}", variable, e.what()));
    }
    check_name(variable, operation, name);
  };
  for (const auto& [operation, name] : pinned_implementations())
    check("WINNOW_PIN", operation, name);
  for (const auto& [operation, name] : forbidden_implementations())
    check("WINNOW_FORBID", operation, name);
}

// What can be made smaller where memory ends, by command.
const char* memory_advice(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    const std::string& name = command->get_name();
    if (name == "check" || name == "bench" || name == "why")
      return "use smaller sizes in the problem; winnow why PROBLEM says what it takes";
    if (name == "train")
      return "lower data.micro_batch_sequences, data.context or the sizes of the model in the "
             "configuration, or use a smaller text";
    if (name == "generate") return "lower --max-tokens, or use a smaller model";
  }
  return "free some memory and run it again";
}

int run(int argc, char** argv) {
  CLI::App app(
      "winnow: DeepSeek Sparse Attention. A small indexer scores all visible keys of a "
      "query, the best k are kept,\nand attention reads only those.");
  app.name("winnow");
  app.footer(kFooter);
  app.set_help_flag("-h,--help", "explains the program or a command");
  app.set_version_flag("--version", "winnow " WINNOW_VERSION, "prints the version");
  app.require_subcommand(0, 1);
  add_demo(app);
  add_train(app);
  add_generate(app);
  add_plan(app);
  add_info(app);
  add_why(app);
  add_check(app);
  add_bench(app);
  try {
    check_environment();
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) {
      fmt::print(stderr, "{}", app.help());
      return 2;
    }
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request);
  } catch (const CLI::ParseError& e) {
    return fail_usage(app, usage_message(app, e));
  } catch (const UsageError& e) {
    return fail_usage(app, e.what());
  } catch (const Error& e) {  // of the problem grammar
    if (std::string_view(e.what()).rfind("[problem]", 0) != 0) throw;
    return fail_usage(app, e.what());
  } catch (const std::bad_alloc&) {
    print_error(fmt::format("this does not fit into memory; {}", memory_advice(app)));
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace winnow::app

int main(int argc, char** argv) {
  int status = 1;
  try {
    status = winnow::app::run(argc, argv);
  } catch (const winnow::app::Exit& e) {
    status = e.status;
  } catch (const winnow::Error& e) {
    winnow::app::print_error(e.what());
    status = e.status() == winnow::Status::kInterrupted ? 130 : 1;
  } catch (const std::exception& e) {
    winnow::app::print_error(e.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    fmt::print(stderr, "winnow: standard output could not be written\n");
    if (status == 0) status = 1;
  }
  return status;
}
