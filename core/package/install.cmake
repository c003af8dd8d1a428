# cmake --install: header, libraries, penstock-lite, and how others find them.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(penstock PROPERTIES VERSION ${abi_version}.${PROJECT_VERSION} SOVERSION ${abi_version})
add_library(penstock_static STATIC $<TARGET_OBJECTS:penstock_objects>)
set_target_properties(penstock_static PROPERTIES OUTPUT_NAME penstock EXPORT_NAME static)
target_link_libraries(penstock_static PUBLIC Threads::Threads m ${CMAKE_DL_LIBS})
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

# The program for machines without Python.
file(GLOB lite_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/core/tools/lite/*.cpp)
add_executable(penstock-lite ${lite_sources})
target_link_libraries(penstock-lite PRIVATE penstock_static)
target_include_directories(penstock-lite PRIVATE ${CMAKE_SOURCE_DIR}/core/include)
target_compile_options(penstock-lite PRIVATE -Wall -Wextra -Werror -fno-exceptions -fno-rtti -ffunction-sections -fdata-sections)
if(PENSTOCK_SANITIZE)
  target_compile_options(penstock-lite PRIVATE $<TARGET_PROPERTY:penstock_objects,INTERFACE_COMPILE_OPTIONS>)
  target_link_options(penstock-lite PRIVATE $<TARGET_PROPERTY:penstock_objects,INTERFACE_LINK_OPTIONS>)
else()
  target_link_options(penstock-lite PRIVATE -static-libstdc++ -static-libgcc -Wl,--gc-sections -Wl,-z,now -s)
endif()
install(TARGETS penstock-lite RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
