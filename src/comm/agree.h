// What ranks do in agreement: go on together or fail together.
//
// An exception on one rank alone leaves the others waiting in their next exchange. Where work can
// fail on some ranks only (a file that one machine lacks, a full disk) it is done inside `together`,
// and its failure is everybody's.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "winnow/communicator.h"
#include "winnow/error.h"

namespace winnow::comm {

// What every rank of a group throws at the same place, with the same message.
class GroupError : public Error {
 public:
  using Error::Error;
};

// "rank 2 of 4"
std::string name_of(const Communicator& group, std::int64_t rank);

// What an exception says; of one that says nothing to a user (out of memory), in words.
std::string message_of(const std::exception_ptr& error);

// Throws GroupError on all ranks if `mine` is an exception on any: with the words of all if they are
// the same, else with the name and the words of the first.
void agree(Communicator& group, const std::exception_ptr& mine);

// Returns body() where it succeeds on all ranks; body makes no exchange. In a group of one its
// exceptions are its own.
template <class Body>
auto together(Communicator& group, Body&& body) {
  using Result = std::invoke_result_t<Body>;
  if (group.size() == 1) return body();
  std::exception_ptr error;
  if constexpr (std::is_void_v<Result>) {
    try {
      body();
    } catch (...) {
      error = std::current_exception();
    }
    agree(group, error);
  } else {
    std::optional<Result> result;
    try {
      result.emplace(body());
    } catch (...) {
      error = std::current_exception();
    }
    agree(group, error);
    return std::move(*result);
  }
}

// Whether it is true on any rank.
bool any(Communicator& group, bool mine);

// The text of rank 0.
std::string text_of_first(Communicator& group, const std::string& mine);

}  // namespace winnow::comm
