# The extension module tenure._C and _build.py, which says what was built.

if(NOT TARGET Tenure::torch_python)
  message(FATAL_ERROR "The torch in ${TENURE_TORCH_ROOT} has no Python: give -DTENURE_PYTHON=OFF.")
endif()

# tenure_add_extension(TARGET SOURCE...): a Python extension module of that name, on libtenure,
# with the pybind11 that torch itself was built with, so that torch's type casters apply.
function(tenure_add_extension target)
  Python_add_library(${target} MODULE WITH_SOABI ${ARGN})
  tenure_compile(${target})
  target_compile_definitions(${target} PRIVATE TORCH_EXTENSION_NAME=${target})
  target_link_libraries(${target} PRIVATE tenure Tenure::torch_python)
  # pybind11 demands hidden visibility: its types are hidden.
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden)
  tenure_precompile(${target} <torch/csrc/utils/pybind.h>)
  tenure_unite(${target} 3)
endfunction()

file(GLOB bindings CONFIGURE_DEPENDS python/bindings/*.cpp)
if(bindings)
  tenure_add_extension(_C ${bindings})
  set_target_properties(_C PROPERTIES INSTALL_RPATH $ORIGIN/lib)
  install(TARGETS _C LIBRARY DESTINATION .)
endif()

set(python_parts ${TENURE_PARTS})
list(TRANSFORM python_parts REPLACE "(.+)" "\"\\1\"")
list(JOIN python_parts ", " python_parts)
foreach(name ASIO SQLITE OPENSSL CUDA)
  if(TENURE_HAVE_${name})
    set(PYTHON_HAVE_${name} True)
  else()
    set(PYTHON_HAVE_${name} False)
  endif()
endforeach()
configure_file(cmake/_build.py.in ${PROJECT_BINARY_DIR}/_build.py)
install(FILES ${PROJECT_BINARY_DIR}/_build.py DESTINATION .)
