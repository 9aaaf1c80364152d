# TURNOUT_SANITIZE=address adds UBSan too; thread is TSan. Sanitizers make g++ see uninitialised variables where there are none.
if(TURNOUT_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -D_GLIBCXX_ASSERTIONS
                      -Wno-maybe-uninitialized)
  add_link_options(-fsanitize=address,undefined)
elseif(TURNOUT_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer -g -Wno-maybe-uninitialized)
  add_link_options(-fsanitize=thread)
elseif(NOT TURNOUT_SANITIZE STREQUAL "")
  message(FATAL_ERROR "TURNOUT_SANITIZE=${TURNOUT_SANITIZE}: use address, thread or leave it empty")
endif()

# Fuzz targets need every library below them counted and checked, too.
if(TURNOUT_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "TURNOUT_FUZZ=ON needs clang++, but the compiler is ${CMAKE_CXX_COMPILER}: use `cmake --preset fuzz`")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()
