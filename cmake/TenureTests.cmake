# The C++ tests: one executable per folder of tests/cpp, named after it. tests/cpp/concurrency is
# linked with the torch-free sources alone and has objects of its own in place of storages
# (objects.h); it is built twice, as all the rest is and for TSan.

# Extensions that the Python tests load; they land in ${TENURE_TEST_MODULES}, which pytest has on
# its path.
set(TENURE_TEST_MODULES ${PROJECT_BINARY_DIR}/modules)
file(GLOB extensions CONFIGURE_DEPENDS tests/*/CMakeLists.txt tests/cpp/*/CMakeLists.txt)
foreach(file IN LISTS extensions)
  cmake_path(GET file PARENT_PATH folder)
  add_subdirectory(${folder})
endforeach()

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(STATUS "GoogleTest not found: no C++ tests")
  return()
endif()
# Where it is an archive it needs this after itself, and -nostdlib++ leaves it out.
target_link_libraries(GTest::gtest INTERFACE m)

# tenure_register_tests(NAME TARGET): an executable as a test of ctest, all its cases in one process:
# starting one with torch takes longer than most of them do.
function(tenure_register_tests name target)
  add_test(NAME ${name} COMMAND ${target} --gtest_brief=1)
  # With one thread torch gives the same bits each time. With more, the first products of a process
  # or a thread may run on another number of them than the next, and MKL's AVX2 kernels then differ.
  set_tests_properties(${name} PROPERTIES TIMEOUT 300 ENVIRONMENT OMP_NUM_THREADS=1)
endfunction()

# Folders whose files each have helpers of the same names.
set(TENURE_TESTS_APART core core_device fake_accelerator pipeline)

function(tenure_add_tests folder)
  file(GLOB sources CONFIGURE_DEPENDS tests/cpp/${folder}/*.cpp)
  if(NOT sources)
    return()
  endif()
  set(target tenure_${folder}_tests)
  add_executable(${target} ${sources})
  tenure_compile(${target})
  # What is tested is optimised as what is shipped; the tests themselves need not be, which saves a
  # quarter of the time that they take to compile.
  target_compile_options(${target} PRIVATE -O1)
  target_link_libraries(
    ${target} PRIVATE tenure ${TENURE_OPTIONAL_LIBRARIES}
                      $<TARGET_NAME_IF_EXISTS:fake_accelerator> GTest::gtest_main)
  target_link_options(${target} PRIVATE LINKER:--as-needed)
  # One precompiled header serves them all.
  get_property(first GLOBAL PROPERTY TENURE_FIRST_TESTS)
  if(TENURE_PCH AND first)
    target_precompile_headers(${target} REUSE_FROM ${first})
  else()
    tenure_precompile(${target} <ATen/core/Tensor.h> <gtest/gtest.h>)
    set_property(GLOBAL PROPERTY TENURE_FIRST_TESTS ${target})
  endif()
  if(NOT folder IN_LIST TENURE_TESTS_APART)
    tenure_unite(${target} 8)
  endif()
  tenure_register_tests(${folder} ${target})
endfunction()

# tenure_add_torch_free_tests(TARGET OPTION...): tests/cpp/concurrency, compiled with these options.
function(tenure_add_torch_free_tests target)
  file(GLOB sources CONFIGURE_DEPENDS tests/cpp/concurrency/*.cpp)
  add_executable(${target} ${sources} ${TENURE_TORCH_FREE})
  tenure_compile(${target})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${TENURE_GENERATED})
  target_compile_options(${target} PRIVATE ${ARGN})
  target_link_options(${target} PRIVATE ${ARGN})
  target_link_libraries(${target} PRIVATE GTest::gtest_main)
  tenure_unite(${target} 8)
endfunction()

file(GLOB folders CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/tests/cpp tests/cpp/*)
foreach(folder IN LISTS folders)
  set(path ${PROJECT_SOURCE_DIR}/tests/cpp/${folder})
  if(folder STREQUAL "concurrency")
    tenure_add_torch_free_tests(tenure_concurrency_tests)
    tenure_register_tests(concurrency tenure_concurrency_tests)
  elseif(IS_DIRECTORY ${path} AND NOT EXISTS ${path}/CMakeLists.txt)
    tenure_add_tests(${folder})
  endif()
endforeach()
if(TARGET tenure_store_tests)
  target_sources(tenure_store_tests PRIVATE tests/fuzz/live.cpp)
  target_compile_definitions(
    tenure_store_tests PRIVATE TENURE_FUZZ_CORPUS="${PROJECT_SOURCE_DIR}/tests/fuzz/corpus")
endif()
if(NOT TENURE_SANITIZE)
  tenure_add_torch_free_tests(tenure_concurrency_tsan -fsanitize=thread)
  tenure_register_tests(tsan.concurrency tenure_concurrency_tsan)
endif()
