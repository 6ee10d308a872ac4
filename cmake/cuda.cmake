# The CUDA toolkit. The runtime is linked statically: the library loads on a machine without a GPU.
#
# Portable kernels carry code for 8.0 (A100 and what runs its binaries), its PTX for whatever comes
# later, and code for 9.0, so that no H100 compiles at run time.
set(WINNOW_PORTABLE_ARCHITECTURES "80;90-real" CACHE STRING "Architectures of the portable kernels")
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(CMAKE_CUDA_COMPILER nvcc PATHS /usr/local/cuda/bin)
endif()
set(CMAKE_CUDA_ARCHITECTURES 80)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(WINNOW_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${WINNOW_CCACHE})
endif()
set(CMAKE_CUDA_STANDARD_REQUIRED OFF)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
# CMake 3.25 knows no CUDA_STANDARD 20 for this compiler.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-lineinfo;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra,-Wno-psabi>"
  "$<$<AND:$<BOOL:${WINNOW_WERROR}>,$<COMPILE_LANGUAGE:CUDA>>:-Werror=all-warnings>")
