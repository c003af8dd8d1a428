# cmake -DCMAKE_TOOLCHAIN_FILE=core/package/aarch64-linux-gnu.cmake: Debian's cross compiler (g++-aarch64-linux-gnu); what CMake
# itself runs, it runs under qemu-aarch64 (qemu-user) where that is installed.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
find_program(QEMU_AARCH64 qemu-aarch64)
if(QEMU_AARCH64)
  set(CMAKE_CROSSCOMPILING_EMULATOR "${QEMU_AARCH64};-L;/usr/aarch64-linux-gnu")
endif()
