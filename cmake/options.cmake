# SPDX-License-Identifier: Apache-2.0
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)   # one set of objects serves the executable and the operator library
set(CMAKE_CXX_COMPILE_OPTIONS_PIE "-fPIC")   # programs too: they share the precompiled header with the libraries
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2")        # asserts stay on: they guard our own mistakes and cost nothing measurable

set(SLUICE_SANITIZE "" CACHE STRING "Sanitizers for our own code, e.g. address,undefined")
option(SLUICE_FUZZ "Build the libFuzzer targets of tests/fuzz (clang)" OFF)
option(SLUICE_TORCH "Build the parts that use libtorch; off only for the sanitizer build of the file readers" ON)

add_library(sluice_options INTERFACE)
target_include_directories(sluice_options INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_options(sluice_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror>)
if(SLUICE_SANITIZE)
  target_compile_options(sluice_options INTERFACE -fsanitize=${SLUICE_SANITIZE} -fno-omit-frame-pointer -g1)
  target_link_options(sluice_options INTERFACE -fsanitize=${SLUICE_SANITIZE})
endif()

# The commit, for --version and run records; "unknown" in a tarball.
find_package(Git QUIET)
set(SLUICE_GIT_HASH "unknown")
if(GIT_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} -C ${CMAKE_SOURCE_DIR} rev-parse --short=12 HEAD
    OUTPUT_VARIABLE hash OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE result)
  if(result EQUAL 0)
    set(SLUICE_GIT_HASH ${hash})
  endif()
endif()
set_source_files_properties(${CMAKE_SOURCE_DIR}/src/sluice/config/version.cpp PROPERTIES
  COMPILE_DEFINITIONS "SLUICE_VERSION=\"${PROJECT_VERSION}\";SLUICE_GIT_HASH=\"${SLUICE_GIT_HASH}\"")
