// Sums over the ranks of a group, made of what a Communicator moves.
//
// A sum is ((rank 0 + rank 1) + rank 2) + ..., element by element: the same bits on every rank, in
// every run and with every engine, whatever the sizes of messages. Arrays lie on the group's device.
#pragma once

#include <span>

#include "winnow/communicator.h"

namespace winnow::comm {

// Every rank's data become the sum.
void sum(Communicator& group, std::span<float> data);
void sum(Communicator& group, std::span<double> data);
// Many arrays as if they lay end to end: few messages for many small ones.
void sum(Communicator& group, std::span<const std::span<float>> arrays);

// mine = the rank-th of size() equal parts of the sum of `parts`.
void reduce_scatter_sum(Communicator& group, std::span<const float> parts, std::span<float> mine);
void reduce_scatter_sum(Communicator& group, std::span<const double> parts, std::span<double> mine);

// all = `mine` of every rank, in the order of ranks.
template <class T>
void all_gather(Communicator& group, std::span<const T> mine, std::span<T> all) {
  group.all_gather(std::as_bytes(mine), std::as_writable_bytes(all));
}

}  // namespace winnow::comm
