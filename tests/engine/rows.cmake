turnout_test(NAME engine_rows_test LABEL unit SOURCES rows_test.cc LIBS turnout_engine_cpu turnout_util turnout_core)
turnout_test(NAME engine_pools_test LABEL unit SOURCES page_pool_test.cc thread_pool_test.cc LIBS turnout_engine_cpu turnout_util turnout_core)
turnout_test(NAME engine_send_list_test LABEL unit SOURCES send_list_test.cc LIBS turnout_engine_cpu turnout_util turnout_core)
