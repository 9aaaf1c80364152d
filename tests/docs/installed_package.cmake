# Installs the build into a folder, builds the examples and the tests in C outside the tree against that folder alone, and runs them.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}: ${result}\n${output}")
  endif()
endfunction()

set(work ${BUILD}/installed_package)
file(REMOVE_RECURSE ${work})
file(GLOB programs ${SOURCE}/examples/*.cc ${SOURCE}/tests/api/c_*_test.c)
list(LENGTH programs count)
if(count LESS 4)
  message(FATAL_ERROR "expected three examples and tests in C, found: ${programs}")
endif()
file(COPY ${programs} ${SOURCE}/tests/api/c_job.h ${SOURCE}/tests/docs/package_examples/CMakeLists.txt DESTINATION ${work}/source)

run(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --prefix ${work}/prefix)
# Moved, as packages are: nothing may depend on where it was installed first.
file(RENAME ${work}/prefix ${work}/moved)
run(${CMAKE_COMMAND} -S ${work}/source -B ${work}/build -G Ninja -D CMAKE_C_COMPILER=${C_COMPILER} -D CMAKE_CXX_COMPILER=${COMPILER}
    -D CMAKE_BUILD_TYPE=${CONFIG} -D CMAKE_PREFIX_PATH=${work}/moved)
run(${CMAKE_COMMAND} --build ${work}/build)
foreach(program ${programs})
  cmake_path(GET program STEM name)
  run(${work}/build/${name})
endforeach()

# The command and what it loads when needed were moved together.
file(GLOB_RECURSE cuda_library ${work}/moved/libturnout_cuda.so)
execute_process(COMMAND ${work}/moved/bin/turnout version OUTPUT_VARIABLE about RESULT_VARIABLE result)
if(NOT result EQUAL 0 OR NOT about MATCHES "cuda: " OR (cuda_library AND about MATCHES "cannot load"))
  message(FATAL_ERROR "turnout version: ${result}\n${about}")
endif()
