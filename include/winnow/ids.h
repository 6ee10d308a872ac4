// What an id of a selected key means, and the way from one meaning to another.
//
// - KeyIds are keys of the call's key space: what an operation over keys in one piece gives and
//   takes.
// - RequestIds are positions inside the row's request: what paged keys go by.
// They are two types, so that neither passes for the other; converting twice does not compile.
// - -1 stays -1. An id outside its row's request becomes -1, which every operation ignores.
// - A conversion may work in place. Ids have any strides; arithmetic is in 64 bit.
// - What breaks a rule throws winnow::Error before anything is written.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

struct KeyIds {
  Tensor ids;  // int32 [rows, topk]
};
struct RequestIds {
  Tensor ids;  // int32 [rows, topk]
};

// Where the request of each row lies in the call's key space: positions [0, length) are the keys
// [base, base + length). A length <= 0: a row without a request.
struct RequestRows {
  Tensor base;    // int32 [rows]
  Tensor length;  // int32 [rows]
};

void convert_ids(const KeyIds& ids, const RequestRows& rows, const RequestIds& out);
void convert_ids(const RequestIds& ids, const RequestRows& rows, const KeyIds& out);

// One rank's part of a request whose keys are dealt to `ranks` ranks, `interleave` positions at a
// time. Position j belongs to rank j / interleave % ranks, and is its position
// j / (interleave * ranks) * interleave + j % interleave.
struct Shard {
  std::int64_t rank = 0, ranks = 1, interleave = 1;
};

// How many of the first `length` positions of a request the rank holds.
std::int64_t shard_length(const Shard& shard, std::int64_t length);

// Positions of the request to positions of the rank's part; those of other ranks become -1.
void to_shard(const RequestIds& ids, const Shard& shard, const RequestIds& out);
// And back.
void from_shard(const RequestIds& ids, const Shard& shard, const RequestIds& out);

}  // namespace winnow
