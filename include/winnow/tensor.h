// A tensor view: where numbers lie, of which type, in which shape. It owns nothing.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace winnow {

// kE4M3: 8 bits S.EEEE.MMM, bias 7, without infinities: the largest is 448, S.1111.111 is NaN.
// kE8M0: a scale of 8 bits, 2^(byte - 127); byte 255 is NaN, and byte 0 is 2^-127, not 0.
enum class DType : std::uint8_t { kF64, kF32, kBF16, kF16, kI64, kI32, kU8, kE4M3, kE8M0 };

std::int64_t dtype_bytes(DType dtype);
// "f64", "f32", "bf16", "f16", "i64", "i32", "u8", "e4m3", "e8m0"
const char* dtype_name(DType dtype);

struct Device {
  enum class Kind : std::uint8_t { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

inline constexpr int kMaxRank = 4;

// Element (i, j, ...) of `data` lies at i * strides[0] + j * strides[1] + ... (in elements, 64
// bit). An empty tensor (rank 0) stands for an argument that is left out. Whether an operation
// reads or writes a tensor is said where the operation is declared.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};
  Device device;

  bool empty() const { return rank == 0; }
  std::int64_t elements() const;  // product of the shape; 0 for an empty tensor
  bool contiguous() const;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  // View of rows [first, first + count) of the first axis.
  Tensor rows(std::int64_t first, std::int64_t count) const;
  // View of channels [first, first + count) of the last axis.
  Tensor channels(std::int64_t first, std::int64_t count) const;
  // View of a matrix with its two axes exchanged.
  Tensor transposed() const;
  // The same contiguous data under another shape of as many elements.
  Tensor reshape(std::initializer_list<std::int64_t> new_shape) const;
};

// A contiguous view of `data`.
Tensor make_tensor(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                   Device device = {});

// Where the work of a GPU is queued: a cudaStream_t, or null for the device's default stream.
struct Stream {
  void* handle = nullptr;
};

// Scratch memory lent to one call, on the device of its tensors. Its size is asked before with
// `..._workspace_bytes`; it needs no alignment and no initial content, and nothing in it outlives
// the call. On a GPU the call is queued on `stream` and returns at once; the memory is lent in the
// order of that stream.
struct Workspace {
  void* data = nullptr;
  std::int64_t bytes = 0;
  Stream stream{};
};

}  // namespace winnow
