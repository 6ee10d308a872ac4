// Any text as problems of the command line: problems whose text parses to themselves, or a
// winnow::Error.
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "bench/problem.h"
#include "winnow/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using winnow::bench::Problem;
  std::vector<std::string> words;
  std::istringstream text(std::string(reinterpret_cast<const char*>(data), size));
  for (std::string word; text >> word;) words.push_back(word);
  try {
    for (const std::string& problem : winnow::bench::split_problems(words)) {
      const std::string written = Problem::parse(problem).text();
      if (Problem::parse(written).text() != written) std::abort();
    }
  } catch (const winnow::Error&) {
  }
  return 0;
}
