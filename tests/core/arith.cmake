turnout_test(NAME core_arith_test LABEL unit SOURCES math_test.cc dtype_test.cc scale_test.cc LIBS turnout_core)
