# Installed package: find_package(turnout) gives turnout::turnout.
include(CMakePackageConfigHelpers)
install(DIRECTORY include/turnout DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS turnout EXPORT turnout_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(EXPORT turnout_targets NAMESPACE turnout:: FILE turnout-targets.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/turnout)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/turnout-config.cmake "include(\${CMAKE_CURRENT_LIST_DIR}/turnout-targets.cmake)\n")
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/turnout-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/turnout-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/turnout-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/turnout)
