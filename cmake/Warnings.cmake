# Compile options of every target: warnings are errors, and sums are never contracted into fused multiply-adds,
# because results must be bit for bit the same on every processor. Only g++ is held to no warnings at all.
add_library(turnout_options INTERFACE)
target_compile_features(turnout_options INTERFACE cxx_std_20)
target_compile_options(turnout_options INTERFACE
  -ffp-contract=off -fno-math-errno
  $<$<BOOL:${PROJECT_IS_TOP_LEVEL}>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion>
  $<$<AND:$<BOOL:${PROJECT_IS_TOP_LEVEL}>,$<CXX_COMPILER_ID:GNU>>:-Werror>)
