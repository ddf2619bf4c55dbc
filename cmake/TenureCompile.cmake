# How everything of ours is compiled: language, warnings, sanitizers, ccache.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# Line tables are what a backtrace needs; full debug information of torch's headers would
# triple the size of each object.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")
# What is shipped is optimised as what is tested: GCC 12 and 13 miscompile an -O3 loop of core.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

# What is shipped does not tell where it was built: __FILE__, also in torch's headers, and line
# tables are relative to the source folder and to torch's. CMakeLists.txt found torch before this.
# The last one that fits counts, and .venv with torch in it may lie in the source folder.
add_compile_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}=.
                    -ffile-prefix-map=${PROJECT_BINARY_DIR}=build
                    -ffile-prefix-map=${TENURE_TORCH_ROOT}/include=torch/include)

find_program(CCACHE ccache)
mark_as_advanced(CCACHE)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without the sloppiness ccache refuses every file that uses a precompiled header. Paths below
  # the source folder are taken as relative to it, so that one clone finds what another compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
      CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  endif()
endif()

# tenure_compile(TARGET): our warnings and sanitizers for one of our own targets.
function(tenure_compile target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Collecting garbage in the compiler takes a tenth of its time, and saves memory that is there.
    target_compile_options(${target} PRIVATE --param=ggc-min-expand=400
                                             --param=ggc-min-heapsize=1048576)
    # g++ 12 and 13 see these in std::string where there are none (GCC bugs 105329 and 105651).
    target_compile_options(${target} PRIVATE -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow)
  endif()
  if(TENURE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(TENURE_SANITIZE)
    target_compile_options(
      ${target} PRIVATE -fsanitize=${TENURE_SANITIZE} -fno-sanitize-recover=all
                        -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${TENURE_SANITIZE})
    # torch does not export the type information of its Python hooks, which this check asks for.
    target_compile_options(${target} PRIVATE -fno-sanitize=vptr)
  endif()
endfunction()

# tenure_precompile(TARGET HEADER...): a precompiled header, where the build wants one.
function(tenure_precompile target)
  if(TENURE_PCH)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# tenure_unite(TARGET SIZE): compiles its sources in groups of one folder, each group at once. Most of
# what compiling takes is torch's headers. SIZE keeps a group below half a minute. A new source moves
# others of its own folder alone.
function(tenure_unite target size)
  if(NOT TENURE_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP
                                             UNITY_BUILD_RELOCATABLE ON)
  # For g++ the sources are headers then, whose unnamed namespaces it suspects.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  get_target_property(sources ${target} SOURCES)
  list(SORT sources)
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(GET folder FILENAME folder)
    math(EXPR group "0${count_${folder}} / ${size}")
    math(EXPR count_${folder} "0${count_${folder}} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder}_${group})
  endforeach()
endfunction()
