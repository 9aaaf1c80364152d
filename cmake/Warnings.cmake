# Compile options of every target: warnings are errors, and sums are never contracted into fused multiply-adds,
# because results must be bit for bit the same on every processor. Only g++ is held to no warnings at all.
add_library(turnout_options INTERFACE)
target_compile_features(turnout_options INTERFACE cxx_std_20)
target_compile_options(turnout_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX,C>:-ffp-contract=off;-fno-math-errno>"
  "$<$<AND:$<BOOL:${PROJECT_IS_TOP_LEVEL}>,$<COMPILE_LANGUAGE:CXX,C>>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wno-sign-conversion>"
  "$<$<AND:$<BOOL:${PROJECT_IS_TOP_LEVEL}>,$<COMPILE_LANGUAGE:CXX,C>,$<CXX_COMPILER_ID:GNU>>:-Werror>")

# The same for nvcc, its host compiler and device code. -Wpedantic and -Wconversion would complain of what nvcc itself generates.
target_compile_options(turnout_options INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;--expt-relaxed-constexpr;--resource-usage;-Xcompiler=-ffp-contract=off,-fno-math-errno>"
  "$<$<AND:$<BOOL:${PROJECT_IS_TOP_LEVEL}>,$<COMPILE_LANGUAGE:CUDA>>:-Xcompiler=-Wall,-Wextra,-Wshadow>"
  "$<$<AND:$<BOOL:${PROJECT_IS_TOP_LEVEL}>,$<COMPILE_LANGUAGE:CUDA>,$<CXX_COMPILER_ID:GNU>>:-Werror=all-warnings;-Xcompiler=-Werror>")
