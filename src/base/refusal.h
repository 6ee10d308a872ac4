// Why an implementation does not run: a sentence without a full stop, or none. It refers to fixed
// text, so that asking allocates nothing.
#pragma once

namespace winnow {

class Refusal {
 public:
  constexpr Refusal() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): a refusal is its sentence
  constexpr Refusal(const char* sentence) : sentence_(sentence) {}
  constexpr bool empty() const { return *sentence_ == '\0'; }
  constexpr const char* sentence() const { return sentence_; }

 private:
  const char* sentence_ = "";
};

}  // namespace winnow
