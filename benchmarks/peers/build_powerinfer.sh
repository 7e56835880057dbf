#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Build PowerInfer's library and powerinfer_bench.cpp for the peers' virtual environment FOLDER:
#
#     git clone https://github.com/SJTU-IPADS/PowerInfer SOURCE
#     benchmarks/peers/build_powerinfer.sh FOLDER SOURCE [JOBS]
#
# Result: the program FOLDER/bin/powerinfer_bench, without a GPU. Needs cmake and a C++ compiler; takes
# some 3 minutes on 2 cores.
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
FOLDER=$(cd "${1:?the folder of the peers\' virtual environment}" && pwd)
SOURCE=$(cd "${2:?the folder of the sources of PowerInfer}" && pwd)
JOBS=${3:-2}
WORK=$FOLDER/powerinfer

mkdir -p "$WORK"
cd "$WORK"
cat > CMakeLists.txt <<CMAKE
cmake_minimum_required(VERSION 3.14)
project(powerinfer_bench CXX C)
add_subdirectory($SOURCE powerinfer EXCLUDE_FROM_ALL)
add_executable(powerinfer_bench $HERE/powerinfer_bench.cpp)
target_link_libraries(powerinfer_bench PRIVATE llama)
CMAKE
PATH=$FOLDER/bin:$PATH
cmake -S . -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_NATIVE=ON -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF
nice -n 19 cmake --build build --parallel "$JOBS" --target powerinfer_bench
install build/powerinfer_bench "$FOLDER/bin"
echo "built $FOLDER/bin/powerinfer_bench"
