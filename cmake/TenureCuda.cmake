# libtenure_cuda, where torch has CUDA and the toolkit's headers are there. Loaded on demand, so
# libtenure itself runs on machines without CUDA.

find_path(TENURE_CUDA_INCLUDE_DIR cuda_runtime_api.h
  HINTS $ENV{CUDA_HOME}/include /usr/local/cuda/include)
mark_as_advanced(TENURE_CUDA_INCLUDE_DIR)
set(c10_cuda ${TENURE_TORCH_LIB_DIR}/libc10_cuda.so)
set(TENURE_HAVE_CUDA 0)
if(NOT EXISTS ${c10_cuda})
  return() # a torch without CUDA: nothing is missing
endif()
if(NOT TENURE_CUDA_INCLUDE_DIR)
  message(STATUS "CUDA headers not found: storages on devices are counted, not traced")
  return()
endif()

set(TENURE_HAVE_CUDA 1)
add_library(tenure_cuda SHARED tenure/inspect/cuda/tracker.cpp tenure/core/cuda/meter.cpp)
tenure_compile(tenure_cuda)
target_include_directories(tenure_cuda SYSTEM PRIVATE ${TENURE_CUDA_INCLUDE_DIR})
target_link_libraries(tenure_cuda PRIVATE tenure ${c10_cuda})
set_target_properties(tenure_cuda PROPERTIES INSTALL_RPATH "$ORIGIN;${tenure_rpath}")
install(TARGETS tenure_cuda LIBRARY DESTINATION lib)
