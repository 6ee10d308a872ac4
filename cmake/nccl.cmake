# NCCL, for groups of GPUs: optional, WINNOW_HAS_NCCL says whether it is there. It may lie in the system
# or, as in the wheel nvidia-nccl-cu13, in a folder of its own: include/nccl.h and lib/libnccl.so.2.
set(WINNOW_NCCL_ROOT "" CACHE PATH "Folder of NCCL, where it is not in the system's own")
set(WINNOW_HAS_NCCL OFF)
if(WINNOW_CUDA)
  find_path(WINNOW_NCCL_INCLUDE nccl.h HINTS ${WINNOW_NCCL_ROOT}/include ${CUDAToolkit_INCLUDE_DIRS})
  find_library(WINNOW_NCCL_LIBRARY NAMES nccl libnccl.so.2
               HINTS ${WINNOW_NCCL_ROOT}/lib ${CUDAToolkit_LIBRARY_DIR})
  if(WINNOW_NCCL_INCLUDE AND WINNOW_NCCL_LIBRARY)
    set(WINNOW_HAS_NCCL ON)
    add_library(winnow_nccl_library UNKNOWN IMPORTED)
    set_target_properties(winnow_nccl_library PROPERTIES
      IMPORTED_LOCATION ${WINNOW_NCCL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${WINNOW_NCCL_INCLUDE})
    message(STATUS "NCCL: ${WINNOW_NCCL_LIBRARY}")
  else()
    message(STATUS "NCCL: none, groups of GPUs will be refused")
  endif()
endif()
