# PENSTOCK_OPS_FROM: a small host program, built here and now, reads the bundles with the core's own reader and writes the
# list of what they need.
if(CMAKE_CROSSCOMPILING)
  find_program(PENSTOCK_HOST_CXX NAMES c++ g++ clang++ DOC "Compiler for programs that run while building")
else()
  set(PENSTOCK_HOST_CXX ${CMAKE_CXX_COMPILER} CACHE FILEPATH "Compiler for programs that run while building")
endif()
if(NOT PENSTOCK_HOST_CXX)
  message(FATAL_ERROR "PENSTOCK_OPS_FROM: reading bundles takes a compiler for this machine: set PENSTOCK_HOST_CXX")
endif()

set(bundles)
foreach(bundle ${PENSTOCK_OPS_FROM})
  get_filename_component(bundle "${bundle}" ABSOLUTE BASE_DIR ${CMAKE_SOURCE_DIR})
  list(APPEND bundles ${bundle})
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${bundles})

set(reader core/tools/generate/bundle_ops.cpp)
foreach(source base/crc32 base/error base/memory base/size_list bundle/file bundle/flatbuffer bundle/metadata ops/layout ops/loaded ops/schema ops/table)
  list(APPEND reader core/src/${source}.cpp)
endforeach()
list(TRANSFORM reader PREPEND ${CMAKE_SOURCE_DIR}/)
set(ops_from_dir ${CMAKE_BINARY_DIR}/ops_from)
file(MAKE_DIRECTORY ${ops_from_dir})
execute_process(
  COMMAND ${PENSTOCK_HOST_CXX} -std=c++20 -O0 -DPENSTOCK_OP_NAMES -I${CMAKE_SOURCE_DIR}/core/include -I${CMAKE_SOURCE_DIR}/core/src
          ${reader} -pthread -o ${ops_from_dir}/bundle_ops
  RESULT_VARIABLE failed ERROR_VARIABLE message)
if(failed)
  message(FATAL_ERROR "PENSTOCK_OPS_FROM: the program that reads bundles does not compile\n${message}")
endif()
string(REPLACE ";" "," kv_layouts "${PENSTOCK_KV_LAYOUTS}")
execute_process(COMMAND ${ops_from_dir}/bundle_ops ${ops_from_dir}/ops_from.h "${kv_layouts}" ${bundles}
  RESULT_VARIABLE failed ERROR_VARIABLE message OUTPUT_VARIABLE summary OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
  message(FATAL_ERROR "PENSTOCK_OPS_FROM: ${message}")
endif()
message(STATUS "PENSTOCK_OPS_FROM: ${summary}")

target_include_directories(penstock_objects PRIVATE ${ops_from_dir})
target_compile_definitions(penstock_objects PRIVATE PENSTOCK_OPS_FROM)
target_compile_options(penstock_objects PRIVATE -Wno-unused-function -Wno-unused-but-set-variable)
