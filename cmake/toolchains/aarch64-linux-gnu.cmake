# 64-bit Arm from a PC, with Debian's packages: g++-aarch64-linux-gnu compiles, qemu-user-static runs the tests.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

# Header-only libraries are the same on every processor, and Debian keeps the files that tell of them by processor.
file(GLOB fmt_DIR /usr/lib/*/cmake/fmt /usr/local/lib/cmake/fmt)
list(GET fmt_DIR 0 fmt_DIR)
set(fmt_DIR ${fmt_DIR} CACHE PATH "fmt, of which headers alone are used")
