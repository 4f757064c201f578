# SPDX-License-Identifier: Apache-2.0
# Every third-party part, by the short name that CMakeLists.txt uses: sluice_dep_NAME.
# All but libtorch are header-only or linked statically, so that what we build runs where it is copied to.
find_package(Threads REQUIRED)
find_package(GTest REQUIRED)

function(sluice_dependency name)
  cmake_parse_arguments(arg "" "" "LINKS;INCLUDES;DEFINES" ${ARGN})
  add_library(sluice_dep_${name} INTERFACE)
  target_link_libraries(sluice_dep_${name} INTERFACE ${arg_LINKS})
  target_include_directories(sluice_dep_${name} SYSTEM INTERFACE ${arg_INCLUDES})
  target_compile_definitions(sluice_dep_${name} INTERFACE ${arg_DEFINES})
endfunction()

function(sluice_static_library_file variable file)
  find_library(${variable} ${file})
  if(NOT ${variable})
    message(FATAL_ERROR "${file} not found: run `make setup`, which installs the system packages that the build needs")
  endif()
endfunction()

sluice_static_library_file(PCRE2_ARCHIVE libpcre2-8.a)
sluice_static_library_file(UTF8PROC_ARCHIVE libutf8proc.a)

sluice_dependency(threads  LINKS Threads::Threads)
sluice_dependency(fmt      DEFINES FMT_HEADER_ONLY)
sluice_dependency(spdlog   DEFINES SPDLOG_HEADER_ONLY SPDLOG_FMT_EXTERNAL FMT_HEADER_ONLY)
sluice_dependency(xxhash   DEFINES XXH_INLINE_ALL)
sluice_dependency(json)
sluice_dependency(toml     DEFINES TOML_HEADER_ONLY=1)
sluice_dependency(pcre2    LINKS ${PCRE2_ARCHIVE} DEFINES PCRE2_STATIC PCRE2_CODE_UNIT_WIDTH=8)
sluice_dependency(utf8proc LINKS ${UTF8PROC_ARCHIVE} DEFINES UTF8PROC_STATIC)

if(SLUICE_TORCH)
  find_path(GLOO_INCLUDE gloo/algorithm.h)   # what libtorch's header of its Gloo includes
  if(NOT GLOO_INCLUDE)
    message(FATAL_ERROR "gloo/algorithm.h not found: run `make setup`, which installs libgloo-dev")
  endif()
  set(SLUICE_VENV ${CMAKE_SOURCE_DIR}/.venv CACHE PATH "Virtual environment whose torch package is linked")
  file(GLOB torch_dir ${SLUICE_VENV}/lib/python3.*/site-packages/torch)
  if(NOT torch_dir)
    message(FATAL_ERROR "no torch package under ${SLUICE_VENV}: run `make setup`")
  endif()
  # torch_cpu and c10 alone: the executable then starts without any CUDA library but cudart and cupti, which torch_cpu
  # itself names; their folder goes into the run path.
  file(GLOB torch_cuda_dirs ${torch_dir}/../nvidia/cu*/lib)
  sluice_dependency(torch
    LINKS ${torch_dir}/lib/libtorch_cpu.so ${torch_dir}/lib/libc10.so ${torch_dir}/lib/libgomp.so.1
    INCLUDES ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
  # at::parallel_for is a template: without OpenMP here it would run our loops on one thread. libtorch's own libgomp.
  target_compile_options(sluice_dep_torch INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fopenmp>)
  set(CMAKE_BUILD_RPATH ${torch_dir}/lib ${torch_cuda_dirs})
  target_link_options(sluice_dep_torch INTERFACE
    -Wl,--disable-new-dtags -Wl,--allow-shlib-undefined -Wl,--as-needed)
endif()

# The CUDA toolkit is optional. Its library stands apart, so that one build serves machines with and without a device;
# today Python alone loads it (tests/gpu).
find_program(SLUICE_NVCC nvcc)
option(SLUICE_CUDA "Build the CUDA library" OFF)
if(SLUICE_NVCC AND SLUICE_TORCH AND NOT DEFINED CACHE{SLUICE_CUDA_CHOSEN})
  set(SLUICE_CUDA ON CACHE BOOL "Build the CUDA library" FORCE)
  set(SLUICE_CUDA_CHOSEN ON CACHE INTERNAL "")
endif()
if(SLUICE_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  foreach(kind STANDARD EXTENSION)   # CMake 3.25 does not know that nvcc has C++20
    if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
      set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
    endif()
  endforeach()
  find_package(CUDAToolkit REQUIRED)
endif()
