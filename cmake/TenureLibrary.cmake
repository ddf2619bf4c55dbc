# libtenure, its headers and the CMake package that C++ programs find.

set(TENURE_GENERATED ${PROJECT_BINARY_DIR}/generated)
configure_file(${PROJECT_SOURCE_DIR}/cmake/config.h.in ${TENURE_GENERATED}/tenure/config.h)

add_library(tenure SHARED ${TENURE_SOURCES})
add_library(Tenure::tenure ALIAS tenure)
tenure_compile(tenure)
target_compile_features(tenure PUBLIC cxx_std_20)
# Our functions may call each other without asking whether a program replaced them.
target_compile_options(tenure PRIVATE -fno-semantic-interposition)
target_link_options(tenure PRIVATE LINKER:-Bsymbolic-functions)
target_include_directories(tenure PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<BUILD_INTERFACE:${TENURE_GENERATED}>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(tenure PUBLIC Tenure::torch)
foreach(library IN LISTS TENURE_OPTIONAL_LIBRARIES)
  target_link_libraries(tenure PRIVATE $<BUILD_INTERFACE:${library}>)
endforeach()
target_link_options(tenure PRIVATE LINKER:--as-needed LINKER:--no-undefined)
tenure_precompile(tenure <ATen/core/Tensor.h> <c10/core/StorageImpl.h>)
set_source_files_properties(${TENURE_TORCH_FREE} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
tenure_unite(tenure 8)

# In a wheel the library is site-packages/tenure/lib/libtenure.so.
set(tenure_rpath $ORIGIN/../../torch/lib)
if(NOT TENURE_PORTABLE)
  list(APPEND tenure_rpath ${TENURE_TORCH_LIB_DIR})
endif()
set_target_properties(tenure PROPERTIES INSTALL_RPATH "${tenure_rpath}")

# A wheel brings it along, for machines that have none: see _guard.py.
if(TENURE_PORTABLE AND TENURE_HAVE_SQLITE)
  file(REAL_PATH ${SQLite3_LIBRARY} sqlite)
  install(FILES ${sqlite} DESTINATION lib/beside RENAME libsqlite3.so.0)
endif()

# Always lib/, never lib64/: the package's folder is looked into by name.
install(TARGETS tenure EXPORT TenureTargets LIBRARY DESTINATION lib)
foreach(header IN LISTS TENURE_HEADERS)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
endforeach()
install(FILES ${TENURE_GENERATED}/tenure/config.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tenure)

include(CMakePackageConfigHelpers)
set(package_dir lib/cmake/Tenure)
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/TenureConfig.cmake.in ${PROJECT_BINARY_DIR}/TenureConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/TenureConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/TenureConfig.cmake ${PROJECT_BINARY_DIR}/TenureConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/TenureTorch.cmake
  DESTINATION ${package_dir})
install(EXPORT TenureTargets NAMESPACE Tenure:: DESTINATION ${package_dir})
