# Finds torch and defines
#   Tenure::torch         libtorch: headers, ABI, libtorch_cpu, libc10 and the umbrella libtorch
#   Tenure::torch_python  libtorch_python, for extension modules
#   TENURE_TORCH_ROOT, TENURE_TORCH_VERSION, TENURE_TORCH_MINOR, TENURE_TORCH_LIB_DIR
#
# The root is TENURE_TORCH_ROOT where it is given, else the torch of the Python interpreter
# (Python_EXECUTABLE, else the python3 on the PATH). Used in the tree and, installed beside
# TenureConfig.cmake, by programs that use Tenure.
#
# torch's own find_package(Torch) is not used: that of a CUDA wheel demands a CUDA toolkit,
# which neither Tenure nor the programs that use it need.

if(TARGET Tenure::torch)
  return()
endif()

function(_tenure_find_torch_root)
  set(python ${Python_EXECUTABLE})
  if(NOT python)
    find_program(TENURE_PYTHON_EXECUTABLE NAMES python3 python)
    mark_as_advanced(TENURE_PYTHON_EXECUTABLE)
    set(python ${TENURE_PYTHON_EXECUTABLE})
  endif()
  if(python)
    # Finds the package without importing it: that would take seconds.
    execute_process(
      COMMAND ${python} -c "import importlib.util as u; s = u.find_spec('torch'); \
print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT root)
    message(FATAL_ERROR "Tenure needs torch and found none in ${python}: "
                        "pip install torch there, or give -DTENURE_TORCH_ROOT=/path/to/torch.")
  endif()
  # Not cached: the next run of CMake may be for another Python.
  set(TENURE_TORCH_ROOT ${root} PARENT_SCOPE)
endfunction()

if(NOT TENURE_TORCH_ROOT)
  _tenure_find_torch_root()
endif()
set(TENURE_TORCH_LIB_DIR ${TENURE_TORCH_ROOT}/lib)

# version.h moved to torch/headeronly in 2.9; the older place includes the newer.
function(_tenure_read_torch_version)
  foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    set(file ${TENURE_TORCH_ROOT}/include/${header})
    if(EXISTS ${file})
      file(STRINGS ${file} defines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
      if(defines)
        list(TRANSFORM defines REPLACE ".* ([0-9]+).*" "\\1")
        list(JOIN defines "." version)
        string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor ${version})
        set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
        set(TENURE_TORCH_VERSION ${version} PARENT_SCOPE)
        set(TENURE_TORCH_MINOR ${minor} PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  message(FATAL_ERROR "There is no torch in ${TENURE_TORCH_ROOT} (no include/torch version header): "
                      "give -DTENURE_TORCH_ROOT=/path/to/torch.")
endfunction()
_tenure_read_torch_version()

add_library(Tenure::torch_cpu SHARED IMPORTED)
set_target_properties(Tenure::torch_cpu PROPERTIES
  IMPORTED_LOCATION ${TENURE_TORCH_LIB_DIR}/libtorch_cpu.so)
add_library(Tenure::c10 SHARED IMPORTED)
set_target_properties(Tenure::c10 PROPERTIES IMPORTED_LOCATION ${TENURE_TORCH_LIB_DIR}/libc10.so)

add_library(Tenure::torch INTERFACE IMPORTED)
target_include_directories(Tenure::torch SYSTEM INTERFACE
  ${TENURE_TORCH_ROOT}/include ${TENURE_TORCH_ROOT}/include/torch/csrc/api/include)
target_link_libraries(Tenure::torch INTERFACE Tenure::torch_cpu Tenure::c10)

# Which libstdc++ there is to link. torch brings the system's into the process. A compiler that has a
# static one alone would put a second beside it, whose locales are others: the first number that is
# written crashes.
function(_tenure_find_libstdcxx)
  set(TENURE_LINK_LIBSTDCXX -lstdc++ PARENT_SCOPE)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR IS_ABSOLUTE "${found}")
    return()
  endif()
  find_library(TENURE_LIBSTDCXX NAMES libstdc++.so.6
               PATHS /lib/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu /usr/lib64)
  mark_as_advanced(TENURE_LIBSTDCXX)
  if(NOT TENURE_LIBSTDCXX)
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} has a static libstdc++ alone, and torch uses the shared one: "
                        "give -DTENURE_LIBSTDCXX=/path/to/libstdc++.so.6, or another compiler.")
  endif()
  set(TENURE_LINK_LIBSTDCXX ${TENURE_LIBSTDCXX} PARENT_SCOPE)
  target_link_options(Tenure::torch INTERFACE -nostdlib++)
  target_link_libraries(Tenure::torch INTERFACE ${TENURE_LIBSTDCXX} m)
endfunction()
_tenure_find_libstdcxx()

target_link_options(Tenure::torch INTERFACE
  # First, so that what has no other home is found there: torch's libraries hold parts of an older
  # libstdc++ and let others see them, and std::filesystem::remove_all of torch 2.11 for CUDA crashes.
  "LINKER:--push-state,--no-as-needed,${TENURE_LINK_LIBSTDCXX},--pop-state"
  # libtorch.so is an empty umbrella whose only use is to load libtorch_cuda where there is one.
  "LINKER:--push-state,--no-as-needed,${TENURE_TORCH_LIB_DIR}/libtorch.so,--pop-state"
  # A CUDA torch needs CUDA libraries that its own RPATH finds, but a linker would not.
  "LINKER:--allow-shlib-undefined")

# Which std::string torch was built with. Every wheel since 2.7 has the new one.
set(_tenure_torch_config ${TENURE_TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake)
if(EXISTS ${_tenure_torch_config})
  file(STRINGS ${_tenure_torch_config} _tenure_old_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(_tenure_old_abi)
    target_compile_definitions(Tenure::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=0)
  endif()
endif()

if(EXISTS ${TENURE_TORCH_LIB_DIR}/libtorch_python.so)
  add_library(Tenure::torch_python SHARED IMPORTED)
  set_target_properties(Tenure::torch_python PROPERTIES
    IMPORTED_LOCATION ${TENURE_TORCH_LIB_DIR}/libtorch_python.so)
  target_link_libraries(Tenure::torch_python INTERFACE Tenure::torch)
endif()
