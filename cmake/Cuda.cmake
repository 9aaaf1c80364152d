# TURNOUT_CUDA=AUTO builds libturnout_cuda.so where it can be built, ON insists, OFF does not. Sets TURNOUT_HAS_CUDA.
# Architectures: CMAKE_CUDA_ARCHITECTURES, else TORCH_CUDA_ARCH_LIST, else real code for sm_80, sm_90 and sm_100.
if(NOT TURNOUT_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TURNOUT_CUDA=${TURNOUT_CUDA}: use AUTO, ON or OFF")
endif()
set(TURNOUT_HAS_CUDA FALSE)
set(TURNOUT_CUDA_OLDEST 12.8)  # the first that knows sm_100

# turnout_no_cuda(WHY): an error if CUDA was insisted on.
macro(turnout_no_cuda why)
  if(TURNOUT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TURNOUT_CUDA=ON, but ${why}")
  endif()
  message(STATUS "CUDA: not built: ${why}")
  return()
endmacro()

include(${CMAKE_CURRENT_LIST_DIR}/TorchArchitectures.cmake)

if(TURNOUT_CUDA STREQUAL "OFF")
  return()
endif()
if(TURNOUT_SANITIZE OR TURNOUT_FUZZ)
  turnout_no_cuda("sanitized builds are CPU only: leave TURNOUT_SANITIZE and TURNOUT_FUZZ off")
endif()

if(NOT CMAKE_CUDA_COMPILER)
  if(DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER $ENV{CUDACXX})
  else()
    file(GLOB toolkits /usr/local/cuda-*)
    list(SORT toolkits COMPARE NATURAL ORDER DESCENDING)
    find_program(TURNOUT_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda ${toolkits} PATH_SUFFIXES bin NO_DEFAULT_PATH)
    find_program(TURNOUT_NVCC nvcc)
    if(NOT TURNOUT_NVCC)
      turnout_no_cuda("no nvcc is in PATH, CUDA_HOME or /usr/local/cuda*: install the CUDA toolkit (${TURNOUT_CUDA_OLDEST} or newer) or set CUDACXX")
    endif()
    set(CMAKE_CUDA_COMPILER ${TURNOUT_NVCC})
  endif()
endif()
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
if(NOT nvcc_version MATCHES "release ([0-9.]+)" OR CMAKE_MATCH_1 VERSION_LESS TURNOUT_CUDA_OLDEST)
  turnout_no_cuda("${CMAKE_CUDA_COMPILER} is of CUDA '${CMAKE_MATCH_1}', and ${TURNOUT_CUDA_OLDEST} or newer is needed")
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  if(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    turnout_torch_architectures("$ENV{TORCH_CUDA_ARCH_LIST}" CMAKE_CUDA_ARCHITECTURES)
  else()
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real)
  endif()
endif()
set(CMAKE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" CACHE STRING "GPU architectures that get code" FORCE)

# What DeepEP's users know: builds without the tensor memory accelerator, as sm_80 does.
set(default_no_sm90 OFF)
if("$ENV{DISABLE_SM90_FEATURES}" MATCHES "^(1|ON|on|true|TRUE|yes)$")
  set(default_no_sm90 ON)
endif()
option(DISABLE_SM90_FEATURES "Build the CUDA engine without what sm_90 brought (TMA)" ${default_no_sm90})

# ptxas tells what each kernel uses: kept beside its object, out of the build's output. scripts/check_ptxas.py reads them.
set(CMAKE_CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/scripts/keep_ptxas.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
find_package(CUDAToolkit REQUIRED)
set(TURNOUT_HAS_CUDA TRUE)
# Programs of the build tree find libturnout_cuda.so as installed ones do beside libturnout.so.
list(APPEND CMAKE_BUILD_RPATH ${PROJECT_BINARY_DIR}/src/api)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
