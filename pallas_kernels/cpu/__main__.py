"""``python -m pallas_kernels.cpu`` compiles the native CPU ops into the package's folder."""

import sys

from pallas_kernels.cpu.build import main

sys.exit(main())
