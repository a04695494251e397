"""Scripts that measure."""

import engine as engine  # before torch: it settles how OpenMP's threads wait
