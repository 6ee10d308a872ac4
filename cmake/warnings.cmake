# Warnings are errors, and arithmetic is what the source says: no contraction, no reassociation.
add_compile_options(
  -Wall -Wextra -Werror -Wshadow -Wnon-virtual-dtor -Wold-style-cast -Wcast-qual
  -Wno-psabi            # 32-byte vectors are always inlined
  -Wno-restrict         # GCC 12 reports std::string + char wrongly
  -ffp-contract=off
)
