# The C interface, tested by a C program.
include_guard(GLOBAL)
add_executable(c_api_test ${CMAKE_CURRENT_LIST_DIR}/c_api_test.c)
target_link_libraries(c_api_test PRIVATE turnout Threads::Threads)
set_target_properties(c_api_test PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
target_compile_options(c_api_test PRIVATE -Wall -Wextra -Wpedantic -Werror)
add_test(NAME c_api_test COMMAND c_api_test)
set_tests_properties(c_api_test PROPERTIES LABELS unit TIMEOUT 120)
