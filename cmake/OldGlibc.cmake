# TURNOUT_GLIBC=2.28 links libraries that run with that glibc and any newer one, as wheels tagged manylinux_2_28 must, on a system whose
# own glibc is newer. The linker sees what the old one had and nothing else (libraries without code, made by zig, which knows what every
# release of glibc had), libstdc++ is linked in, and cmake/old_glibc.c stands in for the few functions that the old one lacks.
set(TURNOUT_GLIBC "" CACHE STRING "Oldest glibc that the libraries must run with, or empty: that of this system")
if(TURNOUT_GLIBC STREQUAL "")
  return()
endif()
if(NOT TURNOUT_GLIBC MATCHES "^2\\.[0-9]+$" OR TURNOUT_SANITIZE OR TURNOUT_FUZZ)
  message(FATAL_ERROR "TURNOUT_GLIBC='${TURNOUT_GLIBC}': give a release like 2.28, and no TURNOUT_SANITIZE or TURNOUT_FUZZ")
endif()
set(TURNOUT_ZIG "" CACHE STRING "How to start zig, which knows what each glibc had; by default zig, or the package ziglang of python3")
set(zig ${TURNOUT_ZIG})
if(NOT zig)
  find_program(TURNOUT_ZIG_PROGRAM zig)
  set(zig ${TURNOUT_ZIG_PROGRAM})
  if(NOT zig)
    set(zig python3 -m ziglang)
  endif()
endif()

# Stubs: zig leaves those that it links with in its cache.
set(stubs ${PROJECT_BINARY_DIR}/glibc-${TURNOUT_GLIBC})
if(NOT EXISTS ${stubs}/libc.so)
  file(WRITE ${stubs}/empty.c "int turnout_empty;\n")
  execute_process(COMMAND ${CMAKE_COMMAND} -E env ZIG_GLOBAL_CACHE_DIR=${stubs}/cache ZIG_LOCAL_CACHE_DIR=${stubs}/cache
                          ${zig} build-lib -dynamic -lc -fno-compiler-rt -fno-ubsan-rt -target ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.${TURNOUT_GLIBC}
                          -femit-bin=${stubs}/empty.so ${stubs}/empty.c
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  file(GLOB libc ${stubs}/cache/o/*/libc.so.6)
  if(status OR NOT libc)
    message(FATAL_ERROR "TURNOUT_GLIBC=${TURNOUT_GLIBC}: zig made no stubs (pip install ziglang, or set TURNOUT_ZIG): ${output}")
  endif()
  get_filename_component(folder ${libc} DIRECTORY)
  file(GLOB libraries ${folder}/*.so.*)
  file(COPY ${libraries} DESTINATION ${stubs})
  foreach(name m dl rt)
    file(GLOB library ${stubs}/lib${name}.so.*)
    file(CREATE_LINK ${library} ${stubs}/lib${name}.so SYMBOLIC)
  endforeach()
  # Functions of threads and dlopen have moved into libc since: programs that look for them there find them.
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libc_nonshared.a OUTPUT_VARIABLE nonshared OUTPUT_STRIP_TRAILING_WHITESPACE)
  file(WRITE ${stubs}/libc.so "GROUP ( ${stubs}/libc.so.6 ${nonshared} AS_NEEDED ( ${stubs}/libpthread.so.0 ${stubs}/libdl.so.2 ${stubs}/librt.so.1 ${stubs}/libld.so.2 ) )\n")
endif()

set(stand_in ${stubs}/old_glibc.o)
execute_process(COMMAND ${CMAKE_C_COMPILER} -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -c ${CMAKE_CURRENT_LIST_DIR}/old_glibc.c -o ${stand_in}
                RESULT_VARIABLE status)
if(status)
  message(FATAL_ERROR "TURNOUT_GLIBC=${TURNOUT_GLIBC}: ${CMAKE_CURRENT_LIST_DIR}/old_glibc.c does not compile")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/old_glibc.c)
string(APPEND CMAKE_CXX_STANDARD_LIBRARIES " ${stand_in}")
add_link_options(-L${stubs} -static-libstdc++ LINKER:--exclude-libs,libstdc++.a)
message(STATUS "glibc: ${TURNOUT_GLIBC} or newer")
