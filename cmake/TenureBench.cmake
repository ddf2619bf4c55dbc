# The C++ benchmarks: one executable per file of bench/.

find_package(benchmark QUIET)
if(NOT benchmark_FOUND)
  message(STATUS "Google Benchmark not found: no C++ benchmarks")
  return()
endif()

file(GLOB sources CONFIGURE_DEPENDS bench/*.cpp)
foreach(source IN LISTS sources)
  cmake_path(GET source STEM name)
  add_executable(bench_${name} ${source})
  tenure_compile(bench_${name})
  target_link_libraries(bench_${name} PRIVATE tenure benchmark::benchmark_main)
  set_target_properties(bench_${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bench)
endforeach()
