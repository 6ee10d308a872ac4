# Warnings are errors on the compilers that are tested, and arithmetic is what the source says: no
# contraction, no reassociation.
set(tested OFF)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^12\\.")
  set(tested ON)
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION MATCHES "^14\\.")
  set(tested ON)
endif()
option(WINNOW_WERROR "Warnings are errors" ${tested})

set(warnings
  -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wold-style-cast -Wcast-qual
  $<$<BOOL:${WINNOW_WERROR}>:-Werror>
  -Wno-psabi            # 32-byte vectors are always inlined
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>  # GCC 12 reports std::string + char wrongly
  -ffp-contract=off
)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${warnings}>")
