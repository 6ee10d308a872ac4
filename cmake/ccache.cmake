# A compiler cache, where there is one.
find_program(WINNOW_CCACHE ccache)
if(WINNOW_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${WINNOW_CCACHE})
endif()
