# cmake --install: header, libraries, penstock-lite (lite.cmake), and how others find them.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(penstock PROPERTIES VERSION ${abi_version}.${PROJECT_VERSION} SOVERSION ${abi_version})
foreach(target penstock penstock_static)
  target_include_directories(${target} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endforeach()

install(FILES core/include/penstock.h core/include/penstock_op.h core/include/penstock_ranks.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS penstock penstock_static EXPORT PenstockTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Penstock)
install(EXPORT PenstockTargets NAMESPACE Penstock:: DESTINATION ${package_dir})
configure_package_config_file(core/package/PenstockConfig.cmake.in ${CMAKE_BINARY_DIR}/PenstockConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/PenstockConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/PenstockConfig.cmake ${CMAKE_BINARY_DIR}/PenstockConfigVersion.cmake DESTINATION ${package_dir})

# Wherever the folder is moved to, the file finds what lies beside it.
file(RELATIVE_PATH prefix_from_pc /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
configure_file(core/package/penstock.pc.in ${CMAKE_BINARY_DIR}/penstock.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/penstock.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(TARGETS penstock-lite RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
