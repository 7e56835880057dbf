# SPDX-License-Identifier: Apache-2.0
import sys
from benchmarks.worker import main
if sys.argv[1]=="_measure": sys.exit(main(int(sys.argv[2]),int(sys.argv[3])))
from benchmarks.model import demo_model_dir

print(demo_model_dir())
